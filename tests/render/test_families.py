"""A family whose stop token is the next role's marker (GLM-4.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from uni_agent.protocols import Renderer
from uni_agent.render import load_renderer
from uni_agent.types import Message, ToolCall, ToolSpec

TOOL = ToolSpec("f", "does f", {"type": "object", "properties": {"a": {"type": "string"}}})


@pytest.fixture(scope="module")
def glm(glm_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("glm")
    return load_renderer(folder, name="glm-4.5", tokenizer=glm_tokenizer)


def test_t12_stop_id_that_is_the_next_role_marker_stands_once(glm: Renderer, glm_tokenizer: Any) -> None:
    observation, user = glm_tokenizer.convert_tokens_to_ids(["<|observation|>", "<|user|>"])
    assert {observation, user} <= set(glm.stop_token_ids)
    prompt = glm.render([Message("user", "q")], [TOOL])
    call = "<think></think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    sampled = [*glm_tokenizer.encode(call, add_special_tokens=False), observation]
    said = glm.parse(sampled, [TOOL])
    assert [(c.name, dict(c.arguments), c.error) for c in said.tool_calls] == [("f", {"a": "1"}, None)]
    added = glm.extend(prompt, sampled, [Message("tool", "r", name="f")], [TOOL])
    assert added is not None
    assert added[0] != observation
    assert (sampled + added).count(observation) == 1


def test_t12_dialogue_trains_the_marker_as_the_stop(glm: Renderer, glm_tokenizer: Any) -> None:
    observation = glm_tokenizer.convert_tokens_to_ids("<|observation|>")
    messages = [
        Message("user", "q"),
        Message("assistant", "c", (ToolCall("call_0", "f", {"a": "1"}),)),
        Message("tool", "r", name="f"),
        Message("assistant", "done"),
    ]
    dialogue = glm.render_dialogue(messages, [TOOL])
    at = dialogue.token_ids.index(observation)
    assert dialogue.token_ids.count(observation) == 1
    assert dialogue.sampled[at]
    assert dialogue.message_index[at] == 1


def test_a_call_that_does_not_parse_says_so(glm: Renderer, glm_tokenizer: Any) -> None:
    broken = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</tool_call>"
    [call] = glm.parse(glm_tokenizer.encode(broken, add_special_tokens=False), [TOOL]).tool_calls
    assert call.name == "f"
    assert call.error == "the call does not parse (malformed structure)"
    assert call.raw == broken
