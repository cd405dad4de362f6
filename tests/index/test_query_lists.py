"""Keys on the lists of queries."""

from __future__ import annotations

from tests.index.oracle import check_result, clustered, make_default


def test_more_lists_are_taken_where_they_hold_fewer_keys_than_are_asked_for() -> None:
    keys, queries = clustered(700)
    index = make_default("query_lists", num_centroids=9, list_tokens=16, num_probes=1)
    index.build(keys, queries[:, None])
    few, many = index.search(queries, 16), index.search(queries, 60)
    check_result(many, queries, keys, 60)
    assert int((few.ids >= 0).sum(-1).max()) == 16
    assert int((many.ids >= 0).sum(-1).min()) > 16
