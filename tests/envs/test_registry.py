"""Environments by name: the article's call, the built-ins, tasks by id, and clear mistakes."""

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from uni_agent.envs import CalculatorEnv, CodeDebugEnv, EnvRegistry, TaskSet
from uni_agent.envs.registry import BUILT_IN
from uni_agent.errors import TaskFileError, UnknownNameError, UsageError
from uni_agent.protocols import StepResult
from uni_agent.testing import EchoEnvironment
from uni_agent.types import Message, Task, ToolResult


@pytest.fixture(autouse=True)
def _empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnvRegistry, "_registered", {})


class GuessEnv:
    """A user's own world, without anything optional."""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        return task.prompt

    async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
        return StepResult(terminated=True)

    async def close(self) -> None: ...


class NeedsArgument(GuessEnv):
    def __init__(self, secret: str) -> None:
        self.secret = secret


def test_the_articles_call_works_and_may_be_repeated() -> None:
    for _ in range(2):
        EnvRegistry.register(name="code_debug_env", entry_point="uni_agent.envs.CodeDebugEnv", max_steps=5)
    assert isinstance(EnvRegistry.make("code_debug_env"), CodeDebugEnv)
    assert EnvRegistry.spec("code_debug_env") == BUILT_IN["code_debug_env"]


def test_built_ins_are_known_without_registering() -> None:
    assert EnvRegistry.names() == ("calculator_env", "code_debug_env")
    assert isinstance(EnvRegistry.make("calculator_env"), CalculatorEnv)
    assert EnvRegistry.make("code_debug_env") is not EnvRegistry.make("code_debug_env")
    assert EnvRegistry.spec("code_debug_env").max_steps == 5


async def test_max_steps_reaches_a_world_that_ends_by_itself() -> None:
    EnvRegistry.register(name="code_debug_env", entry_point=CodeDebugEnv, max_steps=2)
    env = EnvRegistry.make("code_debug_env")
    await env.reset(Task("t", (), {"code": "x", "tests": ["assert 0"]}))
    steps = [await env.step(Message("assistant", "hm"), ()) for _ in range(2)]
    assert [step.terminated for step in steps] == [False, True]


def test_other_values_need_replace() -> None:
    EnvRegistry.register(name="guess", entry_point=GuessEnv, max_steps=3)
    with pytest.raises(UsageError, match=r"already registered with max_steps 3 \(now 4\); .*replace=True"):
        EnvRegistry.register(name="guess", entry_point=GuessEnv, max_steps=4)
    assert EnvRegistry.spec("guess").max_steps == 3
    EnvRegistry.register(name="guess", entry_point=EchoEnvironment, max_steps=4, replace=True)
    assert isinstance(EnvRegistry.make("guess"), EchoEnvironment)
    with pytest.raises(UsageError, match="already registered with entry_point"):
        EnvRegistry.register(name="code_debug_env", entry_point=GuessEnv, max_steps=5)


def test_unknown_name_says_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match="unknown environment 'code_debg_env'; did you mean 'code_debug_env'"
    ):
        EnvRegistry.make("code_debg_env")


@pytest.mark.parametrize(
    ("entry_point", "says"),
    [
        ("no_such_package.Env", "does not import: ModuleNotFoundError: No module named 'no_such_package'"),
        ("uni_agent.envs.CodeDebugEnvv", "has no 'CodeDebugEnvv'; did you mean 'CodeDebugEnv'"),
        ("uni_agent.envs.tasks.TEST_SHARE", "is float; expected a class"),
        ("uni_agent.types.Task", "cannot be made without arguments"),
        (NeedsArgument, "cannot be made without arguments"),
        ("collections.OrderedDict", "OrderedDict is no environment; it needs the async methods reset"),
    ],
)
def test_a_bad_entry_point_is_one_clear_line(entry_point: str, says: str) -> None:
    EnvRegistry.register(name="bad", entry_point=entry_point)
    with pytest.raises(UsageError) as error:
        EnvRegistry.make("bad")
    assert says in str(error.value)
    assert "'bad'" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_module_that_breaks_while_importing_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_world.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    EnvRegistry.register(name="broken", entry_point="broken_world.Env")
    with pytest.raises(UsageError, match="ZeroDivisionError: division by zero"):
        EnvRegistry.make("broken")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": "", "entry_point": GuessEnv}, "needs a name"),
        ({"name": "e", "entry_point": GuessEnv, "max_steps": 0}, "max_steps is 0"),
        ({"name": "e", "entry_point": "GuessEnv"}, "names no module"),
    ],
)
def test_bad_values_are_refused_at_once(values: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        EnvRegistry.register(**values)


def test_task_ids_resolve_and_task_objects_pass() -> None:
    own = Task("mine", (), {"code": "def f(): 1", "tests": ["assert f()"]})
    first, second = EnvRegistry.resolve("code_debug_env", ["held_out-0-2", own])
    assert first.id == "held_out-0-2"
    assert first.data["tests"]
    assert str(first.data["code"]).splitlines()[1] in first.prompt[0].content
    assert second is own
    with pytest.raises(UnknownNameError, match="unknown code-repair task 'nope'"):
        EnvRegistry.resolve("code_debug_env", ["nope"])


def test_a_registered_task_set_comes_before_the_classs_own() -> None:
    tasks = TaskSet([Task("g1", ())])
    EnvRegistry.register(name="guess", entry_point=GuessEnv, task_set=tasks)
    assert EnvRegistry.resolve("guess", ["g1"]) == [tasks["g1"]]
    EnvRegistry.register(
        name="partial", entry_point=functools.partial(CodeDebugEnv, 2), task_set=CodeDebugEnv
    )
    assert EnvRegistry.resolve("partial", ["train-0-0"])[0].data["code"]
    EnvRegistry.register(name="by_place", entry_point=GuessEnv, task_set="uni_agent.envs.CalculatorEnv")
    assert len(EnvRegistry.source("by_place").tasks(None, 3, 0)) == 3


def test_an_environment_without_tasks_says_what_to_do() -> None:
    EnvRegistry.register(name="guess", entry_point=GuessEnv)
    assert EnvRegistry.resolve("guess", [Task("t", ())])[0].id == "t"
    with pytest.raises(UsageError, match="has no task set; pass Task objects or a task file"):
        EnvRegistry.resolve("guess", ["g1"])


def test_task_files_are_read_in_the_environments_form(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": "a", "code": "def f(): return 1", "tests": "assert f() == 2"}\n')
    task = EnvRegistry.load_tasks("code_debug_env", path)["a"]
    assert task.data["tests"] == ["assert f() == 2"]
    EnvRegistry.register(name="guess", entry_point=GuessEnv)
    with pytest.raises(TaskFileError, match="line 1: missing key 'prompt'"):
        EnvRegistry.load_tasks("guess", path)


def test_the_room_imports_without_torch_or_pyarrow() -> None:
    code = (
        "import sys, uni_agent.envs, uni_agent.agents, uni_agent.rewards\n"
        "heavy = ('torch', 'pyarrow', 'renderers', 'uni_agent.envs.repair_tasks')\n"
        "print([module for module in heavy if module in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
