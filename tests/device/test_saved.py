"""Contexts saved on an emulated device and opened there, on the host, or where codes do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.errors import DeviceSelectWarning
from hybrid_kv.index import _device_keys
from hybrid_kv.runtime.select import Selectors
from tests.device import emulated
from tests.device.models import llama, small, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.BackendWarning"),
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.DeviceSelectWarning"),
]

PROMPT = tokens(301)[0].tolist()
QUESTIONS = [tokens(3, 5)[0].tolist(), tokens(41, 6)[0].tolist()]
"""The second one makes pages leave the window."""


@contextmanager
def loaded(device: str, kind: str = "auto", select: str = "device") -> Iterator[hkv.LLM]:
    settings: dict[str, Any] = {"select": select, "cold.index.kind": kind}
    config = small("hybrid").replace(**settings)
    with hkv.load(llama().to(device), config=config) as llm:  # type: ignore[arg-type]
        yield llm


def answers(context: hkv.Context) -> list[list[int]]:
    return [context.ask(question, max_new_tokens=3).token_ids for question in QUESTIONS]


def served(context: hkv.Context) -> set[str]:
    """What finds the cold entries of any head, as a user sees it."""
    told = context.ask(QUESTIONS[0], max_new_tokens=2).index
    return {head["serves"] for head in told}


@pytest.mark.parametrize(
    ("kind", "later"), [("auto", 4096), ("sketch", 20)], ids=["later-as-they-are", "later-coded"]
)
def test_saved_and_opened_on_a_device_it_answers_alike(
    kind: str, later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device_keys, "LATER_KEYS", later)
    with emulated(kernels="defined"), loaded("cuda", kind) as llm:
        context = llm.context(PROMPT)
        context.append(tokens(70, 9)[0].tolist())
        expected = answers(context)
        context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        assert served(opened) == {"device sketch"}
        assert answers(opened) == expected
        opened.append(tokens(90, 3)[0].tolist())
        context.append(tokens(90, 3)[0].tolist())
        assert answers(opened) == answers(context)
        opened.save(tmp_path / "b.hkv")
        assert answers(llm.open(tmp_path / "b.hkv")) == answers(context)


def test_saved_on_a_device_it_is_searched_by_the_same_codes_on_the_host(tmp_path: Path) -> None:
    with emulated(kernels="defined"), loaded("cuda") as llm:
        context = llm.context(PROMPT)
        expected = answers(context)
        context.save(tmp_path / "a.hkv")
    with loaded("cpu", select="auto") as llm:
        opened = llm.open(tmp_path / "a.hkv")
        assert "sketch" in served(opened) <= {"sketch", "flat"}  # what came later is scanned
        assert answers(opened) == expected
        opened.append(tokens(90, 3)[0].tolist())
        opened.save(tmp_path / "b.hkv")
        assert answers(llm.open(tmp_path / "b.hkv")) == answers(opened)


def test_a_context_of_the_host_goes_on_by_the_host_on_a_device(tmp_path: Path) -> None:
    with loaded("cpu", select="auto") as llm:
        context = llm.context(PROMPT)
        expected = answers(context)
        context.save(tmp_path / "a.hkv")
    with emulated(kernels="defined"), loaded("cuda", select="auto") as llm:
        opened = llm.open(tmp_path / "a.hkv")
        assert "device sketch" not in served(opened)
        assert answers(opened) == expected


def test_where_the_codes_do_not_fit_the_host_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated(kernels="defined"), loaded("cuda") as llm:
        context = llm.context(PROMPT)
        expected = answers(context)
        context.save(tmp_path / "a.hkv")
        full = torch.OutOfMemoryError("CUDA out of memory, as a test")

        def no_room(*_: Any) -> Any:
            raise full

        monkeypatch.setattr(Selectors, "restored", no_room)
        with pytest.warns(DeviceSelectWarning, match="cannot select on cuda:0: memory ran out"):
            opened = llm.open(tmp_path / "a.hkv")
        assert "sketch" in served(opened) <= {"sketch", "flat"}  # what came later is scanned
        assert answers(opened) == expected


@pytest.mark.parametrize(("gib", "serves"), [(24, "device sketch"), (1, "sketch")])
def test_by_itself_it_goes_to_a_device_that_has_room_for_its_codes(
    gib: int, serves: str, tmp_path: Path
) -> None:
    with emulated(kernels="defined"), loaded("cuda") as llm:
        context = llm.context(PROMPT)
        expected = answers(context)
        context.save(tmp_path / "a.hkv")
    with emulated(memory_bytes=gib << 30, kernels="defined"), loaded("cuda", select="auto") as llm:
        with torch.inference_mode():  # which the context outlives
            opened = llm.open(tmp_path / "a.hkv")
        assert serves in served(opened)
        assert answers(opened) == expected
        opened.append(tokens(90, 3)[0].tolist())
        assert len(opened.ask(QUESTIONS[0], max_new_tokens=2).token_ids) == 2


def test_a_fork_whose_later_entries_have_no_codes_yet_is_saved(tmp_path: Path) -> None:
    with emulated(kernels="defined"), loaded("cuda") as llm:
        context = llm.context(PROMPT)
        context.save(tmp_path / "a.hkv")
        forks = [llm.open(tmp_path / "a.hkv").fork(), context.fork()]
        for fork in forks:
            fork.append(tokens(60, 3)[0].tolist())
        expected = answers(forks[1])
        assert answers(forks[0]) == expected
        forks[0].save(tmp_path / "b.hkv")
        assert answers(llm.open(tmp_path / "b.hkv")) == expected
