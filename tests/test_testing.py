"""The kit for authors of plug-ins: what keeps its promises passes, what breaks one is named."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.methods.snapkv import SnapKV
from hybrid_kv.plugins import INDEXES, METHODS
from hybrid_kv.testing import check_index, check_method
from hybrid_kv.types import SearchResult

pytestmark = pytest.mark.usefixtures("own_plugins")


@pytest.mark.parametrize("method", ["full", "snapkv", "h2o", "kivi", "quest", "streaming_llm"])
def test_methods_of_every_kind_pass(method: str) -> None:
    check_method(method)


@pytest.mark.parametrize("kind", ["flat", "pages", "pca", "clusters", "graph", "blocks"])
def test_indexes_of_every_kind_pass(kind: str) -> None:
    check_index(kind, recall=0 if kind in ("pages", "blocks") else 0.2)


class _NeverWhole(SnapKV):
    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return params


class _Spendthrift(SnapKV):
    @classmethod
    def at_budget(cls, params: Any, tokens: int, **sizes: Any) -> Any:
        return super().at_budget(params, 3 * tokens, **sizes)


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (_NeverWhole, {"budget_tokens": 64}, "wrong: a full budget must give full attention"),
        (_Spendthrift, {}, r"wrong: at_budget must give at most 150 tokens .* got 4\d\d of 641"),
    ],
)
def test_a_method_that_breaks_a_promise_is_named(
    kind: type[SnapKV], settings: dict[str, Any], text: str
) -> None:
    METHODS.register("wrong")(kind)
    with pytest.raises(AssertionError, match=text):
        check_method("wrong", **settings)


class _Changed(FlatIndex):
    def changed(self, found: SearchResult) -> SearchResult:
        return found

    def search(self, queries: Tensor, top_k: int, *rest: Any) -> SearchResult:
        return self.changed(super().search(queries, top_k, *rest))


class _Rough(_Changed):
    def changed(self, found: SearchResult) -> SearchResult:
        return found._replace(scores=found.scores + 0.01)


class _Unsorted(_Changed):
    def changed(self, found: SearchResult) -> SearchResult:
        return found._replace(ids=found.ids.flip(-1), scores=found.scores.flip(-1))


class _Uncounted(_Changed):
    def changed(self, found: SearchResult) -> SearchResult:
        return found._replace(scored=0)


class _Forgetful(FlatIndex):
    def search(self, queries: Tensor, top_k: int, *rest: Any) -> SearchResult:
        first = FlatIndex(self.params)
        first.build(self._keys[:, :600], None)
        return first.search(queries, top_k, *rest)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (_Forgetful, "wrong: keys that are added later must be found, got none of 101"),
        (_Rough, "wrong: scores must be the true products, got some off by 0.01"),
        (_Unsorted, "wrong: results must come best first"),
        (_Uncounted, "wrong: scored must count every key that was multiplied, got 0 for"),
    ],
)
def test_an_index_that_breaks_a_promise_is_named(kind: type[FlatIndex], text: str) -> None:
    INDEXES.register("wrong")(kind)
    with pytest.raises(AssertionError, match=text):
        check_index("wrong")
