"""Counts what tests know of a cache's insides: `python -m tests.walks` prints it by file.

A *walk* is a line which reads a part of a cache (`PARTS`: stores, rows, chains, tables, pools,
spans, extents) off something that comes from a cache or a layer. It begins where `kv.stores` is
read, the `store` or `held` of a layer of `kv.layers`, or one of `TYPES` is made or annotated; from
there it follows values inside one file through names, loops, tuples, calls and what functions
return. A line counts once. Tests in `OWN` are of these very classes, and no walk there is counted;
nor is one in the kit.

A *reach* is a line which reads an attribute off anything but `self` and `cls` whose name begins
with an underscore and is one of the package's own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent
PACKAGE = ROOT.parent / "hybrid_kv"
KIT = "kit.py"
OWN = "store"
PARTS = {
    *("stores", "store", "held", "rows", "resident", "cold", "chain", "chains"),
    *("table", "tables", "pool", "spans", "extent", "extents"),
}
TYPES = {
    *("LayerKV", "Row", "ColdStore", "ColdChain", "ColdExtent", "Span"),
    *("ResidentStore", "PageTable", "PagePool"),
}
BINDING = (
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.withitem),
    *(ast.arg, ast.Return, ast.Yield),
)


def walks(source: str) -> set[int]:
    """The lines of a file which walk through a cache."""
    begins = rf"\.stores\b|\.layers\[.*\]\.(store|held)\b|\.layer\.|\b({'|'.join(TYPES)})\b"
    return _Flow(ast.parse(source)).walks() if re.search(begins, source) else set()


def reaches(source: str) -> set[int]:
    """The lines of a file which read what is private to an object of the package."""
    names = _private_names()
    if names.isdisjoint(re.findall(r"(?<!\bself)(?<!\bcls)\.(_\w+)", source)):
        return set()
    return {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr in names
        and getattr(node.value, "id", None) not in ("self", "cls")
    }


@cache
def _private_names() -> set[str]:
    """Names with one underscore before them that the package's classes and modules use."""
    own = re.compile(r"(?:\b(?:self|cls)\.|\bdef |^ *)(_[a-zA-Z]\w*)", re.MULTILINE)
    sources = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    return {name for source in sources for name in own.findall(source)}


class _Flow:
    """Which expressions of a file come from inside a cache.

    names: of variables that do, by the function they belong to, and of functions, attributes and
    properties, by None. asked: functions of the kit. types: classes of the store.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.names: set[tuple[ast.AST | None, str]] = set()
        self.tree, self.scope_of = tree, dict(_scopes(tree, tree))
        self.asked = _imported(tree, "tests.kit")
        self.types = _imported(tree, "hybrid_kv.store") & TYPES
        binding = [node for node in self.scope_of if isinstance(node, BINDING)]
        before = -1
        while before < len(self.names):
            before = len(self.names)
            for node in binding:
                self._follow(node)

    def walks(self) -> set[int]:
        return {
            node.end_lineno or node.lineno
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Attribute)
            and node.attr in PARTS
            and (self._begins(node) or self._comes(node.value))
        }

    def _begins(self, node: ast.Attribute) -> bool:
        """Whether a part is read off a cache, off a layer of it, or off that of a step."""
        owner = node.value
        if node.attr in ("store", "held"):
            return getattr(getattr(owner, "value", None), "attr", None) == "layers"
        return node.attr == "stores" or getattr(owner, "attr", None) == "layer"

    def _comes(self, node: ast.AST | None) -> bool:
        """Whether an expression has anything in it that comes from inside."""
        if node is None or self._is_asked(node):
            return False
        return self._is_source(node) or any(map(self._comes, ast.iter_child_nodes(node)))

    def _is_asked(self, node: ast.AST) -> bool:
        """Whether the kit answers: what it gives are values."""
        return isinstance(node, ast.Call) and getattr(node.func, "id", None) in self.asked

    def _is_source(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return self._begins(node) or (None, node.attr) in self.names
        if isinstance(node, ast.Name):
            own = (self.scope_of[node], node.id) in self.names
            return own or node.id in self.types or (None, node.id) in self.names
        return False

    def _follow(self, node: ast.AST) -> None:
        """Names that a statement binds to what comes from inside."""
        for target, value in _bindings(node):
            if self._comes(value):
                self._bind(target)
        if isinstance(node, ast.arg) and _names(node.annotation) & self.types:
            self.names.add((self.scope_of[node], node.arg))
        if isinstance(node, ast.Return | ast.Yield) and self._comes(node.value):
            scope = self.scope_of[node]
            if isinstance(scope, ast.FunctionDef):
                self.names.add((None, scope.name))

    def _bind(self, target: ast.AST) -> None:
        for part in ast.walk(target):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                scope = self.scope_of[part]
                self.names.add((None if isinstance(scope, ast.Module) else scope, part.id))
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                self.names.add((None, part.attr))


def _bindings(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """Targets with the values they are bound to."""
    match node:
        case ast.Assign(targets=targets, value=ast.Tuple(elts=values)):
            for target in targets:
                if isinstance(target, ast.Tuple) and len(target.elts) == len(values):
                    yield from zip(target.elts, values, strict=True)
                else:
                    yield from ((target, value) for value in values)
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield target, value
        case ast.withitem(context_expr=value, optional_vars=target) if target is not None:
            yield target, value


def _imported(tree: ast.Module, module: str) -> set[str]:
    """Names that a file has of a module, or of one inside of it."""
    return {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{module}.")
        for alias in node.names
    }


def _names(annotation: ast.AST | None) -> set[str]:
    found = () if annotation is None else ast.walk(annotation)
    return {part.id for part in found if isinstance(part, ast.Name)}


def _scopes(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every node with the outermost function, or the module, whose variables it names.

    Functions inside of functions see the variables of these.
    """
    yield node, scope
    inner = scope
    if isinstance(scope, ast.Module) and isinstance(node, ast.FunctionDef | ast.Lambda):
        inner = node
    for child in ast.iter_child_nodes(node):
        yield from _scopes(child, inner)


def counts(lines_of: Callable[[str], set[int]], *, own: str | None = None) -> dict[str, int]:
    """By file of the tests, the largest first; without the kit, and without a folder `own`."""
    found = {
        str(path.relative_to(ROOT)): len(lines_of(path.read_text(encoding="utf-8")))
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] not in (KIT, own)
    }
    return dict(sorted(((k, n) for k, n in found.items() if n), key=lambda item: -item[1]))


if __name__ == "__main__":
    for name, told in {"walks": counts(walks, own=OWN), "reaches": counts(reaches)}.items():
        print(f"{sum(told.values())} {name} in {len(told)} files")
        for file, count in told.items():
            print(f"{count:6d} {file}")
