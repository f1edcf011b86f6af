"""The house's rules: who may import whom, how long things may be, what an import may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "uni_agent"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

LAYERS: dict[int, set[str]] = {
    0: {"types", "errors"},
    1: {"protocols", "config", "testing"},
    2: {"render", "models", "sandbox", "tools", "rewards", "algos", "track"},
    3: {"engines", "envs", "agents"},
    4: {"rollout", "train"},
    5: {"dist", "view"},
    6: {"recipes", "api", "cli", "__init__", "__main__"},
}
LAYER_OF = {room: layer for layer, rooms in LAYERS.items() for room in rooms}

# beside the general rule (everything in lower layers), what a room may or may not import
ALSO = {
    "types": {"errors"},
    "testing": {"protocols"},
    "tools": {"sandbox"},
    "rewards": {"sandbox"},
    "recipes": {"api"},
    "cli": {"recipes", "api"},
    "__init__": {"api"},
    "__main__": {"cli"},
}
ONLY = {
    "rollout": {"render", "models", "algos", "track"} | LAYERS[0] | LAYERS[1],
    "train": {"render", "models", "algos", "track"} | LAYERS[0] | LAYERS[1],
    "view": {"types", "errors", "track"},
}
# the fakes of testing.py are for tests
NEVER = {"testing"}

MAY_IMPORT_TORCH = ("models", "engines.local", "algos.losses", "algos.kl", "train", "recipes")
TORCH_FREE_ROOMS = [
    "types",
    "errors",
    "protocols",
    "config",
    "testing",
    "render",
    "sandbox",
    "tools",
    "rewards",
    "algos",
    "track",
    "engines",
    "envs",
    "agents",
    "rollout",
    "cli",
]


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST, modules: set[str], here: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """All imports of our own modules, in functions too, as (line, module); submodules are resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "uni_agent":
                    yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = here.split(".") if is_package else here.split(".")[:-1]
                kept = parents[: len(parents) - node.level + 1]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            if base.split(".")[0] != "uni_agent":
                continue
            for name in node.names:
                full = f"{base}.{name.name}"
                yield node.lineno, full if full in modules else base


def allowed(room: str) -> set[str]:
    if room in ONLY:
        return ONLY[room] - NEVER
    below = {other for other, layer in LAYER_OF.items() if layer < LAYER_OF[room]}
    return (below - NEVER) | ALSO.get(room, set())


def test_every_room_has_a_layer_and_stands_in_agents_md() -> None:
    rooms = {room_of(module_of(path)) for path in sources()}
    assert rooms <= set(LAYER_OF), f"rooms without a layer: {rooms - set(LAYER_OF)}"
    table = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    missing = [room for room in sorted(rooms) if not room.startswith("__") and f"`{room}" not in table]
    assert not missing, f"AGENTS.md does not name {missing}"


def test_imports_go_down_the_layers() -> None:
    modules = {module_of(path) for path in sources()}
    wrong: list[str] = []
    for path in sources():
        here = module_of(path)
        room = room_of(here)
        for line, target in imports(tree_of(path), modules, here, path.name == "__init__.py"):
            other = room_of(target)
            if other not in allowed(room) | {room, "__init__"}:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} must not import {other}")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_import_cycle() -> None:
    modules = {module_of(path) for path in sources()}
    graph = {
        module_of(path): {
            target
            for _, target in imports(tree_of(path), modules, module_of(path), path.name == "__init__.py")
            if target in modules and target != module_of(path)
        }
        for path in sources()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join([*trail[trail.index(module) :], module])}"
        if module in done:
            return
        for target in sorted(graph[module]):
            visit(target, (*trail, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_files_and_functions_are_short_enough() -> None:
    wrong: list[str] = []
    for path in [*sources(), *sorted((ROOT / "examples").rglob("*.py"))]:
        name = path.relative_to(ROOT)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(f"{name} has {lines} lines; at most {MAX_FILE_LINES}")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(
                        f"{name}:{node.lineno}: {node.name} has {length} lines; at most {MAX_FUNCTION_LINES}"
                    )
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    wrong = [str(path.relative_to(ROOT)) for path in sources() if not ast.get_docstring(tree_of(path))]
    assert not wrong, f"no docstring: {wrong}"
    unwritten = [
        str(p.relative_to(ROOT)) for p in sources() if "to come" in (ast.get_docstring(tree_of(p)) or "")
    ]
    assert not unwritten, f"placeholder docstring: {unwritten}"


def test_only_the_command_line_prints() -> None:
    wrong: list[str] = []
    for path in sources():
        if room_of(module_of(path)) == "cli":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, f"print outside cli: {wrong}"


def test_torch_is_imported_at_module_level_only_where_tensors_live() -> None:
    wrong: list[str] = []
    for path in sources():
        name = module_of(path).removeprefix("uni_agent.")
        if name.startswith(MAY_IMPORT_TORCH):
            continue
        for node in tree_of(path).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(n.split(".")[0] in ("torch", "transformers", "peft", "renderers") for n in names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, f"heavy import at module level: {wrong}"


def test_there_is_no_utils() -> None:
    assert not [path for path in sources() if path.stem in ("utils", "util", "helpers", "common", "misc")]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_front_door_is_light() -> None:
    """`import uni_agent` and the command line cost neither torch nor pydantic, and under 0.3 s."""
    code = (
        "import sys, time; began = time.perf_counter(); import uni_agent, uni_agent.cli; "
        "print(time.perf_counter() - began); "
        "heavy = {'torch', 'transformers', 'renderers', 'pydantic', 'peft', 'rich', 'cyclopts'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    times: list[float] = []
    for _ in range(3):  # the machine may be busy: the best of three is what it costs
        seconds, heavy = run_python(code).splitlines()
        assert heavy == "[]"
        times.append(float(seconds))
    assert min(times) < 0.3


@pytest.mark.parametrize("room", TORCH_FREE_ROOMS)
def test_room_imports_without_torch(room: str) -> None:
    heavy = {"torch", "transformers", "renderers"}
    code = f"import sys, uni_agent.{room}; print(sorted({heavy} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"
