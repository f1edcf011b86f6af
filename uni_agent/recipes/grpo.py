"""GRPO (arXiv 2402.03300) on multi-turn episodes, start to end in one file: copy it and edit.

    uni-agent train grpo --model FOLDER --world.env code_debug_env --steps 50

Sample groups of episodes, compare the turns of a group with each other, step, push the weights back,
repeat. The engine samples from the learner's own parameters, so publishing copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from uni_agent.algos.advantages import group_counts, grpo_turns
from uni_agent.algos.checks import check_kl
from uni_agent.algos.losses import policy_clip
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


class Config(BaseConfig):
    """Train a policy by GRPO."""

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
    group_size: Count = 8
    """Episodes per task, compared with each other."""
    groups_per_step: Count = 16
    """Tasks per step."""
    minibatch: CountOrOff = 0
    """Trajectories per optimizer update; 0 makes one update per step."""
    max_staleness: CountOrOff = 0
    """Steps that sampling may run ahead of training; 0 is on-policy."""
    turn_discount: Share = 1.0
    """Per turn: how much of a later turn's reward an earlier turn is credited with."""
    turn_baseline: Literal["group", "turn"] = "turn"
    """Compare a turn with all turns of its group, or with those of the same number."""
    negative_scale: Factor = 1.0
    """On negative advantages; below 1, larger learning rates stay stable."""
    normalize_std: bool = True
    """Divide advantages by the group's deviation."""
    clip_low: Share = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Factor = 0.2
    """The ratio is clipped above 1 + clip_high."""
    kl_coef: Factor = 0.0
    """Of the KL to the starting policy, in the loss; 0 keeps no reference."""
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
    check_kl(config.kl_coef, in_reward=False, in_loss=True)
    loss = partial(
        policy_clip,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
    )
    advantage = partial(
        grpo_turns,
        discount=config.turn_discount,
        baseline=config.turn_baseline,
        negative_scale=config.negative_scale,
        normalize_std=config.normalize_std,
    )
    async with open_session("grpo", config, reference=config.kl_coef > 0) as session:
        before = await session.evaluate("before")
        async with session.pool() as pool:
            async for step in session.steps(pool):
                groups = await session.next_groups(pool)
                await session.engine.pause()
                scores = await session.score(groups) if config.kl_coef else ()
                trained = items(groups, advantage(groups, scores), scores)
                metrics = rollout_metrics(groups) | group_counts(groups)
                if trained:  # else no group had a difference to learn from
                    for part in minibatches(trained, config.minibatch or len(trained), seed=step):
                        metrics |= await session.update(make_batch(part), loss)
                await session.publish(pool)
                await session.log(metrics)
        return await session.finish(before=before, after=await session.evaluate("after"))
