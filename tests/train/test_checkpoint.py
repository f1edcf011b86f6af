import json
import logging
import os

import pytest

from uni_agent.errors import CheckpointError, UsageError
from uni_agent.train import Checkpoints


def writer(content, names=("a.bin", "b.bin", "sub/c.bin"), fail_after=None):
    """Write some files like a learner; die after `fail_after` of them."""

    def write(path):
        for index, name in enumerate(names):
            if index == fail_after:
                raise KeyboardInterrupt
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(content)

    return write


def test_save_and_read_back(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.latest() is None
    checkpoints.save(3, writer("three"), {"seed": 7, "position": [1, 2]})
    found = checkpoints.latest()
    assert found.step == 3
    assert found.state == {"seed": 7, "position": [1, 2]}
    assert (found.learner / "sub/c.bin").read_text() == "three"


def test_c04_killed_at_each_file_while_writing(tmp_path):
    for k in range(3):
        checkpoints = Checkpoints(tmp_path / str(k), keep=1)
        checkpoints.save(2, writer("good"), {"step": 2})
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(4, writer("new", fail_after=k), {"step": 4})
        assert checkpoints.latest().step == 2
        assert checkpoints.latest().state == {"step": 2}
        checkpoints.save(4, writer("new"), {"step": 4})
        assert checkpoints.latest().step == 4


class Killed(BaseException):
    pass


def test_c04_killed_at_each_file_boundary_of_the_commit(tmp_path, monkeypatch):
    """Die at the k-th sync or rename, for every k, leaving everything behind as a kill would."""
    import shutil
    from pathlib import Path

    real_sync, real_rename, real_rmtree = os.fsync, Path.rename, shutil.rmtree
    finished = False
    for k in range(40):
        checkpoints = Checkpoints(tmp_path / str(k), keep=1)
        checkpoints.save(2, writer("good"), {"step": 2})
        count, dead = iter(range(1000)), []

        def tick(k=k, count=count, dead=dead):
            if dead or next(count) == k:
                dead.append(True)
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd, tick=tick: (tick(), real_sync(fd)))
            patch.setattr(Path, "rename", lambda a, b, tick=tick: (tick(), real_rename(a, b))[1])
            patch.setattr(shutil, "rmtree", lambda *a, tick=tick, **kw: (tick(), real_rmtree(*a, **kw)))
            try:
                checkpoints.save(4, writer("new"), {"step": 4})
                finished = True
            except Killed:
                pass
        found = Checkpoints(tmp_path / str(k)).latest()
        assert found.step in (2, 4)
        if finished:
            assert found.step == 4
            break
        assert (found.learner / "a.bin").read_text() == {2: "good", 4: "new"}[found.step]
        checkpoints.save(4, writer("again"), {})
        assert (checkpoints.latest().learner / "a.bin").read_text() == "again"
    assert finished
    assert k > 6


def test_c04_saving_the_same_step_again_never_loses_both(tmp_path, monkeypatch):
    from pathlib import Path

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(2, writer("first"), {})
    real_rename, count = Path.rename, iter(range(10))

    def rename(a, b):
        if next(count) == 1:  # the old one has been moved aside, the new one is not there yet
            raise Killed
        return real_rename(a, b)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Killed):
        checkpoints.save(2, writer("second"), {})
    monkeypatch.undo()
    assert (checkpoints.latest().learner / "a.bin").read_text() == "first"
    checkpoints.save(2, writer("third"), {})
    assert (checkpoints.latest().learner / "a.bin").read_text() == "third"


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest", "no_manifest"])
def test_c04_a_damaged_one_is_skipped_with_a_warning(tmp_path, caplog, damage):
    checkpoints = Checkpoints(tmp_path, keep=5)
    checkpoints.save(2, writer("good"), {})
    newest = checkpoints.save(4, writer("newest"), {})
    file = newest / "learner" / "sub" / "c.bin"
    manifest = newest / "manifest.json"
    {
        "truncate": lambda: file.write_text("new"),
        "flip": lambda: file.write_text("newesT"),
        "remove": file.unlink,
        "manifest": lambda: manifest.write_text(manifest.read_text()[:-20]),
        "no_manifest": manifest.unlink,
    }[damage]()
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest().step == 2
    assert "step_4" in caplog.text
    with pytest.raises(CheckpointError) as error:
        checkpoints.read(4)
    assert "\n" not in str(error.value)


def test_c04_nothing_complete_is_an_error_and_no_silent_restart(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(2, writer("x"), {})
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        checkpoints.latest()


def test_c05_latest_is_by_number(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=10)
    for step in (9, 99, 100, 10):
        checkpoints.save(step, writer(str(step)), {})
    (tmp_path / "step_tmp").write_text("a file")
    (tmp_path / "step_101").mkdir()
    (tmp_path / "step_0102").mkdir()
    assert checkpoints.latest().step == 100


def test_old_ones_go_and_the_best_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    better = []
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.9)):
        checkpoints.save(step, writer(str(step)), {})
        better.append(checkpoints.save_best(step, writer(str(step)), {}, score=score))
    assert better == [True, True, False, False]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "step_3", "step_4"]
    assert checkpoints.best().step == 2
    assert checkpoints.best().score == 0.9
    assert [p.name for p in (tmp_path / "best").iterdir()] == ["step_2"]


def test_state_that_is_not_json_leaves_nothing_behind(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, writer("x"), {})
    with pytest.raises(TypeError):
        checkpoints.save(2, writer("y"), {"bad": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    with pytest.raises(UsageError, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)


def test_a_manifest_of_another_step_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, writer("x"), {})
    path.rename(tmp_path / "step_7")
    with pytest.raises(CheckpointError, match="says step 1"):
        checkpoints.read(7)
    assert json.loads((tmp_path / "step_7/manifest.json").read_text())["step"] == 1


def test_c04_going_on_without_a_checkpoint_is_an_error_and_no_silent_restart(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="holds no finished checkpoint"):
        checkpoints.resumed()
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(1, writer("x", fail_after=1), {})
    with pytest.raises(CheckpointError, match="holds no finished checkpoint"):
        checkpoints.resumed()
    checkpoints.save(1, writer("x"), {})
    assert checkpoints.resumed().step == 1


def test_c04_a_broken_later_step_does_not_cost_the_one_just_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    (tmp_path / "step_9").mkdir()
    checkpoints.save(4, writer("x"), {})
    assert checkpoints.latest().step == 4


def test_c05_a_folder_of_another_naming_is_no_checkpoint(tmp_path):
    (tmp_path / "step_007").mkdir()
    assert Checkpoints(tmp_path).latest() is None


def test_of_two_best_ones_the_higher_score_counts(tmp_path):
    """As after a kill between the new one's commit and the old one's removal."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_best(1, writer("low"), {}, score=0.2)
    (tmp_path / "best/step_1").rename(tmp_path / "aside")
    checkpoints.save_best(2, writer("high"), {}, score=0.9)
    (tmp_path / "aside").rename(tmp_path / "best/step_1")
    assert checkpoints.best().step == 2
    assert not checkpoints.save_best(3, writer("less"), {}, score=0.5)
