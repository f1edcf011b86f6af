"""Families without a fast path, through their own forward: against transformers, in float32."""

from __future__ import annotations

import asyncio
import copy
import threading

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from uni_agent.engines.local.module import ModuleModel
from uni_agent.engines.local.shell import Shell
from uni_agent.engines.local.step import PagedStepper
from uni_agent.errors import ModelError
from uni_agent.models import PACKED_ATTENTION, register_packed_attention, score_tokens
from uni_agent.types import Weights

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PLAIN = {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
GPT2 = PLAIN | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512, "initializer_range": 0.3}
OPT = PLAIN | {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
MOE = {"num_experts_per_tok": 2}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
GEMMA2 = SHAPE | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 16}
FAMILIES = {
    "gemma2": ("Gemma2", GEMMA2 | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "mistral": ("Mistral", SHAPE | {"sliding_window": 8}),
    "phi3": ("Phi3", SHAPE | {"sliding_window": 8}),
    "gpt2": ("GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("GPTNeoX", SHAPE),
    "opt": ("OPT", OPT | {"max_position_embeddings": 512, "word_embed_proj_dim": 16, "init_std": 0.3}),
    "granite": ("Granite", SHAPE | {"logits_scaling": 2.0, "attention_multiplier": 0.3}),
    "olmo2": ("Olmo2", SHAPE),
    "cohere2": ("Cohere2", SHAPE | {"logit_scale": 0.25, "sliding_window": 8}),
    "stablelm": ("StableLm", SHAPE),
    "qwen2_moe": ("Qwen2Moe", SHAPE | MOE | {"num_experts": 4, "moe_intermediate_size": 16}),
    "mixtral": ("Mixtral", SHAPE | MOE | {"num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3",
        SHAPE | MLA | MOE | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    ),
    "gpt_oss": ("GptOss", SHAPE | MOE | {"head_dim": 8, "num_local_experts": 4}),
    "llama4": ("Llama4", SHAPE | {"head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2}),
    "bart": ("Bart", PLAIN | {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}),
}
SAMPLED = [kind for kind in FAMILIES if kind not in ("gpt_oss", "llama4", "bart")]


def family(kind, seed=0, **changes):
    name, shape = FAMILIES[kind]
    model_class = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**(shape | changes)))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # ones and zeros would hide a norm or a bias that is left out
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.parametrize("kind", SAMPLED)
async def test_tokens_and_logprobs_are_the_familys_own(*, kind, make_engine, run, reference, prompt):
    model = family(kind)
    engine = make_engine(model)
    assert isinstance(engine._loop._stepper, PagedStepper)
    system = prompt(30, 1)
    prompts = [prompt(1, 2), prompt(17, 3), system + prompt(3, 4), system + prompt(9, 5)]
    greedy = await asyncio.gather(
        *[run(engine, p, f"s{i}", max_tokens=12, temperature=0.0) for i, p in enumerate(prompts)]
    )
    turns = [
        p + r.token_ids.tolist() + prompt(3 + len(p) % 4, 6) for p, r in zip(prompts, greedy, strict=True)
    ]
    more = await asyncio.gather(*[run(engine, p, f"s{i}", max_tokens=6, seed=i) for i, p in enumerate(turns)])
    for p, got in zip(prompts + turns, greedy + more, strict=True):
        assert np.abs(got.logprobs - reference(model, p, got.token_ids)).max() < 1e-4
    for p, got in zip(prompts, greedy, strict=True):
        ids = torch.tensor([p])
        settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert got.token_ids.tolist() == model.generate(ids, **settings)[0, len(p) :].tolist()
    assert (await engine.stats())["engine/reused_tokens"] > 0


def test_geometry_is_read_from_the_calls_of_attention():
    gemma = ModuleModel(family("gemma2"), 64).geometry
    assert (gemma.layers, gemma.heads, gemma.kv_heads, gemma.head_dim, gemma.vocab_size) == (3, 4, 2, 8, 97)
    assert (gemma.windows, gemma.scale, gemma.softcap) == ((8, None, 8), 0.25, 5.0)
    assert ModuleModel(family("gemma2"), 8).geometry.windows == (None,) * 3  # as long as the context
    assert ModuleModel(family("deepseek_v3"), 64).geometry.head_dim == 12  # keys; values are 8 wide
    assert ModuleModel(family("gpt2"), 2).geometry.windows == (None,) * 3


@pytest.mark.parametrize(
    ("kind", "changes", "context", "why"),
    [
        ("gpt_oss", {}, 64, "its attention has sinks"),
        ("llama4", {}, 64, "neither causal nor a sliding window"),
        ("bart", {}, 64, "differ from the model's own forward by"),
        ("gpt2", {}, 513, "exceeds the model's max_position_embeddings 512"),
        (
            "phi3",
            {
                "original_max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "rope_theta": 1e4,
                },
            },
            33,
            "depends on the length beyond 32 tokens",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_the_reason(kind, changes, context, why):
    with pytest.raises(ModelError, match=why):
        ModuleModel(family(kind, **changes), context)


def test_trained_prompts_and_other_modules_are_refused():
    prompted = get_peft_model(family("gpt2"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ModelError, match="trains a prompt or prefix"):
        ModuleModel(prompted, 64)
    with pytest.raises(ModelError, match="a Linear does not run"):
        ModuleModel(torch.nn.Linear(2, 2), 64)


async def test_the_learners_module_is_left_alone_while_both_run(make_engine, run, reference, prompt):
    """Engine and learner share parameters, and nothing else: modes, hooks and attention are each one's own."""
    register_packed_attention()
    model = family("mistral")
    model.set_attn_implementation(PACKED_ATTENTION)
    ids = torch.tensor([prompt(40, 1)])
    inputs = (ids, torch.arange(40)[None], torch.ones_like(ids), torch.ones(1, 40))
    want = score_tokens(model, *inputs).logprobs.detach()
    engine = make_engine(model)
    done, gaps = threading.Event(), []

    def learn():
        model.train()
        while not done.is_set():
            scored = score_tokens(model, *inputs).logprobs
            scored.sum().backward()
            gaps.append(float((scored.detach() - want).abs().max()))

    learner = threading.Thread(target=learn)
    learner.start()
    results = await asyncio.gather(*[run(engine, prompt(9 + i, i), f"s{i}", max_tokens=40) for i in range(6)])
    done.set()
    learner.join()
    assert len(gaps) > 1
    assert max(gaps) < 1e-5
    assert model.training
    assert model.config._attn_implementation == PACKED_ATTENTION
    model.eval()
    for i, got in enumerate(results):
        assert np.abs(got.logprobs - reference(model, prompt(9 + i, i), got.token_ids)).max() < 1e-4


async def test_lora_samples_with_its_adapter_in_any_mode(make_engine, run, reference, prompt):
    config = LoraConfig(r=4, lora_alpha=12, lora_dropout=0.5, target_modules="all-linear")
    model = get_peft_model(family("gemma2"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tokens = prompt(20, 3)
    model.train()
    with model.disable_adapter():  # the learner computes reference logprobs while the engine is made
        engine = make_engine(model)
        plain = await run(engine, tokens, "a", max_tokens=8, seed=5)
    want = reference(model.eval(), tokens, plain.token_ids)
    assert np.abs(plain.logprobs - want).max() < 1e-4
    model.merge_adapter()
    merged = await run(engine, tokens, "b", max_tokens=8, seed=5)
    model.unmerge_adapter()
    assert np.abs(merged.logprobs - want).max() < 1e-4
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 2
    await engine.load_weights(Weights(1, model))
    after = await run(engine, tokens, "a", max_tokens=8, seed=5)
    assert np.abs(after.logprobs - reference(model, tokens, after.token_ids)).max() < 1e-4
    assert np.abs(reference(model, tokens, plain.token_ids) - want).max() > 0.1


async def test_a_cast_copy_is_refreshed_after_a_step(make_engine, run, reference, prompt):
    model = family("granite")
    engine = make_engine(model, dtype=torch.bfloat16)
    tokens = prompt(20, 3)

    async def gap():
        got = await run(engine, tokens, "a", max_tokens=16, seed=5)
        half = copy.deepcopy(model).to(torch.bfloat16)
        return np.abs(got.logprobs - reference(half, tokens, got.token_ids)).mean()

    assert await gap() < 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss.backward()
    optimizer.step()
    assert await gap() > 0.05  # the copy is the old one still
    await engine.load_weights(Weights(1, model))
    assert await gap() < 0.05
    assert model.dtype == torch.float32


def test_refresh_follows_replaced_parameters_and_keeps_ties():
    model = family("gpt2")
    mine = ModuleModel(model, 64)
    ids = torch.arange(1, 9)

    def ours():
        def attend(layer, q, k, v):
            seen = torch.arange(8)[:, None] >= torch.arange(8)
            scores = torch.einsum("qhd,khd->hqk", q, k) * mine.geometry.scale
            return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

        return mine.logits(mine.hidden(ids, torch.arange(8), attend))

    with torch.no_grad():
        torch.testing.assert_close(ours(), model(ids[None]).logits[0], atol=1e-5, rtol=1e-5)
        model.transformer.wte.weight = torch.nn.Parameter(model.transformer.wte.weight * 2)
        model.tie_weights()
        mine.refresh()
        torch.testing.assert_close(ours(), model(ids[None]).logits[0], atol=1e-5, rtol=1e-5)


def test_refresh_renews_a_cast_copy_in_place_and_sees_a_new_hook():
    model = family("granite")
    mine = ModuleModel(model, 64, dtype=torch.bfloat16)
    shell = mine._shell
    before, copy_of = shell._model, shell._model.get_input_embeddings().weight
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    mine.refresh()
    assert shell._model is before
    torch.testing.assert_close(copy_of, model.get_input_embeddings().weight.to(torch.bfloat16))
    model.register_forward_pre_hook(lambda *_: None)
    mine.refresh()
    assert shell._model is not before


def test_refresh_of_a_cast_copy_counts_a_merged_adapter_once():
    model = get_peft_model(family("granite"), LoraConfig(r=4, lora_alpha=12, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    shell = Shell(model, torch.bfloat16)
    shell.set_own_attention()

    @torch.no_grad()
    def ours():
        return shell.whole(torch.arange(1, 9), torch.arange(8)).log_softmax(-1)

    before = ours()
    model.merge_adapter()
    shell.refresh()
    assert (ours() - before).abs().mean() < 0.05
