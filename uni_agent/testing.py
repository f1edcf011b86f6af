"""Fakes that satisfy the protocols, for deterministic tests. Nothing here is used by a real run.

`ScriptedEngine` hands out prepared tokens, `ToyTokenizer` and `ToyRenderer` are a tiny chat format
that can be checked by hand, `EchoEnvironment` repeats what it hears.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uni_agent.errors import EngineError
from uni_agent.protocols import RenderedDialogue, StepResult
from uni_agent.types import (
    Chunk,
    Completion,
    Finish,
    Message,
    Sampling,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
    Weights,
)

TOY_VOCABULARY: Mapping[str, int] = {
    "<pad>": 0,
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    "\n": 3,
    "\n\n": 4,
    "user": 5,
    "assistant": 6,
    "tool": 7,
    "system": 8,
    "h": 10,
    "e": 11,
    "l": 12,
    "o": 13,
    "he": 14,
    "llo": 15,
    "hello": 16,
    "x": 17,
    "q": 18,
    "a": 19,
    "b": 20,
    "<think>": 21,
    "</think>": 22,
}
"""Id 256 + b stands for byte b."""


@dataclass(frozen=True, slots=True)
class Scripted:
    """One prepared model call. `version` None takes the engine's version at that moment."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    finish: Finish = "stop"
    version: int | Sequence[int] | None = None


Script = Iterable[Scripted | Exception] | Callable[[Sequence[int], Sampling, str], Scripted | Exception]


class ScriptedEngine:
    """Hands out prepared completions in order (or by a function), and keeps every prompt it got.

    An Exception in the script is raised. `latency_s` is waited before each answer. A completion
    longer than `sampling.max_tokens` is cut there, with finish "length".
    """

    def __init__(self, script: Script, *, context_size: int = 4096, latency_s: float = 0.0) -> None:
        self._answer = script if callable(script) else None
        self._script = iter(()) if callable(script) else iter(script)
        self.context_size = context_size
        self.version = 0
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.sessions_ended: list[str] = []
        self._latency_s = latency_s
        self._running = asyncio.Event()
        self._running.set()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str
    ) -> AsyncIterator[Chunk | Completion]:
        """Yield one chunk and the completion."""
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        if len(prompt_ids) >= self.context_size:
            raise EngineError(f"prompt has {len(prompt_ids)} tokens, the context holds {self.context_size}")
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        await self._running.wait()
        item = self._answer(prompt_ids, sampling, session) if self._answer else next(self._script, None)
        if item is None:
            raise EngineError("the script is over: more model calls than prepared answers")
        if isinstance(item, Exception):
            raise item
        ids = list(item.token_ids)[: sampling.max_tokens]
        finish: Finish = item.finish if len(ids) == len(item.token_ids) else "length"
        logprobs = list(item.logprobs)[: len(ids)] if item.logprobs is not None else [-0.5] * len(ids)
        versions = item.version if item.version is not None else self.version
        version_array = np.broadcast_to(np.asarray(versions, np.int32), (len(item.token_ids),))[: len(ids)]
        arrays = (np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), version_array.copy())
        yield Chunk(*arrays)
        yield Completion(*arrays, finish)

    async def load_weights(self, weights: Weights) -> None:
        """Take the version; there are no weights."""
        self.version = weights.version

    async def pause(self) -> None:
        """Hold back further answers."""
        self._running.clear()

    async def resume(self) -> None:
        """Answer again."""
        self._running.set()

    async def end_session(self, session: str) -> None:
        """Note that the session is over."""
        self.sessions_ended.append(session)

    async def close(self) -> None:
        """Nothing is held."""


class ToyTokenizer:
    """Greedy longest match over TOY_VOCABULARY (and `extra` words), byte b as id 256 + b."""

    def __init__(self, extra: Mapping[str, int] | None = None) -> None:
        self._ids = {**TOY_VOCABULARY, **(extra or {})}
        self._texts = {token: text for text, token in self._ids.items()}
        self._longest = sorted(self._ids, key=len, reverse=True)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Text to ids; with special=False the text of a control token becomes plain bytes."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            for word in self._longest:
                if text.startswith(word, at) and (special or not word.startswith("<")):
                    ids.append(self._ids[word])
                    at += len(word)
                    break
            else:
                ids += [256 + byte for byte in text[at].encode("utf-8", "surrogatepass")]
                at += 1
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids to text, bytes joined over tokens, bad bytes replaced."""
        data = b"".join(
            bytes([token - 256]) if token >= 256 else self._texts[token].encode() for token in token_ids
        )
        return data.decode("utf-8", "replace")


class ToyRenderer:
    """`<|im_start|>{role}\\n{content}<|im_end|>\\n` per message, `<|im_start|>assistant\\n` to go on.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in the text. With
    `strips_thinking`, whole renders drop `<think>...</think>` from assistant turns before the last
    user turn, and `extend` refuses when a user message follows such a turn (failure row T02).
    """

    name = "toy"
    stop_token_ids = (2,)

    def __init__(self, tokenizer: ToyTokenizer | None = None, *, strips_thinking: bool = False) -> None:
        self.tokenizer = tokenizer or ToyTokenizer()
        self._strips = strips_thinking

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """All messages, then the opening of the assistant's turn."""
        ids = [token for message in self._visible(messages) for token in self._one(message)]
        return ids + self._open()

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """Close the turn if the model did not, then append the new messages."""
        asked = any(message.role == "user" for message in new_messages)
        if self._strips and asked and 21 in completion_ids:
            return None
        closed = len(completion_ids) > 0 and completion_ids[-1] == 2
        ids = ([] if closed else [2]) + [3]
        for message in new_messages:
            ids += self._one(message)
        return ids + self._open()

    def parse(self, completion_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        """Split text from calls; a call that is not JSON keeps its error."""
        text = self.decode([token for token in completion_ids if token != 2])
        calls: list[ToolCall] = []
        for index, found in enumerate(re.finditer(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)):
            raw = found.group(1)
            try:
                body: Any = json.loads(raw)
                calls.append(ToolCall(f"call_{index}", body["name"], body["arguments"], raw))
            except (ValueError, KeyError, TypeError) as error:
                calls.append(ToolCall(f"call_{index}", "", {}, raw, f"the call does not parse: {error}"))
        content = re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL)
        return Message("assistant", content, tuple(calls))

    def render_dialogue(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> RenderedDialogue:
        """Assistant contents and their closing token count as sampled."""
        ids: list[int] = []
        sampled: list[bool] = []
        index: list[int] = []
        for number, message in enumerate(messages):
            one = self._one(message)
            head = 3 if message.role == "assistant" else len(one)
            ids += one
            sampled += [False] * head + [True] * (len(one) - head - 1) + [False] * (len(one) > head)
            index += [number] * len(one)
        return RenderedDialogue(ids, sampled, index)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids to text."""
        return self.tokenizer.decode(token_ids)

    def _one(self, message: Message) -> list[int]:
        calls = "".join(
            f"<tool_call>{json.dumps({'name': call.name, 'arguments': dict(call.arguments)})}</tool_call>"
            for call in message.tool_calls
        )
        body = self.tokenizer.encode(message.content + calls, special=message.role == "assistant")
        return [1, *self.tokenizer.encode(message.role), 3, *body, 2, 3]

    def _open(self) -> list[int]:
        return [1, 6, 3]

    def _visible(self, messages: Sequence[Message]) -> list[Message]:
        if not self._strips:
            return list(messages)
        last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
        return [
            Message(m.role, re.sub(r"<think>.*?</think>", "", m.content, flags=re.DOTALL), m.tool_calls)
            if m.role == "assistant" and i < last_user
            else m
            for i, m in enumerate(messages)
        ]


class EchoEnvironment:
    """Answers each turn with what was said; reward 1 and the end when it hears `data["secret"]`.

    Counts its own starts, steps and stops, so that tests can see that each world was used once and
    closed.
    """

    def __init__(self, *, fail_at: int | None = None) -> None:
        self._fail_at = fail_at
        self._secret = ""
        self.starts = 0
        self.steps = 0
        self.stops = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Begin with the task's prompt."""
        self.starts += 1
        self._secret = str(task.data.get("secret", ""))
        return task.prompt

    async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
        """Echo; raises RuntimeError at step number `fail_at`."""
        self.steps += 1
        if self.steps == self._fail_at:
            raise RuntimeError("the echo broke")
        heard = bool(self._secret) and self._secret in message.content
        echo = () if tool_results else (Message("user", message.content or "x"),)
        return StepResult(messages=echo, reward=float(heard), terminated=heard)

    async def close(self) -> None:
        """Count."""
        self.stops += 1
