"""A causal LM of transformers as the engine's own object, around parameters that are the learner's.

In: the module that trains. Out: a shell: the same modules, config and hooks copied, the parameters
shared (or cast copies of them). So the engine chooses its attention function, runs in eval mode with
adapters on and no dropout, whatever the learner does to its module meanwhile on another thread.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from uni_agent.engines.local.weights import unwrap
from uni_agent.errors import ModelError

Named = tuple[str, Tensor]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Shell:
    """Runs a causal LM's own forward in two halves: the decoder, and what turns its states into logits.

    `dtype` None is the module's own: nothing is copied, an optimizer's step in place is seen at once.
    Another one keeps a cast copy, which `refresh` renews in place. Raises ModelError for a module
    that is no causal LM of transformers, or has trained prompts.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.module = plain_model(module)
        first: Tensor = next(self.module.parameters())
        self.device = first.device
        self.dtype = first.dtype if dtype is None else dtype
        self._cast = self.dtype != first.dtype
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._made_of: list[object] = []
        self._output: Any = None
        self._attention: str | None = None
        self.refresh()

    @property
    def config(self) -> Any:
        """The shell's own copy of the text model's config."""
        return self._model.config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        """How many logits there are."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    def refresh(self) -> None:
        """Take the module as it is now: its parameters, and objects that were replaced (adapters, say)."""
        with torch.inference_mode(False), torch.no_grad():
            named = list(_shared_tensors(self.module))
            made_of = _objects(self.module, named)
            if _are_same(made_of, self._made_of):
                for source, target in self._copies.values():
                    target.copy_(source)
                return
            memo: dict[int, Any] = {}
            copies: dict[int, tuple[Tensor, Tensor]] = {}
            for name, tensor in named:
                memo[id(tensor)] = self._tensor(name, tensor, copies)
            if not self._cast:  # so that the shell knows when the learner merges an adapter into its base
                for part in self.module.modules():
                    merged: Any = vars(part).get("merged_adapters")
                    if isinstance(merged, list):
                        memo[id(merged)] = merged  # pyright: ignore[reportUnknownArgumentType]
            model: Any = copy.deepcopy(self.module, memo)
        self._copies, self._made_of = copies, made_of
        self._model = model.eval()
        for part in model.modules():
            if "_disable_adapters" in vars(part):
                part._disable_adapters = False
        self._decoder: Any = _decoder(model)
        self._run_decoder: Any = self._decoder.forward
        self._decoder_takes = set(inspect.signature(self._run_decoder).parameters)
        if self._attention is not None:
            self.set_attention(self._attention)

    def set_attention(self, name: str) -> bool:
        """Use an attention function that is registered with transformers; False where the family cannot."""
        if not self._model._can_set_attn_implementation():
            return False
        self._attention = name
        for part in self._model.modules():
            config: Any = vars(part).get("config")
            if hasattr(config, "_attn_implementation"):
                config._attn_implementation = name
        return True

    def set_own_attention(self) -> None:
        """Use what transformers itself would choose for the family, whatever the learner trains with."""
        self.set_attention(self._model.get_correct_attn_implementation(None))

    @contextlib.contextmanager
    def attention(self, name: str) -> Generator[None]:
        """`set_attention` for a while."""
        before = self._model.config._attn_implementation
        self.set_attention(name)
        try:
            yield
        finally:
            self.set_attention(before)

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: Any = None, mask: Tensor | None = None
    ) -> Tensor:
        """int64[B, L], their positions -> the decoder's last states [B, L, H].

        `cache` is a Cache of transformers that is read and extended; `mask` int64[B, cached + L] is 0
        where it holds padding.
        """
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": cache is not None}
        if mask is not None:
            inputs["attention_mask"] = mask
        if "position_ids" in self._decoder_takes:
            inputs["position_ids"] = positions
        if cache is not None:
            inputs["cache"] = cache
        output = self._run_decoder(**inputs)
        self._output = type(output)
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """The decoder's states [N, H] -> float32[N, V], by what the causal LM does after its decoder.

        `hidden` must have run before.
        """
        given = self._output(last_hidden_state=hidden[None])

        def forward(*_: Any, **__: Any) -> Any:
            return given

        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=self.device)
        self._decoder.forward = forward
        try:
            return self._model(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self._decoder.forward = self._run_decoder

    def whole(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The causal LM's own forward of one sequence, nothing taken apart: int64[N] -> float32[N, V]."""
        inputs: dict[str, Any] = {"input_ids": tokens[None], "use_cache": False}
        if "position_ids" in self._decoder_takes:
            inputs["position_ids"] = positions[None]
        return self._model(**inputs).logits[0].float()

    def _tensor(self, name: str, tensor: Tensor, copies: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """What the shell holds in place of one of the module's tensors."""
        if not self._cast or not tensor.is_floating_point() or _stays_float32(self.module, name):
            return tensor
        source, target = self._copies.get(id(tensor), (None, None))
        if source is not tensor or target is None:
            target = nn.Parameter(tensor.detach().to(self.dtype), requires_grad=False)
        else:
            target.copy_(tensor)
        copies[id(tensor)] = (tensor, target)
        return target


def is_recurrent(module: nn.Module) -> bool:
    """Whether a causal LM of transformers keeps more of a sequence than keys and values."""
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    model: Any = plain_model(module)
    if model._is_stateful:
        return True
    layers: list[Any] = DynamicCache(config=model.config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def plain_model(module: nn.Module) -> nn.Module:
    """The causal LM inside torch.compile, DDP and PEFT wrappers; its adapters stay. Raises ModelError."""
    model: Any = unwrap(module)
    if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise ModelError(
            f"a {type(model).__name__} does not run on the local engine; expected a causal LM of transformers"
        )
    adapters: Any = getattr(module, "peft_config", None) or {}
    if any(config.is_prompt_learning for config in adapters.values()):
        raise ModelError(
            "the adapter trains a prompt or prefix, which the local engine does not sample from; use LoRA"
        )
    return model


def _decoder(model: Any) -> Any:
    """What lies beneath the head. Raises ModelError."""
    from transformers import PreTrainedModel

    decoder = model.get_decoder()
    if decoder is model:  # a family whose name for it transformers does not look for
        inner = [part for part in model.children() if isinstance(part, PreTrainedModel)]
        if len(inner) != 1:
            raise ModelError(f"{type(model).__name__} has no decoder beneath its head; use a causal LM")
        decoder = inner[0]
    return decoder


def _shared_tensors(module: nn.Module) -> Iterator[Named]:
    """Parameters and saved buffers; what the modules compute for themselves (rotary tables) is not."""
    yield from module.named_parameters()
    for prefix, part in module.named_modules():
        transient: Any = vars(part)["_non_persistent_buffers_set"]
        for name, buffer in part.named_buffers(recurse=False):
            if name not in transient:
                yield f"{prefix}.{name}", buffer


def _objects(module: nn.Module, named: list[Named]) -> list[object]:
    """What a shell of `module` is made of; empty where adapters have settings that change unseen."""
    parts = list(module.modules())
    if any("merged_adapters" in vars(part) or "modules_to_save" in vars(part)["_modules"] for part in parts):
        return []
    hooks = [hook for part in parts for kind in _HOOKS for hook in vars(part)[kind].values()]
    return [*parts, *(tensor for _, tensor in named), *hooks]


def _are_same(some: list[object], others: list[object]) -> bool:
    """Whether these are the same objects, and any."""
    return bool(some) and len(some) == len(others) and all(map(operator.is_, some, others))


def _stays_float32(module: Any, name: str) -> bool:
    """Whether the family keeps this tensor in float32, as transformers does when it loads bfloat16."""
    kept: Any = module._keep_in_fp32_modules_strict or ()
    return any(f".{part}." in f".{name}." for part in kept)
