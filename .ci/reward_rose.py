"""Exit 1 unless the reward of the run in the given folder rose, from its first steps to its last."""

import json
import sys
from pathlib import Path

from uni_agent.track import read_metrics

run_dir = Path(sys.argv[1])
rewards = [
    row["rollout/reward_mean"]
    for row in read_metrics(run_dir).rows
    if row.get("rollout/reward_mean") is not None
]
if len(rewards) < 8:
    sys.exit(f"{run_dir}: only {len(rewards)} steps have a reward; expected at least 8")
third = len(rewards) // 3
first, last = (sum(part) / third for part in (rewards[:third], rewards[-third:]))
summary = json.loads((run_dir / "summary.json").read_text())
print(
    f"{len(rewards)} steps, reward {first:.3f} -> {last:.3f}, held-out {summary['held_out_before']:.3f} -> "
    f"{summary['held_out_after']:.3f}, control {summary['control_after']:.3f}"
)
if last <= first:
    sys.exit(f"{run_dir}: the reward did not rise")
