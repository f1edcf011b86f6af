"""The tool loop against a scripted policy: what it says to whom, and how it ends."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from uni_agent.agents import ToolLoopAgent
from uni_agent.envs import CalculatorEnv, CodeDebugEnv
from uni_agent.envs.calculator import calculator
from uni_agent.envs.code_debug import NUDGE
from uni_agent.errors import ContextFull, SandboxError
from uni_agent.protocols import ChatRequest, Reply, Sandbox, StepResult, ToolContext
from uni_agent.sandbox import local_sandbox
from uni_agent.testing import EchoEnvironment
from uni_agent.tools import CodeExecutor, tool
from uni_agent.types import Finish, Message, Task, ToolCall, ToolResult, ToolSpec

TASK = Task("t", (Message("user", "add"),), {"secret": "42"})
Said = Message | Exception | tuple[Message, Finish]


class ScriptedPolicy:
    """Says prepared messages, and keeps what it was asked."""

    def __init__(self, *script: Said) -> None:
        self.seed = 77
        self.requests: list[ChatRequest] = []
        self._script = iter(script)

    async def chat(self, request: ChatRequest) -> Reply:
        self.requests.append(request)
        said = next(self._script)
        if isinstance(said, Exception):
            raise said
        message, finish = said if isinstance(said, tuple) else (said, "stop")
        return Reply(message, finish, 10, 5)


class AddTool:
    """Adds two numbers, and remembers its contexts."""

    spec = ToolSpec(
        "add",
        "Add.",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    )
    timeout_s = 5.0

    def __init__(self) -> None:
        self.ran: list[tuple[int, int]] = []
        self.contexts: list[ToolContext] = []

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        self.ran.append((arguments["a"], arguments["b"]))
        self.contexts.append(context)
        await context.sandbox.write("ran", b"")
        return ToolResult("", "add", str(arguments["a"] + arguments["b"]))


class CountedSandbox:
    """A sandbox that only notes what happens to it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def __aenter__(self) -> Any:
        self._log.append("open")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._log.append("close")

    async def write(self, path: str, content: bytes) -> None:
        self._log.append("write")


class SteppedEnvironment(EchoEnvironment):
    """Gives prepared step results, and keeps what it saw."""

    def __init__(self, *steps: StepResult) -> None:
        super().__init__()
        self._results = iter(steps)
        self.saw: list[tuple[Message, tuple[ToolResult, ...]]] = []

    async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
        self.saw.append((message, tuple(tool_results)))
        return next(self._results)


class KeepsSteps(CodeDebugEnv):
    """The shipped world, and what its steps gave."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[StepResult] = []

    async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
        self.results.append(await super().step(message, tool_results))
        return self.results[-1]


def factory(log: list[str]) -> Callable[[], Sandbox]:
    return lambda: CountedSandbox(log)  # type: ignore[return-value]


def add(call_id: str, a: int, b: int) -> ToolCall:
    return ToolCall(call_id, "add", {"a": a, "b": b})


def says(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, calls)


async def test_calls_run_and_their_results_go_to_world_and_model() -> None:
    log: list[str] = []
    adder, call = AddTool(), says("let me add", add("c1", 40, 2))
    policy = ScriptedPolicy(call, says("it is 42"))
    env = SteppedEnvironment(StepResult(messages=(Message("user", "and?"),)), StepResult(terminated=True))
    agent = ToolLoopAgent([adder], factory(log), system_prompt="be exact")
    assert await agent.run(TASK, env, policy) == "done"
    first, second = policy.requests
    assert first.messages == (Message("system", "be exact"), *TASK.prompt)
    assert first.tools == (AddTool.spec,)
    assert second.messages == (
        *first.messages,
        call,
        Message("tool", "42", tool_call_id="c1", name="add"),
        Message("user", "and?"),
    )
    assert env.saw[0][0] is call
    assert [result.content for result in env.saw[0][1]] == ["42"]
    assert env.saw[1] == (says("it is 42"), ())
    assert log == ["open", "write", "close"]
    assert adder.contexts[0].task is TASK
    assert adder.contexts[0].seed == policy.seed


async def test_without_a_system_prompt_there_is_no_system_message() -> None:
    policy = ScriptedPolicy(says("42"))
    assert await ToolLoopAgent([], factory([])).run(TASK, EchoEnvironment(), policy) == "done"
    assert policy.requests[0].messages == TASK.prompt


async def test_p02_a_malformed_call_is_answered_and_the_next_one_runs() -> None:
    adder = AddTool()
    bad = ToolCall("c1", "", {}, '{"name": "add", "arguments": {"a": 1}', "one brace is missing")
    policy = ScriptedPolicy(says("", bad), says("", add("c2", 1, 2)), says("42"))
    env = SteppedEnvironment(StepResult(), StepResult(), StepResult(terminated=True))
    assert await ToolLoopAgent([adder], factory([])).run(TASK, env, policy) == "done"
    answers = [message for message in policy.requests[1].messages if message.role == "tool"]
    assert len(answers) == 1
    assert answers[0].tool_call_id == "c1"
    assert "one brace is missing" in answers[0].content
    assert [result.error_kind for result in env.saw[0][1]] == ["malformed"]
    assert adder.ran == [(1, 2)]


async def test_p05_calls_beyond_the_limit_are_answered_in_order_and_not_run() -> None:
    adder = AddTool()
    policy = ScriptedPolicy(says("", add("c1", 1, 2), add("c2", 3, 4), add("c3", 5, 6)), says("42"))
    env = SteppedEnvironment(StepResult(), StepResult(terminated=True))
    agent = ToolLoopAgent([adder], factory([]), max_calls_per_turn=1)
    assert await agent.run(TASK, env, policy) == "done"
    answers = [message for message in policy.requests[1].messages if message.role == "tool"]
    assert [answer.tool_call_id for answer in answers] == ["c1", "c2", "c3"]
    assert answers[0].content == "3"
    assert [result.error_kind for result in env.saw[0][1]] == ["", "not_executed", "not_executed"]
    assert adder.ran == [(1, 2)]


async def test_x03_a_cut_turn_is_neither_judged_nor_run() -> None:
    adder, log = AddTool(), []
    policy = ScriptedPolicy((says("I will", add("c1", 1, 2)), "length"))
    env = SteppedEnvironment()
    assert await ToolLoopAgent([adder], factory(log)).run(TASK, env, policy) == "max_tokens"
    assert env.saw == []
    assert adder.ran == []
    assert log == []


async def test_x03_a_final_answer_at_the_limit_of_turns_is_done() -> None:
    policy = ScriptedPolicy(says("1"), says("42"))
    agent = ToolLoopAgent([], factory([]), max_turns=2)
    assert await agent.run(TASK, EchoEnvironment(), policy) == "done"


@pytest.mark.parametrize(("max_turns", "turns"), [(1, 1), (3, 3)])
async def test_the_limit_of_turns_truncates(max_turns: int, turns: int) -> None:
    policy, env = ScriptedPolicy(*[says("no")] * 9), EchoEnvironment()
    assert await ToolLoopAgent([], factory([]), max_turns=max_turns).run(TASK, env, policy) == "max_turns"
    assert len(policy.requests) == env.steps == turns


@pytest.mark.parametrize(
    ("step", "end"),
    [
        (StepResult(terminated=True, truncated=True), "done"),
        (StepResult(truncated=True), "max_turns"),
        (StepResult(), "done"),
    ],
)
async def test_the_world_ends_the_episode(step: StepResult, end: str) -> None:
    policy = ScriptedPolicy(says("hm"))
    assert await ToolLoopAgent([], factory([])).run(TASK, SteppedEnvironment(step), policy) == end


async def test_a_cancelled_turn_ends_as_cancelled() -> None:
    policy = ScriptedPolicy((says("h"), "cancelled"))
    assert await ToolLoopAgent([], factory([])).run(TASK, EchoEnvironment(), policy) == "cancelled"


@pytest.mark.parametrize("error", [ContextFull("no room"), RuntimeError("bug")])
async def test_errors_are_raised_and_the_sandbox_is_closed(error: Exception) -> None:
    log: list[str] = []
    policy = ScriptedPolicy(says("", add("c1", 1, 2)), error)
    with pytest.raises(type(error), match=str(error)):
        await ToolLoopAgent([AddTool()], factory(log)).run(TASK, EchoEnvironment(), policy)
    assert log == ["open", "write", "close"]


async def test_episodes_at_the_same_time_share_nothing() -> None:
    log: list[str] = []
    adder = AddTool()
    agent = ToolLoopAgent([adder], factory(log))
    policies = [ScriptedPolicy(says("", add("c1", i, 1)), says("42")) for i in range(3)]
    ends = await asyncio.gather(*(agent.run(TASK, EchoEnvironment(), policy) for policy in policies))
    assert ends == ["done"] * 3
    assert [policy.requests[1].messages[-1].content for policy in policies] == ["1", "2", "3"]
    assert len({id(context.sandbox) for context in adder.contexts}) == 3
    assert sorted(log) == ["close"] * 3 + ["open"] * 3 + ["write"] * 3


async def test_a_sandbox_that_cannot_be_made_is_a_sandbox_error() -> None:
    def broken() -> Sandbox:
        raise SandboxError("no space")

    policy = ScriptedPolicy()
    with pytest.raises(SandboxError, match="no space"):
        await ToolLoopAgent([], broken).run(TASK, EchoEnvironment(), policy)
    assert policy.requests == []


async def test_a6_code_is_repaired_with_the_shipped_tool_world_and_sandbox() -> None:
    task = CodeDebugEnv.task_from_json(
        {"id": "a", "code": "def f(a):\n    return a - 1\n", "tests": "assert f(1) == 2\nassert f(2) == 3"}
    )
    wrong = ToolCall("c1", "code_executor", {"line": 2, "code": "    return 2"})
    right = ToolCall("c2", "code_executor", {"line": 2, "code": "    return a + 1"})
    policy, env = ScriptedPolicy(says("", wrong), says("hm"), says("", right)), KeepsSteps()
    async with local_sandbox() as sandboxes:
        end = await ToolLoopAgent([CodeExecutor()], sandboxes, max_turns=5).run(task, env, policy)
    assert end == "done"
    feedback = policy.requests[1].messages[-1]
    assert feedback.role == "tool"
    assert "1/2 tests passed" in feedback.content
    assert policy.requests[2].messages[-1] == Message("user", NUDGE)
    assert env.results[-1].metrics == {
        "attempts": 3,
        "solved": 1,
        "first_attempt_solved": 0,
        "passed": 2,
        "total": 2,
    }
    assert env.results[-1].artifacts == {"solution.py": b"def f(a):\n    return a + 1\n"}


async def test_the_calculator_is_played_with_a_function_as_its_tool() -> None:
    task = CalculatorEnv.task("train-0-0")
    a, b, c = (int(word) for word in re.findall(r"\d+", task.prompt[0].content))
    times = ToolCall("c1", "calculator", {"left": a, "operation": "*", "right": b})
    minus = ToolCall("c2", "calculator", {"left": a * b, "operation": "-", "right": c})
    policy = ScriptedPolicy(says("", times), says("", minus), says(f"It is {a * b - c}"))
    agent = ToolLoopAgent([tool(calculator)], factory([]), max_turns=6)
    assert await agent.run(task, CalculatorEnv(), policy) == "done"
    assert policy.requests[2].messages[-1].content == str(a * b - c)
