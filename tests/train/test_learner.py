from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from uni_agent.algos import sequence_mean, token_mean
from uni_agent.algos.losses import combine, policy_clip, sft, value_clip
from uni_agent.errors import CheckpointError, ConfigError, RunError
from uni_agent.protocols import Credit
from uni_agent.train import Item, make_batch
from uni_agent.train.critic import ModelCritic, TrunkCritic
from uni_agent.train.learner import LearnerConfig, TorchLearner
from uni_agent.train.optim import OptimConfig
from uni_agent.types import Sampling


def config(**optim):
    return LearnerConfig(optim=OptimConfig(**({"lr": 1e-2} | optim)), microbatch_tokens=64, row_tokens=32)


def tapes(tape, count=5, *, seed=0, temperature=1.0):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        n = int(rng.integers(6, 20))
        mask = rng.random(n) < 0.6
        mask[0], mask[-1] = False, True
        made.append(tape(mask, ids=rng.integers(0, 32, n), sampling=Sampling(temperature=temperature)))
    return made


def batch_of(learner, trajectories, *, seed=0, row_tokens=32, weights=token_mean, values=False):
    """A batch whose behaviour logprobs are the learner's own, with random advantages."""
    rng = np.random.default_rng(seed)
    made = []
    for i, (t, score) in enumerate(zip(trajectories, learner.score(trajectories), strict=True)):
        advantages = np.where(t.sampled, rng.normal(size=len(t.token_ids)), 0).astype(np.float32)
        returns = rng.normal(size=len(t.token_ids)).astype(np.float32) if values else None
        made.append(Item(replace(t, logprobs=score.logprobs), Credit(advantages, returns), i, score))
    return make_batch(made, weights, row_tokens=row_tokens)


def snapshot(learner):
    weights = {n: p.detach().clone() for n, p in learner.model.module.named_parameters()}
    moments = [
        {k: torch.as_tensor(v).clone() for k, v in state.items()}
        for state in learner.optimizer.state.values()
    ]
    return weights, moments, learner.num_steps


def same(a, b):
    return (
        all(torch.equal(a[0][name], b[0][name]) for name in a[0])
        and len(a[1]) == len(b[1])
        and all(torch.equal(x[k], y[k]) for x, y in zip(a[1], b[1], strict=True) for k in x)
        and a[2] == b[2]
    )


def test_q01_scores_are_at_the_sampling_temperature(tiny, tape):
    model = tiny()
    learner = TorchLearner(model, config())
    (t,) = tapes(tape, 1, temperature=0.5)
    (score,) = learner.score([t])
    logits = model.module(torch.as_tensor(t.token_ids)[None].long()).logits[0]
    wanted = (logits[:-1] / 0.5).log_softmax(-1).gather(1, torch.as_tensor(t.token_ids)[1:, None].long())
    wanted = np.concatenate([[0], wanted[:, 0].detach().numpy()])
    assert score.logprobs == pytest.approx(np.where(t.sampled, wanted, 0), abs=1e-5)
    metrics = learner.step(batch_of(learner, [t]), policy_clip)
    assert metrics["train/ratio_error_max"] < 1e-5


@pytest.mark.parametrize("row_tokens", [4, 32, 1000])
def test_q04_q07_packing_does_not_change_a_score(tiny, tape, row_tokens):
    model = tiny()
    trajectories = tapes(tape, 7)
    alone = [TorchLearner(model, config()).score([t])[0] for t in trajectories]
    learner = TorchLearner(model, replace(config(), row_tokens=row_tokens))
    for one, packed in zip(alone, learner.score(trajectories), strict=True):
        assert packed.logprobs == pytest.approx(one.logprobs, abs=1e-5)
        assert packed.logprobs[0] == 0


def test_q03_dropout_is_off_in_score_and_step(tiny, tape):
    model = tiny(dropout=0.5)
    learner = TorchLearner(model, config(lr=0.0))
    trajectories = tapes(tape)
    batch = batch_of(learner, trajectories)
    first = learner.score(trajectories)
    for _ in range(2):
        model.module.train()  # as somebody who shares the module may do
        metrics = learner.step(batch, policy_clip)
        assert metrics["train/ratio_error_max"] < 1e-6
        assert metrics["train/clip_fraction"] == 0
        assert metrics["train/approx_kl"] == pytest.approx(0, abs=1e-9)
        model.module.eval()
        model.module.train()
        again = learner.score(trajectories)
        assert all((a.logprobs == b.logprobs).all() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("weights", [token_mean, sequence_mean])
def test_l01_steps_do_not_depend_on_packing_microbatches_or_order(tiny, tape, weights):
    results = []
    for row_tokens, micro, flip in ((32, 64, 1), (8, 8, 1), (200, 1000, 1), (32, 40, -1)):
        learner = TorchLearner(
            tiny(dtype=torch.float64), replace(config(lr=1e-3, max_grad_norm=0.0), microbatch_tokens=micro)
        )
        made = tapes(tape, 8)
        scores = learner.score(made)
        all_items = [
            Item(replace(t, logprobs=s.logprobs), Credit((t.sampled * (1.0 + i)).astype(np.float32)), i)
            for i, (t, s) in enumerate(zip(made, scores, strict=True))
        ]
        batch = make_batch(all_items[::flip], weights, row_tokens=row_tokens)
        metrics = learner.step(batch, partial(policy_clip, entropy_coef=0.1))
        results.append((metrics, learner.model.module.state_dict()))
    first, weights_after = results[0]
    for metrics, other in results[1:]:
        for name, value in first.items():
            assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
        # Adam divides by the gradient's own size, so that rounding shows in tiny gradients.
        assert all(torch.allclose(weights_after[k], other[k], atol=1e-6) for k in other)


def test_l05_all_masked_batch_is_skipped(tiny, tape):
    learner = TorchLearner(tiny(), config(weight_decay=0.1))
    trajectories = tapes(tape)
    learner.step(batch_of(learner, trajectories), policy_clip)
    before = snapshot(learner)
    masked = make_batch(
        [Item(t, Credit(np.ones(len(t.token_ids), np.float32), trained=False), 0) for t in trajectories]
    )
    zero = replace(batch_of(learner, trajectories))
    zero = replace(zero, weights=np.zeros_like(zero.weights))
    for batch in (masked, zero):
        metrics = learner.step(batch, policy_clip)
        assert metrics["train/skipped"] == 1
    assert same(before, snapshot(learner))
    assert learner.num_skipped == 2


def poisoned(loss, *, steps):
    """The loss, with one gradient element that is NaN at the given calls (counted from 1)."""
    calls = iter(range(1, 1000))

    def wrapped(outputs, batch):
        value, stats = loss(outputs, batch)
        if next(calls) in steps:
            value = value + (outputs.logprobs[0, -1] * 0).sqrt()  # value 0, gradient 0 / 0
        return value, stats

    return wrapped


def test_n01_a_bad_gradient_moves_nothing(tiny, tape):
    learner = TorchLearner(tiny(), replace(config(), microbatch_tokens=10_000))
    batch = batch_of(learner, tapes(tape), row_tokens=1000)
    loss = poisoned(policy_clip, steps={3})
    for step in range(1, 7):
        before = snapshot(learner)
        metrics = learner.step(batch, loss)
        assert metrics["train/skipped"] == (1 if step == 3 else 0)
        assert same(before, snapshot(learner)) == (step == 3)
        assert all(p.grad is None for p in learner.model.module.parameters())
    assert (learner.num_steps, learner.num_skipped) == (5, 1)
    assert all(torch.isfinite(p).all() for p in learner.model.module.parameters())


def test_n01_a_streak_stops_the_run_and_names_step_and_tensors(tiny, tape, tmp_path):
    learner = TorchLearner(tiny(), replace(config(), microbatch_tokens=10_000, max_skipped=3))
    batch = batch_of(learner, tapes(tape), row_tokens=1000)
    loss = poisoned(policy_clip, steps={2, 3, 4, 5})
    for _ in range(4):
        learner.step(batch, loss)
    with pytest.raises(RunError, match=r"step 2: .*model\.embed_tokens\.weight.*4 steps in a row"):
        learner.step(batch, loss)
    with torch.no_grad():
        next(learner.model.module.parameters())[0, 0] = float("nan")
    with pytest.raises(RunError, match="not finite"):
        learner.save(tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_n01_a_loss_without_bound_is_skipped_though_its_gradient_is_finite(tiny, tape):
    learner = TorchLearner(tiny(), config())
    batch = batch_of(learner, tapes(tape))
    before = snapshot(learner)

    def endless(outputs, batch):
        value, stats = policy_clip(outputs, batch)
        return value + float("inf"), stats

    metrics = learner.step(batch, endless)
    assert np.isfinite(metrics["train/grad_norm"])
    assert metrics["train/skipped"] == 1
    assert same(before, snapshot(learner))


def test_n01_skips_with_good_steps_between_are_no_streak(tiny, tape):
    learner = TorchLearner(tiny(), replace(config(), microbatch_tokens=10_000, max_skipped=1))
    batch = batch_of(learner, tapes(tape), row_tokens=1000)
    loss = poisoned(policy_clip, steps={1, 3, 5})
    skipped = [learner.step(batch, loss)["train/skipped"] for _ in range(6)]
    assert skipped == [1, 0, 1, 0, 1, 0]


def test_a_loss_that_raises_leaves_the_learner_as_it_was(tiny, tape):
    learner = TorchLearner(tiny(), config())
    batch = batch_of(learner, tapes(tape))
    before = snapshot(learner)
    with pytest.raises(ConfigError):
        learner.step(batch, partial(policy_clip, kl_coef=0.1))
    assert same(before, snapshot(learner))


def test_sft_learns_and_the_rate_follows_its_schedule(tiny, tape):
    learner = TorchLearner(tiny(), config(lr=2e-2, warmup_steps=4))
    batch = batch_of(learner, tapes(tape))
    metrics = [learner.step(batch, sft) for _ in range(15)]
    assert metrics[-1]["train/nll"] < 0.5 * metrics[0]["train/nll"]
    assert [m["train/lr"] for m in metrics[:6]] == pytest.approx([0.005, 0.01, 0.015, 0.02, 0.02, 0.02])
    assert metrics[0]["train/loss"] == pytest.approx(metrics[0]["train/nll"], rel=1e-5)


def test_policy_gradient_raises_what_was_good(tiny, tape):
    learner = TorchLearner(tiny(), config())
    t = tapes(tape, 1)[0]
    (before,) = learner.score([t])
    item = Item(replace(t, logprobs=before.logprobs), Credit(t.sampled.astype(np.float32)), 0)
    for _ in range(5):
        learner.step(make_batch([item]), partial(policy_clip, clip_high=10.0))
    (after,) = learner.score([t])
    assert after.logprobs.sum() > before.logprobs.sum() + 1


def test_adapter_off_is_the_base_and_only_the_adapter_trains(tiny, tape, tmp_path):
    from peft import LoraConfig, get_peft_model

    def wrapped(seed):
        model = tiny()
        torch.manual_seed(seed)
        model.module = get_peft_model(model.module, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        return model

    base = TorchLearner(tiny(), config())
    model = wrapped(1)
    learner = TorchLearner(model, config(), reference=model.fresh_reference())
    trajectories = tapes(tape)
    batch = batch_of(learner, trajectories)
    for _ in range(3):
        learner.step(batch, partial(policy_clip, kl_coef=0.1))
    scores = learner.score(trajectories)
    for score, plain in zip(scores, base.score(trajectories), strict=True):
        assert score.ref_logprobs == pytest.approx(plain.logprobs, abs=1e-6)
    assert any(np.abs(s.logprobs - s.ref_logprobs).max() > 1e-4 for s in scores)
    learner.save(tmp_path)
    other = TorchLearner(wrapped(2), config())
    other.load(tmp_path)
    assert same(snapshot(learner), snapshot(other))


def test_empty_trajectories_score_as_nothing(tiny, tape):
    model = tiny()
    learner = TorchLearner(model, config(), critic=TrunkCritic(model))
    trajectories = [tape([]), *tapes(tape, 2), tape([]), tape([1])]
    scores = learner.score(trajectories)
    assert [len(s.logprobs) for s in scores] == [len(t.token_ids) for t in trajectories]
    assert learner.score([]) == []
    assert len(learner.score([tape([])])[0].logprobs) == 0


def test_reference_stays_while_the_policy_moves(tiny, tape):
    model = tiny()
    learner = TorchLearner(model, config(), reference=model.fresh_reference())
    trajectories = tapes(tape)
    start = learner.score(trajectories)
    assert all((s.ref_logprobs == s.logprobs).all() for s in start)
    batch = batch_of(learner, trajectories)
    loss = partial(policy_clip, kl_coef=0.1)
    assert learner.step(batch, loss)["train/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert learner.step(batch, loss)["train/ref_kl"] > 1e-5
    moved = learner.score(trajectories)
    assert all((a.ref_logprobs == b.ref_logprobs).all() for a, b in zip(start, moved, strict=True))
    assert any((a.logprobs != b.logprobs).any() for a, b in zip(start, moved, strict=True))


@pytest.mark.parametrize("kind", ["trunk", "own"])
def test_critics_are_exchangeable_and_learn_returns(tiny, tape, kind):
    model = tiny()
    critic = TrunkCritic(model) if kind == "trunk" else ModelCritic(tiny(seed=5))
    learner = TorchLearner(model, config(critic_lr=2e-2), critic=critic)
    trajectories = tapes(tape, 6)
    scores = learner.score(trajectories)
    assert all((s.values == 0).all() and s.bootstrap == 0 for s in scores)  # the head begins at 0
    made = [
        Item(t, Credit(np.zeros(len(t.token_ids), np.float32), t.sampled * np.float32(2.0)), i, s)
        for i, (t, s) in enumerate(zip(trajectories, scores, strict=True))
    ]
    batch = make_batch(made, row_tokens=32)
    first = learner.step(batch, partial(value_clip, clip=None))
    for _ in range(40):
        last = learner.step(batch, partial(value_clip, clip=None))
    assert last["train/value_error"] < 0.1 * first["train/value_error"]
    after = learner.score(trajectories)
    assert after[0].values[trajectories[0].sampled].mean() == pytest.approx(2, abs=0.6)
    assert (after[0].values[~trajectories[0].sampled] == 0).all()
    assert after[0].bootstrap != 0
    # Bootstrap is the value after the last token: the value before a token that would follow.
    t = trajectories[0]
    longer = tape([*t.sampled, True], ids=[*t.token_ids, 3])
    assert learner.score([longer])[0].values[-1] == pytest.approx(after[0].bootstrap, abs=1e-5)


def test_the_value_loss_moves_the_trunk_only_if_asked(tiny, tape):
    for train_trunk in (False, True):
        model = tiny()
        learner = TorchLearner(model, config(), critic=TrunkCritic(model, train_trunk=train_trunk))
        batch = batch_of(learner, tapes(tape), values=True)
        before = snapshot(learner)[0]
        both = combine((0.0, policy_clip), (1.0, value_clip))
        learner.step(batch, both)  # the head's last layer is 0 at first: no gradient passes it yet
        learner.step(batch, both)
        moved = any(not torch.equal(before[n], p) for n, p in model.module.named_parameters())
        assert moved == train_trunk


def test_publish_counts_versions_and_hands_out_the_live_module(tiny, tape):
    model = tiny()
    learner = TorchLearner(model, config())
    assert learner.version == 0
    weights = learner.publish()
    assert (weights.version, weights.location) == (1, model.module)
    metrics = learner.step(batch_of(learner, tapes(tape)), policy_clip)  # sampled by version 0
    assert metrics["train/staleness_max"] == 1
    learner.publish()
    mixed = [tape([0, 1], version=0), tape([0, 1, 1, 1], version=2)]
    metrics = learner.step(batch_of(learner, mixed), policy_clip)
    assert (metrics["train/staleness_max"], metrics["train/staleness_mean"]) == (2, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_critic", [False, True])
def test_c03_resumed_equals_uninterrupted(tiny, tape, tmp_path, dtype, with_critic):
    """Data order and minibatches come from the global generators here, to show that they go on too."""
    import random

    def make(seed):
        model = tiny(seed=seed, dtype=dtype)
        settings = config(lr=1.0, warmup_steps=4, weight_decay=0.01, max_grad_norm=1e-2)
        return TorchLearner(model, settings, critic=TrunkCritic(model) if with_critic else None)

    loss = combine((1.0, policy_clip), (0.5, value_clip)) if with_critic else policy_clip
    data = tapes(tape, 12)

    def run(learner, steps):
        log = []
        for _ in range(steps):
            chosen = [data[i] for i in np.random.permutation(12)[:3]]
            draw = (random.random(), torch.rand(()).item())
            batch = batch_of(learner, chosen, values=with_critic, seed=int(1e6 * draw[0]))
            metrics = learner.step(batch, loss)
            learner.publish()
            log.append((metrics["train/loss"], metrics["train/lr"], draw, learner.version))
        return log

    straight = make(0)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    whole = run(straight, 8)

    first = make(0)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    start = run(first, 4)
    first.save(tmp_path)
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    resumed = make(3)  # another initialisation, which must not matter
    resumed.load(tmp_path)
    rest = run(resumed, 4)

    assert start + rest == whole
    assert [lr for _, lr, *_ in whole] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert same(snapshot(straight), snapshot(resumed))


def test_the_saved_model_loads_with_transformers(tiny, tape, tmp_path):
    from transformers import AutoModelForCausalLM

    learner = TorchLearner(tiny(), config())
    learner.step(batch_of(learner, tapes(tape)), policy_clip)
    learner.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(loaded[k], v) for k, v in learner.model.module.state_dict().items())


@pytest.mark.parametrize("name", ["trained.safetensors", "optimizer.pt", "progress.json", "rng.pt"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_corrupt_state_is_one_clear_line_and_changes_nothing(tiny, tape, tmp_path, name, damage):
    learner = TorchLearner(tiny(), config())
    learner.step(batch_of(learner, tapes(tape)), policy_clip)
    learner.save(tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]) if damage == "cut" else file.unlink()
    other = TorchLearner(tiny(seed=1), config())
    before = snapshot(other)
    with pytest.raises(CheckpointError) as error:
        other.load(tmp_path)
    assert "\n" not in str(error.value)
    assert same(before, snapshot(other))


def test_a_state_of_another_model_is_refused(tiny, tmp_path):
    TorchLearner(tiny(), config()).save(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        TorchLearner(tiny(vocab_size=40), config()).load(tmp_path)
