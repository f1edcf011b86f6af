"""An episode becomes named scores."""

from uni_agent.rewards.code_tests import code_test_pass_rate, code_test_progress
from uni_agent.rewards.functions import reward_from_function, weighted

__all__ = ["code_test_pass_rate", "code_test_progress", "reward_from_function", "weighted"]
