"""The files of hybrid_kv that one completion over HTTP goes through, counted while it is answered.

`python -m tests.serve.test_files` lists them by folder.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import httpx
import pytest

import hybrid_kv
from hybrid_kv.api import load
from hybrid_kv.ops.native import engine_state
from hybrid_kv.runtime.plan import CHECK_PLANS
from hybrid_kv.serve import Engine
from tests.cli.support import save_model
from tests.serve.running import serving

ROOT = Path(hybrid_kv.__file__).parent
FILES = 50
"""Of a completion, those of the steps included. Lower this with every file that goes."""

PROMPT = "key 3f a0: 11 5c 9e 07. ? key 3f a0"


class CalledFiles:
    """Files of the package in which a function was called while `is_on`, in any thread."""

    def __init__(self) -> None:
        self.is_on, self._codes = False, set[CodeType]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """A profile function."""
        if self.is_on and event == "call":
            self._codes.add(frame.f_code)

    def names(self) -> list[str]:
        """Their places below the package."""
        paths = {Path(code.co_filename) for code in self._codes}
        return sorted(str(path.relative_to(ROOT)) for path in paths if ROOT in path.parents)


@contextmanager
def profiled() -> Iterator[CalledFiles]:
    """Records for this thread and for all that start inside."""
    called = CalledFiles()
    threading.setprofile(called)
    try:
        yield called
    finally:
        threading.setprofile(None)


def files_of_a_completion(folder: Path) -> list[str]:
    """Of the second of two equal ones: what is done once has been done."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    with (
        profiled() as called,
        load(folder, config={"index_build": "wait"}) as llm,
        Engine(llm) as engine,
        serving(llm, engine) as server,
    ):
        for called.is_on in (False, True):
            answer: Any = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 4
        called.is_on = False
    return called.names()


def by_folder(paths: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in map(Path, paths):
        found.setdefault(str(path.parent), []).append(path.stem)
    return found


@pytest.mark.skipif(engine_state().isa is None, reason="its portable twins are called instead")
def test_a_completion_goes_through_few_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECK_PLANS, "0")  # else every step is also computed op by op
    names = files_of_a_completion(save_model(tmp_path))
    assert {"serve/engine.py", "serve/http/app.py", "runtime/cache.py"} <= set(names)
    assert len(names) <= FILES, "\n".join([f"{len(names)} files", *names])


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        found = files_of_a_completion(save_model(Path(temporary)))
    print(len(found), "files")
    for parent, names in by_folder(found).items():
        print(f"{len(names):3} {parent}: {' '.join(names)}")
