"""The learning half: trajectories with credit become batches, batches become new weights.

Nothing here knows engines, environments or how episodes are run. Packing and checkpoints are numpy
and are exported here; `learner` and `critic` are torch and are imported by name.
"""

from uni_agent.train.batch import Item, items, make_batch, microbatches, minibatches, truncate
from uni_agent.train.checkpoint import Checkpoint, Checkpoints
from uni_agent.train.demonstrations import demonstration

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "Item",
    "demonstration",
    "items",
    "make_batch",
    "microbatches",
    "minibatches",
    "truncate",
]
