"""One round of agentic rollout: new weights, then 64 multi-turn episodes. vLLM on CPU and ours.

    python bench/agentic.py            about 5 minutes on two quiet cores
    python bench/agentic.py --quick    tiny: shows that every arm works

8 groups of 8 episodes, a 512-token prompt that a group shares, 4 turns of 48 new tokens (temperature 1,
end-of-text ignored) with a 32-token observation between turns, bf16. Each round begins with other
weights: a float32 state dict that the engine has to take. vLLM runs with prefix caching, its engine
stepped by hand so that each episode asks for its next turn as soon as one ends, as ours does.

Before anything is measured, each arm must show that an update replaces the embedding and the head:
with the vocabulary rolled by one, the greedy answer to a prompt rolled by one is the old answer rolled
by one. (With tied embeddings vLLM's `reload_weights` alone keeps the old head.)
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from harness import CONSOLE, Arm, Report, interleave, open_report, our_arm, parse, parser, vllm_arm
from models import NAMES, find_all, model_folder, prompts

PAIRS = [("ours", "vLLM eager"), ("ours", "vLLM compiled")]


def start(folder: Path, context: int, names: list[str]) -> dict[str, Arm]:
    """The arms that were picked and are installed, loaded."""
    arms: dict[str, Arm] = {}
    for name in names:
        arm = our_arm(name) if name.startswith("ours") else vllm_arm(name, kv_cache_gib=2)
        if arm is None:
            continue
        arms[name] = arm
        model: dict[str, Any] = {"model": str(folder), "dtype": "bfloat16", "context": context}
        if name.startswith("ours"):
            arm.ask("load", **model, module_dtype="float32", native=False if name == "ours plain" else None)
        else:
            arm.ask("load", **model, eager=name == "vLLM eager", prefix_caching=True)
        arm.ask("hold_weights", model=str(folder))
    return arms


def check_update(name: str, arm: Arm, folder: Path) -> None:
    """See that an update replaces embedding and head. Raises SystemExit."""
    vocab = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    prompt = prompts(folder, 1, 32, 7)[0]
    arm.ask("update", change=0.0)
    before = arm.ask("greedy", prompt=prompt, new_tokens=4)
    arm.ask("update", change=0.0, roll=1)
    after = arm.ask("greedy", prompt=[(token + 1) % vocab for token in prompt], new_tokens=4)
    if after != [(token + 1) % vocab for token in before]:
        raise SystemExit(
            f"{name}: an update of the weights did not reach embedding and head: {before}, {after}"
        )
    arm.ask("update", change=0.0)


def bench(report: Report, name: str, args: argparse.Namespace) -> None:
    """Rounds of one model."""
    folder = model_folder(name, args.smollm2)
    groups, size, prompt_tokens, turns, new, seen = (
        (2, 2, 64, 2, 8, 8) if args.quick else (8, 8, 512, 4, 48, 32)
    )
    context = prompt_tokens + turns * new + (turns - 1) * seen
    arms = start(folder, context, args.arms.split(","))
    parts: dict[str, dict[str, list[float]]] = {"update": {}, "round": {}}

    def run(arm: Arm, name: str, number: int) -> float:
        asked = [prompt for prompt in prompts(folder, groups, prompt_tokens, number) for _ in range(size)]
        observed = [prompts(folder, turns - 1, seen, 1000 * (number + 1) + i) for i in range(len(asked))]
        update = arm.ask("update", change=1e-4 * (number + 1))
        played = arm.ask("episodes", prompts=asked, observations=observed, new_tokens=new)
        if played["tokens"] != len(asked) * turns * new:
            raise SystemExit(f"{name} sampled {played['tokens']} tokens, expected {len(asked) * turns * new}")
        parts["update"].setdefault(name, []).append(update)
        parts["round"].setdefault(name, []).append(update + played["seconds"])
        return played["tokens"] / (update + played["seconds"])

    try:
        for arm_name, arm in arms.items():
            check_update(arm_name, arm, folder)
            warm = prompts(folder, 1, prompt_tokens, args.repeats) * size  # not counted: one group, one turn
            arm.ask("episodes", prompts=warm, observations=[[]] * size, new_tokens=new)
        calls = {arm_name: partial(run, arm, arm_name) for arm_name, arm in arms.items()}
        report.add(f"{name} bf16 round", "tokens/s", interleave(calls, args.repeats), PAIRS)
        report.add(f"{name} bf16 round", "s", parts["round"], PAIRS, better="less")
        report.add(f"{name} bf16 weight update", "s", parts["update"], PAIRS, better="less")
        for arm_name, arm in arms.items():
            if arm_name.startswith("vLLM"):
                report.versions |= arm.ask("versions")
    finally:
        for arm in arms.values():
            arm.close()


def main() -> None:
    made = parser("agentic", __doc__ or "")
    made.add_argument("--models", default="qwen3-5m,smollm2", help="of " + ", ".join(NAMES))
    made.add_argument("--smollm2", type=Path, default=None, help="the folder of SmolLM2-135M-Instruct")
    made.add_argument("--arms", default="vLLM eager,vLLM compiled,ours")
    args = parse(made, models="qwen3-5m")
    report = open_report("agentic", args)
    find_all(args.models.split(","), args.smollm2)
    for name in args.models.split(","):
        CONSOLE.print(name)
        bench(report, name, args)
    report.finish()


if __name__ == "__main__":
    main()
