"""Repair tasks: deterministic, verified by execution, split by function and by family."""

import ast
import hashlib
import json
import sys
from collections import Counter

import pytest

from uni_agent.envs import repair_tasks
from uni_agent.envs.repair_families import FAMILIES, HELD_OUT_FAMILIES
from uni_agent.envs.repair_tasks import (
    LEVELS,
    NUM_TESTS,
    Task,
    _LineLimit,
    _results,
    expert_episode,
    generate_tasks,
    is_held_out,
    mutants,
    num_bugs,
)

KINDS = {
    "operator",
    "comparison",
    "constant",
    "off_by_one",
    "swapped_arguments",
    "wrong_variable",
    "missing_return",
    "boolean",
    "accumulator",
    "slice_side",
    "wrong_method",
}


HELD_OUT_SHA256 = {
    "held_out": "ab501c9a90cc27ad44e622d96626428f72504b67e6b48bc1c6e3e806b79a6e89",
    "held_out_family": "6c1cee3066fd31dfe4b1080e7a659c90f018d103f1c0f293acc53b76674d9711",
}
"""Of 300 tasks each, seed 0: what README and summary figures speak of."""


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Task]]:
    return {split: generate_tasks(400, seed=3, split=split) for split in repair_tasks.SPLITS}


def _tests(task: Task) -> list[str]:
    tests = task["tests"]
    assert isinstance(tests, list)
    return [str(test) for test in tests]


def _failures(code: str, tests: list[str]) -> int:
    """Count failing tests; lines are counted too, since a bug may loop for ever."""
    namespace: dict[str, object] = {}
    exec(code, namespace)
    failures = 0
    for test in tests:
        before = sys.gettrace()
        sys.settrace(_LineLimit().enter)
        try:
            exec(test, namespace)
        except Exception:
            failures += 1
        finally:
            sys.settrace(before)
    return failures


def _body(code: str) -> str:
    tree = ast.parse(code)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = function.body[1:] if ast.get_docstring(function) else function.body
    return ast.unparse(tree)


def test_buggy_code_fails_and_solution_passes(splits: dict[str, list[Task]]) -> None:
    for task in (task for tasks in splits.values() for task in tasks):
        tests = _tests(task)
        assert len(tests) == NUM_TESTS
        assert _failures(str(task["code"]), tests) > 0, task["id"]
        assert _failures(str(task["solution"]), tests) == 0, task["id"]


def test_same_seed_gives_same_tasks_and_other_seed_others() -> None:
    first = generate_tasks(20, seed=5)
    assert first == generate_tasks(20, seed=5)
    assert first == generate_tasks(30, seed=5)[:20]
    assert first != generate_tasks(20, seed=6)


def test_every_mutation_kind_family_and_level_appears(splits: dict[str, list[Task]]) -> None:
    tasks = [*splits["train"], *splits["held_out"], *generate_tasks(200, seed=3, levels=(1,))]
    kinds = Counter(kind for task in tasks for kind in str(task["mutation"]).split("+"))
    assert set(kinds) == KINDS
    assert {task["family"] for task in tasks} == set(FAMILIES)
    assert {task["level"] for task in tasks} == {1, 2, 3}


def test_held_out_functions_and_families_are_never_trained(splits: dict[str, list[Task]]) -> None:
    trained = {_body(str(task["solution"])) for task in splits["train"]}
    held_out = {_body(str(task["solution"])) for task in splits["held_out"]}
    assert not trained & held_out
    assert not any(is_held_out(code) for code in trained)
    assert all(is_held_out(code) for code in held_out)
    assert {task["family"] for task in splits["held_out_family"]} == set(HELD_OUT_FAMILIES)
    assert not set(FAMILIES) & set(HELD_OUT_FAMILIES)


def test_the_docstring_does_not_move_a_function_to_another_split() -> None:
    plain = "def f(a, b):\n    return a + b"
    documented = 'def f(a, b):\n    """a plus b"""\n    return a + b'
    assert is_held_out(plain) == is_held_out(documented)


def test_levels_say_how_many_lines_are_wrong_and_what_the_agent_sees() -> None:
    for level in LEVELS:
        for task in generate_tasks(40, seed=4, levels=(level,)):
            pairs = zip(str(task["code"]).split("\n"), str(task["solution"]).split("\n"), strict=True)
            assert sum(old != new for old, new in pairs) == num_bugs(level)
            assert str(task["mutation"]).count("+") == num_bugs(level) - 1
            assert ('"""' in str(task["code"])) == (level != 4)


def test_each_bug_alone_fails_a_test() -> None:
    for task in generate_tasks(60, seed=8, levels=(2, 3)):
        broken, right = str(task["code"]).split("\n"), str(task["solution"]).split("\n")
        for line in [i for i, (old, new) in enumerate(zip(broken, right, strict=True)) if old != new]:
            lone = [*right[:line], broken[line], *right[line + 1 :]]
            assert _failures("\n".join(lone), _tests(task)) > 0


def test_the_demo_is_measured_on_the_committed_tasks() -> None:
    for split, digest in HELD_OUT_SHA256.items():
        tasks = generate_tasks(300, seed=0, split=split)
        assert hashlib.sha256(json.dumps(tasks).encode()).hexdigest() == digest


def test_mutants_differ_in_one_line() -> None:
    code = "def f(a, b):\n    if a > 3:\n        return a - b\n    return b"
    found = mutants(code)
    assert len({mutant.code for mutant in found}) == len(found)
    for mutant in found:
        pairs = list(zip(code.split("\n"), mutant.code.split("\n"), strict=True))
        assert [i for i, (old, new) in enumerate(pairs, 1) if old != new] == [mutant.line]


def test_expert_ends_with_the_solution_and_errs_in_half_of_the_episodes() -> None:
    lengths: Counter[int] = Counter()
    for task in generate_tasks(150, seed=3, levels=(1,)):
        edits = expert_episode(task, seed=0)
        assert edits == expert_episode(task, seed=0)
        lengths[len(edits)] += 1
        lines = str(task["code"]).split("\n")
        for number, edit in enumerate(edits, 1):
            lines[edit.line - 1] = edit.code
            assert ("\n".join(lines) == task["solution"]) == (number == len(edits))
    assert set(lengths) == {1, 2}
    assert 0.35 < lengths[1] / sum(lengths.values()) < 0.65


def test_unknown_split_and_level_are_refused() -> None:
    with pytest.raises(ValueError, match="split is 'test'"):
        generate_tasks(1, seed=0, split="test")
    with pytest.raises(ValueError, match="levels are"):
        generate_tasks(1, seed=0, levels=(5,))


@pytest.mark.parametrize(
    "body",
    [
        "    for v in xs:\n        xs.append(v)",
        "    total = xs\n    for v in xs:\n        total += total * 9",
    ],
)
def test_a_mutant_that_never_ends_is_an_error_not_a_hang(body: str) -> None:
    assert _results(f"def f(xs):\n{body}\n    return xs", "f", [([1, 2],)]) == ["_TooMuch"]
