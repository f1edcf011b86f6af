"""Plain ChatML: `<|im_start|>{role}\\n{content}<|im_end|>\\n`, token-exact over turns.

Our own continuation for the models whose template is just that (SmolLM2, for one). What templates of
this kind lack, tools, is written into the system message and read from the text in the manner of
Hermes and Qwen. At load the rendering is compared with the folder's template; a template that says
anything else is refused, never approximated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from uni_agent.errors import MessageError, ModelError
from uni_agent.protocols import RenderedDialogue
from uni_agent.render.calls import assistant_text, read_assistant
from uni_agent.render.messages import tool_to_json
from uni_agent.render.tokens import (
    PlainEncoder,
    apply_template,
    decode,
    require_template,
    token_id,
    until_stop,
)
from uni_agent.types import Message, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_PROMPT = "<|im_start|>assistant\n"


class ChatMLRenderer:
    """Renders plain ChatML; satisfies protocols.Renderer.

    Text of control tokens inside a message stays text. Tool results have the role `tool` where the
    template prints it, and are user messages in `<tool_response>` tags where it does not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        """Check the template of `source` (for messages) against ours. Raises ModelError."""
        require_template(tokenizer, source, "chatml")
        start, end = token_id(tokenizer, "<|im_start|>"), token_id(tokenizer, "<|im_end|>")
        if start is None or end is None:
            raise ModelError(
                f"the tokenizer of {source} lacks the token <|im_start|> or <|im_end|>, so it does not "
                "speak ChatML; use renderer 'template'"
            )
        self._tokenizer = tokenizer
        self._source = source
        self._encode = PlainEncoder(tokenizer, source)
        self._start, self._end = start, end
        self._newline = self._encode("\n")
        self._default_system, self._tool_role = self._probe()
        self._check()

    @property
    def name(self) -> str:
        return "chatml"

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return (self._end, eos) if isinstance(eos, int) and eos != self._end else (self._end,)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The prompt of a first turn, generation prompt included."""
        return self._dialogue(messages, tools).token_ids + self._head("assistant")

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """The ids to append; a turn that was cut off is closed first. None for assistant messages."""
        if not new_messages or any(message.role == "assistant" for message in new_messages):
            return None
        closed = bool(completion_ids) and completion_ids[-1] == self._end
        ids = [*([] if closed else [self._end]), *self._newline]
        for message in new_messages:
            ids += self._block(message)[0]
        return ids + self._head("assistant")

    def parse(self, completion_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        """Read what the model said, up to the first stop token."""
        return read_assistant(self.decode(until_stop(completion_ids, self.stop_token_ids)))

    def render_dialogue(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> RenderedDialogue:
        """The whole conversation; sampled are each assistant's body and its `<|im_end|>`."""
        return self._dialogue(messages, tools)

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)

    def _dialogue(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> RenderedDialogue:
        if not messages:
            raise MessageError("cannot render a dialogue without messages; give at least one")
        ids: list[int] = []
        sampled: list[bool] = []
        owner: list[int] = []
        for index, message in self._with_system(messages, tools):
            block, mask = self._block(message)
            ids += block
            sampled += mask
            owner += [index] * len(block)
        return RenderedDialogue(ids, sampled, owner)

    def _with_system(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[tuple[int, Message]]:
        indexed = list(enumerate(messages))
        owner, system = -1, self._default_system
        if messages[0].role == "system":
            owner, system = 0, messages[0].content
            indexed = indexed[1:]
        if tools:
            listed = "\n".join(json.dumps(tool_to_json(tool), ensure_ascii=False) for tool in tools)
            block = _TOOLS.format(tools=listed)
            system = f"{system}\n\n{block}" if system else block
        return indexed if system is None else [(owner, Message("system", system)), *indexed]

    def _head(self, role: str) -> list[int]:
        return [self._start, *self._encode(role + "\n")]

    def _block(self, message: Message) -> tuple[list[int], list[bool]]:
        if message.role == "assistant":
            # Head and body apart, because the model samples the body after the head's tokens.
            head, body = self._head("assistant"), [*self._encode(assistant_text(message)), self._end]
            mask = [False] * len(head) + [True] * len(body) + [False] * len(self._newline)
            return [*head, *body, *self._newline], mask
        role, content = message.role, message.content
        if role == "tool" and not self._tool_role:
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        ids = [self._start, *self._encode(f"{role}\n{content}"), self._end, *self._newline]
        return ids, [False] * len(ids)

    def _template(self, messages: Sequence[Message], *, prompt: bool) -> str:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return apply_template(self._tokenizer, plain, (), prompt=prompt, source=self._source)

    def _probe(self) -> tuple[str | None, bool]:
        user = Message("user", "q")
        text, body = self._template([user], prompt=True), f"<|im_start|>user\nq<|im_end|>\n{_PROMPT}"
        if not text.endswith(body):
            raise self._refusal(body, text)
        before, default = text.removesuffix(body), None
        if before:
            opening, closing = "<|im_start|>system\n", "<|im_end|>\n"
            if not (before.startswith(opening) and before.endswith(closing)):
                raise self._refusal(f"{opening}...{closing}", before)
            default = before.removeprefix(opening).removesuffix(closing)
        turns = [Message("system", "s"), user, Message("assistant", "a"), Message("tool", "r")]
        try:
            tool_role = self._template(turns, prompt=False).endswith("<|im_start|>tool\nr<|im_end|>\n")
        except MessageError:
            tool_role = False
        return default, tool_role

    def _check(self) -> None:
        turns = [
            Message("system", "Be brief."),
            Message("user", "What is 2 + 3?"),
            Message("assistant", "5."),
        ]
        turns += [Message("tool", "ok: 5")] if self._tool_role else []
        turns += [Message("user", "Thanks, and 7?"), Message("assistant", "7.")]
        for messages in (turns, turns[1:]):
            text, ids = self._template(messages, prompt=False), self._dialogue(messages, ()).token_ids
            encoded: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
            if ids != encoded:
                raise self._refusal(self.decode(ids), text)

    def _refusal(self, ours: str, theirs: str) -> ModelError:
        return ModelError(
            f"the chat template of {self._source} is not plain ChatML: it writes {theirs[-120:]!r} where "
            f"ChatML is {ours[-120:]!r}; use renderer 'template' or the one made for this model"
        )
