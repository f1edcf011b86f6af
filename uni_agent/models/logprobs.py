"""The one logprob function, shared by the learner and by the checks of engines.

In: a batch of rows and a causal LM. Out: for every token its logprob given what stands before it in
its own segment. The shift by one between tokens and predictions happens here and nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from uni_agent.models.attention import Packing, plan_packing, share_prefixes

# Logits of one chunk, in elements: 2**25 float32 are 128 MiB.
_CHUNK_ELEMENTS = 1 << 25


class TokenOutputs(NamedTuple):
    """What a scoring pass says about tokens [B, L]; 0 where nothing was asked or nothing stands before.

    logprobs and entropy are float32[B, L]; entropy is of the distribution that token t was drawn
    from. hidden float32[B, L, H] at t is the model's state before token t; end_hidden float32[B, S, H]
    at s - 1 is its state after the last token of segment s.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    end_hidden: torch.Tensor | None = None


class CausalLM(Protocol):
    """What scoring needs of a model: a decoder that gives last_hidden_state, and its head."""

    config: Any

    def get_decoder(self) -> Any: ...

    def get_output_embeddings(self) -> Any: ...


class _Flat(NamedTuple):
    """A batch as one row of its T real tokens, U of which are computed: shared prefixes once."""

    kept: torch.Tensor  # int64[T]: where in the flattened [B * L] they stand
    computed: torch.Tensor  # int64[U]: the same of those that are computed
    node: torch.Tensor  # int64[T]: which of these stands for each token
    first: torch.Tensor  # bool[T]: starts a segment
    packing: Packing
    ends: torch.Tensor  # int64[N]: the last token of each segment, in the row of T
    slots: torch.Tensor  # int64[N]: row * S + segment - 1
    num_slots: int  # S, segments per row


def score_tokens(
    module: torch.nn.Module,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    segments: torch.Tensor,
    temperature: torch.Tensor,
    *,
    wanted: torch.Tensor | None = None,
    with_entropy: bool = False,
    with_hidden: bool = False,
    chunk: int | None = None,
) -> TokenOutputs:
    """Score tokens under `module` (a causal LM, bare or under PEFT); differentiable.

    All inputs are [B, L]: token_ids, positions (restart per segment), segments (0 is padding, at any
    side; a segment's tokens stand together), temperature (above 0), wanted (bool, None for all: the
    head runs for these only). What several segments begin with is computed once: a group costs its
    prompt once. `chunk` is the most tokens whose logits live at once. Raises ValueError on shapes that
    differ, a split segment, or a temperature of 0.
    """
    _check_shapes(token_ids, positions=positions, segments=segments, temperature=temperature, wanted=wanted)
    rows, columns = token_ids.shape
    model = causal_lm(module)
    if not rows or not columns or not bool(segments.any()):
        return _empty(token_ids, model, with_entropy, with_hidden)
    flat = _flatten(token_ids, positions, segments)
    ids = token_ids.reshape(-1).long()
    hidden = _run_decoder(
        model,
        ids.index_select(0, flat.computed),
        positions.reshape(-1).index_select(0, flat.computed).long(),
        flat.packing,
    )

    targets = ~flat.first if wanted is None else wanted.reshape(-1).index_select(0, flat.kept) & ~flat.first
    targets = targets.nonzero().squeeze(1)
    heat = temperature.reshape(-1).index_select(0, flat.kept).index_select(0, targets).float()
    if bool((heat <= 0).any()):
        raise ValueError(
            "temperature is 0 or below for a token to score; greedy tokens have logprobs at temperature 1"
        )
    states = hidden.index_select(0, flat.node.index_select(0, targets - 1))
    where = flat.kept.index_select(0, targets)
    logprobs, entropy = _score_states(
        model, states, ids.index_select(0, where), heat, with_entropy=with_entropy, chunk=chunk
    )
    outputs = TokenOutputs(
        _spread(logprobs, where, rows * columns).view(rows, columns),
        _spread(entropy, where, rows * columns).view(rows, columns) if entropy is not None else None,
    )
    if not with_hidden:
        return outputs
    states = hidden.float().index_select(0, flat.node)
    after_first = (~flat.first).nonzero().squeeze(1)
    before = _spread(
        states.index_select(0, after_first - 1), flat.kept.index_select(0, after_first), rows * columns
    )
    end = _spread(states.index_select(0, flat.ends), flat.slots, rows * flat.num_slots)
    return outputs._replace(
        hidden=before.view(rows, columns, -1), end_hidden=end.view(rows, flat.num_slots, -1)
    )


def causal_lm(module: torch.nn.Module) -> CausalLM:
    """The causal LM itself, from beneath PEFT where it is wrapped (its adapters stay active)."""
    from peft import PeftModel

    return cast(CausalLM, module.get_base_model() if isinstance(module, PeftModel) else module)


def _run_decoder(
    model: CausalLM, ids: torch.Tensor, positions: torch.Tensor, packing: Packing
) -> torch.Tensor:
    """The last hidden states [U, H] of a flat row."""
    output = model.get_decoder()(
        input_ids=ids[None],
        position_ids=positions[None],
        # Four dimensions mean "ready-made" to transformers: it builds none of its own. Unused.
        attention_mask=ids.new_zeros((1, 1, 1, 1), dtype=torch.bool),
        use_cache=False,
        packing=packing,
    )
    return output.last_hidden_state[0]


def _score_states(
    model: CausalLM,
    states: torch.Tensor,
    ids: torch.Tensor,
    heat: torch.Tensor,
    *,
    with_entropy: bool,
    chunk: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logprobs (and entropies) float32[N] of ids[N] after states[N, H]."""
    head, rule = model.get_output_embeddings(), LogitRule.of(model.config)
    vocabulary = int(head.weight.shape[0])
    size = chunk or max(64, _CHUNK_ELEMENTS // vocabulary)
    hot = bool((heat != 1).any())

    def score(
        states: torch.Tensor, ids: torch.Tensor, heat: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = rule.apply(head(states).float())
        if hot:
            logits = logits / heat[:, None]
        if not with_entropy:
            return -F.cross_entropy(logits, ids, reduction="none"), heat
        return _LogprobAndEntropy.apply(logits, ids)  # pyright: ignore[reportReturnType]

    pieces = list(zip(states.split(size), ids.split(size), heat.split(size), strict=True))
    if len(pieces) == 1 or not torch.is_grad_enabled():
        scored = [score(*piece) for piece in pieces]
    else:  # several chunks: recompute their logits in backward rather than keep them all
        scored = [checkpoint(score, *piece, use_reentrant=False) for piece in pieces]
    logprobs = torch.cat([piece[0] for piece in scored])
    return logprobs, torch.cat([piece[1] for piece in scored]) if with_entropy else None


class _LogprobAndEntropy(torch.autograd.Function):
    """Logits float32[N, V], ids int64[N] -> logprobs and entropies float32[N].

    Autograd's own backward of the same formulas passes over [N, V] three times as often.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        all_logprobs = F.log_softmax(logits, dim=-1)
        probs = all_logprobs.exp()
        entropy = -(probs * all_logprobs).sum(-1)
        ctx.save_for_backward(all_logprobs, probs, ids, entropy)
        return all_logprobs.gather(1, ids[:, None]).squeeze(1), entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the stub names a positional ctx
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        all_logprobs, probs, ids, entropy = ctx.saved_tensors
        of_logprob, of_entropy = (grad[:, None] for grad in grads)
        if bool(of_entropy.any()):
            grad = torch.addcmul(of_logprob + of_entropy * entropy[:, None], all_logprobs, of_entropy)
            grad = grad.mul_(probs).neg_()
        else:  # a loss without entropy bonus
            grad = probs * -of_logprob
        return grad.scatter_add_(1, ids[:, None], of_logprob), None


class LogitRule(NamedTuple):
    """What a family does to its head's output: a scale, and a soft cap (0 for none)."""

    scale: float = 1.0
    softcap: float = 0.0

    @staticmethod
    def of(config: Any) -> LogitRule:
        """Read Gemma's soft cap, Granite's divisor and Cohere's factor; others have none."""
        given = vars(config)
        scale = (given.get("logit_scale") or 1.0) / (given.get("logits_scaling") or 1.0)
        return LogitRule(float(scale), float(given.get("final_logit_softcapping") or 0.0))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def _flatten(token_ids: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor) -> _Flat:
    """Drop padding, share prefixes, plan the packing. Raises ValueError where a segment is in two pieces."""
    device = segments.device
    grid = segments.cpu().numpy().astype(np.int64)
    num_slots = int(grid.max())
    kept = np.flatnonzero(grid)
    owner = kept // grid.shape[1] * num_slots + grid.reshape(-1)[kept] - 1
    first = np.concatenate([[True], owner[1:] != owner[:-1]])
    starts = np.flatnonzero(first)
    slots = owner[starts]
    unique, counts = np.unique(slots, return_counts=True)
    if len(unique) != len(slots):
        row, segment = divmod(int(unique[counts.argmax()]), num_slots)
        raise ValueError(f"segment {segment + 1} of row {row} is in {counts.max()} pieces; expected one run")
    lengths = np.diff(np.append(starts, len(kept)))
    keys = (positions.cpu().numpy().astype(np.int64) << 32) + token_ids.cpu().numpy()
    sharing = share_prefixes(keys.reshape(-1)[kept], lengths)

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return _Flat(
        kept=tensor(kept),
        computed=tensor(kept[sharing.kept]),
        node=tensor(sharing.node),
        first=tensor(first),
        packing=plan_packing(lengths, sharing, device),
        ends=tensor(starts + lengths - 1),
        slots=tensor(slots),
        num_slots=num_slots,
    )


def _spread(values: torch.Tensor, where: torch.Tensor, size: int) -> torch.Tensor:
    """Zeros [size, ...] with `values` at `where`; differentiable."""
    return values.new_zeros((size, *values.shape[1:])).index_copy(0, where, values)


def _empty(token_ids: torch.Tensor, model: CausalLM, with_entropy: bool, with_hidden: bool) -> TokenOutputs:
    weight = model.get_output_embeddings().weight
    zeros = torch.zeros(token_ids.shape, device=weight.device)
    width = int(weight.shape[1])
    return TokenOutputs(
        zeros,
        zeros.clone() if with_entropy else None,
        torch.zeros((*token_ids.shape, width), device=weight.device) if with_hidden else None,
        torch.zeros((token_ids.shape[0], 0, width), device=weight.device) if with_hidden else None,
    )


def _check_shapes(token_ids: torch.Tensor, **others: torch.Tensor | None) -> None:
    shape = tuple(token_ids.shape)
    if len(shape) != 2:
        raise ValueError(f"token_ids has shape {shape}; expected [B, L]")
    for name, tensor in others.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} for token_ids of shape {shape}")
