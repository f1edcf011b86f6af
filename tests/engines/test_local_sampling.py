"""Draws follow their distribution, and logprobs are those of the untruncated one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from uni_agent.engines.local.native import load_native
from uni_agent.engines.local.sampling import Bias, RowSampling, draw, mix, uniforms
from uni_agent.engines.local.stop import StopMatcher


def rows(n, temperature=1.0, top_p=1.0, top_k=0):
    return RowSampling(
        np.full(n, temperature, np.float32),
        np.full(n, top_p, np.float32),
        np.full(n, top_k, np.int64),
        mix(np.arange(n, dtype=np.uint64)),
        np.zeros(n, np.int64),
    )


def frequencies(ids, size):
    return np.bincount(ids, minlength=size) / len(ids)


def test_q01_logprobs_are_at_the_sampling_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(4000, 3)
    ids, logprobs = draw(logits, rows(4000, temperature=0.5))
    for token, want in ((0, -0.142932), (1, -2.142932)):
        assert np.allclose(logprobs[ids == token], want, atol=1e-5)
    assert abs(frequencies(ids, 3)[0] - np.exp(-0.142932)) < 0.02


def test_greedy_has_logprobs_at_temperature_one():
    ids, logprobs = draw(torch.tensor([[2.0, 1.0, 0.0]]), rows(1, temperature=0.0))
    assert ids.tolist() == [0]
    assert np.allclose(logprobs, -0.407606, atol=1e-5)


def test_draws_follow_softmax():
    torch.manual_seed(0)
    logits = torch.randn(1, 20).expand(50_000, 20)
    ids, logprobs = draw(logits, rows(50_000))
    assert np.abs(frequencies(ids, 20) - logits[0].softmax(-1).numpy()).max() < 0.01
    assert np.allclose(logprobs, logits[0].log_softmax(-1).numpy()[ids], atol=1e-6)


def test_top_k_then_top_p_cut_and_keep_the_full_logprobs():
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = probs.log().expand(20_000, 5)
    for settings, want in (
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.7}, [4 / 7, 3 / 7, 0, 0, 0]),  # 0.4 + 0.3 reach 0.7
        ({"top_p": 0.71}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0, 0]),  # of what top-k left, 0.47 + 0.35
        ({"top_p": 0.01}, [1, 0, 0, 0, 0]),
        ({"top_k": 9}, probs.tolist()),
    ):
        ids, logprobs = draw(logits, rows(20_000, **settings))
        got = frequencies(ids, 5)
        assert np.abs(got - want).max() < 0.015, settings
        assert (got[np.array(want) == 0] == 0).all(), settings
        assert np.allclose(logprobs, probs.log().numpy()[ids], atol=1e-5)


def test_rows_with_different_settings_do_not_mix():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(4, 4)
    mixed = RowSampling(
        np.array([0.0, 1.0, 0.5, 1.0], np.float32),
        np.array([1.0, 1.0, 0.1, 1.0], np.float32),
        np.array([0, 1, 0, 0]),
        mix(np.arange(4, dtype=np.uint64)),
        np.arange(4),
    )
    ids, logprobs = draw(logits, mixed)
    assert ids[:3].tolist() == [0, 0, 0]
    squared = np.array([0.4, 0.3, 0.2, 0.1]) ** 2
    assert np.allclose(logprobs[:3], np.log([0.4, 0.4, squared[0] / squared.sum()]), atol=1e-5)


def test_noise_is_uniform_and_differs_by_seed_and_position():
    seeds = mix(np.arange(2000, dtype=np.uint64))
    grid = np.stack([uniforms(seeds, np.full(2000, i)) for i in range(20)])
    assert (grid >= 0).all()
    assert (grid < 1).all()
    assert len(np.unique(grid)) == grid.size
    assert np.abs(np.histogram(grid, 10, (0, 1))[0] / grid.size - 0.1).max() < 0.006
    assert abs(np.corrcoef(grid[0], grid[1])[0, 1]) < 0.07
    assert abs(np.corrcoef(grid[:, 0], grid[:, 1])[0, 1]) < 0.7


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]).expand(5000, 4)
    ids, _ = draw(logits, rows(5000))
    assert set(ids.tolist()) == {0, 2}


def test_stop_matcher_finds_a_stop_after_a_long_text_and_over_empty_tokens():
    pieces = ["word "] * 500 + ["</", "", "", "do", "ne", ">"]
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "".join(pieces[i] for i in ids)

    matcher = StopMatcher(["</done>"], decode)
    hits = [matcher.push(i) for i in range(len(pieces))]
    assert hits.index(True) == len(pieces) - 1
    assert max(decoded) < 60  # the tail stays short


def test_bias_moves_the_draw_and_not_the_logprob():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(20_000, 4)
    bias = Bias(np.array([3, 0]), np.array([np.log(4.0), -np.inf], np.float32))
    half = RowSampling(*rows(20_000)[:5], tuple((i, bias) for i in range(0, 20_000, 2)))
    kernels = load_native()
    for kernel in (None, kernels) if kernels else (None,):
        ids, logprobs = draw(logits, half, kernel)
        got = frequencies(ids[::2], 4)
        assert np.abs(got - np.array([0, 0.3, 0.2, 0.4]) / 0.9).max() < 0.015
        assert got[0] == 0
        assert np.abs(frequencies(ids[1::2], 4) - [0.4, 0.3, 0.2, 0.1]).max() < 0.015
        assert np.allclose(logprobs, np.log([0.4, 0.3, 0.2, 0.1])[ids], atol=1e-5)
    greedy = RowSampling(*rows(1, temperature=0.0)[:5], ((0, bias),))
    ids, logprobs = draw(logits[:1], greedy)
    assert ids.tolist() == [3]
    assert np.allclose(logprobs, np.log(0.1), atol=1e-5)


def test_the_kernel_draws_as_torch_does():
    kernels = load_native()
    if kernels is None:
        pytest.skip("no C++ compiler here")
    torch.manual_seed(1)
    logits = torch.randn(3000, 1003) * 3
    settings = rows(3000)._replace(
        temperature=np.random.default_rng(0).choice(np.array([0, 0.5, 1, 2], np.float32), 3000),
        drawn=np.arange(3000),
    )
    ids, logprobs = draw(logits, settings, kernels)
    want, want_logprobs = draw(logits, settings)
    same = ids == want
    assert same.mean() > 0.998  # a number that falls on the border of two tokens may go either way
    assert np.abs(logprobs - want_logprobs)[same].max() < 1e-5
    assert (np.abs(ids - want)[~same] <= 2).all()
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = logits[:2].clone()
        broken[1] = bad
        _, logprobs = draw(broken, rows(2), kernels)
        assert np.isfinite(logprobs).tolist() == [True, False]
    rare = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]).expand(5000, 4)
    assert set(draw(rare, rows(5000), kernels)[0].tolist()) == {0, 2}
