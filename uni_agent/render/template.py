"""Any Hugging Face chat template: correct, but a new tape each turn.

A template is an opaque program, so what it would print for a longer conversation cannot be appended
safely; `extend` says None. For supervised training the mask comes from prefix renders, or there is
an error: a mask is never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from uni_agent.errors import MessageError
from uni_agent.protocols import RenderedDialogue
from uni_agent.render.calls import THINK, read_assistant
from uni_agent.render.messages import message_to_template, tool_to_json
from uni_agent.render.tokens import (
    apply_template,
    control_tokens,
    decode,
    read_eos_ids,
    require_template,
    until_stop,
)
from uni_agent.types import Message, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TemplateRenderer:
    """Renders through `apply_chat_template`; satisfies protocols.Renderer.

    Calls are read in the `<tool_call>` JSON manner. Text of control tokens inside a message becomes
    control tokens here, as the template gives one string; prefer a renderer made for the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        """Load for the folder `source`. Raises ModelError."""
        require_template(tokenizer, source, "template")
        self._tokenizer = tokenizer
        self._source = source
        probe = [Message("user", "q")]
        self._reasoning_open = self._text(probe, (), prompt=True).rstrip().endswith(THINK)
        ids = [*read_eos_ids(Path(source)), *self._closing_tokens()]
        if isinstance(tokenizer.eos_token_id, int):
            ids.append(tokenizer.eos_token_id)
        self._stop = tuple(dict.fromkeys(ids))

    @property
    def name(self) -> str:
        return "template"

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The prompt of a turn, generation prompt included. Raises MessageError."""
        return self._ids(messages, tools, prompt=True)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """Always None: a template cannot be continued exactly."""
        return None

    def parse(self, completion_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        """Read what the model said, up to the first stop token."""
        text = self.decode(until_stop(completion_ids, self._stop))
        return read_assistant(text, reasoning_open=self._reasoning_open)

    def render_dialogue(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> RenderedDialogue:
        """The conversation, with each assistant's text and closing token marked as sampled.

        An assistant's span is what a render that ends with it has beyond the prompt before it.
        Raises MessageError, naming the template, where those renders do not extend each other.
        """
        whole = self._ids(messages, tools, prompt=False)
        sampled, owner = [False] * len(whole), [-1] * len(whole)
        position = 0
        for index, message in enumerate(messages):
            ended = self._prefix(messages[: index + 1], tools)
            if message.role == "assistant":
                prompt = self._ids(messages[:index], tools, prompt=True) if index else []
                begin, end = len(prompt), self._turn_end(ended, len(prompt))
                if begin in (0, end) or ended[:begin] != prompt or whole[:end] != ended[:end]:
                    raise MessageError(
                        f"the chat template of {self._source} does not show which tokens assistant "
                        f"message {index} is made of (its renders do not extend each other, or it closes "
                        "no turn); use a renderer made for this model"
                    )
                sampled[begin:end] = [True] * (end - begin)
            if len(ended) > position and whole[: len(ended)] == ended:
                owner[position : len(ended)] = [index] * (len(ended) - position)
                position = len(ended)
        return RenderedDialogue(whole, sampled, owner)

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)

    def _prefix(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """A render of the first messages; empty where the template refuses to end there."""
        try:
            return self._ids(messages, tools, prompt=False)
        except MessageError:
            return []

    def _turn_end(self, ids: list[int], begin: int) -> int:
        """Past the last stop token after `begin`; `begin` where there is none."""
        for index in range(len(ids) - 1, begin - 1, -1):
            if ids[index] in self._stop:
                return index + 1
        return begin

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompt: bool) -> str:
        if not messages:
            raise MessageError("cannot render a dialogue without messages; give at least one")
        plain = [message_to_template(message) for message in messages]
        listed = [tool_to_json(tool) for tool in tools]
        return apply_template(self._tokenizer, plain, listed, prompt=prompt, source=self._source)

    def _ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompt: bool) -> list[int]:
        text = self._text(messages, tools, prompt=prompt)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _closing_tokens(self) -> list[int]:
        """The control token that the template writes after an assistant's text, if there is one."""
        text = "Zq7"
        rendered = self._text([Message("user", "q"), Message("assistant", text)], (), prompt=False)
        after: list[int] = self._tokenizer.encode(rendered.rpartition(text)[2], add_special_tokens=False)
        special = control_tokens(self._tokenizer)
        return [token for token in after if token in special][:1]
