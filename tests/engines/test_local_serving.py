"""Requests come, wait, stop, are cancelled, and fail, without a hang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from uni_agent.engines.local.dense import DenseDecoder
from uni_agent.errors import EngineError, ModelError
from uni_agent.types import Chunk, Completion, Sampling, Weights


async def test_requests_join_and_leave_and_none_is_lost(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"), max_running=3)
    order = []

    async def one(i):
        done = await run(engine, prompt(5 + i, i), f"s{i}", max_tokens=1 + i % 7, seed=i)
        order.append(i)
        return done

    results = await asyncio.wait_for(asyncio.gather(*[one(i) for i in range(25)]), 20)
    assert [len(r.token_ids) for r in results] == [1 + i % 7 for i in range(25)]
    assert all(r.finish == "length" for r in results)
    assert order[0] < 3  # first come, first served
    assert order[-1] > 20
    stats = await engine.stats()
    assert 1 < stats["engine/running_mean"] <= 3
    assert stats["engine/finished"] == 25
    assert stats["engine/running"] == stats["engine/waiting"] == 0


async def test_a_late_request_joins_a_running_batch(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"), max_running=2, context_size=512)
    slow = asyncio.create_task(run(engine, prompt(5, 1), "slow", max_tokens=400))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(run(engine, prompt(5, 2), "quick", max_tokens=3), 20)
    assert not slow.done()
    assert len((await slow).token_ids) == 400


async def test_chunks_hold_all_tokens_and_come_while_sampling(make_model, make_engine, prompt):
    engine = make_engine(make_model("qwen3"), chunk_interval_s=0.0)
    items = [item async for item in engine.generate(prompt(9, 1), Sampling(max_tokens=30), "s")]
    chunks, done = items[:-1], items[-1]
    assert isinstance(done, Completion)
    assert len(chunks) > 5
    assert all(isinstance(c, Chunk) for c in chunks)
    for name in ("token_ids", "logprobs", "versions"):
        joined = np.concatenate([getattr(c, name) for c in chunks])
        assert joined.tolist() == getattr(done, name).tolist()


async def test_no_chunks_where_none_are_wanted(make_model, make_engine, prompt):
    engine = make_engine(make_model("qwen3"), chunk_interval_s=None)
    items = [item async for item in engine.generate(prompt(9, 1), Sampling(max_tokens=30), "s")]
    assert len(items) == 1


async def test_closing_the_iterator_frees_the_slot(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"), max_running=1, chunk_interval_s=0.0, context_size=512)
    stream = engine.generate(prompt(4, 1), Sampling(max_tokens=500), "long")
    first = await anext(stream)
    assert isinstance(first, Chunk)
    queued = engine.generate(prompt(4, 9), Sampling(max_tokens=500), "queued")
    waiting = asyncio.create_task(anext(queued))
    await asyncio.sleep(0.01)
    waiting.cancel()  # cancelled while it waits for the slot
    await asyncio.gather(waiting, return_exceptions=True)
    await stream.aclose()
    done = await asyncio.wait_for(run(engine, prompt(4, 2), "next", max_tokens=3), 10)
    assert len(done.token_ids) == 3
    stats = await engine.stats()
    assert stats["engine/running"] == stats["engine/waiting"] == 0
    assert stats["engine/sampled_tokens"] < 450


async def test_end_session_cancels_what_runs(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"), max_running=1, chunk_interval_s=0.0, context_size=512)
    stream = engine.generate(prompt(4, 1), Sampling(max_tokens=500), "gone")
    await anext(stream)
    waiting = asyncio.create_task(run(engine, prompt(4, 2), "gone", max_tokens=5))
    await asyncio.sleep(0.01)
    await engine.end_session("gone")
    items = [item async for item in stream]
    assert items[-1].finish == "cancelled"
    assert 0 < len(items[-1].token_ids) < 500
    empty = await waiting
    assert (empty.finish, len(empty.token_ids)) == ("cancelled", 0)


async def test_x02_max_tokens_is_what_the_window_leaves(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"), context_size=100)
    for length, want in ((70, 20), (90, 10), (99, 1)):
        done = await run(engine, prompt(length, 1), f"{length}", max_tokens=20)
        assert (len(done.token_ids), done.finish) == (want, "length")
    for length in (100, 130):
        with pytest.raises(EngineError, match=f"prompt has {length} tokens and the context 100"):
            await run(engine, prompt(length, 1), max_tokens=20)


@pytest.mark.parametrize(
    ("ids", "settings", "message"),
    [
        ([], {}, "0 tokens"),
        ([1, 97], {}, r"ids from 1 to 97; the model knows 0 to 96"),
        ([-1], {}, "ids from -1"),
        ([1], {"max_tokens": 0}, "max_tokens 0"),
        ([1], {"temperature": -0.5}, "temperature -0.5"),
        ([1], {"top_p": 0.0}, "top_p 0.0"),
        ([1], {"top_k": -1}, "top_k -1"),
        ([1], {"stop": ("x",)}, "without `decode`"),
    ],
)
async def test_a_wrong_request_is_one_clear_error(*, make_model, make_engine, run, ids, settings, message):
    engine = make_engine(make_model("llama"))
    with pytest.raises(EngineError, match=message):
        await run(engine, ids, **settings)
    assert len((await run(engine, [1, 2], max_tokens=2)).token_ids) == 2


async def test_a_seed_draws_the_same_alone_or_in_company(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"))
    tokens = prompt(12, 1)
    alone = await run(engine, tokens, "a", max_tokens=15, seed=7)
    crowd = await asyncio.gather(
        *[run(engine, prompt(5 + i, i), f"c{i}", max_tokens=9) for i in range(6)],
        run(engine, tokens, "b", max_tokens=15, seed=7),
    )
    assert crowd[-1].token_ids.tolist() == alone.token_ids.tolist()
    other = await run(engine, tokens, "c", max_tokens=15, seed=8)
    free = [await run(engine, tokens, "d", max_tokens=15) for _ in range(2)]
    texts = [alone, other, *free]
    assert len({tuple(c.token_ids.tolist()) for c in texts}) == 4


async def distinct(engine, run, prompt):
    """A prompt, and a seed whose first five tokens are all different."""
    for seed in range(50):
        done = await run(engine, prompt(8, 1), f"find{seed}", max_tokens=5, seed=seed)
        if len(set(done.token_ids.tolist())) == 5:
            return seed, done
    raise AssertionError("no seed gives five different tokens")


async def test_t08_stop_string_keeps_ids_through_the_token_that_completes_it(
    make_model, make_engine, run, prompt
):
    texts = {}
    engine = make_engine(make_model("qwen3"), decode=lambda ids: "".join(texts.get(i, "?") for i in ids))
    seed, free = await distinct(engine, run, prompt)
    ids = free.token_ids.tolist()
    texts.update(zip(ids, ["a", "</", "done", ">x", "z"], strict=True))

    async def stopped(session, stop=(), stop_token_ids=()):
        got = await run(
            engine,
            prompt(8, 1),
            session,
            max_tokens=5,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
        )
        assert len(got.token_ids) == len(got.logprobs) == len(got.versions)
        assert got.logprobs.tolist() == pytest.approx(free.logprobs[: len(got.logprobs)].tolist(), abs=1e-5)
        return got.token_ids.tolist(), got.finish

    assert await stopped("1", stop=("</done>",)) == (ids[:4], "stop")
    assert await stopped("2", stop=("</d", "</done>")) == (ids[:3], "stop")
    assert await stopped("3", stop_token_ids=(ids[1], 96)) == (ids[:2], "stop")
    many = tuple(i for i in range(97) if i not in ids[:4])  # more than the table's first width
    assert await stopped("4", stop=("never",), stop_token_ids=many) == (ids, "stop")
    assert await stopped("5", stop=("never",)) == (ids, "length")


async def test_stop_string_over_characters_that_are_split_over_tokens(make_model, make_engine, run, prompt):
    raw = {}
    engine = make_engine(
        make_model("qwen3"),
        decode=lambda ids: b"".join(raw.get(i, b"?") for i in ids).decode("utf-8", "replace"),
    )
    seed, free = await distinct(engine, run, prompt)
    ids = free.token_ids.tolist()
    raw.update(zip(ids, [b"\xf0", b"\x9f", b"\x98", b"\x80", b"z"], strict=True))
    got = await run(engine, prompt(8, 1), max_tokens=5, seed=seed, stop=("\U0001f600",))
    assert got.token_ids.tolist() == ids[:4]


async def test_a_decode_that_raises_fails_its_request_only(make_model, make_engine, run, prompt):
    def decode(ids):
        raise KeyError("no such piece")

    engine = make_engine(make_model("qwen3"), decode=decode)
    good = asyncio.create_task(run(engine, prompt(5, 1), "good", max_tokens=20))
    with pytest.raises(EngineError, match="decode raised KeyError"):
        await run(engine, prompt(5, 2), "bad", stop=("x",))
    assert len((await good).token_ids) == 20


async def test_the_event_loop_is_not_blocked(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3", hidden_size=256, num_hidden_layers=4), context_size=512)
    gaps, stop = [], asyncio.Event()

    async def heartbeat():
        last = time.perf_counter()
        while not stop.is_set():
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    beat = asyncio.create_task(heartbeat())
    await asyncio.gather(*[run(engine, prompt(300, i), f"s{i}", max_tokens=20) for i in range(16)])
    stop.set()
    await beat
    assert len(gaps) > 10
    assert max(gaps) < 0.2


async def test_a_failing_forward_fails_its_requests_and_the_engine_goes_on(
    make_model, make_engine, run, prompt, monkeypatch
):
    engine = make_engine(make_model("qwen3"))
    failing = threading.Event()
    hidden = DenseDecoder.hidden

    def broken(self, *args):
        if failing.is_set():
            raise RuntimeError("out of luck")
        return hidden(self, *args)

    monkeypatch.setattr(DenseDecoder, "hidden", broken)
    kept = await run(engine, prompt(20, 1), "a", max_tokens=5, seed=3)
    failing.set()
    results = await asyncio.wait_for(
        asyncio.gather(
            *[run(engine, prompt(5, i), f"s{i}", max_tokens=5) for i in range(4)], return_exceptions=True
        ),
        10,
    )
    assert all(isinstance(r, EngineError) for r in results)
    assert "out of luck" in str(results[0])
    failing.clear()
    again = await run(engine, prompt(20, 1), "a", max_tokens=5, seed=3)
    assert again.token_ids.tolist() == kept.token_ids.tolist()
    failing.set()
    for i in range(3):
        with pytest.raises(EngineError, match="out of luck"):
            await run(engine, prompt(5, 1), f"d{i}", max_tokens=5)
    failing.clear()
    with pytest.raises(EngineError, match=r"dead after 3 failures in a row.*out of luck"):
        await asyncio.wait_for(run(engine, prompt(5, 1), "late", max_tokens=5), 10)


@pytest.mark.parametrize("native", [None, False])
async def test_logits_that_are_not_finite_fail_the_request(make_model, make_engine, run, prompt, native):
    """And the keys and values that they left behind spoil nobody: a masked NaN is still NaN."""
    model = make_model("qwen3")
    wanted = await run(make_engine(model, native=native), prompt(5, 1), max_tokens=5, temperature=0.0)
    engine = make_engine(model, version=3, native=native)
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    await engine.load_weights(Weights(4, model))
    with pytest.raises(EngineError, match="not finite under version 4"):
        await run(engine, prompt(40, 1), max_tokens=5)
    await engine.load_weights(Weights(5, good))
    again = await run(engine, prompt(5, 1), max_tokens=5, temperature=0.0)
    assert again.token_ids.tolist() == wanted.token_ids.tolist()
    assert again.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


async def test_close_fails_open_requests_and_later_ones(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"), max_running=1, context_size=512)
    opened = [asyncio.create_task(run(engine, prompt(5, i), f"s{i}", max_tokens=500)) for i in range(3)]
    await asyncio.sleep(0.05)
    await engine.close()
    await engine.close()
    results = await asyncio.wait_for(asyncio.gather(*opened, return_exceptions=True), 10)
    assert all(isinstance(r, EngineError) and "closed" in str(r) for r in results)
    with pytest.raises(EngineError, match="closed"):
        await run(engine, prompt(5, 1))


async def test_any_event_loop_may_ask(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"))
    here = asyncio.create_task(run(engine, prompt(5, 1), "here", max_tokens=30, seed=1))
    there = await asyncio.to_thread(
        lambda: asyncio.run(run(engine, prompt(5, 1), "there", max_tokens=30, seed=1))
    )
    assert there.token_ids.tolist() == (await here).token_ids.tolist()


def test_interpreter_exit_does_not_hang():
    code = """
import asyncio, torch
from transformers import LlamaConfig, LlamaForCausalLM
from uni_agent.engines.local import LocalEngine
from uni_agent.types import Sampling
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=2, max_position_embeddings=4096)
engine = LocalEngine(LlamaForCausalLM(config), context_size=4096, chunk_interval_s=0.0)
async def main():
    stream = engine.generate([1, 2], Sampling(max_tokens=4000), "s")
    await anext(stream)
    print("running", flush=True)
    import sys
    sys.exit(7)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "running\n"
    assert done.returncode == 7, done.stderr


def test_what_cannot_run_is_refused(make_model):
    from uni_agent.engines.local import LocalEngine

    with pytest.raises(ModelError):
        LocalEngine(torch.nn.Linear(3, 3), context_size=32)
    with pytest.raises(ModelError, match="context_size 513 exceeds"):
        LocalEngine(make_model("llama"), context_size=513)
    with pytest.raises(EngineError, match="max_running is 0"):
        LocalEngine(make_model("llama"), context_size=64, max_running=0)


async def test_a_caller_that_gave_up_does_not_end_the_engine(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"))
    gone = engine._loop.call(lambda: time.sleep(0.2))
    given_up = engine._loop.call(lambda: None)
    assert given_up.cancel()
    await asyncio.wrap_future(gone)
    assert len((await run(engine, prompt(5, 1), "s", max_tokens=2)).token_ids) == 2
