"""Imports only go down; packages of one level never import each other; nothing goes in a ring.

Every dependency counts: top-level, inside functions, for type checking only, relative, and by name
(a string that is the full name of one of our modules, as `import_module` takes it).
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "hybrid_kv"
ROOT = Path(__file__).parents[1] / PACKAGE

LEVELS = [
    {"types", "counts", "errors", "former", "masses", "registry", "rotary", "texts"},
    {"ops"},
    {"config", "entries", "keywords", "plugin", "plugins", "ragged"},
    {"index"},
    {"store"},
    {"transfer"},
    {"watch"},
    {"methods", "runtime", "testing"},
    {"models"},
    {"planning", "saved"},
    {"report"},
    {"api", "eval"},
    {"contest", "serve", "vllm"},
    {"ray"},
    {"__init__"},  # the public names
    {"cli"},  # a user of everything, the public names included
    {"__main__"},
]
LEVEL = {unit: level for level, units in enumerate(LEVELS) for unit in units}
MODULES = LEVELS[0] | LEVELS[2]
"""Modules, not packages: those of one level import each other, and `ring` keeps them in order."""

BY_NAME = "a registry imports its provider by name on the first lookup (docs/decisions.md)"
EXCEPTIONS = {
    ("plugins", "methods"): BY_NAME,
    ("plugins", "index"): BY_NAME,
}


class Edge(NamedTuple):
    """`source` (a module) depends on `target` (a module) at a line of its file."""

    source: str
    target: str
    line: int

    @property
    def units(self) -> tuple[str, str]:
        return unit_of(self.source), unit_of(self.target)

    def __str__(self) -> str:
        return f"{self.source}:{self.line} -> {self.target}"


def unit_of(module: str) -> str:
    """The part of the package that has a level: 'hybrid_kv.index.flat' -> 'index'."""
    return module.split(".")[1] if "." in module else "__init__"


def modules_below(root: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def edges_of(module: str, path: Path, known: set[str]) -> list[Edge]:
    tree = ast.parse(path.read_text())
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    edges = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*(base if node.level else []), *filter(None, [node.module])])
            names = [
                full if (full := f"{source}.{alias.name}") in known else source
                for alias in node.names
            ]
        elif isinstance(node, ast.Constant) and node.value in known - {PACKAGE}:
            names = [str(node.value)]
        edges += [Edge(module, name, node.lineno) for name in names if in_package(name)]
    return edges


def in_package(name: str) -> bool:
    return re.match(rf"{PACKAGE}(\.|$)", name) is not None


def all_edges(root: Path) -> list[Edge]:
    modules = modules_below(root)
    return [
        edge for module, path in modules.items() for edge in edges_of(module, path, set(modules))
    ]


def misplaced(edges: list[Edge]) -> list[str]:
    """Dependencies that do not go strictly down, but for those inside one package."""
    wrong = []
    for edge in edges:
        source, target = edge.units
        inside = source == target and source not in MODULES
        if not inside and edge.units not in EXCEPTIONS and not goes_down(source, target):
            wrong.append(str(edge))
    return wrong


def goes_down(source: str, target: str) -> bool:
    if source in MODULES and LEVEL[source] == LEVEL[target]:
        return True
    return LEVEL[target] < LEVEL[source]


def ring(edges: list[Edge]) -> list[str]:
    """Modules that depend on each other in a ring, if there are any."""
    graph: dict[str, set[str]] = {}
    for edge in edges:
        if edge.units not in EXCEPTIONS:
            graph.setdefault(edge.source, set()).add(edge.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_has_a_level() -> None:
    unplaced = {module for module in modules_below(ROOT) if unit_of(module) not in LEVEL}
    assert not unplaced, f"give these a level in LEVELS and in docs/decisions.md: {unplaced}"


def test_imports_only_go_down() -> None:
    assert misplaced(all_edges(ROOT)) == []


def test_no_modules_depend_on_each_other_in_a_ring() -> None:
    assert ring(all_edges(ROOT)) == []


def test_every_exception_is_still_needed() -> None:
    assert set(EXCEPTIONS) <= {edge.units for edge in all_edges(ROOT)}


UPWARD = {
    "top level": "import hybrid_kv.store.pool",
    "from": "from hybrid_kv.store import pool",
    "from the package": "from hybrid_kv import store",
    "relative": "from ..store import pool",
    "lazy": "def find():\n    from hybrid_kv.store.pool import Pool",
    "for types only": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from hybrid_kv.store.pool import Pool"
    ),
    "by name": "from importlib import import_module\nimport_module('hybrid_kv.store')",
    "public names": "import hybrid_kv",
    "sideways": "from hybrid_kv.runtime.step import merge",
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    root = tmp_path / PACKAGE
    for name in ("index/flat", "attention/merge", "store/pool", "errors", "types"):
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        (path.parent / "__init__.py").touch()
    return root


@pytest.mark.parametrize("code", UPWARD.values(), ids=UPWARD)
def test_a_wrong_import_is_caught(toy: Path, code: str) -> None:
    (toy / "index/flat.py").write_text(code)
    assert len(misplaced(all_edges(toy))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "from hybrid_kv.errors import ShapeError",
        "from hybrid_kv.index import other",
        "from . import other",
        "import hybrid_kv_tools",
        "'''Unlike hybrid_kv.store.'''",
        "name = 'hybrid_kv.unheard_of'",
    ],
)
def test_a_right_import_is_let_through(toy: Path, code: str) -> None:
    (toy / "index/other.py").touch()
    (toy / "index/flat.py").write_text(code)
    assert misplaced(all_edges(toy)) == []


def test_a_ring_inside_a_level_of_modules_is_caught(toy: Path) -> None:
    (toy / "errors.py").write_text("import hybrid_kv.types")
    assert ring(all_edges(toy)) == []
    (toy / "types.py").write_text("def late():\n    from hybrid_kv.errors import HybridKVError")
    assert set(ring(all_edges(toy))) == {"hybrid_kv.errors", "hybrid_kv.types"}


def test_importing_loads_nothing_heavy() -> None:
    heavy = {"transformers", "faiss", "triton", "flashinfer", "numba"}
    # torch is imported first: what it loads on its own account is not ours.
    code = (
        "import json, sys, torch; before = set(sys.modules);"
        "import hybrid_kv, hybrid_kv.config; print(json.dumps([*set(sys.modules) - before]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    loaded = {name.split(".")[0] for name in json.loads(run.stdout)}
    assert PACKAGE in loaded
    assert not loaded & heavy
