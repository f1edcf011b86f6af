from dataclasses import replace
from functools import partial

import pytest
import torch

from uni_agent.algos import check_kl
from uni_agent.algos.kl import k1, k2, k3, off_policy
from uni_agent.algos.losses import (
    Outputs,
    TensorBatch,
    combine,
    finish_stats,
    merge_stats,
    policy_clip,
    sft,
    value_clip,
)
from uni_agent.errors import ConfigError


def batch(weights, **fields):
    """A TensorBatch of one row in float64; fields that are not given are 0."""
    weights = torch.as_tensor(weights, dtype=torch.float64).reshape(1, -1)
    zeros, ids = torch.zeros_like(weights), torch.zeros_like(weights, dtype=torch.int64)
    given = {
        k: torch.as_tensor(v, dtype=torch.float64).reshape(1, -1) for k, v in fields.items() if k != "whole"
    }
    base = TensorBatch(ids, ids, ids + 1, weights, zeros, zeros, zeros + 1, ids)
    return replace(base, **given)


def row(values, *, grad=False):
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def test_q08_values_and_gradients_of_kl_estimators():
    for estimator, value, slope in ((k1, 0.5, 1), (k2, 0.125, 0.5), (k3, 0.106531, 0.393469)):
        p = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
        kl = estimator(p, torch.tensor(-1.5, dtype=torch.float64))
        kl.backward()
        assert kl.item() == pytest.approx(value, abs=1e-6)
        assert p.grad.item() == pytest.approx(slope, abs=1e-6)


def test_q08_expected_gradients_on_policy():
    ref = torch.tensor([-0.4, 0.1, 0.3], dtype=torch.float64).log_softmax(0)

    def gradient(objective):
        theta = torch.tensor([0.2, -0.3, 0.5], dtype=torch.float64, requires_grad=True)
        objective(theta.log_softmax(0)).backward()
        return theta.grad.tolist()

    def as_loss(estimator):
        return gradient(lambda logp: (logp.exp().detach() * estimator(logp, ref)).sum())

    reverse = [0.131172, -0.125599, -0.005573]
    assert as_loss(k1) == pytest.approx([0, 0, 0], abs=1e-9)
    assert as_loss(k2) == pytest.approx(reverse, abs=1e-6)
    assert as_loss(k3) == pytest.approx([0.123772, -0.148456, 0.024684], abs=1e-6)
    in_reward = gradient(lambda logp: (logp.exp().detach() * k1(logp, ref).detach() * logp).sum())
    assert in_reward == pytest.approx(reverse, abs=1e-6)


def test_q08_off_policy_weight_doubles_and_is_detached():
    log_ratio = torch.tensor(2.0, dtype=torch.float64).log().requires_grad_()
    p = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    weighted = off_policy(k3(p, p.detach() - 0.5), log_ratio)
    weighted.backward()
    assert weighted.item() == pytest.approx(2 * 0.106531, abs=1e-5)
    assert log_ratio.grad is None
    assert p.grad.item() == pytest.approx(2 * 0.393469, abs=1e-5)


def test_policy_clip_against_a_short_reference():
    torch.manual_seed(0)
    n = 40
    new, old, advantages, ref = (torch.randn(n, dtype=torch.float64) * 0.3 for _ in range(4))
    entropy, weights = torch.rand(n, dtype=torch.float64), torch.rand(n, dtype=torch.float64) / n
    new.requires_grad_()
    loss, stats = policy_clip(
        Outputs(new[None], entropy[None]),
        batch(weights, behavior_logprobs=old, advantages=advantages, ref_logprobs=ref),
        clip_low=0.1, clip_high=0.3, kl_coef=0.05, kl=k2, entropy_coef=0.01,
    )  # fmt: skip
    wanted, clipped = torch.zeros((), dtype=torch.float64), 0
    for i in range(n):
        r = torch.exp(new[i] - old[i])
        bounded = min(max(r, torch.tensor(0.9)), torch.tensor(1.3))
        clipped += int(bounded * advantages[i] < r * advantages[i])
        term = -min(r * advantages[i], bounded * advantages[i])
        term = term + 0.05 * r.detach() * 0.5 * (new[i] - ref[i]) ** 2 - 0.01 * entropy[i]
        wanted = wanted + weights[i] * term
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-7)
    got_gradient = torch.autograd.grad(loss, new)[0]
    assert torch.allclose(got_gradient, torch.autograd.grad(wanted, new)[0], atol=1e-7)
    assert 0 < clipped == int(stats["clip_fraction_sum"])
    assert stats["ratio_max"].item() == pytest.approx((new - old).exp().max().item())


def test_value_clip_against_a_short_reference():
    torch.manual_seed(1)
    n = 30
    values, old, returns = (torch.randn(n, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    weights = torch.rand(n, dtype=torch.float64)
    data = batch(weights, values=old, returns=returns)
    wanted = torch.zeros((), dtype=torch.float64)
    for i in range(n):
        near = old[i] + (values[i] - old[i]).clamp(-0.2, 0.2)
        wanted = wanted + weights[i] * 0.5 * max((values[i] - returns[i]) ** 2, (near - returns[i]) ** 2)
    logprobs = torch.zeros(1, n)
    loss, _ = value_clip(Outputs(logprobs, values=values[None]), data, clip=0.2)
    assert loss.item() == pytest.approx(wanted.item())
    got = torch.autograd.grad(loss, values)[0]
    assert torch.allclose(got, torch.autograd.grad(wanted, values)[0])
    free, _ = value_clip(Outputs(logprobs, values=values[None]), data, clip=None)
    assert free.item() == pytest.approx((weights * 0.5 * (values - returns) ** 2).sum().item())


def test_ratio_is_one_when_nothing_changed():
    logprobs = row([-0.3, -2.0, -1.0])
    loss, stats = policy_clip(
        Outputs(logprobs), batch([0.25, 0.25, 0.5], behavior_logprobs=logprobs, advantages=[1, -2, 3])
    )
    assert loss.item() == pytest.approx(-(0.25 - 0.5 + 1.5))
    assert (stats["ratio_error_max"], stats["clip_fraction_sum"], stats["approx_kl_sum"]) == (0, 0, 0)


LOSSES = [
    sft,
    policy_clip,
    partial(policy_clip, kl_coef=0.1, entropy_coef=0.1),
    value_clip,
    combine((1.0, partial(policy_clip, kl_coef=0.1, kl=k2)), (0.5, value_clip)),
]


def nan_case(loss, bad, weights):
    """Put `bad` at position 1 of every input and output."""
    leaves = [row([-0.1, bad, -0.2], grad=True) for _ in range(3)]
    data = batch(
        weights,
        behavior_logprobs=[-0.1, bad, -0.3], advantages=[1.0, bad, 2.0],
        ref_logprobs=[-0.2, bad, -0.1], values=[0.1, bad, 0.2], returns=[0.3, bad, 0.1],
    )  # fmt: skip
    value, stats = loss(Outputs(*leaves), data)
    value.backward()
    return value, stats, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_q10_masked_nan_reaches_nothing(loss, bad):
    value, stats, grads = nan_case(loss, bad, [0.5, 0.0, 0.5])
    clean, clean_stats, clean_grads = nan_case(loss, -0.7, [0.5, 0.0, 0.5])
    assert value.item() == clean.item()
    assert torch.isfinite(value)
    for name in stats:
        assert stats[name].item() == clean_stats[name].item()
    for grad, other in zip(grads, clean_grads, strict=True):
        assert (grad is None) == (other is None)
        if grad is not None:
            assert torch.equal(grad, other)
            assert grad[0, 1] == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_q10_nan_at_a_trained_place_shows(loss):
    value, stats, _ = nan_case(loss, float("nan"), [0.5, 0.1, 0.4])
    assert torch.isnan(value)
    assert any(torch.isnan(stat) for stat in stats.values())


def test_q10_mean_over_the_right_tokens():
    logprobs = row([-0.1, float("nan"), -0.2])
    loss, stats = sft(Outputs(logprobs), batch([0.5, 0, 0.5]))
    assert loss.item() == pytest.approx(0.15)
    assert stats["nll_sum"].item() == pytest.approx(0.3)
    assert finish_stats(stats, 2)["train/nll"] == pytest.approx(0.15)


def test_q09_kl_counts_once():
    check_kl(0.1, in_reward=True, in_loss=False)
    check_kl(0.1, in_reward=False, in_loss=True)
    check_kl(0.0, in_reward=False, in_loss=False)
    with pytest.raises(ConfigError, match="twice"):
        check_kl(0.1, in_reward=True, in_loss=True)
    with pytest.raises(ConfigError, match="neither"):
        check_kl(0.1, in_reward=False, in_loss=False)
    with pytest.raises(ConfigError, match="0 or more"):
        check_kl(-0.1, in_reward=True, in_loss=False)


def test_q09_kl_term_of_the_loss():
    logprobs = row([0.0])
    data = batch([1.0], ref_logprobs=[-1.0])

    def unit_kl(p, q):
        return p - q

    loss, _ = policy_clip(Outputs(logprobs), data, kl_coef=0.1, kl=unit_kl)
    assert loss.item() == pytest.approx(0.1)
    without, stats = policy_clip(Outputs(logprobs), data)
    assert without.item() == 0
    assert "ref_kl_sum" not in stats


def test_missing_inputs_are_named():
    out = Outputs(row([-1.0]))
    with pytest.raises(ConfigError, match="reference logprobs"):
        policy_clip(out, batch([1.0]), kl_coef=0.1)
    with pytest.raises(ConfigError, match="entropy"):
        policy_clip(out, batch([1.0]), entropy_coef=0.1)
    with pytest.raises(ConfigError, match="k1"):
        policy_clip(out, batch([1.0], ref_logprobs=[0.0]), kl_coef=0.1, kl=k1)
    with pytest.raises(ConfigError, match="critic"):
        value_clip(out, batch([1.0]))
    with pytest.raises(ConfigError, match="returns"):
        value_clip(Outputs(row([-1.0]), values=row([0.0])), batch([1.0]))


def test_combine_adds_and_refuses_the_same_statistic_twice():
    out = Outputs(row([-1.0, -2.0], grad=True))
    data = batch([0.5, 0.5])
    single, _ = sft(out, data)
    double, _ = combine((2.0, sft))(out, data)
    assert double.item() == pytest.approx(2 * single.item())
    with pytest.raises(ValueError, match="nll_sum"):
        combine((1.0, sft), (1.0, sft))(out, data)


def test_statistics_of_micro_batches_add():
    logprobs, old = row([-1.0, -2.0, -0.5]), [-1.1, -1.7, -0.5]
    weights, advantages = [0.2, 0.3, 0.5], [1.0, -1.0, 2.0]
    whole_loss, whole = policy_clip(
        Outputs(logprobs), batch(weights, behavior_logprobs=old, advantages=advantages)
    )
    totals, loss = {}, 0.0
    for part in (slice(0, 1), slice(1, 3)):
        value, stats = policy_clip(
            Outputs(logprobs[:, part]),
            batch(weights[part], behavior_logprobs=old[part], advantages=advantages[part]),
        )
        loss += value.item()
        merge_stats(totals, stats)
    assert loss == pytest.approx(whole_loss.item())
    assert finish_stats(totals, 3) == pytest.approx(finish_stats(whole, 3))


def test_q08_off_policy_weight_is_capped():
    weighted = off_policy(torch.tensor(1.0), torch.tensor(50.0).log())
    assert weighted.item() == pytest.approx(10.0)
    assert off_policy(torch.tensor(1.0), torch.tensor(50.0).log(), cap=60.0).item() == pytest.approx(50.0)


def test_statistics_of_the_policy_loss():
    """Sampled by an older policy at -1, now -1.5: KL(old || new) by k3, and a ratio below 1."""
    data = batch([1.0, 0.0], behavior_logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])
    _, stats = policy_clip(Outputs(row([-1.5, -1.0])), data)
    assert stats["approx_kl_sum"].item() == pytest.approx(0.106531, abs=1e-6)
    assert stats["ratio_max"].item() == pytest.approx(0.606531, abs=1e-6)  # the masked ratio of 1 is no part
    assert stats["ratio_error_max"].item() == pytest.approx(0.393469, abs=1e-6)
    assert stats["logprob_gap_sum"].item() == pytest.approx(0.5)
    assert stats["logprob_gap_max"].item() == pytest.approx(0.5)


def test_statistics_of_the_value_loss():
    data = batch([0.5, 0.5, 0.0], returns=[1.0, 3.0, 9.0])
    out = Outputs(row([0.0] * 3), values=row([2.0, 5.0, 7.0]))
    _, stats = value_clip(out, data, clip=None)
    found = {name: stat.item() for name, stat in stats.items()}
    assert found == {"value_loss": 1.25, "value_sum": 7, "return_sum": 4, "value_error_sum": 5}
