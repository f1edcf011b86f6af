"""PPO (arXiv 1707.06347) on multi-turn episodes, start to end in one file: copy it and edit.

    uni-agent train ppo --model FOLDER --world.env code_debug_env --steps 50

Sample episodes, let a critic (a value head on the policy's trunk) say what each turn was worth, make
several passes over the batch, push the weights back, repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from uni_agent.algos.advantages import gae, group_counts
from uni_agent.algos.checks import check_kl
from uni_agent.algos.losses import combine, policy_clip, value_clip
from uni_agent.config import BaseConfig
from uni_agent.recipes.interrupt import run_blocking
from uni_agent.recipes.sections import (
    Count,
    CountOrOff,
    EngineConfig,
    Factor,
    Finite,
    HeldOutConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    Share,
    WorldConfig,
)
from uni_agent.recipes.session import open_session, plan_of
from uni_agent.rollout import rollout_metrics
from uni_agent.train.batch import items, make_batch, minibatches
from uni_agent.types import derive_seed


class Config(BaseConfig):
    """Train a policy by PPO with a value head."""

    model: str
    """A model folder that transformers loads, or a name from `uni-agent model list`."""
    renderer: str = ""
    """Chat format; "" reads it from the model folder."""
    world: WorldConfig = WorldConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    held_out: HeldOutConfig = HeldOutConfig()
    run: RunConfig = RunConfig()
    tasks: str = "train"
    """A .jsonl or .parquet file, or a split of the environment's own task set."""
    num_tasks: CountOrOff = 1000
    """How many tasks; 0 takes a whole file. They are reshuffled each epoch."""
    steps: Count = 100
    """Batches of groups."""
    max_seconds: Factor = 0.0
    """Wall-clock seconds of training after which it ends early; 0 sets no limit."""
    group_size: Count = 1
    """Episodes per task."""
    groups_per_step: Count = 128
    """Tasks per step."""
    epochs: Count = 2
    """Passes over the episodes of a step."""
    minibatch: Count = 64
    """Trajectories per optimizer update."""
    max_staleness: CountOrOff = 0
    """Steps that sampling may run ahead of training; 0 is on-policy."""
    discount: Share = 1.0
    """Of rewards, per turn."""
    lam: Share = 0.95
    """GAE's lambda, per turn."""
    value_coef: Factor = 0.5
    """Of the value loss."""
    clip_low: Share = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Factor = 0.2
    """The ratio is clipped above 1 + clip_high."""
    kl_coef: Factor = 0.0
    """Of the KL to the starting policy, in the reward; 0 keeps no reference."""
    entropy_coef: Finite = 0.0
    """Of the entropy bonus."""
    seed: int = 0
    """Everything random derives from it."""
    resume: str = ""
    """A run directory to go on with."""


def plan(config: Config) -> Mapping[str, object]:
    """What `run` is going to do."""
    return plan_of(config)


def run(config: Config) -> Mapping[str, object]:
    """Train; everything written is in the run directory, the figures in its summary."""
    return run_blocking(_run(config))


async def _run(config: Config) -> Mapping[str, object]:
    check_kl(config.kl_coef, in_reward=True, in_loss=False)
    policy_loss = partial(
        policy_clip,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        entropy_coef=config.entropy_coef,
    )
    loss = combine((1.0, policy_loss), (config.value_coef, partial(value_clip, clip=None)))
    advantage = partial(gae, discount=config.discount, lam=config.lam, kl_coef=config.kl_coef)
    async with open_session("ppo", config, reference=config.kl_coef > 0, critic=True) as session:
        before = await session.evaluate("before")
        async with session.pool() as pool:
            async for step in session.steps(pool):
                groups = await session.next_groups(pool)
                await session.engine.pause()
                scores = await session.score(groups)
                trained = items(groups, advantage(groups, scores), scores)
                metrics = rollout_metrics(groups) | group_counts(groups)
                for epoch in range(config.epochs if trained else 0):
                    seed = derive_seed(config.seed, step, epoch)
                    for part in minibatches(trained, config.minibatch, seed=seed):
                        metrics |= await session.update(make_batch(part), loss)
                await session.publish(pool)
                await session.log(metrics)
        return await session.finish(before=before, after=await session.evaluate("after"))
