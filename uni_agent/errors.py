"""The error tree. A message names the thing, what came, what was expected, and what to do.

Exit codes at the command line: 1 the run failed, 2 the call was wrong, 3 the machine lacks something.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UniAgentError(Exception):
    """Base of all errors that this package raises on purpose."""

    exit_code = 1


class UsageError(UniAgentError):
    """Something the user wrote is wrong: a name, a file, a setting."""

    exit_code = 2


class ConfigError(UsageError):
    """A config file or flag has an unknown key, a wrong type, or an impossible combination."""


class UnknownNameError(UsageError):
    """A name that users write as a string does not resolve; says the nearest one that does."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; {nearest(name, known)}")


class TaskFileError(UsageError):
    """A task file is missing, empty, or has a bad line."""


class ModelError(UsageError):
    """A model folder is missing, incomplete, or cannot be used as asked."""


class MessageError(UsageError):
    """A chat message has a shape or a content part (an image, say) that cannot be rendered."""


class MissingDependencyError(UniAgentError):
    """An optional package is not installed; the message names the extra that brings it."""

    exit_code = 3


class RunError(UniAgentError):
    """A run cannot go on; what had been written stays readable."""


class EngineError(UniAgentError):
    """An engine failed to serve a request or to take weights."""


class SandboxError(UniAgentError):
    """The sandbox itself failed. Never the untrusted code's fault, and never a reward of 0."""


class EnvironmentFailure(UniAgentError):
    """A world broke in reset or step; the episode is invalid, not failed."""


class ToolError(UniAgentError):
    """A tool broke in a way that must end the episode (most tool failures are answers instead)."""


class RewardError(UniAgentError):
    """A reward raised or returned something that is not a number."""


class ContextFull(UniAgentError):
    """The next call does not fit into the model's context window; the episode ends truncated."""


class CheckpointError(UniAgentError):
    """A checkpoint is missing, incomplete, or corrupt."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name is nearest to `name`, or list what there is."""
    options = sorted(known)
    if not options:
        return "none are known"
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    shown = ", ".join(repr(option) for option in options[:12])
    return f"known: {shown}{', ...' if len(options) > 12 else ''}"
