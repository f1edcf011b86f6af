"""Checks of settings that belong together, for recipes to call before a run starts."""

from __future__ import annotations

from uni_agent.errors import ConfigError


def check_kl(coef: float, *, in_reward: bool, in_loss: bool) -> None:
    """Refuse a KL coefficient that counts twice, or that nothing uses. Raises ConfigError."""
    if coef < 0:
        raise ConfigError(f"the KL coefficient is {coef}; expected a number of 0 or more (0 turns it off)")
    if coef == 0:
        return
    if in_reward and in_loss:
        raise ConfigError(
            f"the KL coefficient {coef} is set for the reward and for the loss, which would count it twice; "
            "choose one of the two"
        )
    if not in_reward and not in_loss:
        raise ConfigError(
            f"the KL coefficient is {coef} but neither the reward nor the loss uses it; "
            "choose one of the two, or set it to 0"
        )
