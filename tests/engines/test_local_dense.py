"""The dense decoder against transformers' own forward, with and without kernels, and its refresh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from uni_agent.engines.local import dense
from uni_agent.engines.local.dense import DenseDecoder
from uni_agent.engines.local.native import load_native
from uni_agent.errors import ModelError

VOCAB = 97
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
LENGTHS = [20, 1, 33]
pytestmark = pytest.mark.timeout(600)  # the first run on a machine compiles the kernels


class FullAttention:
    """Attention of whole sequences, one after another, straight from the definition."""

    def __init__(self, geometry: Any, lengths: list[int]) -> None:
        self.geometry, self.lengths = geometry, lengths

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        g = self.geometry
        group = g.heads // g.kv_heads
        outs = []
        for qs, ks, vs in zip(*[x.float().split(self.lengths) for x in (q, k, v)], strict=True):
            scores = torch.einsum("ihd,jhd->hij", qs, ks.repeat_interleave(group, 1)) * g.scale
            i, j = torch.arange(len(qs))[:, None], torch.arange(len(qs))
            seen = (j <= i) & (j > i - (g.windows[layer] or len(qs)))
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hij,jhd->ihd", weights, vs.repeat_interleave(group, 1)))
        return torch.cat(outs).to(q.dtype)


def prompts() -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]


@torch.inference_mode()
def logprobs(decoder: DenseDecoder) -> Any:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    hidden = decoder.hidden(torch.cat(prompts()), positions, FullAttention(decoder.geometry, LENGTHS))
    return decoder.logits(hidden).log_softmax(-1)


@torch.no_grad()
def reference(model: Any) -> Any:
    return torch.cat([model(ids[None]).logits[0].float().log_softmax(-1) for ids in prompts()])


@pytest.fixture(params=["native", "plain"])
def native(request: Any) -> bool:
    if request.param == "native" and load_native() is None:
        pytest.skip("no native kernels on this machine")
    return request.param == "native"


@pytest.fixture(params=["packed", "unpacked"])
def packing(request: Any, monkeypatch: Any) -> str:
    if request.param == "unpacked":
        monkeypatch.setattr(dense, "packing_works", lambda dtype, device: False)
    return request.param


@pytest.mark.parametrize("kind", FAMILIES)
def test_float32_equals_transformers(kind, native, packing, make_model):
    model = make_model(kind)
    got = logprobs(DenseDecoder(model, 64, native=native))
    assert (got - reference(model)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", FAMILIES)
def test_kernels_equal_plain_torch(kind, make_model):
    if load_native() is None:
        pytest.skip("no native kernels on this machine")
    # as sharp as a real model: at the other tests' scale logits reach 40 and float32 itself is at 1e-5
    model = make_model(kind, initializer_range=0.1)
    plain, fast = DenseDecoder(model, 64, native=False), DenseDecoder(model, 64, native=True)
    assert plain._native is None
    assert fast._native is not None
    assert (logprobs(plain) - logprobs(fast)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers(kind, native, make_model):
    model = make_model(kind).bfloat16()
    exact = reference(_float_copy(make_model, kind, model))
    theirs = (reference(model) - exact).abs().mean()
    ours = (logprobs(DenseDecoder(model, 64, native=native)) - exact).abs().mean()
    assert ours < 1.2 * theirs


def _float_copy(make_model: Any, kind: str, model: Any) -> Any:
    copy = make_model(kind)
    copy.load_state_dict(model.state_dict())
    return copy


def test_bfloat16_from_a_float32_module(native, make_model):
    model = make_model("qwen3")
    decoder = DenseDecoder(model, 64, dtype=torch.bfloat16, native=native)
    assert decoder.dtype == torch.bfloat16
    assert model.dtype == torch.float32
    gap = (logprobs(decoder) - reference(model)).abs()
    assert 0 < gap.mean() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_batch_invariant_rows_are_bitwise_equal_alone_and_in_any_batch(
    kind, dtype, native, packing, make_model
):
    decoder = DenseDecoder(make_model(kind), 64, dtype=dtype, native=native, batch_invariant=True)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (70,), generator=generator)
    positions = torch.randint(0, 64, (70,), generator=generator)

    def run(order: Any) -> Any:
        group = decoder.geometry.heads // decoder.geometry.kv_heads
        hidden = decoder.hidden(
            tokens[order], positions[order], lambda _, q, k, v: q * k.repeat_interleave(group, 1)
        )
        return torch.cat((hidden.float(), decoder.logits(hidden)), 1)

    with torch.inference_mode():
        alone = torch.cat([run(torch.tensor([i])) for i in range(70)])
        for size in (2, 15, 16, 17, 33, 70):
            order = torch.randperm(70, generator=generator)[:size]
            assert torch.equal(run(order), alone[order])


@pytest.mark.parametrize("kind", FAMILIES)
def test_refresh_takes_an_optimizer_step_in_place(kind, native, make_model):
    model = make_model(kind)
    decoder = DenseDecoder(model, 64, native=native)
    before = logprobs(decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    ids = prompts()[0][None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(logprobs(decoder), before)  # a copy: nothing moves until it is told to
    decoder.refresh()
    after = logprobs(decoder)
    assert (after - before).abs().max() > 0.01
    assert (after - reference(model)).abs().max() < 1e-4


def adapted(make_model: Any, kind: str, **settings: Any) -> Any:
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 12, "lora_dropout": 0.5, "target_modules": "all-linear"} | settings
    )
    model = get_peft_model(make_model(kind), config)
    for name, parameter in model.named_parameters():
        if (
            "lora_B" in name
            or "lora_embedding_B" in name
            or ("modules_to_save" in name and "norm" not in name)
        ):
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {}),
        ("llama", {"lora_bias": True}),
        ("gemma3", {"use_rslora": True}),
        ("qwen3", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("qwen2", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]}),
    ],
)
def test_lora_is_w_plus_ba_in_train_mode_disabled_or_merged(kind, settings, make_model):
    if settings.get("lora_bias"):
        settings = settings | {"target_modules": ["q_proj", "k_proj"]}  # the layers that have a bias
    model = adapted(make_model, kind, **settings)
    want = reference(model)
    decoder = DenseDecoder(model, 64, native=False)
    with model.disable_adapter():
        base = reference(model)
        decoder.refresh()  # the learner computes reference logprobs; what is sampled stays adapted
        assert (logprobs(decoder) - want).abs().max() < 1e-4
    assert (base - want).abs().max() > 0.1
    model.train()
    decoder.refresh()
    assert (logprobs(decoder) - want).abs().max() < 1e-4
    model.merge_adapter()
    decoder.refresh()
    assert (logprobs(decoder) - want).abs().max() < 1e-4
    model.unmerge_adapter()
    decoder.refresh()
    assert (logprobs(decoder) - want).abs().max() < 1e-4


def test_lora_is_added_in_float32_and_rounded_once(make_model):
    model = adapted(make_model, "qwen3")
    want = reference(model)
    got = logprobs(DenseDecoder(model, 64, dtype=torch.bfloat16, native=False))
    merged = _float_copy(make_model, "qwen3", model.merge_and_unload())
    once = logprobs(DenseDecoder(merged, 64, dtype=torch.bfloat16, native=False))
    # the last bit of a float32 sum may tip a rounding; anything else would differ as bfloat16 itself does
    assert (got - once).abs().mean() < 0.05 * (once - want).abs().mean()


def test_untied_and_tied_heads_follow_their_own_weight(make_model):
    model = make_model("qwen3")
    decoder = DenseDecoder(model, 64, native=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.1)
    decoder.refresh()
    assert (logprobs(decoder) - reference(model)).abs().max() < 1e-4
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.5)  # untied from now on
    decoder.refresh()
    assert (logprobs(decoder) - reference(model)).abs().max() < 1e-4


def test_geometry_names_windows_and_scale(make_model):
    geometry = DenseDecoder(make_model("gemma3"), 64, native=False).geometry
    assert geometry.windows == (7, None, 7, None)
    assert geometry.scale == pytest.approx(24**-0.5)
    geometry = DenseDecoder(make_model("qwen3"), 64, native=False).geometry
    assert geometry.windows == (None, None, None)
    assert geometry.scale == pytest.approx(12**-0.5)


def test_a_window_of_qwen2_is_obeyed(native, make_model):
    model = make_model("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1)
    decoder = DenseDecoder(model, 64, native=native)
    assert decoder.geometry.windows == (None, 5, 5)
    assert (logprobs(decoder) - reference(model)).abs().max() < 1e-4


def test_llama3_and_yarn_rotary(native, make_model):
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    for rope in (scaled, yarn):
        model = make_model("llama", rope_parameters=rope)
        assert (logprobs(DenseDecoder(model, 64, native=native)) - reference(model)).abs().max() < 1e-4


def test_refusals_name_what_came_and_what_runs(make_model):
    small = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 11, "n_positions": 16}
    with pytest.raises(ModelError, match=r"'gpt2'.*llama, qwen2, qwen3, gemma3_text"):
        DenseDecoder(GPT2LMHeadModel(GPT2Config(**small)), 16)
    with pytest.raises(ModelError, match=r"context_size 513 .*512"):
        DenseDecoder(make_model("qwen3"), 513)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ModelError, match=r"'dynamic' .*depends on the length"):
        DenseDecoder(make_model("llama", rope_parameters=dynamic), 64)
    with pytest.raises(ModelError, match="'relu'"):
        DenseDecoder(make_model("llama", hidden_act="relu"), 64)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj .*DoRA"):
        DenseDecoder(adapted(make_model, "qwen3", use_dora=True), 64)
    with pytest.raises(ModelError, match=r"float64"):
        DenseDecoder(make_model("qwen3").double(), 64, native=True)
