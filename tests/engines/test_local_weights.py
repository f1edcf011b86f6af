"""New weights: what is refused, what is copied, and what running requests see."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from uni_agent.errors import EngineError
from uni_agent.types import Weights


class Gate:
    """A `decode` that stops the engine's thread at the n-th token of each request until opened."""

    def __init__(self, at: int) -> None:
        self.at, self.reached, self.go = at, threading.Event(), threading.Event()

    def __call__(self, ids):
        if len(ids) == self.at and not self.go.is_set():
            self.reached.set()
            assert self.go.wait(20)
        return "." * len(ids)


async def test_w01_w03_running_requests_go_on_under_the_new_version(
    make_model, make_engine, run, reference, prompt
):
    gate = Gate(2)
    model, newer = make_model("qwen3"), make_model("qwen3", seed=1)
    old = make_model("qwen3")
    engine = make_engine(model, version=3, max_running=3, decode=gate)
    prompts = [prompt(30, 1), prompt(30, 1)[:25] + prompt(4, 2), prompt(12, 3), prompt(9, 4)]
    await engine.pause()  # so that all are placed in one round
    jobs = [
        asyncio.create_task(run(engine, p, f"s{i}", max_tokens=4, stop=("never",), seed=i))
        for i, p in enumerate(prompts)  # one more than there are slots
    ]
    await asyncio.sleep(0)
    await engine.resume()
    await asyncio.to_thread(gate.reached.wait, 20)
    update = asyncio.create_task(engine.load_weights(Weights(4, newer)))
    await asyncio.sleep(0.02)
    assert engine.version == 3
    gate.go.set()
    await asyncio.wait_for(update, 10)
    assert engine.version == 4
    results = await asyncio.gather(*jobs)
    for i, (p, done) in enumerate(zip(prompts, results, strict=True)):
        assert (len(done.token_ids), done.finish) == (4, "length")
        cut = [2, 1, 2, 0][i]  # the second's prompt waited for the first's, which it shares
        assert done.versions.tolist() == [3] * cut + [4] * (4 - cut)
        want = np.concatenate(
            [reference(old, p, done.token_ids)[:cut], reference(newer, p, done.token_ids)[cut:]]
        )
        assert np.abs(done.logprobs - want).max() < 1e-4  # no old cache met the new weights
    with pytest.raises(EngineError):
        await engine.load_weights(Weights(5, {}))
    assert engine.version == 4


async def test_w03_idle_caches_are_dropped(make_model, make_engine, run, reference, prompt):
    model, newer = make_model("llama"), make_model("llama", seed=1)
    engine = make_engine(model)
    tokens = prompt(40, 1)
    first = await run(engine, tokens, "a", max_tokens=5)
    await engine.load_weights(Weights(1, newer))
    longer = tokens + first.token_ids.tolist() + [5]
    own, shared = await asyncio.gather(
        run(engine, longer, "a", max_tokens=5), run(engine, tokens, "b", max_tokens=5)
    )
    assert np.abs(own.logprobs - reference(newer, longer, own.token_ids)).max() < 1e-4
    assert np.abs(shared.logprobs - reference(newer, tokens, shared.token_ids)).max() < 1e-4
    # b found what a has just computed under the new weights, and nothing else was found
    stats = await engine.stats()
    assert stats["engine/prefill_tokens"] == len(tokens) + len(longer)
    assert stats["engine/reused_tokens"] == len(tokens) - 1


async def test_an_update_while_paused_returns_and_requests_wait(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"), version=1)
    await engine.pause()
    waiting = asyncio.create_task(run(engine, prompt(5, 1), max_tokens=3))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await asyncio.wait_for(engine.load_weights(Weights(2, make_model("qwen3", seed=1))), 10)
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await engine.resume()
    assert (await asyncio.wait_for(waiting, 10)).versions.tolist() == [2, 2, 2]


async def test_pause_ends_the_iteration_and_nothing_is_sampled_after(make_model, make_engine, run, prompt):
    engine = make_engine(make_model("qwen3"), context_size=512)
    job = asyncio.create_task(run(engine, prompt(5, 1), max_tokens=300))
    await asyncio.sleep(0.03)
    await engine.pause()
    await engine.stats()
    await asyncio.sleep(0.05)
    assert (await engine.stats())["engine/sampled_tokens"] == 0
    await engine.resume()
    assert len((await job).token_ids) == 300


PREFIXES = ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod."]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_w04_wrapper_prefixes_are_stripped(prefix, make_model, make_engine):
    model, newer = make_model("qwen2"), make_model("qwen2", seed=1)
    engine = make_engine(model)
    payload = {prefix + name if i % 2 else name: t for i, (name, t) in enumerate(newer.state_dict().items())}
    await engine.load_weights(Weights(1, payload))
    assert all(torch.equal(t, newer.state_dict()[name]) for name, t in model.state_dict().items())


async def test_w04_a_payload_that_does_not_fit_changes_nothing(make_model, make_engine):
    model, newer = make_model("qwen2"), make_model("qwen2", seed=1)
    engine = make_engine(model, version=7)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    good = newer.state_dict()
    bad = {
        rf"names that the model has not, first 'wrapped\.{name}'": good | {f"wrapped.{name}": good[name]},
        f"lack 1 of the model's parameters, first '{name}'": {k: v for k, v in good.items() if k != name},
        r"shape \(3, 3\); the model has \(48, 32\)": good | {name: torch.zeros(3, 3)},
        f"'{name}' hold NaN": good | {name: torch.full((48, 32), float("nan"))},
        "'model.norm.weight' twice": good | {"module.model.norm.weight": good["model.norm.weight"]},
        "weights are at a int": 3,
        "has no \\*.safetensors file": "/",
        "cannot be read": "/does/not/exist.safetensors",
    }
    for message, location in bad.items():
        with pytest.raises(EngineError, match=message):
            await engine.load_weights(Weights(8, location))
        assert engine.version == 7
        assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


async def test_w04_a_partial_payload_must_be_declared(make_model, make_engine):
    model = make_model("qwen2")
    engine = make_engine(model)
    payload = {"model.norm.weight": torch.full((32,), 2.0)}
    with pytest.raises(EngineError, match="say partial=True"):
        await engine.load_weights(Weights(1, payload))
    await engine.load_weights(Weights(1, payload), partial=True)
    assert engine.version == 1
    assert bool((model.model.norm.weight == 2).all())


async def test_w07_tied_heads_follow_the_embedding(make_model, make_engine, run, reference, prompt):
    tied, newer = make_model("qwen3"), make_model("qwen3", seed=1)
    engine = make_engine(tied)
    both = newer.state_dict()
    assert "lm_head.weight" in both
    await engine.load_weights(Weights(1, both))
    await engine.load_weights(Weights(2, {k: v for k, v in both.items() if k != "lm_head.weight"}))
    moved = {"model.embed_tokens.weight": both["model.embed_tokens.weight"] + 1}
    await engine.load_weights(Weights(3, moved), partial=True)
    assert torch.equal(tied.lm_head.weight, tied.model.embed_tokens.weight)
    with torch.no_grad():
        newer.model.embed_tokens.weight.add_(1)
    done = await run(engine, prompt(9, 1), max_tokens=8)
    assert np.abs(done.logprobs - reference(newer, prompt(9, 1), done.token_ids)).max() < 1e-5

    untied = make_model("qwen2")
    engine = make_engine(untied)
    head = untied.lm_head.weight.clone()
    embedding = untied.model.embed_tokens.weight + 1
    await engine.load_weights(Weights(1, {"model.embed_tokens.weight": embedding}), partial=True)
    assert torch.equal(untied.lm_head.weight, head)
    await engine.load_weights(Weights(2, {"lm_head.weight": head + 1}), partial=True)
    assert torch.equal(untied.lm_head.weight, head + 1)
    assert torch.equal(untied.model.embed_tokens.weight, embedding)


async def test_weights_from_a_saved_folder(*, make_model, make_engine, run, tmp_path, prompt, reference):
    newer = make_model("qwen3", seed=1)
    newer.save_pretrained(tmp_path / "full")
    engine = make_engine(make_model("qwen3"))
    await engine.load_weights(Weights(1, tmp_path / "full"))
    done = await run(engine, prompt(9, 1), max_tokens=8)
    assert np.abs(done.logprobs - reference(newer, prompt(9, 1), done.token_ids)).max() < 1e-4
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "one.safetensors")
    await engine.load_weights(Weights(2, str(tmp_path / "one.safetensors")), partial=True)
    assert engine.version == 2


async def test_one_update_reads_the_parameters_once(make_model, make_engine, run, prompt, monkeypatch):
    from uni_agent.engines.local.dense import DenseDecoder

    model, read = make_model("qwen3"), []
    engine = make_engine(model)
    refresh = DenseDecoder.refresh
    monkeypatch.setattr(DenseDecoder, "refresh", lambda self: (read.append(1), refresh(self)))
    await engine.pause()
    await engine.load_weights(Weights(1, model))
    await engine.resume()
    assert (await run(engine, prompt(5, 1), max_tokens=2)).versions.tolist() == [1, 1]
    assert read == [1]
