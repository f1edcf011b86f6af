"""Loading, saving, adapters, references."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from uni_agent.errors import ModelError
from uni_agent.models import HFAutoModel, HFModel, LoRA, count_parameters, merged_weights, score_tokens

torch.set_num_threads(1)
IDS = torch.tensor([[5, 6, 7, 9, 30, 12]])
ADAPTER = LoRA(r=2, alpha=2)


def logprobs(module: Any) -> torch.Tensor:
    ones = torch.ones(IDS.shape)
    return score_tokens(module, IDS, torch.arange(6)[None], ones.long(), ones).logprobs


def train_a_little(model: HFModel) -> None:
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and "lora_B" in name:
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


def test_load_gives_what_the_folder_says(folders: Any) -> None:
    model = HFAutoModel.from_pretrained(folders("qwen3"))
    assert not model.module.training
    assert (model.renderer_name, model.context_size, model.lora) == ("qwen3", 128, None)
    assert model.tokenizer.convert_tokens_to_ids("t5") == 5
    assert count_parameters(folders("qwen3")) == sum(p.numel() for p in model.module.parameters())


def test_saved_folder_loads_in_transformers(folders: Any, tmp_path: Path) -> None:
    model = HFAutoModel.from_pretrained(folders("qwen3"))
    with torch.no_grad():
        model.module.get_parameter("model.embed_tokens.weight").add_(0.1)
    model.save(tmp_path / "out")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = model.module(input_ids=IDS).logits
    torch.testing.assert_close(module(input_ids=IDS).logits, ours, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token == "t0"
    assert json.loads((tmp_path / "out/renderer.json").read_text()) == {"renderer": "qwen3"}
    assert "uni_agent_packed" not in (tmp_path / "out/config.json").read_text()
    torch.testing.assert_close(
        logprobs(HFAutoModel.from_pretrained(tmp_path / "out").module), logprobs(model.module)
    )


def test_generation_still_masks_padding(folders: Any) -> None:
    module: Any = HFAutoModel.from_pretrained(folders("qwen3")).module
    alone = module(input_ids=IDS).logits[0, -1]
    padded = torch.cat([torch.full((1, 3), 9), IDS], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]])
    got = module(input_ids=padded, attention_mask=mask, position_ids=positions).logits[0, -1]
    torch.testing.assert_close(got, alone, atol=1e-4, rtol=1e-4)


def test_w07_tied_heads_stay_tied_and_untied_ones_apart(folders: Any, tmp_path: Path) -> None:
    for name, tied in (("qwen3", True), ("llama", False)):
        model = HFAutoModel.from_pretrained(folders(name))
        model.save(tmp_path / name)
        for module in (model.module, HFAutoModel.from_pretrained(tmp_path / name).module):
            embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight  # pyright: ignore
            assert (embedding is head) is tied
        with torch.no_grad():
            embedding.add_(1)
        assert torch.equal(embedding, head) is tied


def test_w06_merging_never_touches_the_base(folders: Any, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        model = HFAutoModel.from_pretrained(folders("qwen3"), lora=ADAPTER, dtype=dtype)
        train_a_little(model)
        key = "model.layers.0.self_attn.q_proj"
        layer: Any = model.module.get_submodule(f"base_model.model.{key}")
        before = layer.base_layer.weight.clone()
        a, b = (layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float().clone())
        expected = (before.float() + b @ a).to(before.dtype)
        for _ in range(100):
            merged = merged_weights(model.module)
        torch.testing.assert_close(merged[f"{key}.weight"], expected)
        assert torch.equal(layer.base_layer.weight, before)
        with torch.no_grad():
            layer.lora_B["default"].weight.mul_(2)
        twice = merged_weights(model.module)[f"{key}.weight"]
        torch.testing.assert_close(twice, (before.float() + 2 * b @ a).to(before.dtype))
    plain: Any = AutoModelForCausalLM.from_pretrained(folders("qwen3"))
    assert merged_weights(model.module).keys() == plain.state_dict().keys()


def test_adapter_is_saved_as_peft_and_merged_as_a_plain_model(folders: Any, tmp_path: Path) -> None:
    model = HFAutoModel.from_pretrained(folders("qwen3"), lora=ADAPTER)
    base = logprobs(HFAutoModel.from_pretrained(folders("qwen3")).module)
    torch.testing.assert_close(logprobs(model.module), base)
    train_a_little(model)
    now = logprobs(model.module)
    assert (now - base).abs().max() > 1e-2
    model.save(tmp_path / "adapter")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    again = HFAutoModel.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logprobs(again.module), now)
    assert any(p.requires_grad for p in again.module.parameters())
    assert again.renderer_name == "qwen3"
    model.save(tmp_path / "merged", merged=True)
    plain = HFAutoModel.from_pretrained(tmp_path / "merged")
    assert not plain.has_adapter
    torch.testing.assert_close(logprobs(plain.module), now, atol=1e-4, rtol=1e-4)
    with pytest.raises(ModelError, match="holds an adapter already"):
        HFAutoModel.from_pretrained(tmp_path / "adapter", lora=ADAPTER)
    shutil.rmtree(tmp_path / "merged")


def test_only_the_adapter_trains(folders: Any) -> None:
    model = HFAutoModel.from_pretrained(folders("llama"), lora=ADAPTER)
    assert {name.split(".")[-3] for name, p in model.module.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }
    logprobs(model.module).sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in model.module.parameters())
    with pytest.raises(ModelError, match="LoRA targets"):
        HFAutoModel.from_pretrained(folders("llama"), lora=LoRA(r=2, targets=("nothing",)))


@pytest.mark.parametrize("lora", [None, ADAPTER])
def test_reference_stays_where_it_was(folders: Any, lora: LoRA | None) -> None:
    model = HFAutoModel.from_pretrained(folders("qwen3"), lora=lora)
    start = logprobs(model.module).detach()
    reference = model.fresh_reference()
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    moved = logprobs(model.module).detach()
    assert (moved - start).abs().max() > 1e-2
    with reference.active() as module:
        got = logprobs(module)
    assert not got.requires_grad
    torch.testing.assert_close(got, start)
    torch.testing.assert_close(logprobs(model.module).detach(), moved)
    assert any(p.requires_grad for p in model.module.parameters())


def broken(folders: Any, tmp_path: Path, kind: str) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(folders("qwen3"), folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    given = json.loads(config.read_text())
    if kind == "corrupt":
        weights.write_bytes(weights.read_bytes()[:100])
    elif kind == "no weights":
        weights.unlink()
    elif kind == "no config":
        config.unlink()
    elif kind == "bad config":
        config.write_text("{")
    elif kind == "unknown type":
        config.write_text(json.dumps({**given, "model_type": "nonesuch"}))
    elif kind == "not causal":
        config.write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    elif kind == "more layers":
        config.write_text(
            json.dumps({**given, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
        )
    elif kind == "other width":
        config.write_text(json.dumps({**given, "intermediate_size": 40}))
    elif kind == "no tokenizer":
        (folder / "tokenizer.json").write_text("{")
    elif kind == "renderer":
        (folder / "renderer.json").write_text("[]")
    return folder


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("corrupt", "cannot load a causal LM"),
        ("no weights", "cannot load a causal LM"),
        ("no config", "no config.json"),
        ("bad config", "cannot load a causal LM"),
        ("unknown type", "nonesuch"),
        ("not causal", "cannot load a causal LM"),
        ("more layers", "do not fill the model"),
        ("other width", "cannot load a causal LM|do not fill the model"),
        ("no tokenizer", "cannot load a tokenizer"),
        ("renderer", "renderer.json must hold"),
    ],
)
def test_broken_folders_end_in_one_line(folders: Any, tmp_path: Path, kind: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        HFAutoModel.from_pretrained(broken(folders, tmp_path, kind))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_missing_folder_and_unsupported_families(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        HFAutoModel.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="does not exist"):
        count_parameters(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"'gemma2'.*soft-capped"):
        HFAutoModel.from_pretrained(folders("gemma2"))
