"""Hugging Face causal language models: loading, saving, the frozen reference.

In: a model folder. Out: an HFModel ready for scoring, sampling and training. Knows nothing of
batches, losses or engines.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from uni_agent.config.known_models import model_folder
from uni_agent.errors import ModelError
from uni_agent.models.attention import PACKED_ATTENTION, register_packed_attention
from uni_agent.models.logprobs import causal_lm, score_tokens
from uni_agent.models.lora import LoRA, add_lora, merged_weights
from uni_agent.models.norm import speed_up_norms

DtypeName = Literal["float32", "bfloat16", "float16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# How far our logprobs may be from the model's own forward at load, in nats.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
_RENDERER_FILE = "renderer.json"
_ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen policy to measure KL against: a copy, or the base beneath an adapter."""

    module: torch.nn.Module
    beneath_adapter: bool

    @contextlib.contextmanager
    def active(self) -> Generator[torch.nn.Module]:
        """Yield the module to score with, gradients off.

        Beneath an adapter the adapter is off meanwhile, for everyone who uses the module: nothing may
        sample from it at the same time.
        """
        module: Any = self.module
        with torch.no_grad(), module.disable_adapter() if self.beneath_adapter else contextlib.nullcontext():
            yield module


@dataclass(frozen=True, slots=True)
class HFModel:
    """A loaded causal LM: eval mode, no dropout, packed attention.

    `module` is transformers' model, or PEFT's wrapper around it. `renderer_name` is what the folder's
    renderer.json says, `context_size` the most tokens that the positions reach.
    """

    module: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase
    renderer_name: str | None
    path: Path
    context_size: int
    lora: LoRA | None = None

    @property
    def has_adapter(self) -> bool:
        """Whether the module trains an adapter instead of all weights."""
        from peft import PeftModel

        return isinstance(self.module, PeftModel)

    def merged_weights(self) -> dict[str, torch.Tensor]:
        """The weights of the equivalent plain model; see `lora.merged_weights`."""
        return merged_weights(self.module)

    def fresh_reference(self) -> Reference:
        """Freeze the policy as it is now (full training), or name the adapter's base as reference."""
        if self.has_adapter:
            return Reference(self.module, beneath_adapter=True)
        frozen = copy.deepcopy(self.module).eval().requires_grad_(False)
        return Reference(frozen, beneath_adapter=False)

    def save(self, folder: str | Path, *, merged: bool = False) -> None:
        """Write a folder that transformers loads: safetensors, config, tokenizer, renderer.json.

        With an adapter the folder is a standard PEFT adapter, which names its base's path; `merged`
        writes the whole model instead, with the adapter added in.
        """
        folder, module = Path(folder), self.module
        folder.mkdir(parents=True, exist_ok=True)
        if self.has_adapter and not merged:
            adapter: Any = module
            adapter.save_pretrained(str(folder), save_embedding_layers=False)
        else:
            model: Any = causal_lm(module)
            weights = self.merged_weights()
            if model.config.tie_word_embeddings:
                weights = {name: weights[name] for name in weights if name not in _tied_names(model)}
            with quiet_transformers():
                model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        if self.renderer_name is not None:
            (folder / _RENDERER_FILE).write_text(json.dumps({"renderer": self.renderer_name}) + "\n")


class HFAutoModel:
    """Loads causal LMs from folders on this machine."""

    @staticmethod
    def from_pretrained(
        path: str | Path,
        *,
        lora: LoRA | None = None,
        dtype: DtypeName = "float32",
        device: str = "cpu",
    ) -> HFModel:
        """Load a folder: a whole model, or a PEFT adapter whose base lies where it says.

        `path` may be the name of a fetched model, such as "smollm2".
        `lora` adds a fresh adapter. The scoring path is compared with the model's own forward on a few
        tokens, so that a family we would score wrongly is refused here. Raises ModelError.
        """
        folder = model_folder(path)
        if not folder.is_dir():
            raise ModelError(
                f"model folder {folder} does not exist; give the path of a folder on this machine"
            )
        if dtype not in _DTYPES:
            raise ModelError(f"dtype {dtype!r} is unknown; expected one of {', '.join(_DTYPES)}")
        base_folder = _adapter_base(folder)
        if base_folder is not None and lora is not None:
            raise ModelError(f"{folder} holds an adapter already; leave lora out, or give its base's folder")
        register_packed_attention()
        module: Any = _load_weights(base_folder or folder, _DTYPES[dtype])
        disable_dropout(module)
        speed_up_norms(module)
        module.eval().to(device)
        _check_scoring(module, base_folder or folder)
        if base_folder is not None:
            module = _load_adapter(module, folder)
        elif lora is not None:
            module = add_lora(module, lora)
        return HFModel(
            module=module.eval(),
            tokenizer=_load_tokenizer(folder),
            renderer_name=_read_renderer_name(folder),
            path=folder,
            context_size=_context_size(causal_lm(module).config, folder),
            lora=lora,
        )


def count_parameters(path: str | Path) -> int:
    """The parameters of a folder's model, by its config alone: no weights are read. Raises ModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_folder(path)
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; give the path of a folder on this machine")
    folder = _adapter_base(folder) or folder
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            module: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception as problem:  # as in _load_weights
        raise ModelError(f"cannot read a causal LM's config in {folder}: {_first_line(problem)}") from problem
    return sum(parameter.numel() for parameter in module.parameters())


def disable_dropout(module: torch.nn.Module) -> None:
    """Set every dropout to 0, layers and plain attributes alike.

    Sampling has none, and a ratio of two passes means nothing if each drops other units. Setting it
    to 0, rather than relying on eval mode, holds whatever mode someone toggles later.
    """
    for part in module.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            part.p = 0.0
        for name, value in vars(part).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(part, name, 0.0)


def _load_weights(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model folder {folder} has no config.json; it is not a model that transformers saved"
        )
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=PACKED_ATTENTION,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as problem:  # safetensors, torch, json and transformers each raise their own
        raise ModelError(f"cannot load a causal LM from {folder}: {_first_line(problem)}") from problem
    module, info = loaded
    wrong = sorted(info["missing_keys"]) + [str(key[0]) for key in info["mismatched_keys"]]
    if wrong:
        raise ModelError(
            f"the weights in {folder} do not fill the model: {len(wrong)} tensors missing or of another "
            f"shape, {wrong[0]} for one; the folder is incomplete or belongs to another architecture"
        )
    return module


def _load_adapter(base: Any, folder: Path) -> torch.nn.Module:
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(base, str(folder), is_trainable=True)
    except Exception as problem:  # as above
        raise ModelError(f"cannot load the adapter in {folder}: {_first_line(problem)}") from problem


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as problem:  # the Rust tokenizers raise bare Exception for a corrupt file
        raise ModelError(f"cannot load a tokenizer from {folder}: {_first_line(problem)}") from problem


def _adapter_base(folder: Path) -> Path | None:
    """The base folder that an adapter's folder names; None for a whole model."""
    file = folder / _ADAPTER_FILE
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    try:
        base = Path(json.loads(file.read_text())["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as problem:
        raise ModelError(f"{file} does not name a base model: {problem!r}") from problem
    if not base.is_dir():
        raise ModelError(f"the adapter in {folder} needs its base model at {base}, which does not exist")
    return base


def _read_renderer_name(folder: Path) -> str | None:
    file = folder / _RENDERER_FILE
    if not file.is_file():
        return None
    try:
        return str(json.loads(file.read_text())["renderer"])
    except (ValueError, KeyError, TypeError) as problem:
        raise ModelError(f'{file} must hold {{"renderer": NAME}}: {problem!r}') from problem


def _context_size(config: Any, folder: Path) -> int:
    try:
        return int(config.max_position_embeddings)
    except (AttributeError, TypeError) as problem:
        raise ModelError(f"{folder}/config.json has no max_position_embeddings; write it there") from problem


@torch.no_grad()
def _check_scoring(module: Any, folder: Path) -> None:
    """Score two packed segments that begin alike, and compare with the model's own forward on each."""
    lengths = (20, 18)
    device = module.device
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    segments = torch.tensor([[1] * lengths[0] + [2] * lengths[1]], device=device)
    other = (segments[0] == 2) & (positions >= 16)
    ids = (positions * 7 + 1 + other * 3) % module.config.vocab_size
    positions, ones = positions[None], torch.ones(1, sum(lengths), device=device)
    problem = None
    try:
        ours = score_tokens(module, ids[None], positions, segments, ones).logprobs[0]
        theirs = [_own_logprobs(module, part) for part in ids.split(lengths)]
        gap = float((ours - torch.cat(theirs)).abs().max())
    except (AttributeError, TypeError, ValueError, RuntimeError) as caught:
        problem = _first_line(caught)
    else:
        if not gap <= _TOLERANCE[module.dtype]:
            problem = f"packed logprobs differ from the model's own by {gap:.2g} nats"
    if problem is not None:
        raise ModelError(
            f"model type {module.config.model_type!r} in {folder} cannot be scored: {problem}; use a causal "
            "LM with plain or sliding-window attention (Llama, Qwen2, Qwen3, Gemma3, SmolLM)"
        )


def _own_logprobs(module: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = module(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    picked = torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1)
    return torch.cat([picked.new_zeros(1), picked])


def _tied_names(model: Any) -> frozenset[str]:
    """The names under which a tied model holds a tensor a second time."""
    return frozenset(model.all_tied_weights_keys)


@contextlib.contextmanager
def quiet_transformers() -> Generator[None]:
    """No progress bars and load reports on stderr: what matters in them becomes an error."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _first_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__
