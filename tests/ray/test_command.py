"""`hybrid-kv serve --ray` as a process: it answers, and Ctrl-C ends it and its replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.processes import serve_process


@pytest.mark.slow
def test_a_server_before_two_replicas_answers_and_ends(
    cluster: Any, model: Path, tmp_path: Path
) -> None:
    words = ("--ray", cluster.address, "--cache-dir", tmp_path / "contexts", "--name", "tiny")
    with serve_process(model, *words, "--dtype", "float32") as server:
        body = {"model": "tiny", "prompt": [7, 8, 9] * 30, "max_tokens": 3, "temperature": 0}
        answers = [
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60) for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [200, 200], server.lines
        first, second = (answer.json() for answer in answers)
        assert first["choices"] == second["choices"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert server.interrupt() == 130, server.lines
    assert "ended; no request was in work" in server.lines
    assert (tmp_path / "contexts" / "replicas.json").exists()
