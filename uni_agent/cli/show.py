"""`uni-agent show`: what a run left behind, read from its folder."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from uni_agent.errors import UnknownNameError, UsageError
from uni_agent.rollout.store import EpisodeStore
from uni_agent.track import clean_text, read_metrics
from uni_agent.track.live import format_value, table_lines
from uni_agent.types import Episode, Message, Turn

RUNS = Path("runs")
METRIC_STEPS = 5
TEXT_LIMIT = 10_000


def show(
    run: Annotated[str, Parameter(help="A run directory, or its name in runs/.")],
    episode: Annotated[str | None, Parameter(help="Print this episode's transcript.")] = None,
    /,
    *,
    metrics: Annotated[bool, Parameter(negative=(), help="Print the metrics of the last steps.")] = False,
    split: Annotated[str | None, Parameter(help="Only this split: train, or an evaluation's.")] = None,
    end: Annotated[str | None, Parameter(help="Only episodes that ended like this.")] = None,
    step: Annotated[int | None, Parameter(help="Only this step.")] = None,
    limit: Annotated[int, Parameter(help="List at most the last so many; 0 lists all.")] = 30,
    json: Annotated[bool, Parameter(negative=(), help="Print JSON.")] = False,
) -> int:
    """Show a run's episodes, one transcript, or its metrics. Example: uni-agent show my-run --end timeout"""
    path = find_run(run)
    store = EpisodeStore(path)
    if metrics:
        _show_metrics(path, json)
    elif episode is not None:
        found = store.get(episode, split=split)
        lines = [json_format.dumps(episode_as_json(found), default=str)] if json else transcript(found)
        print("\n".join(lines))
    else:
        rows = store.find(step=step, split=split, end=end)
        shown = rows[-limit:] if limit else rows
        if json:
            print(json_format.dumps([asdict(row) for row in shown]))
            return 0
        print("\n".join(table_lines([_row(asdict(row)) for row in shown])))
        print(f"{len(shown)} of {len(rows)} episodes; `uni-agent show {run} ID` prints one")
    return 0


def find_run(run: str) -> Path:
    """The run directory of that path, or of that name in `runs/`. Raises UnknownNameError, UsageError."""
    for path in (Path(run), RUNS / run):
        if (path / "config.toml").is_file():
            return path
    if Path(run).is_dir():
        raise UsageError(f"{run} is not a run directory (it has no config.toml)")
    folder = Path(run).parent if len(Path(run).parts) > 1 else RUNS
    known = [
        str(found.parent.relative_to(RUNS) if folder == RUNS else found.parent)
        for found in folder.glob("*/config.toml")
    ]
    raise UnknownNameError("run", run, known)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    row["tokens"] = row.pop("num_sampled")
    row["turns"] = row.pop("num_turns")
    keys = ["id", "split", "step", "turns", "tokens", "end", "reward"]
    return {key: row[key] for key in keys} | {"error": clean_text(row["error"] or "", 60)}


def _show_metrics(path: Path, as_json: bool) -> None:
    rows, damaged = read_metrics(path)
    if as_json:
        print(json_format.dumps({"rows": rows, "damaged_lines": damaged}))
        return
    last = rows[-METRIC_STEPS:]
    keys = dict.fromkeys(key for row in last for key in row if key != "step")
    table = [{"metric": key} | {f"step {row['step']}": row.get(key) for row in last} for key in keys]
    print("\n".join(table_lines(table)) or f"{path} has no metrics yet")
    if damaged:
        print(f"{damaged} damaged lines were skipped")


def transcript(episode: Episode) -> Iterator[str]:
    """An episode as lines for a reader: every message, call, result and reward, and how it ended."""
    yield f"episode {episode.id}, task {episode.task.id}, seed {episode.seed}"
    for trajectory in episode.trajectories:
        tokens, sampled = len(trajectory.token_ids), int(trajectory.sampled.sum())
        yield f"\n=== agent {trajectory.agent}: {tokens} tokens, {sampled} sampled"
        for number, turn in enumerate(trajectory.turns, 1):
            yield from _turn_lines(number, turn)
    yield f"\n=== end: {episode.end}{' (truncated)' if episode.truncated else ''}"
    reason = f" ({episode.reward_reason})" if episode.reward_reason else ""
    yield f"reward {format_value(episode.reward)}{reason}"
    for name, value in episode.rewards.items():
        yield f"  {name} {format_value(value)}"
    if episode.error:
        yield f"error {clean_text(episode.error, TEXT_LIMIT)}"
    for name, content in episode.artifacts.items():
        yield f"artifact {clean_text(name)} ({len(content)} bytes)"
    if not episode.trainable:
        yield "not trainable: its tokens are not the engine's own"


def _turn_lines(number: int, turn: Turn) -> Iterator[str]:
    for message in turn.observed:
        # a tool's answer was printed where the call was made
        if message.role != "tool":
            yield from _message_lines(message)
    observed = turn.observation[1] - turn.observation[0]
    sampled = turn.sampled[1] - turn.sampled[0]
    yield (
        f"\n--- turn {number}: {observed} tokens seen, {sampled} sampled, {turn.finish}, "
        f"{turn.timing.generate_s:.2f} s, reward {format_value(turn.reward)}"
    )
    yield from _message_lines(turn.message)
    for result in turn.tool_results:
        kind = "" if result.failure == "none" else f", {result.failure} failure"
        kind += f", {result.error_kind}" if result.error_kind else ""
        yield f"[{clean_text(result.name)} answered in {result.wall_s:.2f} s{kind}]"
        yield _indented(result.content)


def _message_lines(message: Message) -> Iterator[str]:
    yield f"[{message.role}]"
    if message.reasoning:
        yield _indented(f"(thinks) {message.reasoning}")
    if message.content:
        yield _indented(message.content)
    for call in message.tool_calls:
        if call.error:
            yield _indented(f"call that does not parse ({call.error}): {call.raw}")
            continue
        arguments = "\n".join(f"{name} = {value}" for name, value in call.arguments.items())
        yield _indented(f"calls {call.name}\n{arguments}" if arguments else f"calls {call.name}")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in clean_text(text, TEXT_LIMIT).split("\n"))


def episode_as_json(episode: Episode) -> dict[str, Any]:
    """An episode without its token arrays, for programs."""
    return {
        "id": episode.id,
        "task": episode.task.id,
        "end": episode.end,
        "truncated": episode.truncated,
        "reward": episode.reward,
        "reward_reason": episode.reward_reason,
        "rewards": dict(episode.rewards),
        "metrics": dict(episode.metrics),
        "error": episode.error,
        "trainable": episode.trainable,
        "trajectories": [
            {
                "agent": trajectory.agent,
                "tokens": len(trajectory.token_ids),
                "sampled_tokens": int(trajectory.sampled.sum()),
                "turns": [_turn_as_json(turn) for turn in trajectory.turns],
            }
            for trajectory in episode.trajectories
        ],
    }


def _turn_as_json(turn: Turn) -> dict[str, Any]:
    fields = asdict(turn)
    for result in fields["tool_results"]:
        result.pop("data")  # whatever a tool keeps for environment and rewards; need not be JSON
    return fields
