"""The demo: three commands of `uni-agent`, and what they found side by side.

    python examples/code_repair/demo.py [--seconds 185] [--root runs] [--no-control]

Reinforcement learning (`uni-agent train grpo @ demo.toml`) runs on one core. Beside it, on another, a
control: the same base, trained further by `uni-agent train sft` on fresh episodes of the expert for the same
wall time, then measured by `uni-agent eval` on the same held-out tasks. Each is a plain run directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "demo.toml"
BASE = HERE / "base"
UNI_AGENT = (sys.executable, "-m", "uni_agent")
ONE_CORE = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def fresh_folder(root: Path) -> Path:
    """Name a run directory that is not there yet."""
    number = 1
    while (root / f"demo-{number}").exists() or (root / f"demo-{number}-control").exists():
        number += 1
    return root / f"demo-{number}"


def control(work: Path, seconds: float) -> None:
    """Write expert episodes, train on them for `seconds`, and measure; output goes to a log."""
    work.mkdir(parents=True)
    data = work / "expert.jsonl"
    train = f"train sft --model {BASE} --data {data} --epochs 1000 --max-seconds {seconds} --run.save-every 0"
    optimizer = "--optimizer.lr 3e-4"
    measure = f"eval --model {work}/sft/model --tasks held_out --num-tasks 300 --sampling.max-tokens 48"
    commands = (
        (sys.executable, str(HERE / "expert.py"), str(data), "--num", "4000", "--seed", "2"),
        (*UNI_AGENT, *f"{train} {optimizer} --run.root {work} --run.name sft".split()),
        (*UNI_AGENT, *f"{measure} --world.concurrency 128 --runs {work} --run eval".split()),
    )
    with (work / "control.log").open("w") as log:
        for command in commands:
            subprocess.run(command, stdout=log, stderr=log, env=ONE_CORE, check=True)


def share(summary: dict[str, Any], key: str) -> str:
    """A share with its 95% interval."""
    low, high = summary[f"{key}_interval"]
    return f"{summary[key]:6.1%}   [{low:.1%}, {high:.1%}]"


def report(run: Path, summary: dict[str, Any]) -> None:
    """Say what was learned and what to do next."""
    rows = [
        ("solved within five attempts, before", "held_out_before"),
        ("solved within five attempts, after RL", "held_out_after"),
        ("  control: SFT for the same time", "control_after"),
        ("solved at the first attempt, before", "first_attempt_before"),
        ("solved at the first attempt, after RL", "first_attempt_after"),
        ("families never seen, within five, before", "family_held_out_before"),
        ("families never seen, within five, after RL", "family_held_out_after"),
    ]
    print(f"\n300 held-out tasks, functions never trained on; {summary['seconds']:.0f} s in all")
    for label, key in rows:
        if key in summary:
            print(f"  {label:44} {share(summary, key)}")
    where = os.path.relpath(run)
    print(f"\nEverything is in {where}. Next:")
    print(f"  .venv/bin/uni-agent show {shlex.quote(where)}")
    print(f"  .venv/bin/uni-agent eval --model {shlex.quote(where)}/model --tasks held_out --num-attempts 4")
    print("  .venv/bin/uni-agent init my_tasks    # then train on tasks of your own")


def main() -> int:
    """Run training and control, merge their summaries."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=185.0, help="of training; in all about 50 more")
    parser.add_argument("--root", type=Path, default=Path("runs"))
    parser.add_argument("--no-control", action="store_true", help="leave the SFT control out")
    args = parser.parse_args()
    began = time.perf_counter()
    run = fresh_folder(args.root)
    command = [
        *UNI_AGENT,
        "train",
        "grpo",
        "@",
        str(CONFIG),
        f"--model={BASE}",
        f"--max-seconds={args.seconds}",
    ]
    command += [f"--run.root={args.root}", f"--run.name={run.name}"]
    print(f"$ uni-agent train grpo @ {os.path.relpath(CONFIG)}")
    with ThreadPoolExecutor(1) as pool:
        beside: Future[None] | None = None
        if not args.no_control:
            beside = pool.submit(control, args.root / f"{run.name}-control", args.seconds)
            print("  beside it: SFT from the same base for the same time, as a control")
        code = subprocess.run(command, env=ONE_CORE, check=False).returncode
        if code:
            return code
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
        if beside is not None:
            beside.result()
            found = json.loads((args.root / f"{run.name}-control" / "eval" / "summary.json").read_text())
            for key, name in (("control_after", "success"), ("control_first_attempt_after", "first_turn")):
                summary[key] = found[name]
                summary[f"{key}_interval"] = [found[f"{name}_low"], found[f"{name}_high"]]
    summary["seconds"] = time.perf_counter() - began
    (run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report(run, summary)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: the control failed (exit {error.returncode}): {shlex.join(map(str, error.cmd))}")
