"""Tools: a Python function becomes a tool; a toolbox answers the calls of an episode.

In: tool calls. Out: tool results for the model, the environment and rewards. Knows nothing of tokens.
"""

from uni_agent.tools.arguments import Argument, Arguments, BadArguments
from uni_agent.tools.code_executor import CodeExecutor
from uni_agent.tools.function import ExpectedFailure, FunctionTool, bad_arguments, cap_output, tool
from uni_agent.tools.toolbox import Toolbox

__all__ = [
    "Argument",
    "Arguments",
    "BadArguments",
    "CodeExecutor",
    "ExpectedFailure",
    "FunctionTool",
    "Toolbox",
    "bad_arguments",
    "cap_output",
    "tool",
]
