"""A causal LM of transformers that keeps its own state: recurrent, hybrid, or with unusual attention.

Runs a `Shell` on batches of `States`. What may be batched is tried at load, not assumed: rows of
different length in one batch, several tokens at once after a state. What deviates from the model's
own forward is then not done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from uni_agent.engines.local.module import TOLERANCE, check_positions, first_line
from uni_agent.engines.local.shell import Shell
from uni_agent.engines.local.states import States, check_layers, gather
from uni_agent.errors import ModelError


class StateModel:
    """Runs a causal LM with transformers' own cache.

    `ragged`: rows of different length may share a batch. `continues`: a state may be followed by
    several tokens in one pass. Raises ModelError when even sequences of one length, token after
    token, differ from the model's own forward.
    """

    def __init__(self, module: nn.Module, context_size: int, *, dtype: torch.dtype | None = None) -> None:
        self.module = module
        self._shell = Shell(module, dtype)
        self.device, self.dtype, self.vocab_size = (
            self._shell.device,
            self._shell.dtype,
            self._shell.vocab_size,
        )
        check_positions(self._shell, context_size)
        self._shell.set_own_attention()
        self.ragged = self.continues = False
        with torch.no_grad():
            self._try_out()

    def refresh(self) -> None:
        """Take the module's parameters as they are now (an optimizer stepped, an adapter changed)."""
        self._shell.refresh()

    def start(self, tokens: Tensor) -> tuple[Tensor, States]:
        """Run sequences from their first token: int64[B, L] -> their last states [B, H], and a new batch."""
        from transformers import DynamicCache

        states = States(DynamicCache(config=self._shell.config), [0] * len(tokens))
        return self._run(tokens, states)[:, -1], states

    def advance(self, tokens: Tensor, states: States) -> Tensor:
        """Feed int64[B, L] more tokens to the batch; returns the last one's states [B, H]."""
        return self._run(tokens, states)[:, -1]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32[N, V]."""
        return self._shell.logits(hidden)

    def bytes_of(self, tokens: int) -> int:
        """About what the state of a sequence of this length takes (of layers with a window, at most)."""
        return self._fixed_bytes + tokens * self._token_bytes

    def _run(self, tokens: Tensor, states: States) -> Tensor:
        count = tokens.shape[1]
        lengths = torch.tensor(states.lengths, device=self.device)[:, None]
        reach, mask = states.reach, None
        if min(states.lengths) < reach and states.has_keys:
            mask = (torch.arange(reach + count, device=self.device) >= reach - lengths).long()
        positions = lengths + torch.arange(count, device=self.device)
        hidden = self._shell.hidden(tokens, positions, states.cache, mask)
        states.lengths = [length + count for length in states.lengths]
        return hidden

    def _try_out(self) -> None:
        """Compare with the model's own forward, on two sequences; sets what may be batched."""
        vocab = self.vocab_size
        long, short = (torch.arange(1 + n, 1 + 6 * n, 5, device=self.device) % vocab for n in (14, 9))
        kind = self._shell.config.model_type
        try:
            place = torch.arange(len(long), device=self.device)
            want = [self._shell.whole(ids, place[: len(ids)]) for ids in (long, short)]
            _, alone = self.start(long[None, :4])
            check_layers(alone.cache)
            small = alone.num_bytes
            gap = self._steps(long[None, :5], alone, [want[0]])
            self._token_bytes = alone.num_bytes - small
            self._fixed_bytes = max(0, small - 4 * self._token_bytes)
            gap = max(gap, self._steps(long[None], alone, [want[0]]))
            hidden, _ = self.start(torch.stack([long[:5], short[:5]]))
            gap = max(gap, self._gap(hidden, [w[4] for w in want]))
            pair = gather([(self.start(ids[None, :5])[1], [0]) for ids in (long, short)])
            gap = max(gap, self._steps(torch.stack([long[:9], short]), pair, want))
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError) as problem:
            raise self._refusal(f"a trial failed: {first_line(problem)}") from problem
        except ModelError as problem:
            raise ModelError(f"model type {kind!r} does not run on the local engine: {problem}") from problem
        if not gap <= self._tolerance:
            raise self._refusal(f"its steps differ from its own forward by {gap:.2g} nats")
        self.ragged = self._succeeds(long, short, want, tokens=1)
        self.continues = self._succeeds(long, long if not self.ragged else short, want, tokens=3)

    @property
    def _tolerance(self) -> float:
        return TOLERANCE.get(self.dtype, 1e-3)

    def _steps(self, tokens: Tensor, states: States, want: list[Tensor]) -> float:
        """Feed the rest of int64[B, L] one by one; the largest gap to the wanted logits, [L, V] a row."""
        gaps = [
            self._gap(self.advance(tokens[:, i : i + 1], states), [row[i] for row in want])
            for i in range(states.reach, tokens.shape[1])
        ]
        return max(gaps)

    def _succeeds(self, long: Tensor, short: Tensor, want: list[Tensor], *, tokens: int) -> bool:
        """Whether a batch of rows of 11 and 6 tokens (or of 11 twice) takes `tokens` more of each."""
        second, at = (want[0], 11) if short is long else (want[1], 6)
        try:
            states = gather([(self.start(long[None, :11])[1], [0]), (self.start(short[None, :at])[1], [0])])
            more = torch.stack([long[11 : 11 + tokens], short[at : at + tokens]])
            hidden = self.advance(more, states)
            first_gap = self._gap(hidden, [want[0][10 + tokens], second[at + tokens - 1]])
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError):
            return False  # this family cannot: it runs in smaller pieces then
        return first_gap <= self._tolerance

    def _gap(self, hidden: Tensor, want: list[Tensor]) -> float:
        ours, theirs = self.logits(hidden).log_softmax(-1), torch.stack(want).log_softmax(-1)
        return float((ours - theirs).abs().max())

    def _refusal(self, why: str) -> ModelError:
        config: Any = self._shell.config
        return ModelError(
            f"model type {config.model_type!r} does not run on the local engine with its own cache: {why}; "
            "serve it over HTTP"
        )
