"""The local engine: `LocalEngine` is its face (`engine`), one thread its body (`loop`).

An iteration is a `stepper`'s: `step` over the paged cache (`cache`, `blocks`), `recurrent` for models
with a state of their own. `choice` picks the model: `dense` with the compiled `kernels`, or any other
through its own forward (`module`, `state_model`). Imports torch.
"""

from uni_agent.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
