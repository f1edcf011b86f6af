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
TOTALS = ("total", "acc", "result")
OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
COMPARISONS = {">": "above", ">=": "at least", "<": "below", "<=": "at most"}


def _number(rng: random.Random) -> int:
    return rng.randint(0, 9)


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(0, 9) for _ in range(3)]


def _text(rng: random.Random) -> str:
    return "".join(rng.choice("abcABC") for _ in range(rng.randint(3, 5)))


def _constant(rng: random.Random) -> int:
    return rng.randint(2, 9)


def _operator(rng: random.Random, signs: str = "+-*") -> tuple[str, str]:
    sign = rng.choice(signs)
    return sign, OPERATORS[sign]


def _comparison(rng: random.Random) -> tuple[str, str]:
    return rng.choice(list(COMPARISONS.items()))


def arithmetic(rng: random.Random) -> Draft:
    """Two numbers through one expression."""
    x, y = rng.sample(NUMBERS, 2)
    k, (one, one_word), (two, two_word) = _constant(rng), _operator(rng), _operator(rng, "+-")
    return Draft(
        rng.choice(("combine", "compute", "calc")),
        (x, y),
        f"{x} {one_word} {y}, {two_word} {k}",
        (f"return {x} {one} {y} {two} {k}",),
        lambda r: (_number(r), _number(r)),
    )


def linear(rng: random.Random) -> Draft:
    """A scaled number and an offset, in two steps."""
    x, y, part = rng.sample(NUMBERS, 3)
    k, (one, one_word), (two, two_word) = _constant(rng), _operator(rng), _operator(rng, "+-")
    return Draft(
        rng.choice(("scale", "price", "convert")),
        (x, y),
        f"{x} {one_word} {k}, {two_word} {y}",
        (f"{part} = {x} {one} {k}", f"return {part} {two} {y}"),
        lambda r: (_number(r), _number(r)),
    )


def branches(rng: random.Random) -> Draft:
    """One of two values, by a comparison."""
    x, y = rng.sample(NUMBERS, 2)
    k, (sign, word), (cmp, cmp_word) = _constant(rng), _operator(rng), _comparison(rng)
    return Draft(
        rng.choice(("choose", "decide", "route")),
        (x, y),
        f"{x} {word} {k} if {x} is {cmp_word} {y}, else {y}",
        (f"if {x} {cmp} {y}:", f"    return {x} {sign} {k}", f"return {y}"),
        lambda r: (r.randint(0, 5), r.randint(0, 5)),
    )


def limits(rng: random.Random) -> Draft:
    """A number that is replaced when it passes a constant."""
    x, y = rng.sample(NUMBERS, 2)
    k, (sign, word), (cmp, cmp_word) = rng.randint(3, 6), _operator(rng), _comparison(rng)
    return Draft(
        rng.choice(("limit", "clamp", "bound")),
        (x, y),
        f"{y} if {x} is {cmp_word} {k}, else {x} {word} {y}",
        (f"if {x} {cmp} {k}:", f"    return {y}", f"return {x} {sign} {y}"),
        lambda r: (_number(r), _number(r)),
    )


def caps(rng: random.Random) -> Draft:
    """The smaller or larger of two numbers, and an offset."""
    x, y = rng.sample(NUMBERS, 2)
    k, (sign, word) = rng.randint(3, 6), _operator(rng)
    pick, pick_word = rng.choice((("min", "smaller"), ("max", "larger")))
    return Draft(
        rng.choice(("cap", "floor", "edge")),
        (x, y),
        f"{pick_word} of {x} and {k}, {word} {y}",
        (f"return {pick}({x}, {k}) {sign} {y}",),
        lambda r: (_number(r), _number(r)),
    )


def slices(rng: random.Random) -> Draft:
    """A part of a text, joined to another text."""
    s, t = rng.sample(TEXTS, 2)
    k = rng.randint(1, 3)
    part, word = rng.choice(((f"{s}[{k}:]", f"from {k}"), (f"{s}[:{k}]", f"up to {k}")))
    return Draft(
        rng.choice(("glue", "label", "splice")),
        (s, t),
        f"{s} {word}, then {t}",
        (f"return {part} + {t}",),
        lambda r: (_text(r), _text(r)),
    )


def strings(rng: random.Random) -> Draft:
    """A repeated text and one in another case."""
    s, t = rng.sample(TEXTS, 2)
    k, method = rng.randint(2, 3), rng.choice(("upper", "lower"))
    return Draft(
        rng.choice(("style", "banner", "shout")),
        (s, t),
        f"{s} times {k}, then {t} {method}",
        (f"return {s} * {k} + {t}.{method}()",),
        lambda r: (_text(r)[:3], _text(r)[:3]),
    )


def select(rng: random.Random) -> Draft:
    """A new list from the items that pass a condition."""
    xs, v = rng.choice(LISTS), rng.choice(ITEMS)
    k, c, (sign, word), (cmp, cmp_word) = rng.randint(3, 6), _constant(rng), _operator(rng), _comparison(rng)
    return Draft(
        rng.choice(("select", "keep", "pick")),
        (xs,),
        f"{v} {word} {c} for {v} in {xs} {cmp_word} {k}",
        (f"return [{v} {sign} {c} for {v} in {xs} if {v} {cmp} {k}]",),
        lambda r: (_numbers(r),),
    )


def items(rng: random.Random) -> Draft:
    """One item of a list and a number."""
    xs, n = rng.choice(LISTS), rng.choice(NUMBERS)
    k, c, (one, one_word), (two, two_word) = (
        rng.randint(0, 2),
        _constant(rng),
        _operator(rng),
        _operator(rng, "+-"),
    )
    return Draft(
        rng.choice(("fetch", "take", "lookup")),
        (xs, n),
        f"item {k} of {xs} {one_word} {n}, {two_word} {c}",
        (f"return {xs}[{k}] {one} {n} {two} {c}",),
        lambda r: (_numbers(r), _number(r)),
    )


def accumulate(rng: random.Random) -> Draft:
    """Add up the items of a list, each changed, from a start."""
    xs, v, total, n = rng.choice(LISTS), rng.choice(ITEMS), rng.choice(TOTALS), rng.choice(NUMBERS)
    k, (sign, word) = _constant(rng), _operator(rng)
    return Draft(
        rng.choice(("add_up", "collect", "tally")),
        (xs, n),
        f"{n} plus sum of {v} {word} {k} for {v} in {xs}",
        (f"{total} = {n}", f"for {v} in {xs}:", f"    {total} += {v} {sign} {k}", f"return {total}"),
        lambda r: (_numbers(r), _number(r)),
    )


def count(rng: random.Random) -> Draft:
    """Count the items that pass a condition."""
    xs, v, n = rng.choice(LISTS), rng.choice(ITEMS), rng.choice(NUMBERS)
    k, (sign, word), (cmp, cmp_word) = rng.randint(1, 3), _operator(rng, "+-"), _comparison(rng)
    return Draft(
        rng.choice(("how_many", "count_if", "matches")),
        (xs, n),
        f"number of {v} in {xs} {cmp_word} {n} {word} {k}",
        (f"return len([{v} for {v} in {xs} if {v} {cmp} {n} {sign} {k}])",),
        lambda r: (_numbers(r), r.randint(2, 7)),
    )


def steps(rng: random.Random) -> Draft:
    """The sum of a range of whole numbers."""
    a, b = rng.sample(NUMBERS, 2)
    k, (sign, word) = _constant(rng), _operator(rng)
    last, last_word = rng.choice((("", "before"), (" + 1", "up to")))
    return Draft(
        rng.choice(("series", "walk", "span_sum")),
        (a, b),
        f"sum from {a} {last_word} {b}, {word} {k}",
        (f"return sum(range({a}, {b}{last})) {sign} {k}",),
        lambda r: (r.randint(0, 3), r.randint(4, 7)),
    )


def logic(rng: random.Random) -> Draft:
    """Whether two conditions hold, both or either."""
    x, y = rng.sample(NUMBERS, 2)
    joint, (one, one_word), (two, two_word) = rng.choice(("and", "or")), _comparison(rng), _comparison(rng)
    k, c = rng.randint(2, 6), rng.randint(2, 6)
    return Draft(
        rng.choice(("check", "allowed", "is_valid")),
        (x, y),
        f"{x} is {one_word} {k} {joint} {y} is {two_word} {c}",
        (f"return {x} {one} {k} {joint} {y} {two} {c}",),
        lambda r: (r.randint(1, 7), r.randint(1, 7)),
    )


def extremes(rng: random.Random) -> Draft:
    """The largest and the smallest item, combined (a held-out family)."""
    xs, k, (one, one_word), (two, two_word) = (
        rng.choice(LISTS),
        _constant(rng),
        _operator(rng),
        _operator(rng, "+-"),
    )
    first, second = rng.choice((("max", "min"), ("min", "max")))
    words = {"max": "largest", "min": "smallest"}
    return Draft(
        rng.choice(("spread", "extent", "range_of")),
        (xs,),
        f"{words[first]} of {xs} {one_word} {words[second]}, {two_word} {k}",
        (f"return {first}({xs}) {one} {second}({xs}) {two} {k}",),
        lambda r: (_numbers(r),),
    )


def weighted(rng: random.Random) -> Draft:
    """Add up a list by position, from a start (a held-out family)."""
    xs, n, total = rng.choice(LISTS), rng.choice(NUMBERS), rng.choice(TOTALS)
    k, (sign, word) = rng.randint(2, 6), _operator(rng)
    return Draft(
        rng.choice(("weigh", "score", "rank_sum")),
        (xs, n),
        f"{n} plus sum of item i of {xs} {word} {k} for i before 3",
        (f"{total} = {n}", "for i in range(3):", f"    {total} += {xs}[i] {sign} {k}", f"return {total}"),
        lambda r: (_numbers(r), _number(r)),
    )


_ALL = (
    arithmetic,
    linear,
    branches,
    limits,
    caps,
    slices,
    strings,
    select,
    items,
    accumulate,
    count,
    steps,
    logic,
)
FAMILIES: dict[str, Callable[[random.Random], Draft]] = {family.__name__: family for family in _ALL}
HELD_OUT_FAMILIES: dict[str, Callable[[random.Random], Draft]] = {"extremes": extremes, "weighted": weighted}
