"""Episodes come back from disk exactly as they were; a file is whole or absent."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uni_agent.errors import RunError, UnknownNameError, UsageError
from uni_agent.rollout import EpisodeRunner, EpisodeStore, segment
from uni_agent.rollout.record import dump_episode, dump_task, load_task, pack, unpack
from uni_agent.types import (
    Episode,
    Group,
    Message,
    Sampling,
    Task,
    Timing,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

ODD = "lone \ud83d, NUL \x00, VT \x0b, private \ue000, line \u2028, 'quotes\"", "</script> é 😀"


def same(one: Any, other: Any) -> bool:
    """Deep equality that looks into arrays, types and NaN."""
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def full_episode(number: int = 0, text: str = ODD[0]) -> Episode:
    """An episode that uses every field."""
    call = ToolCall("c1", "f", {"a": [1, {"b": None}], "s": text, "t": (1, 2)}, raw=text, error=text)
    turns = (
        Turn(
            observation=(0, 2),
            sampled=(2, 4),
            observed=(Message("system", text), Message("user", "q", name="")),
            message=Message("assistant", text, (call,), reasoning=""),
            finish="stop",
            sampling=Sampling(7, 0.5, 0.9, 3, (text,), (1, 2), 2**62, ((5, -0.1), (6, 1e9))),
            tool_results=(
                ToolResult(
                    "c1", "f", text, "abnormal", "malformed", {"x": float("nan"), "y": b"\x00\xff"}, 0.1
                ),
            ),
            reward=0.1 + 0.2,
            timing=Timing(0.1, 1e-9, 3.0),
        ),
        Turn(
            (4, 5),
            (5, 5),
            (Message("tool", "x", tool_call_id="c1"),),
            Message("assistant"),
            "length",
            Sampling(),
        ),
    )
    sampled = np.array([False, False, True, True, False])
    logprobs = np.float32([0, 0, -0.1, -1e-30, 0])
    first = Trajectory(
        "main", np.int32([1, 2, 3, 2**31 - 1, 4]), sampled, logprobs, np.int32([-1, -1, 3, 4, -1]), turns
    )
    empty = np.zeros(0, np.int32)
    second = Trajectory("judge", empty, np.zeros(0, bool), np.zeros(0, np.float32), empty.copy(), ())
    return Episode(
        id=f"0/{text}/{number}",
        task=Task(text, (Message("user", text),), {"tests": (1, "x"), 3: {"$float": "no tag"}, "big": 2**80}),
        trajectories=(first, second),
        end="reward_error",
        rewards={"r": 1 / 3, text: -0.0},
        reward=2 / 3,
        reward_reason=text,
        artifacts={f"out/{text}": bytes(range(256)), "empty": b""},
        error=f"ValueError: {text}\nframes",
        metrics={"rollout/turns": 2, "x": float("inf")},
        seed=2**63 - 1,
        trainable=False,
    )


def plain_episode(number: int, end: Any = "done") -> Episode:
    return Episode(f"0/t/{number}", Task("t", (Message("user", "q"),)), (), end, reward=float(number))


def test_an_episode_comes_back_exactly(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    episodes = [full_episode(0), full_episode(1, ODD[1]), plain_episode(2)]
    store.write(3, [Group("g\ud83d", tuple(episodes[:2])), episodes[2]])
    fresh = EpisodeStore(tmp_path)
    assert same(fresh.read(3), episodes)
    assert same(fresh.read_groups(3), [Group("g\ud83d", tuple(episodes[:2]))])
    for episode in episodes:
        assert same(fresh.get(episode.id), episode)


def test_o02_the_file_is_valid_for_other_readers(tmp_path: Path) -> None:
    path = EpisodeStore(tmp_path).write(0, [full_episode()])
    (row,) = pq.read_table(path).to_pylist()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    for column in ("record", "task"):
        assert row[column].isascii()
        json.loads(row[column], parse_constant=refuse)
    assert row["num_turns"] == 2
    assert row["num_sampled"] == 2
    assert row["token_ids"] == [[1, 2, 3, 2**31 - 1, 4], []]
    assert "\\ud83d" in row["id"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(json_values)
def test_any_data_survives_packing(value: Any) -> None:
    text = json.dumps(pack(value), allow_nan=False)
    assert same(unpack(json.loads(text)), value)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text(), json_values), st.text(st.characters()))
def test_any_task_survives(data: dict[str, Any], text: str) -> None:
    task = Task(text, (Message("user", text, reasoning=text),), data)
    assert same(load_task(dump_task(task)), task)


def test_arrays_and_strange_objects_do_not_cost_the_record() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert same(unpack(json.loads(json.dumps(pack({"a": array, "n": np.int64(3)})))), {"a": array, "n": 3})
    assert unpack(pack({"o": ValueError("x")})) == {"o": "ValueError('x')"}
    assert same(unpack(pack({"$float": "nan"})), {"$float": "nan"})
    pair = {"\ud83d\ude00": "x\ud83d\ude00"}  # two surrogates, not one character
    assert same(unpack(json.loads(json.dumps(pack(pair)))), pair)


def test_a_failed_write_leaves_the_old_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EpisodeStore(tmp_path)
    store.write(1, [plain_episode(0)])
    whole = segment.write_segment

    def half(path: Path, rows: Any) -> None:
        whole(path, rows)
        path.write_bytes(path.read_bytes()[:100])
        raise OSError("the disk is full")

    monkeypatch.setattr("uni_agent.rollout.store.write_segment", half)
    for step in (1, 2):
        with pytest.raises(OSError, match="full"):
            store.write(step, [plain_episode(5)])
    assert store.steps() == [1]
    assert store.read(1) == [plain_episode(0)]
    assert sorted(p.name for p in store.folder.iterdir()) == ["index.sqlite", "train-000001.parquet"]


def test_a_leftover_of_a_killed_writer_is_never_read(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    store.write(1, [plain_episode(0)])
    (store.folder / ".train-000002.parquet.99.tmp").write_bytes(b"PAR1 half")
    assert store.steps() == [1]
    assert len(store.find()) == 1
    store.write(2, [plain_episode(1)])
    assert not list(store.folder.glob(".*.tmp"))


@pytest.mark.parametrize("damage", ["missing", "garbage", "old schema"])
def test_the_index_is_made_again(tmp_path: Path, damage: str) -> None:
    store = EpisodeStore(tmp_path)
    store.write(1, [plain_episode(0), plain_episode(1, "timeout")])
    before = store.find()
    path = store.folder / "index.sqlite"
    path.unlink()
    if damage == "garbage":
        path.write_bytes(b"not a database at all" * 500)
    if damage == "old schema":
        with sqlite3.connect(path) as index:
            index.execute("CREATE TABLE episodes (other TEXT)")
        index.close()
    assert store.find() == before
    assert [row.end for row in before] == ["done", "timeout"]
    assert store.get("0/t/1").reward == 1.0


def test_the_index_follows_the_segments(tmp_path: Path) -> None:
    writer, reader = EpisodeStore(tmp_path), EpisodeStore(tmp_path)
    writer.write(1, [plain_episode(0)])
    assert len(reader.find()) == 1
    writer.write(1, [plain_episode(1), plain_episode(2)])  # a resumed run writes the step again
    writer.write(10, [plain_episode(3)])
    writer.write(1, [plain_episode(7)], split="eval")
    assert [row.id for row in reader.find(split="train")] == ["0/t/1", "0/t/2", "0/t/3"]
    assert [row.id for row in reader.find(step=1, split="eval")] == ["0/t/7"]
    assert [row.id for row in reader.find(limit=2)] == ["0/t/1", "0/t/2"]
    assert reader.find(end="timeout") == []
    assert (reader.steps(), reader.steps(split="eval")) == ([1, 10], [1])
    (writer.folder / "train-000010.parquet").unlink()
    with pytest.raises(UnknownNameError, match="did you mean '0/t/"):
        reader.get("0/t/3")


def test_what_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    assert store.find() == []
    with pytest.raises(UsageError, match="there are none"):
        store.read(0)
    store.write(4, [plain_episode(0)])
    with pytest.raises(UsageError, match=r"no train episodes of step 5 in .*1 steps, 4 to 4"):
        store.read(5)
    with pytest.raises(UsageError, match="split"):
        store.write(1, [], split="../x")


def test_a_damaged_segment_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = EpisodeStore(tmp_path)
    store.write(1, [plain_episode(0)])
    path = store.write(2, [plain_episode(1)])
    path.write_bytes(path.read_bytes()[:-20])
    assert [row.id for row in store.find()] == ["0/t/0"]
    assert "train-000002.parquet cannot be read" in caplog.text
    with pytest.raises(RunError, match="train-000002"):
        store.read(2)


def test_an_empty_step_and_many_rows(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    store.write(0, [])
    assert store.read(0) == []
    episodes = [plain_episode(number) for number in range(600)]
    store.write(1, episodes)
    assert store.get("0/t/599") == episodes[599]
    assert store.read(1) == episodes


async def test_played_episodes_come_back(
    tmp_path: Path, make_runner: Callable[..., EpisodeRunner], task: Task
) -> None:
    episode = await make_runner().run(task, episode_id="0/t/0", seed=1)
    store = EpisodeStore(tmp_path)
    store.write(0, [episode])
    assert same(store.get("0/t/0"), episode)
    assert "\n" not in dump_episode(episode)
