"""Tokens per second of plain generation: transformers, vLLM on CPU (eager and compiled), and ours.

    python bench/engine.py                      all models and batches; about 15 minutes on two quiet cores
    python bench/engine.py --models qwen3-5m    one model
    python bench/engine.py --quick              tiny: shows that every arm works

128 prompt and 128 new tokens, greedy, the end-of-text token ignored, all requests at once, prefill
included. Each repeat has prompts of its own, the same for every arm. "ready" is from the model's files
to the first token in a fresh process, its top-level imports not counted; our kernels were compiled
before, vLLM's code where its cache holds it. float32 is reported, not aimed at: without --all it is
measured on the 5M and SmolLM2, at batch 1 and 8, without vLLM compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    CONSOLE,
    Arm,
    Report,
    interleave,
    open_report,
    our_arm,
    parse,
    parser,
    transformers_arm,
    vllm_arm,
)
from models import NAMES, find_all, model_folder, prompts

PAIRS = [
    ("ours plain", "transformers"),
    ("ours", "transformers"),
    ("ours", "vLLM eager"),
    ("ours", "vLLM compiled"),
]
BATCHES = (1, 8, 64)
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def start(names: list[str]) -> dict[str, Arm]:
    """The arms that were picked and are installed."""
    arms: dict[str, Arm | None] = {}
    for name in names:
        if name == "transformers":
            arms[name] = transformers_arm()
        elif name.startswith("vLLM"):
            arms[name] = vllm_arm(name, kv_cache_gib=1)
        else:
            arms[name] = our_arm(name)
    return {name: arm for name, arm in arms.items() if arm is not None}


def compile_kernels(dtypes: list[str]) -> None:
    """Have our kernels compiled and cached, in a process that is gone before anything is measured."""
    arm = our_arm("ours compiling")
    for dtype in dtypes:
        arm.ask("load", model=str(model_folder("qwen3-5m", None)), dtype=DTYPES[dtype], context=64)
    arm.close()


def load(name: str, arm: Arm, *, folder: Path, dtype: str, context: int) -> float:
    """Load a model into an arm; seconds until it was ready."""
    model: dict[str, Any] = {"model": str(folder), "dtype": dtype}
    if name == "transformers":
        return arm.ask("load", **model)
    if name.startswith("vLLM"):
        return arm.ask("load", **model, eager=name == "vLLM eager", context=context, prefix_caching=False)
    return arm.ask("load", **model, context=context, native=False if name == "ours plain" else None)


def measure(
    report: Report, case: str, arms: Mapping[str, Arm], *, folder: Path, batch: int, new: int
) -> None:
    """Add the rows of one batch size."""
    repeats = report.settings["repeats"]
    asked = [prompts(folder, batch, new, seed) for seed in range(repeats + 1)]

    def run(arm: Arm, number: int) -> float:
        return batch * new / arm.ask("generate", prompts=asked[number], new_tokens=new)

    for arm in arms.values():  # not counted: shapes seen for the first time
        arm.ask("generate", prompts=asked[repeats], new_tokens=8)
    calls = {name: partial(run, arm) for name, arm in arms.items()}
    report.add(case, "tokens/s", interleave(calls, repeats), PAIRS)


def bench(report: Report, name: str, dtype: str, args: argparse.Namespace) -> None:
    """All batches of one model in one precision."""
    folder = model_folder(name, args.smollm2)
    new = 16 if args.quick else 128
    names, batches = args.arms.split(","), [int(part) for part in args.cases.split(",")]
    if dtype == "fp32" and not args.all:
        names = [arm for arm in names if arm != "vLLM compiled"]
        batches = [batch for batch in batches if batch < 64]
    arms = start(names)
    try:
        ready = {
            arm: [load(arm, it, folder=folder, dtype=DTYPES[dtype], context=2 * new)]
            for arm, it in arms.items()
        }
        report.add(f"{name} {dtype} ready", "s", ready, PAIRS, better="less")
        for batch in batches:
            measure(report, f"{name} {dtype} batch {batch}", arms, folder=folder, batch=batch, new=new)
        if "vLLM eager" in arms:
            report.versions |= arms["vLLM eager"].ask("versions")
    finally:
        for arm in arms.values():
            arm.close()


def main() -> None:
    made = parser("engine", __doc__ or "")
    made.add_argument("--models", default=",".join(NAMES))
    made.add_argument("--smollm2", type=Path, default=None, help="the folder of SmolLM2-135M-Instruct")
    made.add_argument("--cases", default=",".join(map(str, BATCHES)), help="batch sizes")
    made.add_argument("--dtypes", default=",".join(DTYPES))
    made.add_argument("--arms", default="transformers,vLLM eager,vLLM compiled,ours plain,ours")
    made.add_argument("--all", action="store_true", help="float32 whole: see above")
    args = parse(made, models="qwen3-5m", cases="1,8", dtypes="bf16")
    report = open_report("engine", args)
    find_all(args.models.split(","), args.smollm2)
    if "ours" in args.arms.split(","):
        compile_kernels(args.dtypes.split(","))
    for name in args.models.split(","):
        for dtype in args.dtypes.split(","):
            if dtype == "fp32" and name == "qwen3-100m" and not args.all:
                CONSOLE.print("qwen3-100m in float32 is left out; --all measures it")
                continue
            CONSOLE.print(f"{name}, {dtype}")
            bench(report, name, dtype, args)
    report.finish()


if __name__ == "__main__":
    main()
