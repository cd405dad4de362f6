"""Errors say what is wrong in one sentence, and what the command line returns for them."""

from __future__ import annotations

import pytest

from hybrid_kv import errors
from hybrid_kv.errors import ConfigError, HybridKVError, unknown_name

TYPED = sorted(
    (
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, HybridKVError)
    ),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", TYPED)
def test_one_base_class_catches_every_error(kind: type[HybridKVError]) -> None:
    with pytest.raises(HybridKVError, match="why"):
        raise kind("why")


@pytest.mark.parametrize("kind", [kind for kind in TYPED if kind is not HybridKVError])
def test_each_error_is_a_builtin_one_too(kind: type[HybridKVError]) -> None:
    plain = {object, BaseException, Exception}
    assert any(base.__module__ == "builtins" for base in set(kind.__mro__) - plain)


def test_exit_codes_tell_a_mistake_from_a_failure() -> None:
    codes = {kind.__name__: kind.exit_code for kind in TYPED}
    assert codes == {
        "AuditError": 1,
        "BackendUnavailable": 2,
        "CapacityError": 2,
        "ConfigError": 2,
        "DeviceMemoryError": 1,
        "FileFormatError": 2,
        "HybridKVError": 1,
        "IntegrityError": 1,
        "ModelNotFoundError": 2,
        "NonFiniteError": 1,
        "ShapeError": 1,
        "UnsupportedModelError": 2,
        "WriteError": 1,
    }


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("hnws", ["ivf", "hnsw"], "unknown index 'hnws'; did you mean 'hnsw'? known: hnsw, ivf"),
        ("x", ["ivf", "hnsw"], "unknown index 'x'; known: hnsw, ivf"),
        ("x", [], "unknown index 'x'; known: (none)"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(name: str, known: list[str], text: str) -> None:
    error = unknown_name("index", name, known)
    assert isinstance(error, ConfigError)
    assert str(error) == text
