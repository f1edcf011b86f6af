"""The code-repair world and the calculator, step by step."""

import json
from collections.abc import Sequence

import pytest

from uni_agent.envs import CalculatorEnv, CodeDebugEnv
from uni_agent.envs.calculator import calculator
from uni_agent.envs.code_debug import NUDGE
from uni_agent.errors import EnvironmentFailure, TaskFileError, UnknownNameError
from uni_agent.protocols import StepResult
from uni_agent.types import Message, Task, ToolResult

TASK = CodeDebugEnv.task_from_json(
    {"id": "a", "code": "def f(): return 1", "tests": ["assert f() == 2", "assert f() != 1"]}
)
SAID = Message("assistant", "")


def ran(passed: int, program: str = "p", total: int = 2) -> ToolResult:
    data = {"program": program, "passed": passed, "total": total, "parsed": True, "status": "ok"}
    return ToolResult("c", "code_executor", f"{passed} of {total}", data=data)


def refused(kind: str, name: str = "code_executor") -> ToolResult:
    return ToolResult("c", name, "not like that", error_kind=kind)


async def play(env: CodeDebugEnv, *turns: Sequence[ToolResult]) -> list[StepResult]:
    await env.reset(TASK)
    return [await env.step(SAID, results) for results in turns]


# --- code repair ----------------------------------------------------------------------------------


async def test_solved_at_once_ends_with_the_solution() -> None:
    (step,) = await play(CodeDebugEnv(), [ran(2, "good")])
    assert step.terminated
    assert not step.truncated
    assert step.reward is None
    assert step.artifacts == {"solution.py": b"good"}
    assert step.metrics == {"attempts": 1, "solved": 1, "first_attempt_solved": 1, "passed": 2, "total": 2}


async def test_solved_later_is_not_solved_at_the_first_attempt() -> None:
    first, second = await play(CodeDebugEnv(), [ran(1, "bad")], [ran(2, "good")])
    assert not first.terminated
    assert first.artifacts == {"solution.py": b"bad"}
    assert first.messages == ()
    assert second.terminated
    assert (second.metrics["solved"], second.metrics["first_attempt_solved"]) == (1, 0)
    assert second.metrics["attempts"] == 2


async def test_five_failures_are_the_worlds_own_end() -> None:
    steps = await play(CodeDebugEnv(), *[[ran(1, f"p{i}")] for i in range(5)])
    assert [step.terminated for step in steps] == [False] * 4 + [True]
    assert not steps[-1].truncated
    assert steps[-1].artifacts == {"solution.py": b"p4"}
    assert steps[-1].metrics["solved"] == 0


async def test_a_turn_without_a_call_is_told_so_and_counts() -> None:
    first, second = await play(CodeDebugEnv(max_attempts=2), [], [])
    assert first.messages == (Message("user", NUDGE),)
    assert first.artifacts == {}
    assert second.terminated
    assert second.messages == ()


async def test_refused_calls_count_and_keep_the_last_program() -> None:
    steps = await play(
        CodeDebugEnv(), [ran(1, "kept")], [refused("malformed", "")], [refused("unknown_tool", "x")]
    )
    assert [step.metrics["attempts"] for step in steps] == [1, 2, 3]
    assert steps[-1].artifacts == {"solution.py": b"kept"}
    assert steps[-1].messages == ()


async def test_many_calls_in_one_turn_cannot_buy_more_attempts() -> None:
    (step,) = await play(CodeDebugEnv(max_attempts=2), [ran(0, "a"), ran(1, "b"), ran(2, "c")])
    assert step.terminated
    assert step.metrics["solved"] == 0
    assert step.artifacts == {"solution.py": b"b"}


async def test_the_first_passing_program_of_a_turn_is_the_solution() -> None:
    (step,) = await play(CodeDebugEnv(), [ran(0, "a"), ran(2, "b"), ran(0, "c"), refused("not_executed")])
    assert step.terminated
    assert step.artifacts == {"solution.py": b"b"}
    assert step.metrics["attempts"] == 2


async def test_calls_over_the_limit_of_a_turn_are_no_attempts() -> None:
    (step,) = await play(CodeDebugEnv(), [ran(0, "a"), refused("not_executed"), refused("not_executed")])
    assert step.metrics["attempts"] == 1


async def test_other_tools_are_free() -> None:
    (step,) = await play(CodeDebugEnv(), [ToolResult("c", "search", "found")])
    assert step.metrics["attempts"] == 0
    assert step.messages == ()


async def test_a_run_without_tests_solves_nothing() -> None:
    (step,) = await play(CodeDebugEnv(), [ran(0, total=0)])
    assert not step.terminated


async def test_p06_a_lone_surrogate_in_a_program_does_not_break_the_world() -> None:
    (step,) = await play(CodeDebugEnv(), [ran(0, "x = '\ud800'")])
    assert step.artifacts == {"solution.py": b"x = '?'"}


@pytest.mark.parametrize("data", [{"code": "x"}, {"tests": ["assert 1"]}, {"code": "x", "tests": "assert 1"}])
async def test_a_task_without_code_or_tests_is_a_failure_of_the_environment(data: dict[str, object]) -> None:
    with pytest.raises(EnvironmentFailure, match=r"task 't' needs 'code' .* and 'tests'"):
        await CodeDebugEnv().reset(Task("t", (), data))


def test_the_prompt_shows_the_code_and_no_ground_truth() -> None:
    task = CodeDebugEnv.task("train-0-0")
    lines = [line.split("|", 1)[1] for line in task.prompt[0].content.split("\n")[1:]]
    assert "\n".join(lines) == str(task.data["code"])
    assert str(task.data["solution"]) not in task.prompt[0].content
    own = CodeDebugEnv.task_from_json({"id": "a", "code": "c", "tests": "assert 1", "prompt": "Please."})
    assert own.prompt == (Message("user", "Please."),)


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ([], "'tests' is []"),
        ([1], "'tests' is [1]"),
        (["assert 1", " "], "expected Python: a text, or a list of asserts"),
        (" ", "expected Python: a text, or a list of asserts"),
        (["assert 1", "assert ("], "'tests': test 2 'assert (' is not Python"),
        ({"a": 1}, "'tests' is dict"),
    ],
)
def test_bad_tests_are_named(tests: object, says: str) -> None:
    with pytest.raises(TaskFileError) as error:
        CodeDebugEnv.task_from_json({"id": "a", "code": "c", "tests": tests})
    assert says in str(error.value)


def test_a_text_of_asserts_is_as_many_tests() -> None:
    def tests_of(tests: object) -> object:
        return CodeDebugEnv.task_from_json({"id": "a", "code": "c", "tests": tests}).data["tests"]

    assert tests_of("assert f(1) == 2\nassert f(2) == 3\n") == ["assert f(1) == 2", "assert f(2) == 3"]
    assert tests_of(["assert f(1)=='x'"]) == ["assert f(1)=='x'"]
    assert tests_of("x = f(1)\nassert x == 2") == ["x = f(1)\nassert x == 2"]


def test_generated_tasks_are_reproducible_and_found_by_id() -> None:
    tasks = CodeDebugEnv.tasks("test", 3, seed=7)
    assert [task.id for task in tasks] == ["held_out-7-0", "held_out-7-1", "held_out-7-2"]
    assert CodeDebugEnv.task("held_out-7-2") == tasks["held_out-7-2"]
    assert json.dumps(tasks["held_out-7-0"].data)
    with pytest.raises(UnknownNameError, match="did you mean 'held_out'"):
        CodeDebugEnv.tasks("heldout", 3)


# --- calculator -----------------------------------------------------------------------------------


async def test_the_calculator_rewards_each_step() -> None:
    env = CalculatorEnv()
    task = CalculatorEnv.task("train-0-0")
    await env.reset(task)
    step = await env.step(SAID, [ToolResult("c", "calculator", "12")])
    assert (step.reward, step.terminated, step.truncated) == (-0.1, False, False)
    step = await env.step(Message("assistant", f"It is {task.data['value']}"), [])
    assert (step.reward, step.terminated, step.metrics) == (1.0, True, {"solved": 1.0})


async def test_the_calculator_ends_at_a_wrong_answer_and_is_cut_without_one() -> None:
    env = CalculatorEnv(max_turns=2)
    await env.reset(Task("t", (), {"value": 5}))
    steps = [await env.step(SAID, [ToolResult("c", "calculator", "1")]) for _ in range(2)]
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, True)]
    env = CalculatorEnv()
    await env.reset(Task("t", (), {"value": 5}))
    step = await env.step(Message("assistant", "5, no: 6"), [])
    assert (step.reward, step.terminated) == (0.0, True)


def test_the_calculators_tasks_are_right() -> None:
    tasks = CalculatorEnv.tasks("train", 20, 3)
    assert len(tasks) == 20
    for task in tasks:
        a, b, c = (int(word) for word in task.prompt[0].content.split("?")[0].split() if word.isdigit())
        assert int(calculator(int(calculator(a, "*", b)), "-", c)) == task.data["value"]
