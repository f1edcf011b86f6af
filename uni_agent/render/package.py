"""The `renderers` package behind our contract: some thirty model families, token-exact.

The package owns templates, continuation and the finding of calls. This file translates messages,
holds the package to the append-only rule, and keeps calls that it would drop or misread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from uni_agent.errors import MessageError, ModelError
from uni_agent.protocols import RenderedDialogue
from uni_agent.render.calls import THINK, UNCLOSED, read_arguments, read_assistant, read_block
from uni_agent.render.messages import message_to_template, tool_to_json
from uni_agent.render.tokens import decode, first_line, plain_copy, remember, token_id, until_stop
from uni_agent.types import Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from renderers.base import ParsedToolCall, RenderedTokens
    from renderers.base import Renderer as ForeignRenderer
    from transformers import PreTrainedTokenizerBase

# Not renderers of a model family: the package's own guessing, its opaque template, and user code.
_NOT_FAMILIES = ("auto", "default", "custom")


def package_renderer_names() -> list[str]:
    """The families that the installed `renderers` package knows."""
    from renderers.configs import RendererConfig

    union = get_args(RendererConfig)[0]
    names = [str(config.model_fields["name"].default) for config in get_args(union)]
    return sorted(name for name in names if name not in _NOT_FAMILIES)


class PackageRenderer:
    """Renders one model family; satisfies protocols.Renderer.

    A later turn is appended where the family allows it. A new user message normally starts a new
    tape, because these templates drop earlier reasoning then; where the tape holds no reasoning there
    is nothing to drop, and it is appended.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        """Load the family `name` for the tokenizer of `source`. Raises ModelError."""
        self._name = name
        self._tokenizer = tokenizer
        self._foreign = self._guarded(name, tokenizer, source)
        self._appending = _create(name, self._foreign_tokenizer, source, keep_reasoning=True)
        self._stop = tuple(self._foreign.get_stop_token_ids())
        marks = (token_id(tokenizer, "<think>"), token_id(tokenizer, "</think>"))
        self._reasoning_marks = None if None in marks else frozenset(marks)
        # What opens an assistant's turn; the package looks there for reasoning opened by the prompt.
        self._opening = self._foreign.render_ids(_PROBE[:1], add_generation_prompt=True)

    @property
    def name(self) -> str:
        return self._name

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The prompt of a first turn, generation prompt included. Raises MessageError."""
        return self._render(_foreign_messages(messages), tools, prompt=True).token_ids

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """The ids to append, a closing token for a turn that was cut off first; else None."""
        before = [*prompt_ids, *completion_ids]
        foreign = self._foreign
        if self._reasoning_marks is not None and self._reasoning_marks.isdisjoint(before):
            foreign = self._appending
        bridged = foreign.bridge_to_next_turn(
            list(prompt_ids),
            list(completion_ids),
            _foreign_messages(new_messages),
            tools=_foreign_tools(tools),
        )
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return bridged.token_ids[len(before) :]

    def parse(self, completion_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        """Read what the model said. Each attempted call is there, broken ones with their error."""
        ids = until_stop(completion_ids, self._stop)
        try:
            parsed = self._foreign.parse_response(
                list(completion_ids), tools=_foreign_tools(tools), prompt_ids=self._opening
            )
        except (ValueError, RecursionError):
            # JSON that breaks the package's reader (nesting, a number of 5000 digits) but not ours.
            return read_assistant(self.decode(ids))
        calls = tuple(self._call(call, index, ids) for index, call in enumerate(parsed.tool_calls))
        reasoning = parsed.reasoning_content
        if reasoning is None and self._reasoning_marks is not None:
            # The package says None for an empty block too, and would then forget it in a new tape.
            reasoning = None if self._reasoning_marks.isdisjoint(ids) else ""
        return Message("assistant", parsed.content, calls, reasoning=reasoning)

    def render_dialogue(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> RenderedDialogue:
        """The conversation as the model would have met it, for supervised training.

        A turn without reasoning (None) has no reasoning block, the last one neither, where Qwen3's
        template would put an empty one: the model cannot know which turn is its last. A turn whose
        reasoning the template drops from history is context, not sampled: nobody would sample it so.
        """
        foreign = _foreign_messages(messages)
        rendered = self._render(foreign, tools, prompt=False)
        unreasoned = messages[-1].role == "assistant" and messages[-1].reasoning is None
        if unreasoned and self._opens_reasoning(rendered, len(messages) - 1):
            rendered = self._as_if_not_last(foreign, tools) or rendered
        if len(rendered.sampled_mask) != len(rendered.token_ids):
            raise MessageError(f"renderer {self._name!r} does not say which tokens are sampled; use another")
        sampled, owner = list(rendered.sampled_mask), list(rendered.message_indices)
        for index, message in enumerate(messages):
            if message.role == "assistant" and message.reasoning:
                mine = [t for t, who in enumerate(owner) if who == index and sampled[t]]
                if message.reasoning.strip() not in self.decode([rendered.token_ids[t] for t in mine]):
                    for t in mine:
                        sampled[t] = False
        return RenderedDialogue(list(rendered.token_ids), sampled, owner)

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[ToolSpec], *, prompt: bool
    ) -> RenderedTokens:
        if not messages:
            raise MessageError("cannot render a dialogue without messages; give at least one")
        listed: Any = messages
        return self._foreign.render(listed, tools=_foreign_tools(tools), add_generation_prompt=prompt)

    def _as_if_not_last(
        self, messages: list[dict[str, Any]], tools: Sequence[ToolSpec]
    ) -> RenderedTokens | None:
        """Render with a tool result behind the last turn, and cut that off again.

        None where the last turn would have its reasoning block all the same.
        """
        last = len(messages) - 1
        rendered = self._render([*messages, {"role": "tool", "content": "x"}], tools, prompt=False)
        owners = rendered.message_indices
        end = owners.index(last + 1) if last + 1 in owners else len(owners)
        if self._opens_reasoning(rendered, last):
            return None
        rendered.token_ids = rendered.token_ids[:end]
        rendered.sampled_mask = rendered.sampled_mask[:end]
        rendered.message_indices = owners[:end]
        return rendered

    def _opens_reasoning(self, rendered: RenderedTokens, index: int) -> bool:
        """Whether the sampled part of message `index` begins with a reasoning block."""
        owned = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=False)
        ids = [token for token, owner, sampled in owned if owner == index and sampled]
        return self.decode(ids[:8]).lstrip().startswith(THINK)

    def _call(self, call: ParsedToolCall, index: int, ids: list[int]) -> ToolCall:
        raw = self.decode(ids[slice(*call.token_span)]) if call.token_span else call.raw
        given: Any = call.name
        name, status = given if isinstance(given, str) else "", str(call.status)
        arguments, error = read_arguments(call.arguments)
        ours = read_block(call.raw)
        if status == "unclosed_block":
            name, arguments, error = name or ours.name, ours.arguments, UNCLOSED
        elif (name and ours.name == name) or (not name and status != "malformed_structure"):
            # JSON in the Hermes manner, or nothing readable: our reader says what is wrong with it.
            # The package refuses raw newlines in strings and prose behind the object, and takes NaN.
            name, arguments, error = ours.name, ours.arguments, ours.error
        elif status not in ("ok", "unknown_tool"):  # an unknown tool is the toolbox's to answer
            error = f"the call does not parse ({status.replace('_', ' ')})"
        return ToolCall(call.id or f"call_{index}", name, arguments, raw, error)

    def _guarded(self, name: str, tokenizer: PreTrainedTokenizerBase, source: str) -> ForeignRenderer:
        """Prefer a tokenizer that leaves control-token text in messages alone, where ids agree."""
        self._foreign_tokenizer = tokenizer
        usual = _create(name, tokenizer, source)
        plain = remember(plain_copy(tokenizer))
        guarded = _create(name, plain, source)
        if _probe_ids(usual) != _probe_ids(guarded):
            return usual  # this family writes its own control tokens as text
        self._foreign_tokenizer = plain
        return guarded


_PROBE_TOOLS = [tool_to_json(ToolSpec("f", "d", {"type": "object", "properties": {"a": {"type": "string"}}}))]
_PROBE: list[Any] = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "r",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        ],
    },
    {"role": "tool", "content": "x", "tool_call_id": "call_0", "name": "f"},
    {"role": "assistant", "content": "d"},
]


def _probe_ids(renderer: ForeignRenderer) -> list[list[int]]:
    system: Any = {"role": "system", "content": "s"}
    tools: Any = _PROBE_TOOLS
    prompt = renderer.render_ids([system, *_PROBE[:1]], tools=tools, add_generation_prompt=True)
    stop = renderer.get_stop_token_ids()[:1]
    bridged = renderer.bridge_to_next_turn(prompt, stop, [_PROBE[2]], tools=tools)
    return [
        prompt,
        renderer.render_ids([system, *_PROBE], tools=tools),
        renderer.render_ids(_PROBE, add_generation_prompt=True),
        bridged.token_ids if bridged is not None else [],
    ]


def _create(
    name: str, tokenizer: PreTrainedTokenizerBase, source: str, *, keep_reasoning: bool = False
) -> ForeignRenderer:
    from renderers import config_from_name, create_renderer

    config: Any = config_from_name(name)
    if keep_reasoning:
        config = config.model_copy(update={"thinking_retention": "all"})
    try:
        return create_renderer(tokenizer, config)
    except (AssertionError, ValueError, TypeError, KeyError) as problem:
        raise ModelError(
            f"renderer {name!r} does not fit the tokenizer of {source}: {first_line(problem)}"
        ) from problem


def _foreign_messages(messages: Sequence[Message]) -> list[Any]:
    return [message_to_template(message) for message in messages]


def _foreign_tools(tools: Sequence[ToolSpec]) -> Any:
    return [tool_to_json(tool) for tool in tools] or None
