"""`uni-agent doctor`: what is installed, what the machine offers, what is missing and how to get it."""

from __future__ import annotations

import asyncio
import json as json_format
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

DISTRIBUTION = "uni-agent-rl"
MIN_FREE_BYTES = 1 << 30
MIN_MEMORY_BYTES = 2 << 30
NEEDED_EXTRA = "train"

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(slots=True)
class Report:
    """What was found. `missing` holds needed things, each with the way to get it."""

    machine: dict[str, str] = field(default_factory=dict[str, str])
    packages: dict[str, dict[str, str | None]] = field(default_factory=dict[str, dict[str, str | None]])
    sandbox: dict[str, str | int] = field(default_factory=dict[str, str | int])
    missing: list[str] = field(default_factory=list[str])
    optional: list[str] = field(default_factory=list[str])


def doctor(*, json: Annotated[bool, Parameter(negative=(), help="Print one JSON object.")] = False) -> int:
    """Say what is installed, what this machine offers, and what is missing. Exit code 3 if it must be had."""
    report = Report()
    _look_at_machine(report)
    _look_at_packages(report)
    _look_at_sandbox(report)
    if json:
        fields = ("machine", "packages", "sandbox", "missing", "optional")
        print(json_format.dumps({name: getattr(report, name) for name in fields}))
    else:
        _show(report)
    return 3 if report.missing else 0


def _look_at_machine(report: Report) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(Path.cwd()).free
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    report.machine.update(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_version()} in {sys.prefix}",
        cores=str(cores),
        memory=f"{memory / 2**30:.1f} GiB",
        disk=f"{free / 2**30:.1f} GiB free in {Path.cwd()}",
        gpu=_gpu(),
    )
    if free < MIN_FREE_BYTES:
        report.missing.append(f"disk: at least 1 GiB free in {Path.cwd()}; remove files, or run elsewhere")
    if memory < MIN_MEMORY_BYTES:
        report.optional.append("memory: below 2 GiB training will be very slow or be killed")


def _gpu() -> str:
    """Ask the driver, not torch: importing torch takes seconds and may be missing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none found (no nvidia-smi); runs use the CPU"
    asked = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return "; ".join(line.strip() for line in found.splitlines()) or "none"


def _look_at_packages(report: Report) -> None:
    """Compare what is installed with what our own distribution asks for, extra by extra."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
        report.packages["uni-agent"] = {DISTRIBUTION: metadata.version(DISTRIBUTION)}
    except metadata.PackageNotFoundError:
        report.missing.append(f"{DISTRIBUTION} itself: pip install -e . in the project's folder")
        return
    for requirement in requirements:
        name = _REQUIREMENT.match(requirement)
        extra = _EXTRA.search(requirement)
        if name is not None:
            group = report.packages.setdefault(extra[1] if extra else "core", {})
            group[name[1]] = _version(name[1])
    for extra, packages in report.packages.items():
        absent = [name for name, version in packages.items() if version is None]
        if not absent:
            continue
        target = DISTRIBUTION if extra == "core" else f"'{DISTRIBUTION}[{extra}]'"
        needed = extra in ("core", NEEDED_EXTRA)
        (report.missing if needed else report.optional).append(f"{', '.join(absent)}: pip install {target}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _look_at_sandbox(report: Report) -> None:
    from uni_agent.sandbox import probe

    found = asyncio.run(probe())
    report.sandbox.update(level=found.level, reason=found.reason, advice=found.advice)
    if found.level == 0:
        report.missing.append(f"a working sandbox: {found.reason}; {found.advice}")


def _show(report: Report) -> None:
    print("machine")
    for name, value in report.machine.items():
        print(f"  {name:<10} {value}")
    print("packages")
    for extra, packages in report.packages.items():
        shown = ", ".join(f"{name} {version or 'MISSING'}" for name, version in packages.items())
        print(f"  {extra:<10} {shown}")
    if report.sandbox:
        print("sandbox")
        for name, value in report.sandbox.items():
            print(f"  {name:<10} {value}")
    for heading, lines in (("optional, not here", report.optional), ("MISSING", report.missing)):
        if lines:
            print(heading)
        for line in lines:
            print(f"  {line}")
    if not report.missing:
        print("ready")
