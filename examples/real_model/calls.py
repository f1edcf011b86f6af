"""A world in which a question becomes one tool call: four tools, questions made here, a graded reward.

`train.toml` names what stands here: `calls:CallEnv`, `calls:exact_call`. Held-out questions share neither
wording nor values with those that are trained on: other templates, cities, days, things, numbers and codes.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uni_agent.envs import TaskSet
from uni_agent.errors import UnknownNameError
from uni_agent.protocols import StepResult
from uni_agent.types import Episode, Message, Task, ToolCall, ToolResult

# --- the tools ----------------------------------------------------------------------------------------


def weather(city: str, day: str) -> str:
    """Confirm the request."""
    return f"forecast for {city} on {day}"


def set_timer(minutes: int) -> str:
    """Confirm the request."""
    return f"timer of {minutes} minutes"


def shop(item: str, price: int) -> str:
    """Confirm the request."""
    return f"{item} up to {price} dollars"


def translate(word: str, language: str) -> str:
    """Confirm the request."""
    return f"{word} in {language}"


TOOLS: Mapping[str, Callable[..., str]] = {
    tool.__name__: tool for tool in (weather, set_timer, shop, translate)
}


def signature_of(tool: Callable[..., Any]) -> str:
    """Such as "set_timer(minutes: int)": a schema in a fifth of the tokens."""
    parameters = inspect.signature(tool, eval_str=True).parameters.values()
    return f"{tool.__name__}({', '.join(f'{p.name}: {p.annotation.__name__}' for p in parameters)})"


SYSTEM = "\n".join(
    [
        "Answer with one function call in <tool_call> tags and nothing else. The functions:",
        *map(signature_of, TOOLS.values()),
    ]
)

SHOTS: Sequence[tuple[str, str, Mapping[str, Any]]] = (
    ("How is the weather in Zurich today?", "weather", {"city": "Zurich", "day": "today"}),
    ("Start a timer, 7 minutes.", "set_timer", {"minutes": 7}),
    ("I want to buy hats below 99 dollars.", "shop", {"item": "hats", "price": 99}),
    ("Translate bread to Latin.", "translate", {"word": "bread", "language": "Latin"}),
    ("Set a timer of 5 minutes.", "set_timer", {"minutes": 5}),
    ("Will it be cold in Prague tomorrow?", "weather", {"city": "Prague", "day": "tomorrow"}),
    ("What is milk in Dutch?", "translate", {"word": "milk", "language": "Dutch"}),
    ("Find chairs for at most 8 dollars.", "shop", {"item": "chairs", "price": 8}),
)
"""Two questions and their calls for each tool. Every prompt begins with them; they are computed once."""


def prompt_of(question: str) -> tuple[Message, ...]:
    """The tools, the shots and a question."""
    messages = [Message("system", SYSTEM)]
    for asked, tool, arguments in SHOTS:
        call = ToolCall("call_0", tool, arguments)
        messages += [Message("user", asked), Message("assistant", "", (call,))]
    return (*messages, Message("user", question))


# --- the questions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """What the questions of one split are made of; nothing in it stands in the other one."""

    templates: Mapping[str, tuple[str, ...]]
    words: Mapping[str, tuple[str, ...]]
    """By name of the argument."""
    remainders: tuple[int, ...]
    """Its numbers n have one of these n % 5."""

    def arguments(self, tool: str, rng: random.Random) -> dict[str, Any]:
        """Draw the arguments of a call of `tool`; no two are the same."""
        drawn: dict[str, Any] = {}
        for name in inspect.signature(TOOLS[tool]).parameters:
            known = self.words.get(name) or [n for n in range(10, 91) if n % 5 in self.remainders]
            drawn[name] = rng.choice([value for value in known if value not in drawn.values()])
        return drawn


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPLITS: Mapping[str, Split] = {
    "train": Split(
        templates={
            "weather": (
                "What is the weather in {city} on {day}?",
                "Will it rain in {city} on {day}?",
                "I travel to {city} on {day}. How is the weather there?",
                "Tell me the forecast for {city}, {day}.",
                "Should I take a coat to {city} on {day}?",
                "Is it sunny in {city} on {day}?",
            ),
            "set_timer": (
                "Set a timer of {minutes} minutes.",
                "Start a {minutes} minute timer.",
                "I need a timer for {minutes} minutes.",
                "Timer please: {minutes} minutes.",
            ),
            "shop": (
                "Find {item} for at most {price} dollars.",
                "I want to buy {item} and spend no more than {price} dollars.",
                "Search for {item} under {price} dollars.",
                "Show me {item} up to {price} dollars.",
            ),
            "translate": (
                "Translate {word} to {language}.",
                "What is {word} in {language}?",
                "How do you say {word} in {language}?",
                "Give me the {language} word for {word}.",
            ),
        },
        words={
            "city": _words("Paris Berlin Madrid Tokyo Boston Cairo Oslo Lima Delhi"),
            "day": _words("Monday Tuesday Wednesday Thursday"),
            "item": _words("shoes lamps headphones backpacks mugs pillows gloves candles skis"),
            "word": _words("house river window green winter horse apple doctor"),
            "language": _words("French German Spanish Polish Hindi"),
        },
        remainders=(0, 1, 3),
    ),
    "held_out": Split(
        templates={
            "weather": (
                "Do I need an umbrella in {city} on {day}?",
                "How is the weather going to be in {city} this {day}?",
            ),
            "set_timer": (
                "Can you start a timer, {minutes} minutes?",
                "Remind me in {minutes} minutes with a timer.",
            ),
            "shop": (
                "Where can I buy {item} below {price} dollars?",
                "Look for {item}, my budget is {price} dollars.",
            ),
            "translate": (
                "What do people who speak {language} call {word}?",
                "I want to learn {language}. Translate {word} for me.",
            ),
        },
        words={
            "city": _words("London Vienna Sydney Chicago Dublin Nairobi Lisbon Seoul"),
            "day": _words("Friday Saturday Sunday"),
            "item": _words("boots jackets keyboards bottles tents"),
            "word": _words("garden mountain bridge yellow"),
            "language": _words("Italian Danish Greek Turkish"),
        },
        remainders=(2, 4),
    ),
}


def make_task(split: str, seed: int, number: int) -> Task:
    """The question of that number; tools take turns, everything else is drawn."""
    rng = random.Random(f"{split}-{seed}-{number}")
    parts = SPLITS[split]
    tool = list(TOOLS)[number % len(TOOLS)]
    arguments = parts.arguments(tool, rng)
    question = rng.choice(parts.templates[tool]).format(**arguments)
    return Task(f"{split}-{seed}-{number}", prompt_of(question), {"tool": tool, "arguments": arguments})


class CallEnv:
    """Ask a question; the answer, whatever it is, ends the episode."""

    @staticmethod
    def tasks(split: str | None, num: int, seed: int = 0) -> TaskSet:
        """Any number of questions; "test" means "held_out", None means "train"."""
        name = {None: "train", "test": "held_out"}.get(split, split)
        if name not in SPLITS:
            raise UnknownNameError("split of the generated questions", str(name), SPLITS)
        return TaskSet(make_task(str(name), seed, number) for number in range(num))

    @staticmethod
    def task(task_id: str) -> Task:
        """The question of an id such as "train-0-17"."""
        split, _, rest = task_id.partition("-")
        seed, _, number = rest.partition("-")
        if split not in SPLITS or not (seed.isdecimal() and number.isdecimal()):
            raise UnknownNameError("question", task_id, ["train-0-0", "held_out-0-0"])
        return make_task(split, int(seed), int(number))

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Ask."""
        return task.prompt

    async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
        """Any answer is the last one; `exact_call` judges it."""
        return StepResult(terminated=True)

    async def close(self) -> None:
        """Nothing is held."""


# --- the reward ---------------------------------------------------------------------------------------


_BEGUN = re.compile(r'<tool_call>\s*\{"name": "([^"]*)"')


def exact_call(episode: Episode) -> float:
    """1 for exactly the right call and nothing beside it; below, at most 0.8: a slope to train on.

    0.05 for a call that begins well and does not parse, 0.15 if it names the right tool; the rest is
    `call_score`. An episode counts as solved from 1 on, so the slope enters no figure that is reported.
    """
    message = episode.trajectories[-1].turns[-1].message
    tool = episode.task.data["tool"]
    if len(message.tool_calls) != 1 or message.content:
        return 0.0
    call = message.tool_calls[0]
    if call.error is None:
        return call_score(call, tool, episode.task.data["arguments"])
    begun = _BEGUN.match(call.raw)
    if begun is None:
        return 0.0
    return 0.15 if begun[1] == tool else 0.05


def call_score(call: ToolCall, tool: str, arguments: Mapping[str, Any]) -> float:
    """0.1 for a call, 0.3 for the right tool, up to 0.8 with names and values of arguments, 1 for all."""
    if call.name != tool:
        # a bonus for any tool that exists would teach to call one and the same
        return 0.1
    named = call.arguments.keys() & arguments.keys()
    right = sum(_same(call.arguments[name], arguments[name]) for name in named)
    if right == len(arguments) == len(call.arguments):
        return 1.0
    size = max(len(arguments), len(call.arguments))
    return 0.3 + 0.2 * len(named) / size + 0.3 * right / size


def _same(got: object, wanted: object) -> bool:
    """The same text, letter case aside, or the same whole number; "5" is not 5."""
    if isinstance(got, str) and isinstance(wanted, str):
        return got.casefold() == wanted.casefold()
    return type(got) is type(wanted) and got == wanted
