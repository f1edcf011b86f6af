"""The kernel against plain torch, on one cache content: decode, shared prefixes, prompts, windows, soft caps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from uni_agent.engines.local.attention import Span, TorchAttention
from uni_agent.engines.local.blocked import NativeAttention, share
from uni_agent.engines.local.blocks import BLOCK
from uni_agent.engines.local.cache import PagedCache
from uni_agent.engines.local.model import Geometry
from uni_agent.engines.local.native import load_native

CONTEXT = 640
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def filled(attention_of, *, dtype, heads, kv_heads, dim, windows=(None,), softcap=None, lengths):
    """A cache whose rows hold `lengths` tokens, and the attention over it; row 0's prompt is shared."""
    geometry = Geometry(len(windows), heads, kv_heads, dim, 7, dim**-0.5, windows, softcap)
    cache = PagedCache(
        geometry, blocks=200, count=len(lengths), context=CONTEXT, dtype=dtype, device=torch.device("cpu")
    )
    attention = attention_of(cache)
    generator = torch.Generator().manual_seed(3)
    shared = np.arange(70, dtype=np.int32)
    for row, length in enumerate(lengths):
        tokens = np.concatenate([shared, np.full(CONTEXT, 100 + row, np.int32)])[:length]
        found = cache.admit(row, tokens, f"s{row}", reserve=0)
        assert found is not None
        made = attention.plan(np.zeros(0, np.int64), np.zeros(0, np.int64), [Span(row, found.cached, length)])
        for layer in range(len(windows)):
            made(layer, *vectors(length - found.cached, heads, kv_heads, dim, dtype, generator))
        cache.publish(row, tokens, f"s{row}")
    return cache, attention


def vectors(n, heads, kv_heads, dim, dtype, generator):  # noqa: PLR0917
    return [torch.randn(n, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)]


@pytest.fixture(scope="module")
def native():
    kernels = load_native()
    if kernels is None:
        pytest.skip("no C++ compiler here")
    return kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "windows", "softcap"),
    [
        (4, 2, 32, (None, None), None),
        (9, 3, 64, (None, 20), None),
        (8, 8, 128, (33, None), 5.0),
        (5, 1, 256, (16, 400), None),
    ],
)
def test_native_equals_plain(*, native, dtype, heads, kv_heads, dim, windows, softcap):
    lengths = [71, 90, 161, 300, 8, 555, 85]
    settings = {
        "dtype": dtype, "heads": heads, "kv_heads": kv_heads, "dim": dim, "windows": windows,
        "softcap": softcap, "lengths": lengths,
    }  # fmt: skip
    plain = filled(lambda cache: TorchAttention(cache, batch_invariant=False), **settings)
    fast = filled(lambda cache: NativeAttention(cache, native, batch_invariant=False), **settings)
    assert fast[0].pool.held.max() > 1  # some blocks are shared
    rows, position = np.array([0, 1, 2, 5]), np.array([lengths[i] - 1 for i in (0, 1, 2, 5)])
    spans = [Span(3, 200, 300), Span(4, 0, 8), Span(6, 0, 85)]  # the first and the last are long
    for layer in range(len(windows)):
        q, k, v = vectors(4 + 100 + 8 + 85, heads, kv_heads, dim, dtype, torch.Generator().manual_seed(9))
        want = plain[1].plan(rows, position, spans)(layer, q, k, v)
        got = fast[1].plan(rows, position, spans)(layer, q, k, v)
        assert (got - want).abs().max() < TOLERANCE[dtype]
        assert want.abs().max() > 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["native", "plain"])
def test_a_tokens_bits_do_not_depend_on_the_pass(native, dtype, kind):
    """Decoded alone, beside others that share its prompt, or computed as part of a span: the same bits."""
    lengths = [300, 250, 244, 161]

    def attention_of(cache):
        if kind == "native":
            return NativeAttention(cache, native, batch_invariant=True)
        return TorchAttention(cache, batch_invariant=True)

    _, attention = filled(
        attention_of,
        dtype=dtype,
        heads=6,
        kv_heads=2,
        dim=64,
        windows=(None, 50),
        softcap=None,
        lengths=lengths,
    )
    q, k, v = vectors(5, 6, 2, 64, dtype, torch.Generator().manual_seed(5))
    none = np.zeros(0, np.int64)
    for layer in range(2):
        span = attention.plan(none, none, [Span(0, 295, 300)])(layer, q, k, v)
        alone = attention.plan(np.array([0]), np.array([299]), [])(layer, q[4:], k[4:], v[4:])
        others = vectors(3, 6, 2, 64, dtype, torch.Generator().manual_seed(6))
        beside = [torch.cat([mine[4:], theirs]) for mine, theirs in zip((q, k, v), others, strict=True)]
        crowd = attention.plan(np.arange(4), np.array(lengths) - 1, [])(layer, *beside)
        assert torch.equal(alone[0], span[4])
        assert torch.equal(alone[0], crowd[0])


def test_rows_that_share_most_make_an_item():
    tables = np.full((7, 9), -1, np.int32)
    fresh = itertools.count(100)
    system, prompt_a, prompt_b = [1, 2], [3, 4, 5, 6], [7, 8, 9, 10]
    for row, leading in enumerate([system + prompt_a, system + prompt_b] * 3 + [[50]]):
        own = [next(fresh) for _ in range(9 - len(leading))]
        tables[row] = leading + own
    items = share(tables, np.full(7, 8), most=16, least_items=1)
    members = np.split(np.array(items.tokens), np.cumsum(items.sizes)[:-1])
    found = {(frozenset(m.tolist()), j) for m, j in zip(members, items.joint, strict=True)}
    assert found == {(frozenset({0, 2, 4}), 6), (frozenset({1, 3, 5}), 6), (frozenset({6}), 8)}
    assert BLOCK == 16


def test_items_are_cut_where_threads_would_idle():
    tables = np.zeros((8, 4), np.int32)
    assert share(tables, np.full(8, 4), most=16, least_items=4).sizes == [2, 2, 2, 2]
    assert share(tables, np.full(8, 4), most=5, least_items=1).sizes == [5, 3]
