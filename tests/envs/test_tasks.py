"""Task sets and task files: order, splits, resuming, and one clear line for each mistake."""

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uni_agent.envs import TaskSet, load_tasks
from uni_agent.envs.code_debug import CodeDebugEnv
from uni_agent.envs.tasks import row_field
from uni_agent.errors import TaskFileError, UnknownNameError, UsageError
from uni_agent.types import Message, Task


def make_tasks(num: int) -> list[Task]:
    return [Task(f"t{i}", (Message("user", f"do {i}"),)) for i in range(num)]


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def row(task_id: str, **extra: object) -> str:
    return json.dumps({"id": task_id, "prompt": "hello", **extra})


def ids(tasks: TaskSet) -> list[str]:
    return [task.id for task in tasks]


# --- sets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [6, 8, 11, 16, 19])
def test_c01_a_resumed_cycle_goes_on_where_it_stopped(start: int) -> None:
    tasks = TaskSet(make_tasks(8))
    whole = [task.id for task in itertools.islice(tasks.cycle(seed=3), 24)]
    resumed = [task.id for task in itertools.islice(tasks.cycle(seed=3, start=start), 24 - start)]
    assert len(resumed) == 24 - start
    assert resumed == whole[start:]
    assert sorted(whole[8:16]) == sorted(ids(tasks))
    assert len({tuple(whole[:8]), tuple(whole[8:16]), tuple(whole[16:])}) == 3


def test_cycle_follows_its_seed() -> None:
    tasks = TaskSet(make_tasks(20))
    first, again, other = (
        [task.id for task in itertools.islice(tasks.cycle(seed), 20)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_split_by_hash_is_stable_when_tasks_are_added() -> None:
    small, large = TaskSet(make_tasks(300)), TaskSet(make_tasks(400))
    test = set(ids(small.split("test")))
    train = set(ids(small.split("train")))
    assert test | train == set(ids(small))
    assert not test & train
    assert 10 <= len(test) <= 60
    assert test == set(ids(large.split("test"))) & set(ids(small))
    assert len(small.split("test", test_share=0.5)) > 100


def test_n02_a_set_says_how_many_it_has_and_is_never_empty() -> None:
    tasks = TaskSet(make_tasks(3))
    assert len(tasks) == 3
    assert len(tasks.first(4)) == 3
    with pytest.raises(UsageError, match="at least one task"):
        TaskSet([])
    with pytest.raises(UsageError, match="split 'test' holds none of the 1 tasks"):
        TaskSet(make_tasks(1)).split("test", test_share=0.0)
    with pytest.raises(UsageError, match="asked for 0 tasks"):
        tasks.first(0)


def test_lookup_by_id_names_the_nearest() -> None:
    tasks = TaskSet([Task("clamp-1", ()), Task("sum-1", ())])
    assert tasks["sum-1"].id == "sum-1"
    assert "sum-1" in tasks
    with pytest.raises(UnknownNameError, match="did you mean 'clamp-1'"):
        tasks["clmp-1"]
    with pytest.raises(UsageError, match="two tasks have the id 't0'"):
        TaskSet([*make_tasks(1), *make_tasks(1)])


def test_tasks_draws_without_repeats_from_a_split() -> None:
    tasks = TaskSet(make_tasks(50), {f"t{i}": "dev" if i < 10 else "main" for i in range(50)})
    drawn = tasks.tasks("dev", 4, seed=1)
    assert len(set(ids(drawn))) == 4
    assert set(ids(drawn)) <= {f"t{i}" for i in range(10)}
    assert ids(drawn) == ids(tasks.tasks("dev", 4, seed=1)) != ids(tasks.tasks("dev", 4, seed=2))
    with pytest.raises(UsageError, match="unknown split 'dv'; did you mean 'dev'"):
        tasks.split("dv")


# --- files ----------------------------------------------------------------------------------------


def test_jsonl_loads_with_split_seed_and_limit(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "t.jsonl",
        *(row(f"a{i}", split="dev" if i % 2 else "main", answer=i) for i in range(10)),
        "",
    )
    assert ids(load_tasks(path)) == [f"a{i}" for i in range(10)]
    dev = load_tasks(path, split="dev", seed=4, limit=3)
    assert len(dev) == 3
    assert all(int(task_id[1:]) % 2 for task_id in ids(dev))
    assert ids(dev) == ids(load_tasks(path, split="dev", seed=4, limit=3))
    assert dev[ids(dev)[0]].data == {"split": "dev", "answer": int(ids(dev)[0][1:])}


def test_parquet_holds_the_same_tasks(tmp_path: Path) -> None:
    rows = [
        {"id": "p1", "code": "def f(): return 1", "tests": ["assert f() == 2"], "note": None},
        {
            "id": "p2",
            "code": "def g(): return 1",
            "tests": ["assert g() == 3", "assert g() != 1"],
            "note": "x",
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    lines = [json.dumps({key: value for key, value in r.items() if value is not None}) for r in rows]
    write_lines(tmp_path / "t.jsonl", *lines)
    convert = CodeDebugEnv.task_from_json
    from_parquet = load_tasks(tmp_path / "t.parquet", convert=convert)
    assert list(from_parquet) == list(load_tasks(tmp_path / "t.jsonl", convert=convert))
    assert "note" not in from_parquet["p1"].data


def test_prompt_may_be_messages(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path = write_lines(tmp_path / "t.jsonl", json.dumps({"id": "m", "prompt": prompt}))
    assert load_tasks(path)["m"].prompt == (Message("system", "be brief"), Message("user", "hi"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": "b", "prompt": "x"', "line 2: not JSON"),
        ("[1, 2]", "line 2: is list [1, 2]; expected a JSON object"),
        ("null", "line 2: is NoneType None; expected a JSON object"),
        (
            '{"id": "b", "promt": "x"}',
            "line 2: missing key 'prompt' (it has 'id', 'promt'); is 'promt' meant",
        ),
        ("{}", "line 2: missing key 'id' (it is empty)"),
        ('{"id": 7, "prompt": "x"}', "line 2: 'id' is int 7; expected text"),
        ('{"id": "a", "prompt": "x"}', "line 2: the id 'a' is already used in line 1"),
        ('{"id": "b", "prompt": []}', "line 2: 'prompt' is an empty list"),
        ('{"id": "b", "prompt": ["x"]}', "line 2: 'prompt[0]' is str 'x'; expected a message object"),
        ('{"id": "b", "prompt": [{"role": "boss"}]}', "line 2: 'prompt[0]': message role 'boss' is unknown"),
        (
            '{"id": "b", "prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "only text (str) can be rendered",
        ),
        (
            '{"id": "b", "prompt": "x", "split": "dev"}',
            "line 2: some rows have a key 'split' and some have none",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", row("a"), line)
    with pytest.raises(TaskFileError) as error:
        load_tasks(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"no\.jsonl does not exist"):
        load_tasks(tmp_path / "no.jsonl")
    with pytest.raises(TaskFileError, match="is a folder"):
        load_tasks(tmp_path)
    with pytest.raises(TaskFileError, match="holds no tasks"):
        load_tasks(write_lines(tmp_path / "empty.jsonl", "", "  "))
    with pytest.raises(TaskFileError, match=r"ends in '\.csv'"):
        load_tasks(write_lines(tmp_path / "t.csv", "a,b"))
    (tmp_path / "latin.jsonl").write_bytes(row("a").encode() + b'\n{"id": "\xe9"}\n')
    with pytest.raises(TaskFileError, match="line 2: byte 8 is not UTF-8"):
        load_tasks(tmp_path / "latin.jsonl")
    with pytest.raises(TaskFileError, match="not readable as Parquet"):
        load_tasks(write_lines(tmp_path / "t.parquet", "no parquet"))
    path = write_lines(tmp_path / "t.jsonl", row("a", split="dev"))
    with pytest.raises(TaskFileError, match=r"t\.jsonl: unknown split 'train'"):
        load_tasks(path, split="train")


def test_a_file_with_a_byte_order_mark_loads(tmp_path: Path) -> None:
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + row("a").encode())
    assert ids(load_tasks(tmp_path / "bom.jsonl")) == ["a"]


def test_what_a_users_converter_raises_names_the_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", row("a", n="x"))
    with pytest.raises(TaskFileError, match=r"t\.jsonl, line 1: missing key 'm'"):
        load_tasks(path, convert=lambda r: Task(r["m"], ()))
    with pytest.raises(TaskFileError, match=r"t\.jsonl, line 1: invalid literal for int"):
        load_tasks(path, convert=lambda r: Task(str(int(r["n"])), ()))


def test_true_is_not_a_number() -> None:
    with pytest.raises(TaskFileError, match="'n' is bool True; expected a whole number"):
        row_field({"n": True}, "n", int)
    assert row_field({"n": True}, "n", bool) is True


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[" * 200_000, "line 2: cannot be read: maximum recursion depth"),
        ('{"id": "b", "prompt": "q", "n": ' + "1" * 5000 + "}", "line 2: cannot be read: Exceeds the limit"),
    ],
    ids=["deep", "digits"],
)
def test_a_line_beyond_pythons_limits_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "prompt": "q"}\n' + line + "\n")
    with pytest.raises(TaskFileError, match=says):
        load_tasks(path)


def test_parquet_cells_that_python_cannot_hold_are_one_line(tmp_path: Path) -> None:
    two = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["id", "id"])
    late = pa.table({"id": ["a"], "at": pa.array([1], pa.timestamp("ns"))})
    offsets, text = pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")
    latin = pa.table({"id": pa.Array.from_buffers(pa.string(), 1, [None, offsets, text])})
    for number, table in enumerate((two, late, latin)):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(table, path)
        with pytest.raises(TaskFileError, match="is not readable as Parquet: ") as caught:
            load_tasks(path)
        assert "\n" not in str(caught.value)
