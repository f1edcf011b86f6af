"""One GRPO step: TRL's GRPOTrainer and ours, generation and training apart, and peak memory.

    python bench/step.py            about 7 minutes on two quiet cores
    python bench/step.py --quick    tiny: shows that every arm works

8 prompts of 128 tokens, 8 answers each of exactly 64 new tokens (temperature 1, end-of-text kept from
ending one), one AdamW update over all of them, no reference model. TRL samples and trains under bf16
autocast, without gradient checkpointing. Ours samples in bf16 and trains in float32, as the recipe does.
Each arm has a fresh process per case, whose peak resident memory is taken at its end. The first step is
not counted.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from harness import CONSOLE, Arm, Report, interleave, open_report, our_arm, parse, parser, trl_arm
from models import find_all, model_folder, text_prompts

CASES = {
    "qwen3-5m full": ("qwen3-5m", 0),
    "smollm2 lora": ("smollm2", 16),
    "smollm2 full": ("smollm2", 0),
}
PAIRS = [("ours", "TRL")]
LR = 1e-5
MICROBATCH_TOKENS = 4096  # ours: of one forward and backward
BATCH_SIZE = 8  # TRL: completions of one forward and backward


def bench(report: Report, case: str, args: argparse.Namespace) -> None:
    """All steps of one case."""
    name, lora_rank = CASES[case]
    folder = model_folder(name, args.smollm2)
    num_prompts, group, length, new = (2, 4, 16, 8) if args.quick else (8, 8, 128, 64)
    steps = args.repeats + 1
    texts = text_prompts(folder, steps * num_prompts, length, 0)
    peer = trl_arm()
    arms = {"ours": our_arm("ours")} | ({} if peer is None else {"TRL": peer})
    parts: dict[str, dict[str, list[float]]] = {"step": {}, "generation": {}, "training": {}}

    def run(arm: str, number: int) -> float:
        # the uncounted step is the first of TRL's dataset, so that number n is the same n + 1 for both
        mine = texts[number * num_prompts : (number + 1) * num_prompts]
        if arm == "ours":
            taken = arms[arm].ask("step", prompts=mine, group_size=group, new_tokens=new)
        else:
            taken = arms[arm].ask("step")
        if number:
            for part, series in parts.items():
                series.setdefault(arm, []).append(taken[part])
        return taken["step"]

    def counted(arm: str, number: int) -> float:
        return run(arm, number + 1)

    try:
        _load_ours(arms["ours"], folder, lora_rank, length + new)
        if peer is not None:
            settings = {
                "group_size": group,
                "new_tokens": new,
                "lr": LR,
                "lora_rank": lora_rank,
                "bf16": True,
            }
            batch_size = min(BATCH_SIZE, num_prompts * group)
            peer.ask("load", model=str(folder), prompts=texts, steps=steps, batch_size=batch_size, **settings)
            report.versions |= peer.ask("versions")
        for arm in arms:
            run(arm, 0)
        interleave({arm: partial(counted, arm) for arm in arms}, args.repeats)
        for part, series in parts.items():
            report.add(f"{case} {part}", "s", series, PAIRS, better="less")
        peak = {arm: [it.peak_bytes() / 1e9] for arm, it in arms.items()}
        report.add(f"{case} peak memory", "GB", peak, PAIRS, better="less")
    finally:
        for arm in arms.values():
            arm.close()


def _load_ours(arm: Arm, folder: Path, lora_rank: int, context: int) -> None:
    arm.ask(
        "load",
        model=str(folder),
        dtype="bfloat16",
        module_dtype="float32",
        context=context,
        lora_rank=lora_rank,
    )
    arm.ask("make_learner", lr=LR, microbatch_tokens=MICROBATCH_TOKENS)


def main() -> None:
    made = parser("step", __doc__ or "")
    made.add_argument("--cases", default=",".join(CASES))
    made.add_argument("--smollm2", type=Path, default=None, help="the folder of SmolLM2-135M-Instruct")
    args = parse(made, cases="qwen3-5m full")
    report = open_report("step", args)
    find_all([CASES[case][0] for case in args.cases.split(",")], args.smollm2)
    for case in args.cases.split(","):
        CONSOLE.print(case)
        bench(report, case, args)
    report.finish()


if __name__ == "__main__":
    main()
