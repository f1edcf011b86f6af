"""A world in which a question becomes one tool call: six tools, questions made here, a graded reward.

`train.toml` names what stands here: `calls:CallEnv`, the tools, `calls:exact_call`. Held-out questions
share neither wording nor values with those that are trained on: other templates, other cities, numbers,
currencies, days and things.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uni_agent.envs import TaskSet
from uni_agent.errors import UnknownNameError
from uni_agent.protocols import StepResult
from uni_agent.types import Episode, Message, Task, ToolCall, ToolResult

# --- the tools: an episode is over with the call, so they only confirm what was asked of them --------


def get_weather(city: str, day: str) -> str:
    """Get the weather forecast of a city."""
    return f"forecast for {city} on {day}"


def convert_currency(amount: int, source: str, target: str) -> str:
    """Convert money between currencies."""
    return f"{amount} {source} in {target}"


def convert_unit(value: int, source: str, target: str) -> str:
    """Convert a measured value between units."""
    return f"{value} {source} in {target}"


def add_event(title: str, day: str, hour: int) -> str:
    """Add an event to the calendar."""
    return f"{title} on {day} at {hour}:00"


def set_timer(minutes: int, label: str) -> str:
    """Start a timer."""
    return f"{minutes} minutes for {label}"


def search_products(query: str, max_price: int) -> str:
    """Search the shop."""
    return f"{query} up to {max_price}"


TOOLS = ("get_weather", "convert_currency", "convert_unit", "add_event", "set_timer", "search_products")

# --- the questions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """What the questions of one split are made of; nothing in it stands in the other one."""

    templates: Mapping[str, tuple[str, ...]]
    cities: tuple[str, ...]
    currencies: tuple[str, ...]
    units: tuple[tuple[str, str], ...]
    events: tuple[str, ...]
    days: tuple[str, ...]
    labels: tuple[str, ...]
    products: tuple[str, ...]
    remainders: tuple[int, ...]
    """Its numbers n have one of these n % 5, its hours likewise."""

    def number(self, rng: random.Random, low: int, high: int) -> int:
        """Draw a number of this split."""
        return rng.choice([n for n in range(low, high + 1) if n % 5 in self.remainders])

    def arguments(self, tool: str, rng: random.Random) -> dict[str, Any]:
        """Draw the arguments of a call of `tool`."""
        match tool:
            case "get_weather":
                return {"city": rng.choice(self.cities), "day": rng.choice(self.days)}
            case "convert_currency":
                source, target = rng.sample(self.currencies, 2)
                return {"amount": self.number(rng, 10, 950), "source": source, "target": target}
            case "convert_unit":
                source, target = rng.choice(self.units)
                return {"value": self.number(rng, 2, 400), "source": source, "target": target}
            case "add_event":
                hour = self.number(rng, 8, 20)
                return {"title": rng.choice(self.events), "day": rng.choice(self.days), "hour": hour}
            case "set_timer":
                return {"minutes": self.number(rng, 2, 90), "label": rng.choice(self.labels)}
            case _:
                return {"query": rng.choice(self.products), "max_price": self.number(rng, 15, 600)}


SPLITS: Mapping[str, Split] = {
    "train": Split(
        templates={
            "get_weather": (
                "What is the weather in {city} on {day}?",
                "Will it rain in {city} on {day}?",
                "I travel to {city} on {day}. How is the weather there?",
                "Tell me the forecast for {city}, {day}.",
            ),
            "convert_currency": (
                "Convert {amount} {source} to {target}.",
                "How much is {amount} {source} in {target}?",
                "I have {amount} {source}. What do I get in {target}?",
                "Please change {amount} {source} into {target}.",
            ),
            "convert_unit": (
                "Convert {value} {source} to {target}.",
                "How many {target} are {value} {source}?",
                "Give me {value} {source} in {target}.",
                "What is {value} {source} expressed in {target}?",
            ),
            "add_event": (
                "Add {title} to my calendar on {day} at {hour}:00.",
                "I have {title} on {day} at {hour}:00, please write it down.",
                "Schedule {title} for {day} at {hour}:00.",
                "Put {title} into the calendar, {day}, {hour}:00.",
            ),
            "set_timer": (
                "Set a timer of {minutes} minutes for {label}.",
                "Start a {minutes} minute timer for {label}.",
                "The {label} needs {minutes} minutes, set a timer.",
                "Timer please: {label}, {minutes} minutes.",
            ),
            "search_products": (
                "Find {query} for at most {max_price} dollars.",
                "I want to buy {query} and spend no more than {max_price} dollars.",
                "Search for {query} under {max_price} dollars.",
                "Show me {query} up to {max_price} dollars.",
            ),
        },
        cities=("Paris", "Berlin", "Madrid", "Tokyo", "Boston", "Cairo", "Oslo", "Lima", "Delhi", "Rome"),
        currencies=("USD", "EUR", "GBP", "JPY", "CHF", "SEK"),
        units=(("miles", "kilometers"), ("pounds", "kilograms"), ("feet", "meters"), ("gallons", "liters")),
        events=("a dentist visit", "lunch with Anna", "the team meeting", "a yoga class", "the school play"),
        days=("Monday", "Tuesday", "Wednesday", "Thursday"),
        labels=("pasta", "tea", "laundry", "cake", "rice", "homework"),
        products=("running shoes", "a desk lamp", "wireless headphones", "a backpack", "a coffee maker"),
        remainders=(0, 1, 3),
    ),
    "held_out": Split(
        templates={
            "get_weather": (
                "Do I need an umbrella in {city} on {day}?",
                "How is the weather going to be in {city} this {day}?",
            ),
            "convert_currency": (
                "What are {amount} {source} worth in {target}?",
                "My bill is {amount} {source}; how many {target} is that?",
            ),
            "convert_unit": (
                "Express {value} {source} as {target}.",
                "A sign says {value} {source}. What is that in {target}?",
            ),
            "add_event": (
                "Save {title} to my calendar, it is this {day} at {hour}:00.",
                "On {day} at {hour}:00 there is {title}, add it.",
            ),
            "set_timer": (
                "Can you time {minutes} minutes for the {label}?",
                "Count down {minutes} minutes, a timer for {label}.",
            ),
            "search_products": (
                "Where can I buy {query} below {max_price} dollars?",
                "Look for {query}, my budget is {max_price} dollars.",
            ),
        },
        cities=("London", "Vienna", "Sydney", "Chicago", "Dublin", "Nairobi", "Lisbon", "Seoul"),
        currencies=("CAD", "AUD", "INR", "NOK", "MXN"),
        units=(("inches", "centimeters"), ("ounces", "grams"), ("yards", "meters"), ("acres", "hectares")),
        events=("a haircut", "dinner with Tom", "the budget review", "a piano lesson"),
        days=("Friday", "Saturday", "Sunday"),
        labels=("bread", "eggs", "nap", "soup"),
        products=("hiking boots", "a rain jacket", "a mechanical keyboard", "a water bottle"),
        remainders=(2, 4),
    ),
}


def make_task(split: str, seed: int, number: int) -> Task:
    """The question of that number; tools take turns, everything else is drawn."""
    rng = random.Random(f"{split}-{seed}-{number}")
    parts = SPLITS[split]
    tool = list(parts.templates)[number % len(parts.templates)]
    arguments = parts.arguments(tool, rng)
    question = rng.choice(parts.templates[tool]).format(**arguments)
    data = {"tool": tool, "arguments": arguments}
    return Task(f"{split}-{seed}-{number}", prompt_of(question), data)


SHOTS = (
    ("How is the weather in Zurich today?", "get_weather", {"city": "Zurich", "day": "today"}),
    ("Please change 7 DKK into PLN.", "convert_currency", {"amount": 7, "source": "DKK", "target": "PLN"}),
    ("Convert 500 stones to pints.", "convert_unit", {"value": 500, "source": "stones", "target": "pints"}),
    ("Add a concert, today at 22:00.", "add_event", {"title": "concert", "day": "today", "hour": 22}),
    ("Set a timer of 100 minutes for the pizza.", "set_timer", {"minutes": 100, "label": "pizza"}),
    ("Find chairs for at most 7 dollars.", "search_products", {"query": "chairs", "max_price": 7}),
)
"""A question and its call for each tool; every prompt begins with them, computed once for all prompts."""


def prompt_of(question: str) -> tuple[Message, ...]:
    """The shots and a question."""
    messages: list[Message] = []
    for asked, tool, arguments in SHOTS:
        call = ToolCall("call_0", tool, arguments)
        messages += [Message("user", asked), Message("assistant", "", (call,))]
    return (*messages, Message("user", question))


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


def exact_call(episode: Episode) -> float:
    """1 for exactly the right call; below, at most 0.8 for what is right about it: a slope to train on.

    An episode counts as solved from 1 on, so that the slope does not enter the figures that are reported.
    """
    turns = episode.trajectories[-1].turns
    calls = turns[-1].message.tool_calls if turns and not episode.truncated else ()
    if len(calls) != 1 or calls[0].error is not None:
        return 0.0
    return call_score(calls[0], episode.task.data["tool"], episode.task.data["arguments"])


def call_score(call: ToolCall, tool: str, arguments: Mapping[str, Any]) -> float:
    """0.05 for a call, 0.25 for the right tool, then 0.2 for the names of arguments and 0.3 for values."""
    if call.name != tool:
        # a bonus for any tool that exists would teach to call one and the same
        return 0.05
    named = call.arguments.keys() & arguments.keys()
    right = sum(_same(call.arguments[name], arguments[name]) for name in named)
    if right == len(arguments) == len(call.arguments):
        return 1.0
    size = max(len(arguments), len(call.arguments))
    return 0.3 + 0.2 * len(named) / size + 0.3 * right / size


def _same(got: object, wanted: object) -> bool:
    """The same text, letter case and an article aside, or the same whole number; "5" is not 5."""
    if isinstance(got, str) and isinstance(wanted, str):
        return _bare(got) == _bare(wanted)
    return type(got) is type(wanted) and got == wanted


def _bare(text: str) -> str:
    words = text.casefold().split()
    return " ".join(words[1:] if words and words[0] in ("a", "an", "the") else words)
