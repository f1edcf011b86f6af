"""Messages to token ids and back, for one chat format per model. Imports neither torch nor renderers."""

from uni_agent.render.chatml import ChatMLRenderer
from uni_agent.render.load import RENDERER_FILE, load_renderer, renderer_names
from uni_agent.render.messages import (
    dialogue_from_json,
    message_from_json,
    message_to_json,
    tool_from_json,
    tool_to_json,
    truncate,
)
from uni_agent.render.package import PackageRenderer
from uni_agent.render.template import TemplateRenderer

__all__ = [
    "RENDERER_FILE",
    "ChatMLRenderer",
    "PackageRenderer",
    "TemplateRenderer",
    "dialogue_from_json",
    "load_renderer",
    "message_from_json",
    "message_to_json",
    "renderer_names",
    "tool_from_json",
    "tool_to_json",
    "truncate",
]
