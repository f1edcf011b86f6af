"""The reference policy that a KL is measured against: a frozen copy, or the model without its adapter.

Both satisfy what the learner asks of a reference, as does `models.Reference`.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import nn

from uni_agent.errors import ConfigError
from uni_agent.models import HFModel


class Reference(Protocol):
    """Gives the reference's module for the length of a `with`."""

    def active(self) -> AbstractContextManager[nn.Module]: ...


class FrozenCopy:
    """The weights as they are now, copied; costs the memory of a second model."""

    def __init__(self, model: HFModel) -> None:
        self._module = copy.deepcopy(model.module).eval().requires_grad_(False)

    @contextmanager
    def active(self) -> Generator[nn.Module]:
        """Give the copy."""
        yield self._module


class AdapterOff:
    """A LoRA model's own base weights; costs nothing. Raises ConfigError for a model without adapter."""

    def __init__(self, model: HFModel) -> None:
        from peft import PeftModel

        if not isinstance(model.module, PeftModel):
            raise ConfigError(
                f"the model ({type(model.module).__name__}) has no adapter to turn off; "
                "use FrozenCopy, or load it with lora=..."
            )
        self._module = model.module

    @contextmanager
    def active(self) -> Generator[nn.Module]:
        """Give the model with its adapter turned off."""
        with self._module.disable_adapter():
            yield self._module
