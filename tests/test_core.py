"""The files that a maintainer of `hybrid` on a CPU must hold; others are loaded on demand.

`python -m tests.test_core` lists the files of the core, with their lines and who imports them.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_kv.ops.native import engine_state

ROOT = Path(__file__).parents[1]
PACKAGE = "hybrid_kv"

CORE = (
    *("hybrid_kv.models.attach", "hybrid_kv.methods.retrieval", "hybrid_kv.index.auto"),
    "hybrid_kv.ops.native.prompt",  # which a prompt loads
)
FILES, LINES = 60, 18_500
"""Of the core. Lower these with every file that goes or is loaded on demand."""


def file_of(module: str, root: Path = ROOT) -> Path | None:
    path = root.joinpath(*module.split("."))
    places = path.with_suffix(".py"), path / "__init__.py"
    return next((place for place in places if place.exists()), None)


def imports_of(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Modules of the package that a file imports when it is imported: neither those inside of
    functions nor those for types only.
    """
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            parts = {f"{node.module}.{one.name}" for one in node.names}
            modules = {part for part in parts if file_of(part, root)}
            yield from sorted(modules)
            if modules != parts:
                yield node.module or ""
        else:
            nodes += ast.iter_child_nodes(node)


def closure(modules: tuple[str, ...], root: Path = ROOT) -> dict[str, str]:
    """All modules that these import, directly or not, each with the one that does so first."""
    found, waiting = dict.fromkeys(modules, ""), list(modules)
    while waiting:
        module = waiting.pop()
        path = file_of(module, root)
        assert path is not None, module
        for one in imports_of(path, root):
            if one not in found:
                found[one] = module
                waiting.append(one)
    return found


def num_lines(module: str) -> int:
    path = file_of(module)
    return 0 if path is None else path.read_text().count("\n")


def is_made(module: str) -> bool:
    """Whether a program writes the module, which nobody has to hold."""
    path = file_of(module)
    return path is not None and "\nMade by `scripts/" in path.read_text()


def test_the_core_does_not_grow() -> None:
    core = [module for module in closure(CORE) if not is_made(module)]
    files, lines = len(core), sum(map(num_lines, core))
    assert files <= FILES, f"{files} files: load on demand what a step on a CPU never uses"
    assert lines <= LINES, f"{lines} lines: load on demand what a step on a CPU never uses"


STEPS = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from hybrid_kv.models.attach import attach

sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
index = {"kind": "auto", "target_recall": 0.01}
index["sizes"] = {"min_keys": 64, "gain": 0.0, "target_mass": 0.01}
settings = {"window_tokens": 32, "sink_tokens": 16, "page_size": 16, "index_build": "wait"}
settings["cold"] = {"top_k": 20, "index": index}
with torch.inference_mode(), attach(model.eval(), {"method": "hybrid", **settings}) as runtime:
    cache = runtime.cache()
    model(torch.randint(97, (1, 333)), past_key_values=cache)
    for _ in range(70):
        model(torch.randint(97, (1, 1)), past_key_values=cache)
    steps = cache.kv.describe_steps()
    indexes = cache.kv.layers.describe_indexes()
    loaded = [name for name in sys.modules if name.split(".")[0] == "hybrid_kv"]
print(json.dumps([steps, indexes, loaded]))
"""


@pytest.mark.skipif(engine_state().isa is None, reason="its portable twins are loaded instead")
def test_steps_on_a_cpu_load_the_core_alone() -> None:
    code = [sys.executable, "-c", STEPS]
    plain = {**os.environ, "HYBRID_KV_CHECK_PLANS": "0"}
    run = subprocess.run(code, capture_output=True, text=True, check=True, cwd=ROOT, env=plain)
    steps, indexes, loaded = json.loads(run.stdout.splitlines()[-1])
    assert all(step["plans"] for step in steps)
    assert all("sketch" in head["reason"] for head in indexes), "one was learned, and timed"
    packages = {name for name in loaded if (file_of(name) or ROOT).name == "__init__.py"}
    assert set(loaded) - set(closure(CORE)) - packages == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from hybrid_kv.store.pool import PagePool", {"hybrid_kv.store.pool"}),
        ("from hybrid_kv.store import pool", {"hybrid_kv.store.pool"}),
        ("from hybrid_kv.store import pool, PagePool", {"hybrid_kv.store", "hybrid_kv.store.pool"}),
        ("try:\n    import hybrid_kv.store\nexcept ImportError: ...", {"hybrid_kv.store"}),
        ("class A:\n    from hybrid_kv.store import B", {"hybrid_kv.store"}),
        ("def late():\n    from hybrid_kv.store import pool", set()),
        ("if TYPE_CHECKING:\n    from hybrid_kv.store import pool", set()),
        ("import torch", set()),
    ],
)
def test_what_a_file_imports(tmp_path: Path, code: str, found: set[str]) -> None:
    for name in ("__init__", "pool"):
        path = tmp_path / PACKAGE / "store" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "own.py").write_text(code)
    assert set(imports_of(tmp_path / "own.py", tmp_path)) == found


if __name__ == "__main__":
    for name, by in sorted(closure(CORE).items()):
        print(f"{num_lines(name):5} {name}", f"<- {by}" if by else "")
