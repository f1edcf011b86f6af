"""Models that keep their own state: against transformers' own forward and generate, in float32."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
import transformers

from uni_agent.engines.local.recurrent import StateStepper
from uni_agent.engines.local.shell import is_recurrent
from uni_agent.engines.local.state_model import StateModel
from uni_agent.errors import EngineError, ModelError
from uni_agent.types import Weights

IDS = {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
PLAIN = IDS | {"hidden_size": 32, "num_hidden_layers": 3, "initializer_range": 0.3}
SHAPE = PLAIN | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
HYBRID = {"mamba_n_heads": 4, "mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
FAMILIES = {
    "mamba": ("Mamba", PLAIN | {"state_size": 8}),
    "mamba2": ("Mamba2", PLAIN | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}),
    "falcon_h1": ("FalconH1", SHAPE | HYBRID | {"mamba_chunk_size": 8}),
    "jamba": (
        "Jamba",
        SHAPE | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "gpt_oss": (
        "GptOss",
        SHAPE | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "bloom": ("Bloom", IDS | {"hidden_size": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.3}),
    "bart": ("Bart", IDS | {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "init_std": 0.3}),
    "recurrent_gemma": ("RecurrentGemma", SHAPE | {"head_dim": 8, "lru_width": 32}),
}  # fmt: skip


def family(kind, seed=0):
    name, shape = FAMILIES[kind]
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(seed)
    return model_class(model_class.config_class(**shape)).eval()


def check(model, prompts, results, reference):
    for p, got in zip(prompts, results, strict=True):
        assert np.abs(got.logprobs - reference(model, p, got.token_ids)).max() < 1e-4


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_h1", "jamba", "gpt_oss"])
async def test_eight_at_once_equal_generate_and_go_on(*, kind, make_engine, run, reference, prompt):
    model = family(kind)
    engine = make_engine(model, max_running=6)
    prompts = [prompt(n, n) for n in (1, 2, 17, 9, 5, 6, 23, 12)]
    results = await asyncio.gather(
        *[run(engine, p, f"s{i}", max_tokens=5 + i, temperature=0.0) for i, p in enumerate(prompts)]
    )
    check(model, prompts, results, reference)
    for i, p in enumerate(prompts):
        ids = torch.tensor([p])
        settings = {"max_new_tokens": 5 + i, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert results[i].token_ids.tolist() == model.generate(ids, **settings)[0, len(p) :].tolist()
    await engine.stats()
    turns = [p + r.token_ids.tolist() + prompt(4, len(p)) for p, r in zip(prompts, results, strict=True)]
    again = await asyncio.gather(
        *[run(engine, t, f"s{i}", max_tokens=6, seed=i) for i, t in enumerate(turns)]
    )
    check(model, turns, again, reference)
    stats = await engine.stats()
    assert stats["engine/reused_tokens"] == sum(map(len, turns)) - 8 * 5  # the last sampled one was not fed
    assert stats["engine/prefill_tokens"] == 8 * (5 if StateModel(model, 64).continues else 4)


def test_who_is_recurrent_and_what_may_be_batched():
    assert [is_recurrent(family(kind)) for kind in ("mamba", "falcon_h1", "gpt_oss")] == [True, True, False]
    models = {kind: StateModel(family(kind), 64) for kind in ("mamba", "falcon_h1", "bart")}
    assert {kind: (m.ragged, m.continues) for kind, m in models.items()} == {
        "mamba": (True, False),  # its scan starts from nothing
        "falcon_h1": (True, True),
        "bart": (False, True),  # its positions are those of the cache
    }
    assert models["mamba"].bytes_of(10) == models["mamba"].bytes_of(1000)
    grows = models["falcon_h1"].bytes_of(11) - models["falcon_h1"].bytes_of(10)
    assert grows == 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, float32
    with pytest.raises(ModelError, match=r"'recurrent_gemma' .* steps differ from its own forward by"):
        StateModel(family("recurrent_gemma"), 64)


@pytest.mark.parametrize("kind", ["bart", "bloom"])
async def test_rows_of_other_lengths_step_apart_where_they_must(kind, make_engine, run, reference, prompt):
    model = family(kind)
    engine = make_engine(model)
    prompts = [prompt(n, n) for n in (3, 8, 8, 20)]
    results = await asyncio.gather(
        *[run(engine, p, f"s{i}", max_tokens=8, seed=i) for i, p in enumerate(prompts)]
    )
    check(model, prompts, results, reference)


async def test_a_groups_prompt_is_computed_once(make_engine, run, reference, prompt):
    model = family("falcon_h1")
    engine = make_engine(model)
    await engine.pause()  # so that all are placed in one round
    tokens = [prompt(30, 1)] * 5 + [prompt(30, 2)] * 3
    jobs = [asyncio.create_task(run(engine, p, f"s{i}", max_tokens=6, seed=i)) for i, p in enumerate(tokens)]
    await asyncio.sleep(0)
    await engine.resume()
    results = await asyncio.gather(*jobs)
    check(model, tokens, results, reference)
    stats = await engine.stats()
    assert (stats["engine/prefill_tokens"], stats["engine/copied_tokens"]) == (60, 180)
    assert len({tuple(r.token_ids.tolist()) for r in results[:5]}) > 1


async def test_a_state_serves_only_what_extends_exactly_it(make_engine, run, reference, prompt):
    model = family("mamba")
    engine = make_engine(model)
    first = await run(engine, prompt(20, 1), "a", max_tokens=5, seed=1)
    whole = prompt(20, 1) + first.token_ids.tolist()
    await engine.stats()
    other = [*whole[:-2], (whole[-2] + 1) % 97, 3, 4]  # the state has seen whole[-2]
    shorter, fork = whole[:20], [*whole, 7]
    results = [await run(engine, p, s, max_tokens=4, seed=2) for p, s in ((other, "a"), (shorter, "a"))]
    assert (await engine.stats())["engine/reused_tokens"] == 0
    results += [await run(engine, fork, "b", max_tokens=4, seed=2)]  # of another session: copied, not taken
    results += [await run(engine, fork, "a", max_tokens=4, seed=2)]
    assert (await engine.stats())["engine/reused_tokens"] == 2 * 24
    check(model, [other, shorter, fork, fork], results, reference)
    await engine.end_session("a")
    await engine.end_session("b")
    await run(engine, fork, "b", max_tokens=4, seed=2)
    assert (await engine.stats())["engine/reused_tokens"] == 0


@pytest.mark.parametrize("prefill_tokens", [7, 1024])
async def test_long_prompts_come_in_parts(prefill_tokens, make_engine, run, reference, prompt):
    model = family("falcon_h1")
    engine = make_engine(model, prefill_tokens=prefill_tokens)
    prompts = [prompt(n, n) for n in (40, 33, 3, 40)]
    results = await asyncio.gather(
        *[run(engine, p, f"s{i}", max_tokens=6, seed=i) for i, p in enumerate(prompts)]
    )
    check(model, prompts, results, reference)


async def test_new_weights_drop_every_state(make_engine, run, reference, prompt):
    model, old, newer = family("falcon_h1"), family("falcon_h1"), family("falcon_h1", seed=1)
    reached, go = threading.Event(), threading.Event()

    def decode(ids):
        if len(ids) == 3 and not go.is_set():
            reached.set()
            assert go.wait(20)
        return "." * len(ids)

    engine = make_engine(model, decode=decode)
    idle = await run(engine, prompt(12, 1), "idle", max_tokens=4)
    jobs = [
        asyncio.create_task(run(engine, prompt(9 + 3 * i, i), f"s{i}", max_tokens=8, stop=("never",), seed=i))
        for i in range(3)
    ]
    await asyncio.to_thread(reached.wait, 20)
    update = asyncio.create_task(engine.load_weights(Weights(1, newer)))
    await asyncio.sleep(0.02)
    go.set()
    await update
    await engine.stats()
    for i, got in enumerate(await asyncio.gather(*jobs)):
        cut = int((got.versions == 0).sum())
        assert 0 < cut < 8
        p = prompt(9 + 3 * i, i)
        want = [reference(old, p, got.token_ids)[:cut], reference(newer, p, got.token_ids)[cut:]]
        assert np.abs(got.logprobs - np.concatenate(want)).max() < 1e-4
    turn = prompt(12, 1) + idle.token_ids.tolist() + [5]
    check(newer, [turn], [await run(engine, turn, "idle", max_tokens=4)], reference)
    assert (await engine.stats())["engine/reused_tokens"] == 0


async def test_states_stay_within_the_budget(make_engine, run, reference, prompt):
    model = family("falcon_h1")
    size = StateModel(model, 64).bytes_of(32 - 1)
    engine = make_engine(model, cache_bytes=int(2.5 * size), max_running=8, context_size=256)
    prompts = [prompt(20, i) for i in range(5)]
    await engine.pause()
    jobs = [
        asyncio.create_task(run(engine, p, f"s{i}", max_tokens=12, seed=i)) for i, p in enumerate(prompts)
    ]
    await asyncio.sleep(0)
    await engine.resume()
    check(model, prompts, await asyncio.gather(*jobs), reference)
    stats = await engine.stats()
    assert stats["engine/finished"] == 5
    assert 1 < stats["engine/running_mean"] <= 2  # a third has to wait
    assert stats["engine/evicted"] >= 3
    with pytest.raises(EngineError, match=r"the state of 219 tokens takes \d+ bytes, and cache_bytes is"):
        await run(engine, prompt(20, 1), max_tokens=200)
    assert len((await run(engine, prompt(20, 1), max_tokens=3)).token_ids) == 3


async def test_batch_invariant_bits_do_not_depend_on_neighbours(make_engine, run, prompt):
    engine = make_engine(family("falcon_h1"), batch_invariant=True)
    alone = await run(engine, prompt(20, 1), "a", max_tokens=12, seed=5)
    crowd = await asyncio.gather(
        run(engine, prompt(20, 1), "b", max_tokens=12, seed=5),
        *[run(engine, prompt(20 - i, i), f"s{i}", max_tokens=12, seed=i) for i in range(5)],
    )
    assert crowd[0].token_ids.tolist() == alone.token_ids.tolist()
    assert crowd[0].logprobs.tobytes() == alone.logprobs.tobytes()


async def test_bfloat16_copy_of_a_float32_module(make_engine, run, prompt):
    model = family("mamba")
    engine = make_engine(model, dtype=torch.bfloat16)
    got = await run(engine, prompt(20, 1), max_tokens=12, seed=5)
    half = family("mamba").to(torch.bfloat16)
    ids = torch.tensor([prompt(20, 1) + got.token_ids.tolist()])
    with torch.no_grad():
        rows = half(ids).logits[0, 19:-1].float().log_softmax(-1)
    want = rows.gather(-1, ids[0, 20:, None])[:, 0].numpy()
    assert np.abs(got.logprobs - want).mean() < 0.1
    assert model.dtype == torch.float32


def test_the_stepper_is_what_serves_them(make_engine):
    engine = make_engine(family("mamba"))
    assert isinstance(engine._loop._stepper, StateStepper)
