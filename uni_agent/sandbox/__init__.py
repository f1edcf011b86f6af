"""Runs untrusted code and says what happened to it.

In: programs and limits. Out: a SandboxResult, or SandboxError where the sandbox itself failed. Grading by
tests is here too, because tools and rewards share it. Knows nothing of agents, episodes or rewards.
"""

from uni_agent.sandbox.grade import TestReport, check_tests, run_tests
from uni_agent.sandbox.local import LocalSandbox, LocalSandboxes, local_sandbox
from uni_agent.sandbox.pool import ForkServer
from uni_agent.sandbox.probe import SandboxProbe, probe

__all__ = [
    "ForkServer",
    "LocalSandbox",
    "LocalSandboxes",
    "SandboxProbe",
    "TestReport",
    "check_tests",
    "local_sandbox",
    "probe",
    "run_tests",
]
