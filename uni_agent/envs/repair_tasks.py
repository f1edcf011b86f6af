"""Code-repair tasks from a generator: a correct function, one or two mutations, tests, and a scripted expert.

Flows out: tasks as JSON objects (`id`, `code`, `tests`, and what made them: `level`, `family`, `mutation`,
`solution`). The solution is for the expert and for checks; an environment never shows it. Everything follows
from the seed. This module knows nothing of agents, tools, renderers or training.
"""

import ast
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from uni_agent.envs.repair_families import FAMILIES, HELD_OUT_FAMILIES, Args, Draft

Task = dict[str, object]
"""A task as a JSON object."""

SPLITS = ("train", "held_out", "held_out_family")
LEVELS = {
    1: "one bug, the docstring states the intent",
    2: "one bug, no docstring: only the failing tests tell",
    3: "two bugs in one line, the docstring states the intent",
}
SHARES = {1: 0.2, 2: 0.6, 3: 0.2}
"""How often each level is drawn, among those asked for."""

HELD_OUT_SHARE = 0.2
"""Share of all functions that is never trained on."""

NUM_TESTS = 3
NUM_RIVALS = 12
_ATTEMPTS = 200


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
    """Generate `num` verified tasks: the code fails a test, the solution passes all of them.

    Families alternate evenly, levels are drawn by `SHARES`. A function belongs to exactly one of `train` and
    `held_out`, by a hash of its text without docstring, whatever the seed; `held_out_family` has families
    that `train` lacks.
    """
    tasks = stream_tasks(seed=seed, split=split, levels=levels)
    return [next(tasks) for _ in range(num)]


def stream_tasks(*, seed: int, split: str = "train", levels: Sequence[int] = (1, 2, 3)) -> Iterator[Task]:
    """Yield the tasks of `generate_tasks` without end."""
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
    if not levels or any(level not in LEVELS for level in levels):
        raise ValueError(f"levels are {list(levels)}; expected some of {list(LEVELS)}")
    families = list(HELD_OUT_FAMILIES if split == "held_out_family" else FAMILIES)
    number = 0
    while True:
        rng = random.Random(f"{seed}/{split}/{number}")
        if number % len(families) == 0:
            random.Random(f"{seed}/{split}/order/{number}").shuffle(families)
        level = rng.choices(levels, [SHARES[level] for level in levels])[0]
        yield _make_task(f"{split}-{seed}-{number}", families[number % len(families)], level, split, rng)
        number += 1


def _make_task(task_id: str, family: str, level: int, split: str, rng: random.Random) -> Task:
    build = FAMILIES.get(family) or HELD_OUT_FAMILIES[family]
    for _ in range(_ATTEMPTS):
        draft = build(rng)
        solution = _source(draft, with_doc=level != 2)
        if split != "held_out_family" and is_held_out(solution) != (split == "held_out"):
            continue
        bug = _break(solution, level, rng)
        tests = bug and _choose_tests(draft, solution, bug.code, rng)
        if bug and tests:
            return {
                "id": task_id,
                "code": bug.code,
                "tests": tests,
                "level": level,
                "family": family,
                "mutation": bug.kind,
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


def _break(solution: str, level: int, rng: random.Random) -> Mutant | None:
    """Mutate once, or twice in the same line for level 3."""
    options = mutants(solution)
    first = _pick_kind(options, rng)
    if level != 3:
        return first
    again = [m for m in mutants(first.code) if m.line == first.line and m.code != solution]
    again = [m for m in again if m.kind != first.kind and m.code not in {o.code for o in options}]
    if not again:
        return None
    second = _pick_kind(again, rng)
    return Mutant(second.code, f"{first.kind}+{second.kind}", first.line)


def _pick_kind(options: list[Mutant], rng: random.Random) -> Mutant:
    """Draw a kind first, so that frequent kinds do not crowd out rare ones."""
    kind = rng.choice(sorted({m.kind for m in options}))
    return rng.choice([m for m in options if m.kind == kind])


# ---- tests


def _choose_tests(draft: Draft, solution: str, code: str, rng: random.Random) -> list[str] | None:
    """Choose calls that tell the solution from as many of its mutants as possible; None if `code` passes."""
    calls = [draft.draw(rng) for _ in range(8)]
    expected = _results(solution, draft.name, calls)
    others = [m.code for m in mutants(solution) if m.code != code]
    rivals = [code, *rng.sample(others, min(NUM_RIVALS, len(others)))]
    results = [_results(rival, draft.name, calls) for rival in rivals]
    caught = [{i for i, value in enumerate(row) if value != expected[i]} for row in results]
    if not caught[0]:
        return None
    chosen: list[int] = []
    left = [places for places in caught if places]
    while len(chosen) < NUM_TESTS:
        rest = [i for i in range(len(calls)) if i not in chosen]
        best = max(rest, key=lambda i: sum(i in places for places in left))
        chosen.append(best)
        left = [places for places in left if best not in places]
    if not caught[0] & set(chosen):
        return None
    chosen.sort()
    return [f"assert {draft.name}({', '.join(map(repr, calls[i]))}) == {expected[i]}" for i in chosen]


def _results(code: str, name: str, calls: list[Args]) -> list[str]:
    """Return the repr of each call, or its error's name. Generated code only: it is not sandboxed."""
    namespace: dict[str, object] = {}
    exec(code, namespace)
    function = namespace[name]
    assert callable(function)
    results: list[str] = []
    for args in calls:
        try:
            results.append(repr(function(*args)))
        except Exception as error:
            results.append(type(error).__name__)
    return results


# ---- mutations

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
    lines = code.split("\n")
    found: dict[str, Mutant] = {}
    for index, node in enumerate(ast.walk(tree)):
        for kind, number in _options(node, tree):
            changed = ast.parse(code)
            _apply(list(ast.walk(changed))[index], kind, number, changed)
            text = ast.unparse(changed)
            new = text.split("\n")
            differ = [i for i, line in enumerate(lines) if i < len(new) and line != new[i]]
            if len(new) == len(lines) and len(differ) == 1:
                found.setdefault(text, Mutant(text, kind, differ[0] + 1))
    return list(found.values())


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


# ---- the expert


def expert_episode(task: Task, seed: int) -> list[Edit]:
    """Write the answers of an expert who knows the solution.

    Half of the episodes are right at the first try; the others start with a plausible mistake (another change
    of one line of the task's code) and are right at the second. The last edit gives the solution.
    """
    rng = random.Random(f"expert/{task['id']}/{seed}")
    code, solution = str(task["code"]), str(task["solution"])
    right = _edit(code, solution)
    if rng.random() < 0.5:
        return [right]
    wrong = [m for m in mutants(code) if m.code != solution]
    same_line = [m for m in wrong if m.line == right.line]
    mistake = rng.choice(same_line if same_line and rng.random() < 0.5 else wrong)
    return [_edit(code, mistake.code), right]


def _edit(old: str, new: str) -> Edit:
    pairs = zip(old.split("\n"), new.split("\n"), strict=True)
    number, line = next((i, b) for i, (a, b) in enumerate(pairs, 1) if a != b)
    return Edit(number, line)
