"""Exit 1 unless the run in the given folder learned: reward over the steps, and held-out success."""

import json
import sys
from pathlib import Path

from uni_agent.track import read_metrics

MIN_GAIN = 0.02

run_dir = Path(sys.argv[1])
rewards = [
    row["rollout/reward_mean"]
    for row in read_metrics(run_dir).rows
    if row.get("rollout/reward_mean") is not None
]
if len(rewards) < 4:
    sys.exit(f"{run_dir}: only {len(rewards)} steps have a reward; expected at least 4")
quarter = max(1, len(rewards) // 4)
first, last = (sum(part) / quarter for part in (rewards[:quarter], rewards[-quarter:]))
summary = json.loads((run_dir / "summary.json").read_text())
before, after = summary["held_out_before"], summary["held_out_after"]
print(f"reward {first:.3f} -> {last:.3f}, held-out {before} -> {after}")
if last < first + MIN_GAIN:
    sys.exit(f"{run_dir}: the reward did not rise by {MIN_GAIN}")
if after <= before:
    sys.exit(f"{run_dir}: held-out success did not rise")
