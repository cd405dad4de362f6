"""Counters of steps and what the audit finds; vLLM is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.paged_cache import SearchRange
from hybrid_kv.vllm.audit import AuditTurns, engine_turns
from hybrid_kv.vllm.counters import FIELDS, FOLDER, CountsCollector, StepCounts, totals
from hybrid_kv.vllm.settings import VllmSettings, search_range
from tests.vllm.paged import DIM, GROUP, HEADS, PagedDriver, PagedSequence
from tests.vllm.test_layer import SMALL, short_contexts

_ = short_contexts  # a fixture

needs_engine = pytest.mark.skipif(engine_state().isa is None, reason="decoding needs the engine")


def counted(counts: StepCounts) -> dict[str, float]:
    return {name: counts[name] for name in FIELDS if counts[name]}


@needs_engine
def test_steps_are_counted() -> None:
    driver, long, short = PagedDriver(SMALL, num_blocks=300), PagedSequence(), PagedSequence()
    driver.step((long, 2500), (short, 40))
    assert counted(driver.layer.counts) == {"prompt_tokens": 2540, "indexes": 1}
    for _ in range(3):
        driver.step((long, 1), (short, 1))
    searched = [(length - 32) // 16 * 16 - 16 for length in (2501, 2502, 2503)]
    near = [length - count for length, count in zip((2501, 2502, 2503), searched, strict=True)]
    assert counted(driver.layer.counts) == {
        "prompt_tokens": 2540,
        "indexes": 1,
        "decodes": 6,
        "searched_decodes": 3,
        "estimated_decodes": 3,
        "context_entries": 2501 + 2502 + 2503 + 41 + 42 + 43,
        "searched_entries": sum(searched),
        "read_entries": sum(near) + 3 * 64 + 41 + 42 + 43,
    }


@needs_engine
def test_what_cannot_be_searched_is_counted_as_whole() -> None:
    driver, one = PagedDriver(SMALL), PagedSequence()
    driver.step((one, 2000))
    driver.spoiled = 0
    driver.step((one, 1))
    counts = driver.layer.counts
    assert (counts["decodes"], counts["searched_decodes"], counts["read_entries"]) == (1, 0, 2001)


@needs_engine
@pytest.mark.parametrize("softcap", [0.0, 1.0])
def test_the_audit_measures_what_was_not_read(softcap: float) -> None:
    """By the definition: the softmax over all entries, less that of near and found ones; sequences
    of one step find different numbers of entries.
    """
    settings, turns = VllmSettings(budget="3%"), AuditTurns(1)
    driver = PagedDriver(settings, num_blocks=400, seed=3, turns=turns, softcap=softcap)
    ones = [PagedSequence(), PagedSequence()]
    driver.step(*((one, length) for one, length in zip(ones, (2500, 3500), strict=True)))
    counts, missed = driver.layer.counts, []
    for looked_at in (1, 0, 1):
        driver.step(*((one, 1) for one in ones))
        one, q = ones[looked_at], driver.queries[looked_at].view(1, HEADS, GROUP, DIM)
        first, count, top_k = search_range(driver.settings, one.length) or pytest.fail("searched")
        own, end = SearchRange(one.blocks, first, count, top_k, round(2 * top_k)), first + count
        ids, _ = driver.layer.index.search(q.contiguous(), [own])
        rows = driver.shape.rows(one.blocks, torch.arange(one.length))
        read = (ids[0, ..., None] == rows.T[:, None, None]).any(2)
        token = torch.arange(one.length)
        read |= (token < first) | (token >= end)
        logits = DIM**-0.5 * q[0] @ one.k.mT
        weights = (softcap * (logits / softcap).tanh() if softcap else logits).softmax(-1)
        missed.append(float(weights.masked_fill(read, 0).sum(-1).mean()))
        assert counts["audit_missed_mass"] == pytest.approx(sum(missed), rel=1e-3)
    assert counts["audit_looks"] == 3
    assert min(missed) > 0.3, "random keys: much is not read"
    assert counts["audit_output_error"] > 0


@needs_engine
def test_the_audit_finds_less_with_a_larger_budget() -> None:
    found = []
    for budget in ("16", "64", "256"):
        settings = VllmSettings(budget=budget, sink_tokens=16, window_tokens=32)
        driver = PagedDriver(settings, seed=5, turns=AuditTurns(1))
        one = PagedSequence()
        driver.step((one, 2000))
        driver.step((one, 1))
        counts = driver.layer.counts
        found.append((counts["audit_missed_mass"], counts["audit_output_error"]))
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


@needs_engine
def test_at_budget_all_nothing_is_missed() -> None:
    driver, one = PagedDriver(VllmSettings(budget="all"), turns=AuditTurns(1)), PagedSequence()
    driver.step((one, 2000))
    for _ in range(4):
        driver.step((one, 1))
    counts = driver.layer.counts
    assert counts["audit_looks"] == 4
    assert counts["audit_missed_mass"] == counts["audit_output_error"] == 0


@needs_engine
def test_the_audit_sees_what_was_not_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that is not that of all entries: a look compares, it does not believe."""
    driver, one = PagedDriver(VllmSettings(budget="all"), turns=AuditTurns(1)), PagedSequence()
    driver.step((one, 2000))
    whole = driver.layer.attend_whole

    def half(blocks: object, query: object, output: torch.Tensor, *rest: object) -> None:
        whole(blocks, query, output, *rest)
        output *= 0.5

    monkeypatch.setattr(driver.layer, "attend_whole", half)
    driver.step((one, 1))
    assert driver.layer.counts["audit_output_error"] == pytest.approx(0.5, abs=1e-5)


def test_layers_and_sequences_look_in_turn() -> None:
    turns = AuditTurns(4)
    layers = [turns.join() for _ in range(3)]
    looks = [
        (step, layer, place)
        for step in range(1, 33)
        for layer in layers
        if (place := turns.looked_at(layer, step, 2)) is not None
    ]
    assert looks == [
        *((4, 1, 0), (8, 2, 0), (12, 0, 1), (16, 1, 1), (20, 2, 1), (24, 0, 0), (28, 1, 0)),
        (32, 2, 0),
    ]


def test_engines_of_a_process_take_turns_apart() -> None:
    class Engine:
        pass

    first, second = Engine(), Engine()
    layers = [engine_turns(first, 4).join() for _ in range(3)]
    other = engine_turns(second, 4)
    assert [*layers, other.join()] == [0, 1, 2, 0]
    assert [other.looked_at(0, step, 1) for step in (4, 8, 12)] == [0, 0, 0]
    del first
    assert engine_turns(Engine(), 4).join() == 0


WRITER = """
import sys
from pathlib import Path
from hybrid_kv.vllm.counters import process_counts
process_counts().add(decodes=3, audit_missed_mass=0.25)
"""


def test_processes_are_added_up(tmp_path: Path) -> None:
    folder = tmp_path / "counters"
    assert totals(folder) == {}
    shown = CollectorRegistry()
    shown.register(CountsCollector(folder))
    assert generate_latest(shown) == b""
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", WRITER], check=True, env={**os.environ, FOLDER: str(folder)}
        )
    found = totals(folder)
    assert (found["decodes"], found["audit_missed_mass"]) == (6, 0.5)
    text = generate_latest(shown).decode()
    assert "\nvllm:hybrid_kv_decodes_total 6.0\n" in text
    assert text.count("# TYPE vllm:hybrid_kv_") == len(FIELDS)


FORKING = """
import os
from hybrid_kv.vllm.counters import process_counts
held = process_counts()
held.add(decodes=3)
if os.fork() == 0:
    held.add(decodes=4)
    os._exit(0)
os.wait()
print(held["decodes"])
"""


def test_a_forked_process_counts_for_itself(tmp_path: Path) -> None:
    folder = tmp_path / "counters"
    environment = {**os.environ, FOLDER: str(folder)}
    run = subprocess.run(
        [sys.executable, "-c", FORKING], check=True, env=environment, capture_output=True, text=True
    )
    assert float(run.stdout) == 3
    assert totals(folder)["decodes"] == 7


PUBLISHER = """
import os
from hybrid_kv.vllm.counters import FOLDER, process_counts, publish
publish()
publish()
process_counts().add(decodes=1)
from prometheus_client import REGISTRY, generate_latest
print(generate_latest(REGISTRY).decode().count("vllm:hybrid_kv_decodes_total 1.0"))
print(os.environ[FOLDER])
"""


def test_the_first_process_shows_them_and_takes_the_folder_away() -> None:
    plain = {name: value for name, value in os.environ.items() if name != FOLDER}
    run = subprocess.run(
        [sys.executable, "-c", PUBLISHER], check=True, env=plain, capture_output=True, text=True
    )
    shown, folder = run.stdout.split()
    assert shown == "1"
    assert not Path(folder).exists()
