"""The nouns that flow between the rooms.

T tokens of a trajectory, B rows and L columns of a packed batch. Position t always speaks of
token t: `logprobs[t]` is the logprob of `token_ids[t]` given what stands before it. Logprobs are in
nats, at the sampling temperature, before top-p and top-k. Times are in seconds.

`sampled` is a fact (the engine produced this token); `weights` in a Batch is a decision (how much
it trains). A reward is a number or None (not scored); None is never 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsFloat, get_args

import numpy as np
import numpy.typing as npt

from uni_agent.errors import MessageError, RewardError

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Role = Literal["system", "user", "assistant", "tool"]
FailureKind = Literal["none", "expected", "abnormal"]
Finish = Literal["stop", "length", "cancelled"]
EndReason = Literal[
    "done",
    "max_turns",
    "max_tokens",
    "context_full",
    "timeout",
    "cancelled",
    "agent_error",
    "tool_error",
    "env_error",
    "sandbox_error",
    "engine_error",
    "reward_error",
]
TrainingPolicy = Literal["train", "bootstrap", "mask", "drop", "retry"]

TRAINING_POLICY: Mapping[EndReason, TrainingPolicy] = {
    # train: the outcome is the agent's. bootstrap: cut short, so GAE takes the value of the next
    # state, and estimators without values train it as it is. mask: kept in the store, counted, no
    # token trains. drop: as mask, and the episode does not count in its group. retry: as drop, and
    # the pool runs the episode once more.
    "done": "train",
    "max_turns": "bootstrap",
    "max_tokens": "bootstrap",
    "context_full": "bootstrap",
    "timeout": "mask",
    "cancelled": "drop",
    "agent_error": "drop",
    "tool_error": "drop",
    "env_error": "retry",
    "sandbox_error": "retry",
    "engine_error": "retry",
    "reward_error": "drop",
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asked for.

    `error` is set when the text could not be parsed; `name` and `arguments` are then what could be
    recovered (perhaps nothing), and `raw` is the text as the model wrote it.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    raw: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message in the OpenAI shape. `reasoning` is kept apart from `content`."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise MessageError(
                f"message role {self.role!r} is unknown; expected one of {', '.join(get_args(Role))}"
            )
        content: object = self.content
        if not isinstance(content, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            parts = content if isinstance(content, list) else [content]
            kinds = sorted({str(p.get("type")) if isinstance(p, dict) else type(p).__name__ for p in parts})
            raise MessageError(
                f"{self.role} message has content of kind {', '.join(kinds)}; only text (str) can be "
                "rendered; remove the part or describe it in words"
            )


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What the model is told about a tool; `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call came to. `content` goes to the model, `data` to environment and rewards only.

    `failure` is `expected` for a business refusal (sold out, not found), `abnormal` for a time-out,
    a crash or malformed output. `error_kind` counts the model's own mistakes: "malformed",
    "unknown_tool", "bad_arguments", "not_executed", or "" when the tool ran.
    """

    call_id: str
    name: str
    content: str
    failure: FailureKind = "none"
    error_kind: str = ""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do. `prompt` is shown to the agent; `data` (ground truth) never is."""

    id: str
    prompt: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    max_tokens is per turn. temperature 0 is greedy, with logprobs at temperature 1: such episodes
    are for evaluation, and training on them is refused. top_p 1 and top_k 0 mean off; training on
    truncated sampling is refused. `logit_bias` are pairs (token id, what is added to its logit before
    the temperature); logprobs stay those of the unbiased logits, and training is refused here too.
    `seed` None draws from the engine's own generator.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some freshly sampled tokens: int32[n], float32[n], int32[n]."""

    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array


@dataclass(frozen=True, slots=True)
class Completion:
    """All tokens of one model call, the stop token included: int32[T], float32[T], int32[T]."""

    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish: Finish

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if len(self.logprobs) != n or len(self.versions) != n:
            raise ValueError(
                f"completion has {n} tokens, {len(self.logprobs)} logprobs and {len(self.versions)} "
                "versions; the engine must return one of each per token"
            )


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall-clock seconds: when the turn began (since the episode's start), and what took how long."""

    started_s: float = 0.0
    generate_s: float = 0.0
    tools_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: what was observed, said, done and earned.

    `observation` and `sampled` are half-open spans [start, end) of the trajectory's tokens.
    `observed` are the messages behind the observation span, `message` what the model said,
    `reward` the step reward, None where the environment gave none.
    """

    observation: tuple[int, int]
    sampled: tuple[int, int]
    observed: tuple[Message, ...]
    message: Message
    finish: Finish
    sampling: Sampling
    tool_results: tuple[ToolResult, ...] = ()
    reward: float | None = None
    timing: Timing = Timing()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One linear record of tokens (a tape). History that was rewritten or forked starts a new one.

    token_ids int32[T], sampled bool[T], logprobs float32[T] (0 where not sampled), versions
    int32[T] (-1 where not sampled). Each sampled token of an episode is sampled in exactly one
    trajectory; where a later tape repeats it as context, it is not sampled there.
    """

    agent: str
    token_ids: Int32Array
    sampled: BoolArray
    logprobs: Float32Array
    versions: Int32Array
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("sampled", "logprobs", "versions"):
            got = len(getattr(self, name))
            if got != n:
                raise ValueError(f"trajectory {self.agent!r}: {name} has {got} values for {n} tokens")
        covered = np.zeros(n, bool)
        for turn in self.turns:
            covered[turn.sampled[0] : turn.sampled[1]] = True
        if not np.array_equal(covered, self.sampled):
            raise ValueError(f"trajectory {self.agent!r}: `sampled` is not the union of its turns' spans")
        if not np.isfinite(self.logprobs[self.sampled]).all():
            raise ValueError(f"trajectory {self.agent!r}: a sampled token has a logprob that is not finite")


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task, complete: everything that training, grading and viewing need.

    `rewards` are named scores and `reward` their weighted sum; `reward` is None when the episode
    could not be scored, with the reason in `reward_reason`. `trainable` is False when the tokens are
    not the engine's own (a chat endpoint) or not fit to train on. `truncated` means that a limit cut
    the episode short, not the world.
    """

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    end: EndReason
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    reward: float | None = None
    reward_reason: str | None = None
    artifacts: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    seed: int = 0
    trainable: bool = True

    @property
    def truncated(self) -> bool:
        """Whether a limit ended the episode."""
        return self.end in ("max_turns", "max_tokens", "context_full", "timeout")

    @property
    def num_turns(self) -> int:
        """Model calls over all trajectories."""
        return sum(len(trajectory.turns) for trajectory in self.trajectories)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the sampled tokens; None when there are none."""
        seen = [t.versions[t.sampled].min() for t in self.trajectories if t.sampled.any()]
        return int(min(seen)) if seen else None


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task that are compared with each other."""

    id: str
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows, ready for one optimizer step; all arrays are [B, L].

    token_ids int32, positions int32 (restart per segment), segments int32 (0 is padding, 1.. number
    the trajectories of a row), weights float32 (how much each token trains; a loss is
    sum(weights * token_loss) and has no denominator), advantages float32, behavior_logprobs float32,
    temperature float32, versions int32. A token whose predecessor lies in another segment has
    weight 0. Optional: ref_logprobs, values, returns float32; rewards are already in advantages.
    """

    token_ids: Int32Array
    positions: Int32Array
    segments: Int32Array
    weights: Float32Array
    advantages: Float32Array
    behavior_logprobs: Float32Array
    temperature: Float32Array
    versions: Int32Array
    ref_logprobs: Float32Array | None = None
    values: Float32Array | None = None
    returns: Float32Array | None = None

    @property
    def num_trained_tokens(self) -> int:
        """Tokens whose weight is not 0."""
        return int(np.count_nonzero(self.weights))


@dataclass(frozen=True, slots=True)
class Weights:
    """A policy's weights: their version and where they are (an in-process handle, or a path)."""

    version: int
    location: Any


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from (run seed, step, task, episode, turn, ...): same parts, same seed."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def plain_number(value: object, where: str) -> float | None:
    """A plain float from a number-like scalar (bool, numpy, torch); None, not scored, for None and NaN.

    Raises RewardError, opened by `where`, for anything else: text, arrays, infinities.
    """
    if value is None:
        return None
    number = value if isinstance(value, float) else _to_float(value)  # nearly always a float
    if number is None:
        text = " ".join(repr(value).split())
        raise RewardError(
            f"{where} is {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}; "
            "expected one number, or None for not scored"
        )
    if math.isinf(number):
        raise RewardError(f"{where} is {number}; expected a finite number, or None for not scored")
    return None if math.isnan(number) else float(number)


def _to_float(value: object) -> float | None:
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat) or np.shape(value) != ():  # pyright: ignore[reportArgumentType, reportCallIssue]
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
