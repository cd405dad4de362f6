"""Errors say what is wrong in one sentence, and what the command line returns for them."""

from __future__ import annotations

import pytest

from hybrid_kv import errors
from hybrid_kv.errors import ConfigError, HybridKVError, nearest_name, unknown_name

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
        "BrokenCacheError": 1,
        "BusyError": 1,
        "CapacityError": 2,
        "ConfigError": 2,
        "DeviceMemoryError": 1,
        "FileFormatError": 2,
        "HybridKVError": 1,
        "IntegrityError": 1,
        "MethodError": 1,
        "ModelNotFoundError": 2,
        "NoBudgetError": 2,
        "NonFiniteError": 1,
        "OtherContextError": 2,
        "QueueFullError": 1,
        "ReadError": 2,
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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("page_tokens", "page_size"),  # spelling said spare_tokens
        ("block_size", "page_size"),
        ("sinks", "sink_tokens"),
        ("cold.k", "cold.top_k"),
        ("cold.topk", "cold.top_k"),
        ("cld.top_k", "cold.top_k"),
        ("ef", "cold.index.ef_search"),
        ("window_token", "window_tokens"),
        ("zzz", None),
    ],
)
def test_another_systems_word_for_a_setting_is_understood(name: str, meant: str | None) -> None:
    known = ["cold.index.page_size", "cold.index.ef_search", "page_size", "spare_tokens"]
    known += ["sink_tokens", "cold.top_k", "window_tokens"]
    assert nearest_name(name, known) == meant


def test_a_dot_in_the_name_of_a_model_divides_nothing() -> None:
    assert nearest_name("lama-3.1-8b", ["llama-3.1-8b", "qwen2.5-7b"]) == "llama-3.1-8b"
