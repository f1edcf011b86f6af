"""The optimizer's settings and its schedule."""

from dataclasses import replace

import pytest
import torch

from uni_agent.errors import ConfigError
from uni_agent.train.optim import OptimConfig, lr_factor, make_adamw


def test_lr_factor():
    linear = OptimConfig(warmup_steps=2, decay="linear", total_steps=6, final_lr_ratio=0.1)
    assert [lr_factor(linear, s) for s in range(1, 9)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1, 0.1]
    )
    cosine = OptimConfig(decay="cosine", total_steps=3)
    assert [lr_factor(cosine, s) for s in (1, 2, 3)] == pytest.approx([1, 0.5, 0])
    with pytest.raises(ConfigError, match="total_steps"):
        OptimConfig(decay="cosine", warmup_steps=5, total_steps=5)


def test_the_optimizer_has_the_settings_of_its_config():
    settings = OptimConfig(lr=1e-3, critic_lr=2e-3, betas=(0.5, 0.6), eps=1e-5, weight_decay=0.1)
    made = make_adamw(settings, torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    rows = [(g["peak_lr"], g["weight_decay"], g["betas"], g["eps"]) for g in made.param_groups]
    same = ((0.5, 0.6), 1e-5)
    assert rows == [(1e-3, 0.1, *same), (1e-3, 0.0, *same), (2e-3, 0.1, *same), (2e-3, 0.0, *same)]
    alone = make_adamw(replace(settings, critic_lr=None), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    assert {g["peak_lr"] for g in alone.param_groups} == {1e-3}
