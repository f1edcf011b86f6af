"""The contracts between the rooms: structural, nothing to inherit from.

The world half (agents, environments, tools, sandboxes) speaks in messages; engines speak in tokens;
renderers translate; policies sit between and write the tokens down.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from uni_agent.types import (
    Batch,
    Chunk,
    Completion,
    EndReason,
    Episode,
    Finish,
    Float32Array,
    Group,
    Message,
    Sampling,
    Task,
    ToolResult,
    ToolSpec,
    Trajectory,
    Weights,
)

# --- tokens ---------------------------------------------------------------------------------------


class Engine(Protocol):
    """Token ids in; ids, logprobs and policy versions out."""

    @property
    def version(self) -> int:
        """The policy version that samples the next token."""
        ...

    @property
    def context_size(self) -> int:
        """The most tokens (prompt and completion) that one request may hold."""
        ...

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str
    ) -> AsyncIterator[Chunk | Completion]:
        """Yield chunks as they are sampled, then one Completion of them all; closing the iterator cancels.

        Requests of one `session` that extend each other reuse the session's cache. Raises EngineError.
        """
        ...

    async def load_weights(self, weights: Weights) -> None:
        """Take new weights between two decode iterations; all or nothing. Raises EngineError."""
        ...

    async def pause(self) -> None:
        """Stop decoding; requests wait and are continued by `resume`."""
        ...

    async def resume(self) -> None: ...

    async def end_session(self, session: str) -> None:
        """Forget a session's cache."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RenderedDialogue:
    """A whole conversation as tokens: which of them a model would have sampled, and whose they are.

    token_ids int[T], sampled bool[T], message_index int[T] (-1 for scaffolding of no message).
    """

    token_ids: list[int]
    sampled: list[bool]
    message_index: list[int]


class Renderer(Protocol):
    """Messages to token ids and back, for one chat format."""

    @property
    def name(self) -> str: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The prompt of a first turn, generation prompt included. Raises MessageError."""
        ...

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """The ids to append after prompt + completion so that `new_messages` stand there and the
        model's next turn is opened; None when this format cannot continue exactly."""
        ...

    def parse(self, completion_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        """What the model said; calls that do not parse are kept, with `ToolCall.error` set."""
        ...

    def render_dialogue(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> RenderedDialogue:
        """A finished conversation, for supervised training. Raises MessageError."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


# --- messages -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What an agent asks of its policy: the whole conversation so far, and the tools on offer."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    agent: str = "main"


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's answer, and its cost in tokens."""

    message: Message
    finish: Finish
    prompt_tokens: int
    completion_tokens: int


class Policy(Protocol):
    """Answers messages, and records what was sampled. Sampling settings are the policy's own."""

    @property
    def seed(self) -> int:
        """The episode's seed; everything random in the episode derives from it."""
        ...

    async def chat(self, request: ChatRequest) -> Reply:
        """Answer. Raises ContextFull before a call that cannot fit, EngineError."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a turn led to. `reward` None means: no step reward here (not 0).

    `messages` are further observations beside the tool results; `artifacts` (path -> bytes) are
    what grading will need, later ones replacing earlier ones of the same path.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    artifacts: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Environment(Protocol):
    """One live world, used once. It never runs a tool: it sees what the tools returned."""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Begin; return the first messages (usually `task.prompt`)."""
        ...

    async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult: ...

    async def close(self) -> None: ...


class Agent(Protocol):
    """Control flow in messages."""

    async def run(self, task: Task, env: Environment, policy: Policy) -> EndReason:
        """Play one episode to its end and say how it ended. Errors may simply be raised."""
        ...


# --- sandboxes and tools --------------------------------------------------------------------------

SandboxStatus = Literal["ok", "nonzero", "signaled", "timeout", "oom", "output_limit"]


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one run. Memory is address space per process; output is per stream."""

    timeout_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 16
    file_bytes: int = 16 << 20
    processes: int = 64


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """What happened to untrusted code; a fault of the sandbox itself raises SandboxError instead.

    stdout and stderr keep head and tail when `*_truncated`; after a timeout they hold what came
    before it. `level` is the isolation level that the run really had (0 none .. 3 namespaces).
    """

    status: SandboxStatus
    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    level: int

    @property
    def stdout_text(self) -> str:
        """stdout with undecodable bytes replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """stderr with undecodable bytes replaced."""
        return self.stderr.decode("utf-8", "replace")


class Sandbox(Protocol):
    """A private folder in which untrusted programs run; an async context manager."""

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult: ...

    async def run_python(
        self, code: str, *, stdin: bytes = b"", limits: SandboxLimits | None = None
    ) -> SandboxResult: ...

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, content: bytes) -> None: ...


SandboxFactory = Callable[[], Sandbox]


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may reach in one episode. `sandbox` is started once per episode.

    `state` is what the episode's tools remember between calls, empty at its start; a tool keeps its
    own under its name.
    """

    task: Task
    sandbox: Sandbox
    seed: int
    state: dict[str, Any] = field(default_factory=dict[str, Any])


@runtime_checkable
class Tool(Protocol):
    """A schema and a call, with its own time-out and output cap."""

    @property
    def spec(self) -> ToolSpec: ...

    @property
    def timeout_s(self) -> float: ...

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Run; the toolbox has parsed `arguments` but not validated them. `call_id` may be ""."""
        ...


# --- learning -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scores:
    """What a reward says: named values, named values per turn, or why the episode is invalid.

    A sequence in `turns` has one value per turn, over all trajectories in order, and says where the
    total was earned; it is not paid on top.
    """

    values: Mapping[str, float] = field(default_factory=dict[str, float])
    turns: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    invalid: str | None = None

    @property
    def total(self) -> float | None:
        """The episode's reward: the value named "reward" where there is one, else the sum of all values.

        None (not scored, never 0) when the episode is invalid or nothing was valued.
        """
        if self.invalid is not None or not self.values:
            return None
        return self.values["reward"] if "reward" in self.values else sum(self.values.values())

    @property
    def turn_totals(self) -> Sequence[float] | None:
        """Each turn's reward by the same rule; None when no reward was given per turn."""
        if self.invalid is not None or not self.turns:
            return None
        if "reward" in self.turns:
            return self.turns["reward"]
        return [sum(parts) for parts in zip(*self.turns.values(), strict=True)]


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What a reward may use beside the episode."""

    sandbox: SandboxFactory


Reward = Callable[[Episode, RewardContext], Awaitable[Scores]]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The learner's own view of one trajectory, float32[T] each; 0 where the token is not sampled.

    `values[t]` is the critic's value of the state before token t; `bootstrap` its value after the
    last token, for episodes that were cut short.
    """

    logprobs: Float32Array
    values: Float32Array | None = None
    ref_logprobs: Float32Array | None = None
    bootstrap: float = 0.0


@dataclass(frozen=True, slots=True)
class Credit:
    """How good each sampled token of one trajectory was, float32[T]; 0 where not sampled.

    `trained` False keeps the trajectory out of the loss (an invalid or a lone sample, say).
    `returns` are a critic's targets.
    """

    advantages: Float32Array
    returns: Float32Array | None = None
    trained: bool = True


Advantage = Callable[[Sequence[Group], Sequence[Sequence[Sequence[TokenScores]]]], list[list[list[Credit]]]]
"""(groups, scores[group][episode][trajectory]) -> credit[group][episode][trajectory]. Whitening over the
batch happens inside. An estimator that needs no scores takes them empty."""


Loss = Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]
"""(Outputs, micro-batch of tensors) -> (scalar = sum(weights * token_loss), sums for metrics); both are
defined by `algos.losses`, and the tensors are torch's, which this module must not import."""


class Learner(Protocol):
    """Owns the trained weights."""

    @property
    def version(self) -> int: ...

    def score(self, trajectories: Sequence[Trajectory]) -> list[TokenScores]:
        """Logprobs (and values, reference logprobs where configured) under the current weights."""
        ...

    def step(self, batch: Batch, loss: Loss) -> Mapping[str, float]:
        """One optimizer step; returns its metrics. A bad batch raises before anything moves."""
        ...

    def publish(self) -> Weights:
        """Make the current weights a new version for engines."""
        ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...
