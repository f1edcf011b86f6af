"""The command line: thin verbs over recipes, configs and run directories, one file each.

In: arguments. Out: text for a person or one JSON object for a program, and an exit code: 0, 1 the run
failed, 2 the call was wrong, 3 the machine lacks something, 130 interrupted. A verb is imported when
it is called, so that `--help` costs no more than the parser.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence

from uni_agent.errors import UniAgentError

SUMMARY = "Build an LLM agent, run it, and train it by reinforcement learning from its own episodes."
MORE_HELP = "`uni-agent VERB --help` says more. `--debug` shows tracebacks."
VERBS = {
    "init": "Write a small project of your own: tasks, a world, a config.",
    "run": "Run episodes with a model and keep them; no training.",
    "eval": "Measure a model on held-out tasks.",
    "train": "Train a model with a recipe: sft, grpo, ppo, or a file of yours.",
    "show": "Show a run's episodes, one transcript, or its metrics.",
    "config": "List a recipe's settings, or write them as a TOML file.",
    "model": "Fetch a model that has a name, or list them.",
    "doctor": "Say what is installed, what this machine offers, and what is missing.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `--debug` shows tracebacks."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        # a character that the terminal cannot show must not end a command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(words)
    except KeyboardInterrupt as interrupt:
        if debug:
            raise
        # a recipe that saved before it let go says how to go on
        print("interrupted" + "".join(f"; {hint}" for hint in interrupt.args), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader (head, less) has left; a second failure at exit would print a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        lines, code = _explain(error)
        for line in lines:
            print(f"error: {line}", file=sys.stderr)
        return code


def _dispatch(words: list[str]) -> int:
    # answered without the parser, whose import alone takes longer than a reader should wait
    if not words or words in (["--help"], ["-h"]):
        print(_help())
        return 0
    import cyclopts

    app = cyclopts.App(
        name="uni-agent",
        help=SUMMARY,
        help_epilogue=MORE_HELP,
        help_format="plaintext",
        version=_version,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for verb, summary in VERBS.items():
        app.command(f"uni_agent.cli.{verb}:{verb}", name=verb, help=summary)
    try:
        code = app(words, exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return int(code or 0)


def _help() -> str:
    verbs = "\n".join(f"  {verb:<8} {summary}" for verb, summary in VERBS.items())
    return f"""{SUMMARY}

Usage: uni-agent VERB ...

{verbs}

{MORE_HELP} `--version` prints the version."""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("uni-agent-rl")
    except PackageNotFoundError:
        return "unknown (not installed)"


def _explain(error: Exception) -> tuple[list[str], int]:
    """The lines and the exit code for what a verb raised; groups of a TaskGroup are opened."""
    causes = list(_leaves(error))
    ours = [cause for cause in causes if isinstance(cause, UniAgentError)]
    if ours:
        return list(dict.fromkeys(str(cause) for cause in ours)), ours[0].exit_code
    lines = [f"{type(cause).__name__}: {cause}; --debug shows where" for cause in causes]
    return list(dict.fromkeys(lines)), 1


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for below in error.exceptions:
            yield from _leaves(below)
    else:
        yield error
