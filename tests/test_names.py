"""A name means one thing: no two classes of the package share one, but for twins."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import hybrid_kv

ROOT = Path(hybrid_kv.__file__).parent
TWINS = {"QuantisedKeys", "SketchSearcher", "SketchTier"}
"""What the engine does and its portable twin does as well, under one name on purpose."""


def classes_of(path: Path) -> Iterable[str]:
    """Names that a module gives to classes and, in capitals and small letters, to types."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            names = (target.id for target in node.targets if isinstance(target, ast.Name))
            yield from (name for name in names if name[0].isupper() and not name.isupper())


def homes(root: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for name in classes_of(path):
            found[name].append(str(path.relative_to(root)))
    return found


def test_no_two_classes_share_a_name() -> None:
    twice = {name: where for name, where in homes(ROOT).items() if len(where) > 1}
    assert {name for name in twice if name not in TWINS} == set(), twice
    assert set(twice) >= TWINS, "a twin is gone: take it off the list"
    for name in TWINS:
        assert {where.split("/")[0] for where in twice[name]} == {"ops"}


def test_a_name_used_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Span: ...\nSPAN = 3\n_log = 1\n")
    (tmp_path / "two.py").write_text("Span = tuple[int, int]\nSPAN = 4\n_log = 2\n")
    assert homes(tmp_path) == {"Span": ["one.py", "two.py"]}
