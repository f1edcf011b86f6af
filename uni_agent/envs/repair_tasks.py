"""Code-repair tasks from a generator: a correct function, one to three bugs, tests, and a scripted expert.

Flows out: tasks as JSON objects (`id`, `code`, `tests`, and what made them: `level`, `family`, `mutation`,
`solution`). The solution is for the expert and for checks; an environment never shows it. Everything follows
from the seed. This module knows nothing of agents, tools, renderers or training.
"""

import ast
import copy
import functools
import hashlib
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from uni_agent.envs.repair_families import FAMILIES, HELD_OUT_FAMILIES, Args, Draft

Task = dict[str, object]
"""A task as a JSON object."""

SPLITS = ("train", "held_out", "held_out_family")
LEVELS = {
    1: "one bug",
    2: "two bugs, in two lines",
    3: "three bugs, in three lines",
    4: "one bug, and no docstring that states the intent: only the failing tests tell",
}
SHARES = {1: 0.2, 2: 0.4, 3: 0.4, 4: 0.2}
"""How often each level is drawn, among those asked for."""

HELD_OUT_SHARE = 0.2
"""Share of all functions that is never trained on."""

NUM_TESTS = 3
_NUM_CALLS = 10
_MAX_LINES = 500
_MAX_SIZE = 10_000
_ATTEMPTS = 400


class Mutant(NamedTuple):
    """A changed function: its source, the kind of change, and the line (from 1) that changed."""

    code: str
    kind: str
    line: int


class Edit(NamedTuple):
    """An answer of the expert: `code` replaces line `line` (from 1) of the task's code."""

    line: int
    code: str


def generate_tasks(
    num: int, *, seed: int, split: str = "train", levels: Sequence[int] = (1, 2, 3)
) -> list[Task]:
    """Generate `num` verified tasks: the solution passes all tests, and each bug alone fails one.

    Levels are drawn by `SHARES`, families evenly among those with enough lines. A function belongs to
    exactly one of `train` and `held_out`, by a hash of its text without docstring, whatever the seed;
    `held_out_family` has families that `train` lacks.
    """
    tasks = stream_tasks(seed=seed, split=split, levels=levels)
    return [next(tasks) for _ in range(num)]


def stream_tasks(*, seed: int, split: str = "train", levels: Sequence[int] = (1, 2, 3)) -> Iterator[Task]:
    """Yield the tasks of `generate_tasks` without end."""
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
    if not levels or any(level not in LEVELS for level in levels):
        raise ValueError(f"levels are {list(levels)}; expected some of {list(LEVELS)}")
    for number in itertools.count():
        rng = random.Random(f"{seed}/{split}/{number}")
        level = rng.choices(levels, [SHARES[level] for level in levels])[0]
        family = rng.choice(_families(split, num_bugs(level)))
        yield _make_task(f"{split}-{seed}-{number}", family, level, split, rng)


def num_bugs(level: int) -> int:
    """How many lines of a task of this level are wrong."""
    return 1 if level == 4 else level


@functools.cache
def _families(split: str, bugs: int) -> list[str]:
    """Name the families of a split whose functions have enough lines for so many bugs."""
    known = HELD_OUT_FAMILIES if split == "held_out_family" else FAMILIES
    drafts = {name: build(random.Random(0)) for name, build in known.items()}
    return sorted(name for name, draft in drafts.items() if len(draft.body) >= bugs)


def _make_task(task_id: str, family: str, level: int, split: str, rng: random.Random) -> Task:
    build = FAMILIES.get(family) or HELD_OUT_FAMILIES[family]
    for _ in range(_ATTEMPTS):
        draft = build(rng)
        solution = _source(draft, with_doc=level != 4)
        if split != "held_out_family" and is_held_out(solution) != (split == "held_out"):
            continue
        bugs = _break(solution, num_bugs(level), rng)
        tests = bugs and _choose_tests(draft, solution, bugs, rng)
        if bugs and tests:
            return {
                "id": task_id,
                "code": bugs[-1].code,
                "tests": tests,
                "level": level,
                "family": family,
                "mutation": "+".join(bug.kind for bug in bugs),
                "solution": solution,
            }
    raise RuntimeError(f"family {family!r} gave no task of level {level} in {_ATTEMPTS} tries")


def is_held_out(code: str) -> bool:
    """Tell whether a correct function is kept from training, by the hash of its text without docstring."""
    tree = ast.parse(code)
    function = tree.body[0]
    if isinstance(function, ast.FunctionDef) and ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    digest = hashlib.sha256(ast.unparse(tree).encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def _source(draft: Draft, *, with_doc: bool) -> str:
    lines = [f"def {draft.name}({', '.join(draft.params)}):"]
    lines += [f'    """{draft.doc}"""'] if with_doc else []
    lines += [f"    {line}" for line in draft.body]
    return ast.unparse(ast.parse("\n".join(lines)))


def _break(solution: str, bugs: int, rng: random.Random) -> list[Mutant]:
    """Mutate `bugs` different lines, one after the other; empty where a line too few can be mutated."""
    found: list[Mutant] = []
    code = solution
    for _ in range(bugs):
        mutant = _mutate(code, {bug.line for bug in found}, rng)
        if mutant is None:
            return []
        found.append(mutant)
        code = mutant.code
    return found


# --- tests ---


def _choose_tests(draft: Draft, solution: str, bugs: list[Mutant], rng: random.Random) -> list[str] | None:
    """Choose calls such that each bug alone fails one of them; None where that cannot be."""
    calls = [draft.draw(rng) for _ in range(_NUM_CALLS)]
    expected = _results(solution, draft.name, calls)
    lone = [_with_line(solution, bug.line, bugs[-1].code) for bug in bugs]
    programs = list(dict.fromkeys([*lone, bugs[-1].code]))
    results = [_results(program, draft.name, calls) for program in programs]
    left = [{i for i, value in enumerate(row) if value != expected[i]} for row in results]
    if not all(left):
        return None
    chosen: list[int] = []
    while len(chosen) < NUM_TESTS:
        rest = [i for i in range(len(calls)) if i not in chosen]
        chosen.append(max(rest, key=lambda i: sum(i in places for places in left)))
        left = [places for places in left if chosen[-1] not in places]
    if left:
        return None
    return [f"assert {draft.name}({', '.join(map(repr, calls[i]))}) == {expected[i]}" for i in sorted(chosen)]


def _with_line(code: str, number: int, other: str) -> str:
    """Take line `number` (from 1) from another version of the code."""
    lines = code.split("\n")
    lines[number - 1] = other.split("\n")[number - 1]
    return "\n".join(lines)


def _results(code: str, name: str, calls: list[Args]) -> list[str]:
    """Return the repr of each call, or its error's name. Generated code only: it is not sandboxed.

    A mutant may loop for ever or grow without bound (a list that is multiplied while it is walked), so
    lines are counted and sizes are watched.
    """
    namespace: dict[str, object] = {}
    exec(code, namespace)
    function = namespace[name]
    assert callable(function)
    results: list[str] = []
    for args in calls:
        before = sys.gettrace()
        sys.settrace(_LineLimit().enter)
        try:
            results.append(repr(function(*copy.deepcopy(args))))
        except Exception as error:
            results.append(type(error).__name__)
        finally:
            sys.settrace(before)
    return results


class _TooMuch(Exception):
    """A generated function ran longer, or made more, than any of them should."""


class _LineLimit:
    """A trace function that stops a call after `_MAX_LINES` lines, or when a value grows too large."""

    def __init__(self) -> None:
        self._left = _MAX_LINES

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        self._left -= 1
        if self._left < 0:
            raise _TooMuch
        if self._left % 4 == 0:  # looking at the frame is slow, and four lines cannot make much
            for value in frame.f_locals.values():
                if isinstance(value, list | str) and len(value) > _MAX_SIZE:
                    raise _TooMuch
        return self.enter


# --- mutations ---

_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add, ast.Mult),
    ast.Mult: (ast.Add, ast.Sub),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt, ast.LtE),
}
_NAMES = {"upper": "lower", "lower": "upper", "min": "max", "max": "min"}


def mutants(code: str) -> list[Mutant]:
    """List every mutant of `code` that differs from it in one line, without repeats, in a fixed order."""
    tree = ast.parse(code)
    found: dict[str, Mutant] = {}
    for index, node in enumerate(ast.walk(tree)):
        for kind, number in _options(node, tree):
            mutant = _mutant(code, index, kind, number)
            if mutant is not None:
                found.setdefault(mutant.code, mutant)
    return list(found.values())


def _mutate(code: str, taken: set[int], rng: random.Random) -> Mutant | None:
    """Draw a mutant outside the lines that are taken: its kind first, so that rare kinds are seen."""
    tree = ast.parse(code)
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for index, node in enumerate(ast.walk(tree)):
        if isinstance(node, ast.expr | ast.stmt) and node.lineno in taken:
            continue
        for kind, number in _options(node, tree):
            by_kind.setdefault(kind, []).append((index, number))
    while by_kind:
        kind = rng.choice(sorted(by_kind))
        index, number = by_kind[kind].pop(rng.randrange(len(by_kind[kind])))
        if not by_kind[kind]:
            del by_kind[kind]
        mutant = _mutant(code, index, kind, number)
        if mutant is not None and mutant.line not in taken:
            return mutant
    return None


def _mutant(code: str, index: int, kind: str, number: int) -> Mutant | None:
    """Apply one mutation to the node of that index; None unless exactly one line changed."""
    changed = ast.parse(code)
    _apply(list(ast.walk(changed))[index], kind, number, changed)
    text = ast.unparse(changed)
    old, new = code.split("\n"), text.split("\n")
    differ = [i for i, (a, b) in enumerate(zip(old, new, strict=False), 1) if a != b]
    return Mutant(text, kind, differ[0]) if len(new) == len(old) and len(differ) == 1 else None


def _options(node: ast.AST, tree: ast.Module) -> list[tuple[str, int]]:
    """List the mutations of one node, as kinds with a number that tells the variants apart."""
    match node:
        case ast.BinOp() if type(node.op) in _OPERATORS:
            swap = [("swapped_arguments", 0)] if isinstance(node.op, ast.Sub) else []
            return [("operator", 0), ("operator", 1), *swap]
        case ast.Compare():
            return [("comparison", 0), ("comparison", 1), ("comparison", 2), ("swapped_arguments", 0)]
        case ast.BoolOp():
            return [("boolean", 0)]
        case ast.AugAssign():
            return [("accumulator", 0)]
        case ast.Constant() if type(node.value) is int:
            return [("constant", -1), ("constant", 1)]
        case ast.Call(func=ast.Name(id="range")):
            return [("off_by_one", -1), ("off_by_one", 1)]
        case ast.Slice():
            return [("slice_side", 0)]
        case ast.Return():
            return [("missing_return", 0)]
        case ast.Attribute() if node.attr in _NAMES:
            return [("wrong_method", 0)]
        case ast.Name(ctx=ast.Load()) if node.id in _NAMES:
            return [("wrong_method", 0)]
        case ast.Name(ctx=ast.Load()):
            return [("wrong_variable", i) for i in range(len(_others(node.id, tree)))]
        case _:
            return []


def _apply(node: ast.AST, kind: str, number: int, tree: ast.Module) -> None:
    """Change `node`, which is part of `tree`, in place."""
    match node:
        case ast.BinOp() if kind == "swapped_arguments":
            node.left, node.right = node.right, node.left
        case ast.BinOp():
            node.op = _OPERATORS[type(node.op)][number]()
        case ast.Compare() if kind == "swapped_arguments":
            node.left, node.comparators[0] = node.comparators[0], node.left
        case ast.Compare():
            node.ops[0] = _COMPARISONS[type(node.ops[0])][number]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.AugAssign():
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        case ast.Constant(value=int(value)):
            node.value = value + number
        case ast.Call():
            last = node.args[-1]
            op = ast.Add() if number > 0 else ast.Sub()
            node.args[-1] = ast.BinOp(left=last, op=op, right=ast.Constant(value=1))
        case ast.Slice():
            node.lower, node.upper = node.upper, node.lower
        case ast.Return() if node.value is not None:
            _replace(tree, node, ast.Expr(value=node.value))
        case ast.Attribute():
            node.attr = _NAMES[node.attr]
        case ast.Name() if kind == "wrong_method":
            node.id = _NAMES[node.id]
        case ast.Name():
            node.id = _others(node.id, tree)[number]
        case _:
            raise AssertionError(f"no mutation {kind} of {ast.dump(node)}")


def _others(name: str, tree: ast.Module) -> list[str]:
    """List the other variables of the function, sorted."""
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names = stored | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    return sorted(names - {name}) if name in names else []


def _replace(tree: ast.Module, old: ast.stmt, new: ast.stmt) -> None:
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and old in value:
                value[value.index(old)] = new


# --- the expert ---


def expert_episode(task: Task, seed: int) -> list[Edit]:
    """Write the answers of an expert who knows the solution of a task with one bug.

    Half of the episodes are right at the first try. The others are right at the second, after a
    mistake: a wrong change of the wrong line, or another line, rewritten as it stood. The last edit
    gives the solution. Raises ValueError for a task with several bugs, which nobody scripted.
    """
    rng = random.Random(f"expert/{task['id']}/{seed}")
    code, solution = str(task["code"]), str(task["solution"])
    right = _edit(code, solution)
    if rng.random() < 0.5:
        return [right]
    lines = code.split("\n")
    first = 3 if lines[1].strip().startswith('"""') else 2
    others = [Edit(n, lines[n - 1]) for n in range(first, len(lines) + 1) if n != right.line]
    if others and rng.random() < 0.5:
        return [rng.choice(others), right]
    wrong = [m for m in mutants(code) if m.line == right.line and m.code != solution]
    return [_edit(code, rng.choice(wrong).code), right] if wrong else [right]


def _edit(old: str, new: str) -> Edit:
    pairs = zip(old.split("\n"), new.split("\n"), strict=True)
    differ = [Edit(number, line) for number, (before, line) in enumerate(pairs, 1) if before != line]
    if len(differ) != 1:
        raise ValueError(f"{len(differ)} lines differ; the expert edits one")
    return differ[0]
