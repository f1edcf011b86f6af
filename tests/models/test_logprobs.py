"""score_tokens: exact numbers on table models, and one answer in every layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from uni_agent.models import HFAutoModel, disable_dropout, score_tokens

torch.set_num_threads(1)


class Table(nn.Module):
    """FX-LM: the logits are looked up from the previous token."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.head = nn.Linear(len(rows), len(rows[0]), bias=False)
        self.head.weight.data = torch.tensor(rows).T.contiguous()
        self.config = SimpleNamespace()

    def get_decoder(self) -> Any:
        def run(*, input_ids: Tensor, **_: Any) -> Any:
            return SimpleNamespace(
                last_hidden_state=nn.functional.one_hot(input_ids, self.head.in_features).float()
            )

        return run

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


BIGRAM = [[1.0, 0.0, -1.0], [0.0, 2.0, 0.0], [-1.0, 0.0, 1.0]]


def score(module: nn.Module, ids: Any, segments: Any = None, positions: Any = None, **rest: Any) -> Any:
    ids = torch.tensor(ids)
    segments = torch.ones_like(ids) if segments is None else torch.tensor(segments)
    positions = torch.arange(ids.shape[1]).expand_as(ids) if positions is None else torch.tensor(positions)
    heat = rest.pop("temperature", torch.ones(ids.shape))
    return score_tokens(module, ids, positions, segments, heat, **rest)


def test_q01_temperature_divides_the_logits() -> None:
    table = Table([[2.0, 1.0, 0.0]] * 3)
    ids = [[0, 0, 1], [0, 0, 1]]
    heat = torch.tensor([[0.5] * 3, [1.0, 0.5, 1.0]])
    got = score(table, ids, temperature=heat).logprobs
    at_one = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0]), -1)[1].item()
    expected = torch.tensor([[0, -0.142932, -2.142932], [0, -0.142932, at_one]])
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_q07_alignment_on_a_bigram_model() -> None:
    got = score(Table(BIGRAM), [[0, 1, 1, 2]]).logprobs
    torch.testing.assert_close(got, torch.tensor([[0, -1.407606, -0.239545, -2.239545]]), atol=1e-6, rtol=0)


def test_q07_packed_rows_do_not_see_each_other() -> None:
    got = score(Table(BIGRAM), [[0, 1, 2, 0, 0]], [[1, 1, 2, 2, 0]]).logprobs
    torch.testing.assert_close(got, torch.tensor([[0, -1.407606, 0, -2.407606, 0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["positions", "segments", "temperature", "wanted"])
def test_q07_unequal_lengths_raise(name: str) -> None:
    shapes = {"positions": (1, 6), "segments": (1, 6), "temperature": (1, 6), "wanted": (1, 6)}
    shapes[name] = (1, 4)
    made = {key: torch.ones(shape) for key, shape in shapes.items()}
    wanted = made.pop("wanted").bool()
    with pytest.raises(ValueError, match=rf"{name} has shape \(1, 4\)"):
        score_tokens(Table(BIGRAM), torch.zeros(1, 6, dtype=torch.long), **made, wanted=wanted)  # pyright: ignore


def test_bad_rows_raise() -> None:
    with pytest.raises(ValueError, match="segment 1 of row 0 is in 2 pieces"):
        score(Table(BIGRAM), [[0, 1, 2]], [[1, 2, 1]])
    with pytest.raises(ValueError, match="temperature is 0"):
        score(Table(BIGRAM), [[0, 1]], temperature=torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"expected \[B, L\]"):
        score_tokens(Table(BIGRAM), *[torch.ones(3)] * 4)


def test_wanted_entropy_and_chunks() -> None:
    ids = torch.randint(3, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = score(Table(BIGRAM), ids.tolist(), with_entropy=True)
    wanted = torch.arange(9).expand(2, 9) % 2 == 1
    part = score(Table(BIGRAM), ids.tolist(), with_entropy=True, wanted=wanted, chunk=2)
    for all_of, some in ((whole.logprobs, part.logprobs), (whole.entropy, part.entropy)):
        torch.testing.assert_close(some, torch.where(wanted, all_of, 0.0))
    p = torch.tensor(BIGRAM)[ids[0, 0]].softmax(-1)
    torch.testing.assert_close(whole.entropy[0, 1], -(p * p.log()).sum())
    table = Table(BIGRAM)
    grads = []
    for chunk in (None, 2):
        table.zero_grad()
        out = score(table, ids.tolist(), with_entropy=True, chunk=chunk)
        (out.logprobs.sum() + 0.3 * out.entropy.sum()).backward()
        grads.append(table.head.weight.grad.clone())  # pyright: ignore
    torch.testing.assert_close(grads[0], grads[1])


def test_rows_without_tokens_or_targets() -> None:
    out = score(Table(BIGRAM), [[0, 0]], [[0, 0]], with_entropy=True, with_hidden=True)
    assert not out.logprobs.any()
    assert out.hidden.shape == (1, 2, 3)
    none = score(Table(BIGRAM), [[0, 1]], wanted=torch.zeros(1, 2, dtype=torch.bool), with_hidden=True)
    assert not none.logprobs.any()
    assert none.hidden.any()


FAMILIES = ["qwen3", "qwen2", "llama", "smollm3", "gpt2", "gemma3"]
ROW, OTHER = [5, 6, 7, 9, 30, 12, 8, 44], [11, 3, 63]
N, M = len(ROW), len(OTHER)


@pytest.mark.parametrize("name", FAMILIES)
def test_q04_one_answer_in_every_layout(folders: Any, name: str) -> None:
    module = HFAutoModel.from_pretrained(folders(name)).module
    logits = module(input_ids=torch.tensor([ROW]), use_cache=False).logits[0, :-1].log_softmax(-1)
    own = logits.gather(1, torch.tensor(ROW[1:])[:, None]).squeeze(1)
    at, rest = list(range(N)), list(range(M))
    layouts = [
        ([ROW], [[1] * N], [at], 0, 0),
        ([[0, 0, *ROW]], [[0, 0] + [1] * N], [[0, 0, *at]], 0, 2),
        ([[*ROW, 0, 0]], [[1] * N + [0, 0]], [[*at, 0, 0]], 0, 0),
        ([[*OTHER, *ROW]], [[1] * M + [2] * N], [[*rest, *at]], 0, M),
        (
            [[*ROW, *OTHER], [0, *ROW, 9, 9]],
            [[1] * N + [2] * M, [0] + [1] * N + [2, 2]],
            [[*at, *rest], [0, *at, 0, 1]],
            1,
            1,
        ),
        ([ROW, ROW], None, None, 1, 0),
    ]
    for ids, segments, positions, row, begin in layouts:
        out = score(module, ids, segments, positions, with_hidden=True)
        got = out.logprobs[row, begin : begin + N]
        assert got[0] == 0
        torch.testing.assert_close(got[1:], own, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_gradients_do_not_depend_on_the_layout(folders: Any, name: str) -> None:
    module = HFAutoModel.from_pretrained(folders(name)).module
    grads = []
    for ids, segments, positions in (
        ([[*ROW, *OTHER]], [[1] * N + [2] * M], [[*range(N), *range(M)]]),
        ([ROW, [*OTHER] + [0] * (N - M)], [[1] * N, [1] * M + [0] * (N - M)], None),
    ):
        module.zero_grad()
        score(module, ids, segments, positions).logprobs.sum().backward()
        grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert any(grad.abs().max() > 1e-3 for grad in grads[0])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_shared_prefixes_are_computed_once_and_change_nothing(
    folders: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = HFAutoModel.from_pretrained(folders(name)).module
    system, task = [(3 * i + 5) % 64 for i in range(18)], [(5 * i + 2) % 64 for i in range(20)]
    rows = [
        system + task + [7, 8, 9],
        system + task + [7, 8, 4, 1],
        system + task,  # nothing of its own
        system + task[:1] + [60, 61],
        system[:10] + [2, 3],  # too little in common
        task,
    ]
    width = max(len(row) for row in rows)
    ids = [row + [0] * (width - len(row)) for row in rows]
    segments = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    computed: list[int] = []
    decoder = module.get_decoder()
    decoder.register_forward_pre_hook(
        lambda _, args, rest: computed.append(rest["input_ids"].numel()), with_kwargs=True
    )
    results: list[list[Tensor]] = []
    for shared in (16, 1000):
        monkeypatch.setattr("uni_agent.models.attention._MIN_SHARED", shared)
        module.zero_grad()
        out = score(module, ids, segments, with_entropy=True, with_hidden=True)
        (out.logprobs.sum() + 0.3 * out.entropy.sum() + out.hidden.square().mean()).backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        results.append([out.logprobs, out.entropy, out.hidden, out.end_hidden, *grads])
    total = sum(len(row) for row in rows)
    assert computed == [total - 40 - 38 - 19, total]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert (results[0][0] - results[1][0]).abs().max() < 1e-5


def test_fast_backwards_equal_autograd(folders: Any) -> None:
    """Norms, logprobs and entropy have a backward of their own."""
    from uni_agent.models.logprobs import _LogprobAndEntropy
    from uni_agent.models.norm import speed_up_norms

    torch.manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 6, 3, 3, 1])
    assert torch.autograd.gradcheck(lambda x: _LogprobAndEntropy.apply(x, ids), (logits,))

    class LlamaRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.randn(6)), 0.1

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    norm, x, push = LlamaRMSNorm(), torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 3, 6)
    slow = norm(x), *torch.autograd.grad(norm(x), (x, norm.weight), push)
    speed_up_norms(norm)
    fast = norm(x), *torch.autograd.grad(norm(x), (x, norm.weight), push)
    assert "RMSNorm" in str(fast[0].grad_fn)
    for one, other in zip(slow, fast, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    loaded: Any = HFAutoModel.from_pretrained(folders("qwen3")).module
    assert "RMSNorm" in loaded.model.norm(torch.ones(1, 32)).grad_fn.name()


def test_hidden_is_the_state_before_each_token(folders: Any) -> None:
    module: Any = HFAutoModel.from_pretrained(folders("qwen3")).module
    states = module.get_decoder()(input_ids=torch.tensor([ROW]), use_cache=False).last_hidden_state[0]
    out = score(
        module, [[0, *OTHER, *ROW]], [[0, *[1] * M, *[2] * N]], [[0, *range(M), *range(N)]], with_hidden=True
    )
    torch.testing.assert_close(out.hidden[0, M + 2 :], states[:-1], atol=1e-5, rtol=0)
    assert not out.hidden[0, M + 1].any()
    torch.testing.assert_close(out.end_hidden[0, 1], states[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_q03_dropout_is_off_in_every_mode(folders: Any, name: str) -> None:
    module = HFAutoModel.from_pretrained(folders(name)).module
    old = score(module, [ROW]).logprobs
    module.train()
    first, second = score(module, [ROW]).logprobs, score(module, [ROW]).logprobs
    module.eval()
    module.train()
    third = score(module, [ROW]).logprobs
    for other in (first, second, third):
        assert ((other - old).exp() - 1).abs().max() < 1e-6


def test_q03_functional_dropout_attribute() -> None:
    class Functional(Table):
        def __init__(self) -> None:
            super().__init__(BIGRAM)
            self.drop = nn.Dropout(0.5)
            self.hidden_dropout = 0.5

        def get_decoder(self) -> Any:
            inner = super().get_decoder()

            def run(**inputs: Any) -> Any:
                hidden = self.drop(inner(**inputs).last_hidden_state)
                return SimpleNamespace(last_hidden_state=nn.functional.dropout(hidden, self.hidden_dropout))

            return run

    module = Functional().train()
    ids = [[0, 1, 1, 2] * 8]
    assert not torch.equal(score(module, ids).logprobs, score(module, ids).logprobs)
    disable_dropout(module)
    torch.testing.assert_close(score(module, ids).logprobs, score(Table(BIGRAM), ids).logprobs)


def test_checkpointing_changes_nothing(folders: Any) -> None:
    module: Any = HFAutoModel.from_pretrained(folders("qwen3")).module
    grads = []
    for on in (False, True):
        module.zero_grad()
        if on:
            module.train()
            module.gradient_checkpointing_enable()
        score(module, [[*OTHER, *ROW]], [[1] * M + [2] * N]).logprobs.sum().backward()
        grads.append(module.get_input_embeddings().weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1])
