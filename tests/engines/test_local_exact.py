"""The engine's tokens and logprobs against transformers' own forward and generate, in float32."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model


def check(pairs):
    gaps = np.concatenate([np.abs(got - want) for got, want in pairs])
    assert gaps.mean() < 1e-5, gaps.mean()
    assert gaps.max() < 1e-4, gaps.max()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_logprobs_equal_forward_over_batches_turns_and_shared_prefixes(
    *, kind, make_model, make_engine, run, reference, prompt
):
    model = make_model(kind)
    engine = make_engine(model, max_running=5)
    system = prompt(40, 1)
    pairs = []

    async def session(i):
        tokens = (system if i % 3 else []) + prompt(3 + 7 * i, 10 + i // 2)
        for turn in range(3):
            temperature = [1.0, 0.7, 1.3][turn]
            done = await run(
                engine, tokens, f"s{i}", max_tokens=5 + 3 * turn + i, temperature=temperature, seed=i
            )
            pairs.append((done.logprobs, reference(model, tokens, done.token_ids, temperature)))
            tokens = tokens + done.token_ids.tolist() + prompt(4 + i, 100 * turn + i)

    await asyncio.gather(*[session(i) for i in range(9)])  # more sessions than slots
    check(pairs)
    stats = await engine.stats()
    assert stats["engine/copied_tokens"] > 0
    assert stats["engine/reused_tokens"] > 0


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_greedy_equals_generate(*, kind, make_model, make_engine, run, reference, prompt):
    model = make_model(kind)
    engine = make_engine(model)
    prompts = [prompt(n, n) for n in (1, 2, 17, 33)]
    results = await asyncio.gather(
        *[run(engine, p, f"s{i}", max_tokens=20, temperature=0.0) for i, p in enumerate(prompts)]
    )
    for p, got in zip(prompts, results, strict=True):
        want = model.generate(torch.tensor([p]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert got.token_ids.tolist() == want[0, len(p) :].tolist()
        check([(got.logprobs, reference(model, p, got.token_ids))])  # greedy: logprobs at temperature 1


async def test_lora_is_w_plus_ba_in_train_mode_disabled_or_merged(
    make_model, make_engine, run, reference, prompt
):
    config = LoraConfig(r=4, lora_alpha=12, lora_dropout=0.5, target_modules="all-linear")
    model = get_peft_model(make_model("qwen3"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    engine = make_engine(model)
    tokens = prompt(30, 3)
    model.train()  # dropout belongs to the learner, not to what is sampled
    plain = await run(engine, tokens, "a", max_tokens=12, seed=5)
    with model.disable_adapter():  # the learner computes reference logprobs
        disabled = await run(engine, tokens, "b", max_tokens=12, seed=5)
        base = reference(model.eval(), tokens, plain.token_ids)
    want = reference(model, tokens, plain.token_ids)
    model.merge_adapter()
    merged = await run(engine, tokens, "c", max_tokens=12, seed=5)
    model.unmerge_adapter()
    assert np.abs(base - want).max() > 0.1  # the adapter does something
    for got in (plain, disabled, merged):
        assert got.token_ids.tolist() == plain.token_ids.tolist()
        check([(got.logprobs, want)])


async def test_an_optimizer_step_is_seen_without_a_copy(make_model, make_engine, run, reference, prompt):
    from uni_agent.types import Weights

    model = make_model("llama")
    engine = make_engine(model)
    tokens = prompt(20, 4)
    before = await run(engine, tokens, "a", max_tokens=10, seed=1)
    await engine.pause()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss.backward()
    optimizer.step()
    await engine.load_weights(Weights(1, model))
    await engine.resume()
    after = await run(engine, tokens, "a", max_tokens=10, seed=1)
    check([(after.logprobs, reference(model, tokens, after.token_ids))])
    assert not np.allclose(before.logprobs, reference(model, tokens, before.token_ids), atol=1e-3)
    assert after.versions.tolist() == [1] * 10


async def test_compaction_keeps_the_right_cache(make_model, make_engine, run, reference, prompt):
    """Long requests at high rows stay when many short ones below them end: their slots move."""
    model = make_model("qwen3")
    engine = make_engine(model, max_running=16)
    jobs = [
        run(engine, prompt(10 + i, i), f"s{i}", max_tokens=60 if i in (11, 15) else 2 + i, seed=i)
        for i in range(16)
    ]
    results = await asyncio.gather(*jobs)
    check([(r.logprobs, reference(model, prompt(10 + i, i), r.token_ids)) for i, r in enumerate(results)])
    # the idle sessions moved too: their next turns must reuse what is really theirs
    turns = [prompt(10 + i, i) + r.token_ids.tolist() + prompt(5, 50 + i) for i, r in enumerate(results)]
    await engine.stats()
    again = await asyncio.gather(
        *[run(engine, t, f"s{i}", max_tokens=5, seed=i) for i, t in enumerate(turns)]
    )
    check([(r.logprobs, reference(model, t, r.token_ids)) for t, r in zip(turns, again, strict=True)])
    stats = await engine.stats()
    assert stats["engine/reused_tokens"] == sum(len(t) for t in turns) - 16 * 6
    assert stats["engine/prefill_tokens"] == 16 * 6


async def test_a_groups_prompt_is_computed_once(make_model, make_engine, run, reference, prompt):
    model = make_model("qwen3")
    engine = make_engine(model, max_running=8)
    system = prompt(50, 1)
    groups = [system + prompt(30, 20 + g) for g in range(2)]
    results = await asyncio.gather(
        *[run(engine, groups[i // 4], f"s{i}", max_tokens=6, seed=i) for i in range(8)]
    )
    check([(r.logprobs, reference(model, groups[i // 4], r.token_ids)) for i, r in enumerate(results)])
    stats = await engine.stats()
    assert stats["engine/prefill_tokens"] == 80 + 30  # the system prompt once, each task once
    assert len({tuple(r.token_ids.tolist()) for r in results[:4]}) > 1


async def test_longer_prompt_does_not_take_a_prefix_that_is_not_computed_yet(
    make_model, make_engine, run, reference, prompt
):
    """Session b copies all but its last token from a, which lies in a higher row; c extends both."""
    model = make_model("llama")
    engine = make_engine(model)
    tokens = prompt(40, 2)
    await run(engine, prompt(60, 9), "b", max_tokens=2)  # b owns row 0
    jobs = {"a": tokens, "b": tokens, "c": tokens + prompt(20, 3), "d": tokens}
    await engine.pause()  # so that all four are placed in one round
    tasks = [asyncio.create_task(run(engine, p, s, max_tokens=6, seed=1)) for s, p in jobs.items()]
    await asyncio.sleep(0)
    await engine.resume()
    results = await asyncio.gather(*tasks)
    check(
        [(r.logprobs, reference(model, p, r.token_ids)) for p, r in zip(jobs.values(), results, strict=True)]
    )


async def test_the_cache_grows_under_running_requests(make_model, make_engine, run, reference, prompt):
    model = make_model("llama", max_position_embeddings=2048)
    engine = make_engine(model, context_size=2000)
    short = asyncio.create_task(run(engine, prompt(20, 1), "short", max_tokens=100, seed=1))
    await asyncio.sleep(0.03)
    long = await run(engine, prompt(600, 2), "long", max_tokens=10, seed=2)
    again = await run(engine, prompt(700, 1), "again", max_tokens=400, seed=1)
    first = await short
    check(
        [
            (first.logprobs, reference(model, prompt(20, 1), first.token_ids)),
            (long.logprobs, reference(model, prompt(600, 2), long.token_ids)),
            (again.logprobs, reference(model, prompt(700, 1), again.token_ids)),
        ]
    )
