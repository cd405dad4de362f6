"""How Faiss is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybrid_kv.config import IndexConfig
from tests.index.oracle import clustered


def test_naming_the_kinds_does_not_import_faiss() -> None:
    code = "import sys; from hybrid_kv.plugins import INDEXES; print(list(INDEXES), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'ivf'" in done.stdout
    assert "faiss" not in done.stdout.split()


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_the_thread_count_of_the_process_is_left_alone(kind: str) -> None:
    import faiss

    keys, queries = clustered(100)
    before = faiss.omp_get_max_threads()
    index = IndexConfig(kind=kind).build()
    index.build(keys, None)
    index.search(queries, 5)
    assert faiss.omp_get_max_threads() == before


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_building_prints_nothing(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    for rows in (1, 50, 500):
        IndexConfig(kind=kind).build().build(clustered(rows)[0], None)
    assert capfd.readouterr() == ("", "")
