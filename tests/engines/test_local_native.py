"""The kernels against torch in float64, and how the loader builds, caches, fails and is shared."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from uni_agent.engines.local import native
from uni_agent.engines.local.native import load_native, require_native
from uni_agent.errors import ModelError

pytestmark = pytest.mark.timeout(600)  # the first run on a machine compiles the kernels

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def kernels() -> Any:
    native = load_native()
    if native is None:
        pytest.skip("no native kernels on this machine")
    return native


def near(got: Any, want: Any) -> None:
    """Within one rounding of the exact value (two for what is rounded on the way)."""
    relative = 2.0**-7 if got.dtype == torch.bfloat16 else 2e-6
    gap = (got.double() - want).abs()
    assert bool((gap <= relative * want.abs() + 1e-6).all()), gap.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 48, 1536])
def test_gated(kernels, dtype, width):
    x = (torch.randn(37, 2 * width) * 5).to(dtype)
    gate, up = x.double().chunk(2, -1)
    near(kernels.gated(x, False), F.silu(gate) * up)
    near(kernels.gated(x, True), F.gelu(gate, approximate="tanh") * up)


def test_gated_at_the_ends_of_the_range(kernels):
    gate = torch.tensor(
        [-torch.inf, -1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, torch.inf, torch.nan]
    )
    for gelu in (False, True):
        got = kernels.gated(torch.cat((gate, torch.ones(11)))[None], gelu)[0]
        want = F.gelu(gate.double(), approximate="tanh") if gelu else F.silu(gate.double())
        assert got[1:-2].tolist() == pytest.approx(want[1:-2].tolist(), abs=1e-30, rel=1e-5)
        assert got[-2] == torch.inf
        assert got[-1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("width", [5, 32, 577])
def test_add_norm(kernels, dtype, post, width):
    x, added = torch.randn(70, width).to(dtype), (3 * torch.randn(70, width)).to(dtype)
    weight, after = torch.randn(width), torch.randn(width)
    want_added = F.rms_norm(added.double(), (width,), after.double(), EPS) if post else added.double()
    summed = x.double() + want_added.to(dtype).double()
    got = kernels.add_norm(x, added, after if post else None, weight, EPS)
    near(x, summed)
    near(got, F.rms_norm(x.double(), (width,), weight.double(), EPS))
    before = x.clone()
    near(kernels.add_norm(x, None, None, weight, EPS), F.rms_norm(x.double(), (width,), weight.double(), EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 12, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("norms", [False, True])
def test_norm_rope(kernels, dtype, dim, norms):
    heads, kv_heads, rows = 3, 1, 19
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(50, dim // 2).repeat(1, 2) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 50, (rows,))
    weights = (torch.randn(dim), torch.randn(dim)) if norms else (None, None)
    wanted = []
    for head, x in enumerate(qkv.double().view(rows, -1, dim).unbind(1)):
        weight = weights[0] if head < heads else weights[1]
        turned = x
        if weight is not None and head < heads + kv_heads:
            turned = F.rms_norm(x, (dim,), weight.double(), EPS).to(dtype).double()
        if head < heads + kv_heads:
            half = torch.cat((-turned[:, dim // 2 :], turned[:, : dim // 2]), 1)
            turned = turned * cos[positions].double() + half * sin[positions].double()
        wanted.append(turned)
    kernels.norm_rope(qkv, *weights, cos, sin, positions, heads, kv_heads, EPS)
    want = torch.stack(wanted, 1)
    got = qkv.view(rows, -1, dim)
    scale = want.abs().amax(-1, keepdim=True)  # a rotation may cancel: its error is that of the longer side
    assert bool(((got.double() - want).abs() <= (2.0**-6 if dtype == torch.bfloat16 else 2e-6) * scale).all())


def test_norm_rope_refuses_a_position_outside_its_table(kernels):
    table = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="position 4 is outside the 4"):
        kernels.norm_rope(torch.zeros(1, 24), None, None, table, table, torch.tensor([4]), 1, 1, EPS)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_their_neighbours_or_threads(kernels, threads):
    x = torch.randn(300, 2 * 640).bfloat16()
    weight = torch.randn(1280)
    torch.set_num_threads(threads)
    try:
        gated, normed = kernels.gated(x, False), kernels.add_norm(x.clone(), x, None, weight, EPS)
    finally:
        torch.set_num_threads(1)
    for i in (0, 150, 299):
        row = x[i : i + 1]
        assert torch.equal(kernels.gated(row, False), gated[i : i + 1])
        assert torch.equal(kernels.add_norm(row.clone(), row, None, weight, EPS), normed[i : i + 1])


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: Any) -> Path:
    """A loader over a source that compiles at once, with a cache of its own."""
    sources, cache = tmp_path / "native", tmp_path / "cache"
    sources.mkdir()
    (sources / "module.cpp").write_text(TINY)
    monkeypatch.setattr(native, "_SOURCES", sources)
    monkeypatch.setenv("UNI_AGENT_CACHE", str(cache))
    native._load.cache_clear()
    yield tmp_path
    native._load.cache_clear()


TINY = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "uni_agent_native", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_uni_agent_native() { return PyModule_Create(&module); }
"""


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "native").glob("*.so"))


def needs_compiler() -> None:
    try:
        native._compiler()
    except native._BuildError:
        pytest.skip("no C++ compiler on this machine")


def test_compiles_once_says_so_and_follows_the_sources(tiny, caplog):
    needs_compiler()
    assert load_native() is not None
    assert "compiling the local engine's native kernels, once" in caplog.text
    first = libraries(tiny)
    assert len(first) == 1
    caplog.clear()
    native._load.cache_clear()
    assert load_native() is not None
    assert caplog.text == ""
    (tiny / "native" / "module.cpp").write_text(TINY + "// changed\n")
    native._load.cache_clear()
    assert load_native() is not None
    assert len(libraries(tiny)) == 2
    assert not [p for p in (tiny / "cache" / "native").iterdir() if p.is_dir()]  # no scratch is left


def test_a_failed_build_is_said_once_and_not_tried_again(tiny, caplog, monkeypatch):
    needs_compiler()
    (tiny / "native" / "module.cpp").write_text("#error no kernels today\n")
    with caplog.at_level(logging.WARNING):
        assert load_native() is None
        assert load_native() is None
    assert caplog.text.count("runs without native kernels") == 1
    assert "no kernels today" in caplog.text
    native._load.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    with pytest.raises(ModelError, match=r"compiling failed before; .*\.log says why"):
        require_native()


def test_without_a_compiler_there_are_no_kernels(tiny, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_native() is None
    with pytest.raises(ModelError, match="no C\\+\\+ compiler \\(no-such-compiler\\)"):
        require_native()


def test_a_broken_cache_file_is_named(tiny):
    needs_compiler()
    folder = tiny / "cache" / "native"
    folder.mkdir(parents=True)
    key = native._key(native._compiler())
    (folder / f"uni_agent_native-{key}.so").write_bytes(b"not a library")
    with pytest.raises(ModelError, match=r"does not load: .*delete it to compile again"):
        require_native()


def test_a_cache_that_cannot_be_written_is_named(tiny, monkeypatch):
    needs_compiler()
    (tiny / "file").write_text("")
    monkeypatch.setenv("UNI_AGENT_CACHE", str(tiny / "file"))
    with pytest.raises(ModelError, match="cannot write"):
        require_native()


def test_processes_that_start_together_compile_once(tiny):
    needs_compiler()
    real = native._compiler()
    wrapper, calls = tiny / "c++", tiny / "calls"
    wrapper.write_text(f'#!/bin/sh\ncase "$1" in -c) echo x >> {calls}; sleep 0.3;; esac\nexec {real} "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    script = (
        "from pathlib import Path\n"
        "from uni_agent.engines.local import native\n"
        f"native._SOURCES = Path({str(tiny / 'native')!r})\n"
        "assert native.load_native() is not None\n"
    )
    environment = os.environ | {"CXX": str(wrapper), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert calls.read_text().count("x") == 1
    assert len(libraries(tiny)) == 1
