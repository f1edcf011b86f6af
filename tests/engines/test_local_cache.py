"""Prefixes are computed and stored once, memory has a bound, and what it costs is time, not results."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from uni_agent.engines.local.blocks import BLOCK, BlockPool
from uni_agent.engines.local.native import load_native
from uni_agent.errors import EngineError
from uni_agent.types import Weights

BLOCK_BYTES = 3 * 2 * 2 * BLOCK * 12 * 4  # of the tiny qwen3: layers, k and v, key heads, head size, float32


def check(got, want):
    assert np.abs(got - want).max() < 1e-4


async def at_once(engine, jobs):
    """Run coroutines whose requests are all there when the engine next looks."""
    await engine.pause()
    tasks = [asyncio.create_task(job) for job in jobs]
    await asyncio.sleep(0)
    await engine.resume()
    return await asyncio.gather(*tasks)


async def test_a_groups_prompt_is_computed_and_stored_once(make_model, make_engine, run, reference, prompt):
    model = make_model("qwen3")
    engine = make_engine(model, cache_bytes=100 * BLOCK_BYTES)
    tokens = prompt(8 * BLOCK + 5, 1)
    results = await at_once(engine, [run(engine, tokens, f"s{i}", max_tokens=4, seed=i) for i in range(8)])
    for done in results:
        check(done.logprobs, reference(model, tokens, done.token_ids))
    assert len({tuple(r.token_ids.tolist()) for r in results}) > 1
    stats = await engine.stats()
    assert stats["engine/prefill_tokens"] == len(tokens)
    assert stats["engine/copied_tokens"] == 7 * 4  # the tail but for the last token, which each computes
    assert stats["engine/cache_blocks_used"] == pytest.approx((8 + 8) / 100)


async def test_a_turn_extends_the_last_one_in_place(make_model, make_engine, run, reference, prompt):
    model = make_model("qwen3")
    engine = make_engine(model, cache_bytes=50 * BLOCK_BYTES)
    tokens = prompt(21, 1)
    for turn in range(4):
        done = await run(engine, tokens, "s", max_tokens=6, seed=turn)
        check(done.logprobs, reference(model, tokens, done.token_ids))
        tokens = tokens + done.token_ids.tolist() + prompt(5, turn)
    stats = await engine.stats()
    assert stats["engine/prefill_tokens"] == 21 + 3 * (1 + 5)  # a turn's last token was not computed yet
    assert stats["engine/copied_tokens"] == 0
    computed = len(tokens) - 5 - 1
    assert stats["engine/cache_blocks_used"] == pytest.approx(-(-computed // BLOCK) / 50)


async def test_forks_of_a_session_do_not_disturb_each_other(make_model, make_engine, run, reference, prompt):
    model = make_model("llama")
    engine = make_engine(model)
    tokens = prompt(24, 1)
    first = await run(engine, tokens, "s", max_tokens=6, seed=1)
    whole = tokens + first.token_ids.tolist()
    forks = [whole + prompt(9, 5), whole + prompt(9, 6), whole[:27] + prompt(9, 7), whole + prompt(9, 8)]
    results = await asyncio.gather(
        *[run(engine, t, "s" if i % 2 else f"t{i}", max_tokens=12, seed=i) for i, t in enumerate(forks)]
    )
    again = await run(engine, forks[1] + results[1].token_ids.tolist(), "s", max_tokens=5, seed=1)
    for t, done in zip(forks, results, strict=True):
        check(done.logprobs, reference(model, t, done.token_ids))
    check(again.logprobs, reference(model, forks[1] + results[1].token_ids.tolist(), again.token_ids))


async def test_pressure_puts_requests_back_and_gives_the_same(
    make_model, make_engine, run, reference, prompt
):
    model = make_model("qwen3")
    prompts = [prompt(5 + 3 * (i % 9), i) for i in range(40)]

    async def all_of(engine):
        jobs = [
            run(engine, p, f"s{i % 30}", max_tokens=20 + i % 50, seed=i, stop=("never",))
            for i, p in enumerate(prompts)
        ]
        results = await asyncio.wait_for(at_once(engine, jobs), 60)
        return results, await engine.stats()

    settings = {"max_running": 12, "decode": lambda ids: ".", "chunk_interval_s": 0.0}
    wide, relaxed = await all_of(make_engine(model, **settings))
    tight, pressed = await all_of(make_engine(model, cache_bytes=8 * BLOCK_BYTES, **settings))
    assert relaxed["engine/preempted"] == relaxed["engine/evicted"] == 0
    assert pressed["engine/preempted"] > 3
    assert pressed["engine/evicted"] > 10
    assert pressed["engine/finished"] == 40
    assert pressed["engine/sampled_tokens"] == sum(20 + i % 50 for i in range(40))  # none is drawn twice
    assert pressed["engine/running"] == pressed["engine/waiting"] == 0
    for i, (p, done, want) in enumerate(zip(prompts, tight, wide, strict=True)):
        assert len(done.token_ids) == 20 + i % 50
        assert done.token_ids.tolist() == want.token_ids.tolist()
        check(done.logprobs, want.logprobs)
        check(done.logprobs, reference(model, p, done.token_ids))


async def test_cancelling_and_weights_under_pressure(make_model, make_engine, run, reference, prompt):
    model, newer = make_model("qwen3"), make_model("qwen3", seed=1)
    old = make_model("qwen3")
    engine = make_engine(model, cache_bytes=8 * BLOCK_BYTES, version=0)
    jobs = [
        asyncio.create_task(run(engine, prompt(10, i), f"s{i}", max_tokens=60, seed=i)) for i in range(12)
    ]
    while not (await engine.stats())["engine/preempted"]:  # noqa: ASYNC110 - only the engine knows
        await asyncio.sleep(0.005)
    await engine.end_session("s1")
    jobs[5].cancel()
    await engine.load_weights(Weights(1, newer))
    results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)
    assert results[1].finish == "cancelled"
    for i, done in enumerate(results):
        if i in (1, 5):
            continue
        assert len(done.token_ids) == 60
        cut = int((done.versions == 0).sum())
        assert done.versions.tolist() == [0] * cut + [1] * (60 - cut)
        want = np.concatenate(
            [
                reference(m, prompt(10, i), done.token_ids)[part]
                for m, part in ((old, slice(cut)), (newer, slice(cut, 60)))
            ]
        )
        check(done.logprobs, want)  # no old key or value met the new weights


async def test_a_request_that_never_fits_is_refused_at_once(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"), cache_bytes=8 * BLOCK_BYTES)
    running = asyncio.create_task(run(engine, prompt(9, 1), "fits", max_tokens=8 * BLOCK - 8))
    with pytest.raises(
        EngineError, match=r"9 prompt tokens and max_tokens 121 need.*129.*128; raise cache_bytes"
    ):
        await run(engine, prompt(9, 1), "never", max_tokens=8 * BLOCK - 7)
    assert len((await running).token_ids) == 8 * BLOCK - 8
    with pytest.raises(EngineError, match="cache_bytes is 5; expected at least"):
        make_engine(make_model("qwen3"), cache_bytes=5)


async def test_long_prompts_are_computed_in_parts(make_model, make_engine, run, reference, prompt):
    model = make_model("qwen3")
    engine = make_engine(model, prefill_tokens=20)
    prompts = [prompt(n, n) for n in (90, 41, 3, 150)]
    results = await at_once(
        engine, [run(engine, p, f"s{i}", max_tokens=5, seed=i) for i, p in enumerate(prompts)]
    )
    for p, done in zip(prompts, results, strict=True):
        check(done.logprobs, reference(model, p, done.token_ids))
    assert (await engine.stats())["engine/prefill_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_batch_invariant_bits(*, native, dtype, make_model, make_engine, run, prompt):
    import torch

    if native and load_native() is None:
        pytest.skip("no C++ compiler here")
    model = make_model("llama", hidden_size=128)  # heads of 32: the kernel serves them
    settings = {"batch_invariant": True, "native": native, "dtype": getattr(torch, dtype)}
    tokens = prompt(37, 1)
    block = 3 * 2 * 2 * BLOCK * 32 * (4 if dtype == "float32" else 2)
    alone = await run(make_engine(model, **settings), tokens, "a", max_tokens=25, seed=7)
    engine = make_engine(model, **settings, cache_bytes=11 * block, prefill_tokens=50, max_running=16)
    jobs = [run(engine, tokens[: 20 + i] + prompt(i, i), f"c{i}", max_tokens=40, seed=i) for i in range(28)]
    jobs.append(run(engine, tokens, "b", max_tokens=25, seed=7))
    jobs.append(run(engine, tokens, "c", max_tokens=25, seed=7))
    results = await at_once(engine, jobs)
    stats = await engine.stats()
    assert stats["engine/preempted"] > 0
    assert stats["engine/reused_tokens"] > 0
    for done in results[-2:]:
        assert done.token_ids.tolist() == alone.token_ids.tolist()
        assert done.logprobs.tolist() == alone.logprobs.tolist()


def tokens_of(*values):
    return np.array(values, np.int32)


def test_pool_evicts_leaves_first_and_clear_makes_all_unfindable():
    pool = BlockPool(3)
    tokens = np.arange(2 * BLOCK, dtype=np.int32)
    first, second = pool.take(), pool.take()
    node, _ = pool.list_block(first, pool.root, tokens[:BLOCK], "a")
    pool.list_block(second, node, tokens[BLOCK:], "a")
    assert pool.find(tokens).blocks == [first, second]
    assert pool.find(tokens[: BLOCK + 3])[2:] == (second, 3)
    pool.drop(second)
    pool.drop(first)
    assert pool.available == 3
    taken = [pool.take(), pool.take()]
    assert second in taken
    assert pool.evicted == 1
    assert pool.find(tokens).blocks == [first]
    for block in taken:
        pool.drop(block)
    root = pool.root
    pool.clear()
    assert pool.root != root
    assert pool.find(tokens).tokens == 0


def test_pool_compares_tokens_not_hashes(monkeypatch):
    """Two prefixes differ in their first block only: the second block of one is not the other's."""
    pool = BlockPool(4)
    one, two = np.zeros(2 * BLOCK, np.int32), np.zeros(2 * BLOCK, np.int32)
    two[0] = 1
    for tokens in (one, two):
        node = pool.root
        for at in (0, BLOCK):
            node, _ = pool.list_block(pool.take(), node, tokens[at : at + BLOCK], "s")
    assert not set(pool.find(one).blocks) & set(pool.find(two).blocks)
