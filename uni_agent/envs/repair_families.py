"""Families of small correct functions, from which repair tasks are made.

A family is a function from a random generator to a Draft: source text whose docstring states the whole
intent, and a way to draw arguments. It must not know about bugs, tests, levels or splits.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

Value = int | str | bool | list[int] | list[str]
Args = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """One correct function and how to call it."""

    name: str
    params: tuple[str, ...]
    doc: str
    body: tuple[str, ...]
    draw: Callable[[random.Random], Args]


NUMBERS = ("a", "b", "c", "x", "y", "z", "n", "m", "p", "q")
LISTS = ("items", "nums", "values", "data", "xs")
TEXTS = ("s", "text", "word", "name", "line")
ITEMS = ("v", "item", "e", "t")
OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
COMPARISONS = {">": "above", ">=": "at least", "<": "below", "<=": "at most"}


def _pick(rng: random.Random, pool: tuple[str, ...], num: int) -> list[str]:
    return rng.sample(pool, num)


def _number(rng: random.Random) -> int:
    return rng.randint(-4, 12)


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-3, 9) for _ in range(rng.randint(3, 5))]


def _text(rng: random.Random) -> str:
    return "".join(rng.choice("abcdeABC") for _ in range(rng.randint(4, 7)))


def _constant(rng: random.Random) -> int:
    return rng.randint(2, 9)


def arithmetic(rng: random.Random) -> Draft:
    """Two or three numbers through one expression."""
    x, y = _pick(rng, NUMBERS, 2)
    k, first, second = _constant(rng), rng.choice(list(OPERATORS)), rng.choice("+-")
    name = rng.choice(("combine", "compute", "calc", "mix"))
    return Draft(
        name,
        (x, y),
        f"{x} {OPERATORS[first]} {y}, {OPERATORS[second]} {k}",
        (f"return {x} {first} {y} {second} {k}",),
        lambda r: (_number(r), _number(r)),
    )


def linear(rng: random.Random) -> Draft:
    """A scaled number and an offset, in two steps."""
    x, y, part = _pick(rng, NUMBERS, 3)
    k, op = _constant(rng), rng.choice("+-")
    name = rng.choice(("scale", "price", "line_at", "convert"))
    return Draft(
        name,
        (x, y),
        f"{x} times {k}, {OPERATORS[op]} {y}",
        (f"{part} = {x} * {k}", f"return {part} {op} {y}"),
        lambda r: (_number(r), _number(r)),
    )


def clamp(rng: random.Random) -> Draft:
    """Limit a number from below and from above."""
    x, low, high = rng.choice(NUMBERS), rng.choice(("low", "lo", "least")), rng.choice(("high", "hi", "most"))
    k, op = _constant(rng), rng.choice(list(OPERATORS))
    name = rng.choice(("clamp", "limit", "bound"))

    def draw(r: random.Random) -> Args:
        low_value = r.randint(-2, 4)
        return (_number(r), low_value, low_value + r.randint(1, 5))

    return Draft(
        name,
        (x, low, high),
        f"{x} kept from {low} to {high}, {OPERATORS[op]} {k}",
        (
            f"if {x} < {low}:",
            f"    return {low} {op} {k}",
            f"if {x} > {high}:",
            f"    return {high} {op} {k}",
            f"return {x} {op} {k}",
        ),
        draw,
    )


def accumulate(rng: random.Random) -> Draft:
    """Add up the items that pass a condition."""
    xs, v, total = rng.choice(LISTS), rng.choice(ITEMS), rng.choice(("total", "acc", "result"))
    k, cmp, op = rng.randint(1, 6), rng.choice(list(COMPARISONS)), rng.choice(list(OPERATORS))
    c = _constant(rng)
    name = rng.choice(("sum_where", "total_of", "add_up"))
    return Draft(
        name,
        (xs,),
        f"sum of {v} {OPERATORS[op]} {c} for {v} in {xs} {COMPARISONS[cmp]} {k}",
        (
            f"{total} = 0",
            f"for {v} in {xs}:",
            f"    if {v} {cmp} {k}:",
            f"        {total} += {v} {op} {c}",
            f"return {total}",
        ),
        lambda r: (_numbers(r),),
    )


def count(rng: random.Random) -> Draft:
    """Count the items that pass a condition."""
    xs, v, total, n = rng.choice(LISTS), rng.choice(ITEMS), rng.choice(("count", "found")), rng.choice(NUMBERS)
    cmp, op, k = rng.choice(list(COMPARISONS)), rng.choice("+-"), rng.randint(1, 4)
    name = rng.choice(("count_where", "how_many", "tally"))
    return Draft(
        name,
        (xs, n),
        f"number of {xs} {COMPARISONS[cmp]} {n} {OPERATORS[op]} {k}",
        (
            f"{total} = 0",
            f"for {v} in {xs}:",
            f"    if {v} {cmp} {n} {op} {k}:",
            f"        {total} += 1",
            f"return {total}",
        ),
        lambda r: (_numbers(r), r.randint(0, 6)),
    )


def slices(rng: random.Random) -> Draft:
    """A part of a text, joined to another text."""
    s, t = _pick(rng, TEXTS, 2)
    k, tail, method = rng.randint(1, 4), rng.random() < 0.5, rng.choice(("upper", "lower"))
    flip = rng.random() < 0.5
    part, where = (f"{s}[{k}:]", f"without first {k}") if tail else (f"{s}[:{k}]", f"first {k} only")
    left, right = (f"{t}.{method}()", part) if flip else (part, f"{t}.{method}()")
    order = f"{t} {method}, then {s} {where}" if flip else f"{s} {where}, then {t} {method}"
    name = rng.choice(("join_parts", "glue", "label"))
    return Draft(name, (s, t), order, (f"return {left} + {right}",), lambda r: (_text(r), _text(r)))


def strings(rng: random.Random) -> Draft:
    """Repeat or keep a text by its length."""
    s, n = rng.choice(TEXTS), rng.choice(NUMBERS)
    cmp, k = rng.choice(list(COMPARISONS)), rng.randint(1, 3)
    method = rng.choice(("upper", "lower"))
    name = rng.choice(("emphasize", "style", "banner"))
    return Draft(
        name,
        (s, n),
        f"{s} {method} times {k} if its length is {COMPARISONS[cmp]} {n}, else {s} times {k + 1}",
        (f"if len({s}) {cmp} {n}:", f"    return {s}.{method}() * {k}", f"return {s} * {k + 1}"),
        lambda r: (_text(r), r.randint(4, 7)),
    )


def select(rng: random.Random) -> Draft:
    """A new list from the items that pass a condition."""
    xs, v = rng.choice(LISTS), rng.choice(ITEMS)
    cmp, k, op, c = rng.choice(list(COMPARISONS)), rng.randint(1, 6), rng.choice(list(OPERATORS)), _constant(rng)
    name = rng.choice(("select", "keep", "filter_by"))
    return Draft(
        name,
        (xs,),
        f"{v} {OPERATORS[op]} {c} for {v} in {xs} {COMPARISONS[cmp]} {k}",
        (f"return [{v} {op} {c} for {v} in {xs} if {v} {cmp} {k}]",),
        lambda r: (_numbers(r),),
    )


def branches(rng: random.Random) -> Draft:
    """One of two expressions, by a comparison."""
    x, y = _pick(rng, NUMBERS, 2)
    cmp, one, two = rng.choice(list(COMPARISONS)), rng.choice(list(OPERATORS)), rng.choice(list(OPERATORS))
    k, c = _constant(rng), _constant(rng)
    name = rng.choice(("choose", "decide", "route"))
    return Draft(
        name,
        (x, y),
        f"{x} {OPERATORS[one]} {k} if {x} is {COMPARISONS[cmp]} {y}, else {y} {OPERATORS[two]} {c}",
        (f"if {x} {cmp} {y}:", f"    return {x} {one} {k}", f"return {y} {two} {c}"),
        lambda r: (r.randint(0, 5), r.randint(0, 5)),
    )


def steps(rng: random.Random) -> Draft:
    """A loop over a range of whole numbers."""
    a, b = _pick(rng, NUMBERS, 2)
    total, k, op = rng.choice(("total", "acc", "result")), _constant(rng), rng.choice(list(OPERATORS))
    last, word = rng.choice((("", "before"), (" + 1", "up to")))
    name = rng.choice(("range_sum", "series", "walk"))
    return Draft(
        name,
        (a, b),
        f"sum of i {OPERATORS[op]} {k} for i from {a} {word} {b}",
        (f"{total} = 0", f"for i in range({a}, {b}{last}):", f"    {total} += i {op} {k}", f"return {total}"),
        lambda r: (r.randint(0, 3), r.randint(4, 7)),
    )


def search(rng: random.Random) -> Draft:
    """The place of the first item that passes a condition."""
    xs, n = rng.choice(LISTS), rng.choice(NUMBERS)
    cmp, k, op = rng.choice(list(COMPARISONS)), rng.randint(1, 4), rng.choice("+-")
    name = rng.choice(("find_first", "locate", "index_of"))
    return Draft(
        name,
        (xs, n),
        f"first i with {xs} at i {COMPARISONS[cmp]} {n} {OPERATORS[op]} {k}, else -1",
        (
            f"for i in range(len({xs})):",
            f"    if {xs}[i] {cmp} {n} {op} {k}:",
            "        return i",
            "return -1",
        ),
        lambda r: (_numbers(r), r.randint(0, 6)),
    )


def logic(rng: random.Random) -> Draft:
    """Whether two conditions hold, both or either."""
    x, y = _pick(rng, NUMBERS, 2)
    word, one, two = rng.choice(("and", "or")), rng.choice(list(COMPARISONS)), rng.choice(list(COMPARISONS))
    k, c = rng.randint(1, 6), rng.randint(1, 6)
    name = rng.choice(("check", "allowed", "is_valid"))
    return Draft(
        name,
        (x, y),
        f"whether {x} is {COMPARISONS[one]} {k} {word} {y} is {COMPARISONS[two]} {c}",
        (f"return {x} {one} {k} {word} {y} {two} {c}",),
        lambda r: (r.randint(0, 7), r.randint(0, 7)),
    )


def extremes(rng: random.Random) -> Draft:
    """The largest and the smallest item, combined (a held-out family)."""
    xs, op, sign, k = rng.choice(LISTS), rng.choice(list(OPERATORS)), rng.choice("+-"), _constant(rng)
    one, two = rng.choice((("max", "min"), ("min", "max")))
    words = {"max": "largest", "min": "smallest"}
    name = rng.choice(("spread", "extent", "span"))
    return Draft(
        name,
        (xs,),
        f"{words[one]} of {xs} {OPERATORS[op]} {words[two]}, {OPERATORS[sign]} {k}",
        (f"return {one}({xs}) {op} {two}({xs}) {sign} {k}",),
        lambda r: (_numbers(r),),
    )


def weighted(rng: random.Random) -> Draft:
    """Add up a list by position (a held-out family)."""
    xs, n, total = rng.choice(LISTS), rng.choice(NUMBERS), rng.choice(("total", "acc", "result"))
    op, other, k = rng.choice(list(OPERATORS)), rng.choice("+-"), rng.randint(2, 6)
    name = rng.choice(("weigh", "score", "rank_sum"))
    return Draft(
        name,
        (xs, n),
        f"{n} plus sum of {xs} at i {OPERATORS[op]} i {OPERATORS[other]} {k}",
        (
            f"{total} = {n}",
            f"for i in range(len({xs})):",
            f"    {total} += {xs}[i] {op} i {other} {k}",
            f"return {total}",
        ),
        lambda r: (_numbers(r), r.randint(0, 6)),
    )


FAMILIES: dict[str, Callable[[random.Random], Draft]] = {
    "arithmetic": arithmetic,
    "linear": linear,
    "clamp": clamp,
    "accumulate": accumulate,
    "count": count,
    "slices": slices,
    "strings": strings,
    "select": select,
    "branches": branches,
    "steps": steps,
    "search": search,
    "logic": logic,
}

HELD_OUT_FAMILIES: dict[str, Callable[[random.Random], Draft]] = {
    "extremes": extremes,
    "weighted": weighted,
}
