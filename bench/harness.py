"""What the benches share: arms in their own processes, interleaving, rows, the machine, one JSON file.

An arm is one way of doing the work (ours or a peer's), in a process that stays up and is stopped
(SIGSTOP) while another one is measured, so that no busy loop of an idle arm takes its cores. Nothing
here imports torch.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import Console
from rich.table import Table

BENCH = Path(__file__).resolve().parent
PEERS = BENCH / ".peers"
RESULTS = BENCH / "results"
CONSOLE = Console(width=None if sys.stdout.isatty() else 120)

Better = Literal["more", "less"]


# --- arms ---


class ArmError(Exception):
    """An arm's process failed; the message names it, what went wrong and its log."""


class Arm:
    """A process that answers JSON lines. It runs only while it is asked something.

    `script` is started with `python` from the folder `bench/`; its stderr goes to `log`.
    """

    def __init__(self, name: str, python: Path, script: str, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        logs = PEERS / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{name.replace(' ', '-')}.log"
        with self.log.open("w") as stderr:
            self._process = subprocess.Popen(
                [str(python), script],
                cwd=BENCH,
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # its children are stopped with it
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - no other thread runs here
            )
        atexit.register(self.close)  # a stopped process would stay for ever

    def ask(self, op: str, **args: Any) -> Any:
        """Let the process run for one operation and return its answer. Raises ArmError."""
        stdin, stdout = self._pipes()
        self._signal(signal.SIGCONT)
        try:
            stdin.write(json.dumps({"op": op, "args": args}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise ArmError(f"{self.name} ended with exit status {code} during {op!r}; see {self.log}")
        self._signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise ArmError(f"{self.name} failed in {op!r}: {answer['error']}; see {self.log}")
        return answer["ok"]

    def peak_bytes(self) -> int:
        """The most memory that the process has had resident since it began (VmHWM)."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise ArmError(f"{self.name}: /proc/{self._process.pid}/status has no VmHWM")

    def close(self) -> None:
        """End the process."""
        stdin, _ = self._pipes()
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            stdin.close()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # it has ended; the next read says so


def _die_with_parent() -> None:
    """Have the kernel kill this process when the bench is killed: a stopped one would stay for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def our_arm(name: str) -> Arm:
    """An arm on this interpreter that runs `ours_worker.py`."""
    return Arm(name, Path(sys.executable), "ours_worker.py")


def transformers_arm() -> Arm:
    """`generate` of the transformers that this environment has, in its own process."""
    return Arm("transformers", Path(sys.executable), "peers/transformers_worker.py")


def vllm_arm(name: str, *, kv_cache_gib: int) -> Arm | None:
    """vLLM with the settings of `docs/performance.md`; None, with a line, where it is not installed."""
    python = _peer_python("vllm")
    if python is None:
        return None
    # vLLM's documentation asks for both; setup puts them there
    libraries = [PEERS / "vllm/lib/libtcmalloc_minimal.so.4", PEERS / "vllm/lib/libiomp5.so"]
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in process: no IPC, and weights can be handed over
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        # compiled code is kept from run to run
        "VLLM_CACHE_ROOT": str(PEERS / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(PEERS / "cache" / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
        "HF_HUB_OFFLINE": "1",
    }
    return Arm(name, python, "peers/vllm_worker.py", env)


def trl_arm() -> Arm | None:
    """TRL's GRPOTrainer; None, with a line, where it is not installed."""
    python = _peer_python("trl")
    if python is None:
        return None
    return Arm("TRL", python, "peers/trl_worker.py", {"HF_HUB_OFFLINE": "1"})


def _peer_python(peer: str) -> Path | None:
    python = PEERS / peer / "bin" / "python"
    if python.exists():
        return python
    CONSOLE.print(f"{peer} is left out: it is not installed; make it with: sh bench/peers/setup {peer}")
    return None


# --- measuring ---


def interleave(arms: Mapping[str, Callable[[int], float]], repeats: int) -> dict[str, list[float]]:
    """Call each arm with 0, 1, .. in turn, ours and the peers' alternating; every repeat begins elsewhere."""
    names = list(arms)
    values: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        start = repeat % len(names)
        for name in names[start:] + names[:start]:
            values[name].append(arms[name](repeat))
    return values


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: medians, and all repeats behind them.

    `ratio` is above 1 where ours is better, whichever way the unit counts; None without a peer.
    """

    case: str
    unit: str
    ours_arm: str
    peer_arm: str | None
    ours: float
    peer: float | None
    ratio: float | None
    ours_repeats: list[float]
    peer_repeats: list[float]


@dataclass(slots=True)
class Report:
    """Collects rows, then prints them and writes the JSON file."""

    name: str
    file: Path
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list[Row])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    load_before: tuple[float, float, float] = field(default_factory=os.getloadavg)
    began: float = field(default_factory=time.perf_counter)

    def add(
        self,
        case: str,
        unit: str,
        values: Mapping[str, Sequence[float]],
        pairs: Sequence[tuple[str, str]],
        *,
        better: Better = "more",
    ) -> None:
        """Add a row for each pair (our arm, peer's arm); one that was not measured is left out.

        Our arms of which no peer was measured have a row of their own.
        """
        alone = {ours for ours, _ in pairs if ours in values}
        for ours, peer in pairs:
            if ours in values and peer in values:
                alone.discard(ours)
                self._row(_compared(case, unit, values, (ours, peer), better))
        for ours in sorted(alone):
            series = list(values[ours])
            mine = statistics.median(series)
            self._row(Row(case, unit, ours, None, mine, None, None, series, []))

    def _row(self, row: Row) -> None:
        self.rows.append(row)
        against = "no peer" if row.ratio is None else f"{row.peer_arm} {row.peer:,.4g}, ratio {row.ratio:.2f}"
        CONSOLE.print(f"  {row.case}: {row.ours_arm} {row.ours:,.4g} {row.unit}, {against}")

    def finish(self) -> None:
        """Print the table and write the file."""
        seconds = time.perf_counter() - self.began
        table = Table(title=f"{self.name} ({seconds:.0f} s)")
        for column in ("case", "unit", "ours", "", "peer", "", "ratio", "spread"):
            table.add_column(column, justify="left" if column in ("case", "unit") else "right")
        for row in self.rows:
            peer = "" if row.peer is None else f"{row.peer:,.4g}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            ours = f"{row.ours:,.4g}"
            cells = (row.ours_arm, ours, row.peer_arm or "", peer, ratio, _spread(row))
            table.add_row(row.case, row.unit, *cells)
        CONSOLE.print(table)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self._content(seconds), indent=1) + "\n")
        CONSOLE.print(f"written: {self.file}")

    def _content(self, seconds: float) -> dict[str, Any]:
        return {
            "bench": self.name,
            "command": " ".join(sys.argv),
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(seconds, 1),
            "settings": self.settings,
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
            "versions": our_versions() | self.versions,
            "machine": machine(),
            "load_before": self.load_before,
            "load_after": os.getloadavg(),
        }


def _compared(
    case: str, unit: str, values: Mapping[str, Sequence[float]], pair: tuple[str, str], better: Better
) -> Row:
    series = [list(values[name]) for name in pair]
    mine, theirs = (statistics.median(one) for one in series)
    ratio = mine / theirs if better == "more" else theirs / mine
    return Row(case, unit, *pair, mine, theirs, ratio, *series)


def _spread(row: Row) -> str:
    """How far the repeats lie apart, (max - min) / median, the worse of the two arms."""
    series = [values for values in (row.ours_repeats, row.peer_repeats) if values]
    worst = max((max(values) - min(values)) / statistics.median(values) for values in series)
    return f"±{worst / 2:.0%}"


def our_versions() -> dict[str, str]:
    """Of Python and of the packages in this environment."""
    names = {"torch": "torch", "transformers": "transformers", "uni_agent": "uni-agent-rl"}
    return {"python": platform.python_version()} | {name: version(dist) for name, dist in names.items()}


def machine() -> dict[str, Any]:
    """CPU, cores that this process may use, memory, kernel."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = int(Path("/proc/meminfo").read_text().splitlines()[0].split()[1]) * 1024
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
    }


# --- the command line ---


def parser(name: str, doc: str, *, repeats: int = 3) -> argparse.ArgumentParser:
    """The options that all benches share."""
    made = argparse.ArgumentParser(
        prog=f"bench/{name}.py", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, default=None, help=f"default bench/results/{name}.json")
    made.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that it works, measures nothing"
    )
    made.add_argument(
        "--repeats", type=int, default=repeats, help=f"of each case and arm (default {repeats})"
    )
    return made


def parse(made: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parse the command line; with --quick, `quick` are the defaults."""
    if "--quick" in sys.argv[1:]:
        made.set_defaults(**quick)
    return made.parse_args()


def open_report(name: str, args: argparse.Namespace) -> Report:
    """The report that a bench's options ask for; a quick run's figures go to bench/.peers/quick."""
    file = args.json or (PEERS / "quick" if args.quick else RESULTS) / f"{name}.json"
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    if args.repeats < 1:
        raise SystemExit(f"--repeats is {args.repeats}; expected 1 or more (3 for figures to publish)")
    return Report(
        name, file.resolve(), {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}
    )
