"""Milliseconds from the end of an optimizer step to the first token under the new weights.

    python bench/publish.py            about 2 minutes on two quiet cores
    python bench/publish.py --quick    tiny: shows that every arm works

Ours: the engine takes the float32 parameters that AdamW has just moved, then answers a new request of
128 prompt tokens with one token, which must carry the new version. vLLM, for context: its weight update
from a float32 state dict in the same process, then the same request.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import CONSOLE, Arm, Report, interleave, open_report, our_arm, parse, parser, vllm_arm
from models import NAMES, find_all, model_folder, prompts

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
PAIRS = [("ours", "vLLM eager")]
CONTEXT = 256


def bench(report: Report, name: str, dtype: str, args: argparse.Namespace) -> None:
    """One model in one precision of the engine."""
    folder = model_folder(name, args.smollm2)
    peer = vllm_arm("vLLM eager", kv_cache_gib=1)
    arms = {"ours": our_arm("ours")} | ({} if peer is None else {"vLLM eager": peer})
    asked = prompts(folder, args.repeats + 2, 16 if args.quick else 128, 0)

    def ours(number: int) -> float:
        return 1000 * arms["ours"].ask("publish", prompt=asked[number])

    def vllm(number: int) -> float:
        update = arms["vLLM eager"].ask("update", change=1e-4 * (number + 1))
        return 1000 * (update + arms["vLLM eager"].ask("first_token", prompt=asked[number]))

    try:
        _load(arms, folder, DTYPES[dtype])
        calls = {"ours": ours} | ({} if peer is None else {"vLLM eager": vllm})
        for call in calls.values():
            call(args.repeats)  # not counted: the optimizer makes its moments
            call(args.repeats + 1)
        report.add(f"{name} {dtype}", "ms", interleave(calls, args.repeats), PAIRS, better="less")
        if peer is not None:
            report.versions |= peer.ask("versions")
    finally:
        for arm in arms.values():
            arm.close()


def _load(arms: dict[str, Arm], folder: Path, dtype: str) -> None:
    for name, arm in arms.items():
        if name == "ours":
            arm.ask("load", model=str(folder), dtype=dtype, module_dtype="float32", context=CONTEXT)
        else:
            arm.ask("load", model=str(folder), dtype=dtype, eager=True, context=CONTEXT, prefix_caching=False)
            arm.ask("hold_weights", model=str(folder))


def main() -> None:
    made = parser("publish", __doc__ or "", repeats=5)
    made.add_argument("--models", default=",".join(NAMES))
    made.add_argument("--smollm2", type=Path, default=None, help="the folder of SmolLM2-135M-Instruct")
    made.add_argument("--dtypes", default=",".join(DTYPES))
    args = parse(made, models="qwen3-5m")
    report = open_report("publish", args)
    find_all(args.models.split(","), args.smollm2)
    for name in args.models.split(","):
        for dtype in args.dtypes.split(","):
            CONSOLE.print(f"{name}, {dtype}")
            bench(report, name, dtype, args)
    report.finish()


if __name__ == "__main__":
    main()
