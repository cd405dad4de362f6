"""What leaves a layer arrives whole, however long it takes, and has one owner meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig, IndexConfig
from hybrid_kv.errors import CapacityError, NonFiniteError
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.models.rollback import Checkpoint
from hybrid_kv.plugins import METHODS, Placement
from hybrid_kv.rotary import Samples
from hybrid_kv.runtime import KVCache
from hybrid_kv.runtime.offload import Offload, find_by
from hybrid_kv.store import ColdChain, LayerStore
from hybrid_kv.store.index_builder import InlineRunner
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.types import Demotion, LayerShape, ModelInfo
from tests.drive_method import ROTARY
from tests.kit import every, held
from tests.store.scene import append
from tests.transfer.late import LateLane

SHAPE = LayerShape(0, 6, 2, 72)
INFO = ModelInfo((SHAPE, replace(SHAPE, layer_idx=1)), (ROTARY, ROTARY))
SMALL = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8}


def tokens(new: int, rows: int = 1) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    q, k, v = (torch.randn(rows, heads, new, 72) for heads in (6, 2, 2))
    return q, (k, v)


def caches(method: str = "hybrid", **settings: Any) -> tuple[KVCache, KVCache, LateLane]:
    """One cache whose copies arrive late by the lane, and one whose copies arrive at once."""
    lane = LateLane()
    config = HybridConfig(method=method, index_build="wait", **settings)
    late = KVCache(INFO, config, CudaExecutor(SyncExecutor(), lambda device: lane))
    return late, KVCache(INFO, config), lane


def attend(kv: KVCache, q: Tensor, entries: tuple[Tensor, Tensor], layer_idx: int = 0) -> Tensor:
    return kv.attend(layer_idx, q, tuple(t.clone() for t in entries), None, scale=0.3).out


def settings_of(method: str) -> dict[str, Any]:
    return {key: value for key, value in SMALL.items() if _knows(method, key)}


def _knows(method: str, key: str) -> bool:
    return key == "page_size" or key in METHODS[method].params.model_fields


FEW = {"top_k": 5, "index": "flat"}


@pytest.mark.usefixtures("untrained_heads")
@pytest.mark.parametrize(
    ("method", "further"),
    [
        *(pytest.param(method, {}, id=method) for method in sorted(METHODS)),
        pytest.param("hybrid", {"spare_tokens": 12, "page_budget": 1, "cold": FEW}, id="spare"),
    ],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_no_method_depends_on_when_copies_arrive(
    method: str, further: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", "0")  # copies that come late are made op by op
    late, now, lane = caches(method, **settings_of(method), **further)
    for new in (37, *[1] * 9, 3, 1, 40, *[1] * 5):
        q, entries = tokens(new, rows)
        outs = [attend(kv, q, entries) for kv in (late, now)]
        torch.testing.assert_close(*outs, rtol=0, atol=0)
    late.check_integrity()
    assert not lane.pending


def leaving(kv: KVCache) -> set[int]:
    return {idx for idx, layer in kv.layers.items() if layer.leaving.departure}


def test_a_page_has_one_owner_while_it_leaves() -> None:
    late, _, lane = caches(**SMALL)
    attend(late, *tokens(20))
    late.layers.seal(0)
    assert lane.pending, "or there is nothing to look at"
    row = held(late, settled=False)
    row.check_integrity()
    assert (len(row.cold), len(row.resident)) == (0, 20)
    late.check_integrity()
    assert (len(row.cold), len(row.resident)) == (8, 12)


def test_a_layer_leaves_while_the_next_is_computed_and_no_longer() -> None:
    late, _, lane = caches(**SMALL)
    for layer_idx in (0, 1):
        attend(late, *tokens(20), layer_idx=layer_idx)
        late.layers.seal(layer_idx)
        assert leaving(late) == {layer_idx}
    assert len(held(late, settled=False).cold) == 8
    assert len(held(late, layer=1).cold) == 8
    assert not lane.pending


def test_a_step_does_not_wait_for_the_page_that_left_in_it() -> None:
    late, _, lane = caches(**SMALL)
    attend(late, *tokens(20))
    while not lane.pending:
        attend(late, *tokens(1))
    assert leaving(late) == {0}


@pytest.mark.parametrize("change", ["crop", "fork", "checkpoint", "layers", "check_integrity"])
def test_whoever_changes_or_reads_a_layer_waits_for_what_leaves_it(change: str) -> None:
    late, now, lane = caches(**SMALL)
    q, entries = tokens(37)
    for kv in (late, now):
        attend(kv, q, entries)
        kv.layers.seal(0)
        if change == "crop":
            kv.layers[0].crop(3)
        elif change == "fork":
            kv.layers[0].fork([0])
        elif change == "checkpoint":
            Checkpoint.of(kv.layers)
        elif change == "layers":
            assert len(held(kv).cold) == 24
        else:
            kv.check_integrity()
    assert not lane.pending
    q, entries = tokens(1)
    torch.testing.assert_close(attend(late, q, entries), attend(now, q, entries))
    if change != "checkpoint":  # meanwhile both sides count the other's references
        late.check_integrity()


@pytest.mark.parametrize("end", ["reset", "reset_layer", "restore"])
def test_what_is_forgotten_while_it_leaves_never_arrives(end: str) -> None:
    late, now, _ = caches(**SMALL)
    prompt = tokens(37)
    steps = [tokens(1) for _ in range(9)]
    for kv in (late, now):
        attend(kv, *prompt)
        saved = Checkpoint.of(kv.layers)
        for step in steps:
            attend(kv, *step)
        if end == "restore":
            saved.restore(kv.layers)
        else:
            kv.reset() if end == "reset" else kv.layers[0].reset()
            attend(kv, *prompt)
        outs = [attend(kv, *step) for step in steps]
        kv.check_integrity()
        if kv is late:
            first = outs
    torch.testing.assert_close(first, outs)  # one op by op, one in the engine's call


@pytest.mark.parametrize("which", [0, 1])
def test_entries_that_are_no_numbers_are_named_and_nothing_moves(which: int) -> None:
    late, now, _ = caches(**SMALL)
    q, entries = tokens(37)
    entries[which][0, 1, 9, 5] = torch.nan
    for kv in (late, now):
        attend(kv, q, entries)
        name = ("keys", "values")[which]
        with pytest.raises(NonFiniteError, match=f"{name} must be finite.*KV head 1 at position 9"):
            _sealed_and_settled(kv)
        row = held(kv, settled=False)
        row.check_integrity()
        assert len(row.cold) == 0


def _sealed_and_settled(kv: KVCache) -> None:
    kv.layers.seal(0)
    kv.check_integrity()


# Neighbours found where the keys lie


class Learner(FlatIndex):
    """Keeps what it is given to learn from."""

    given: ClassVar[list[tuple[Tensor, Tensor | None, Tensor | None]]] = []

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self.given.append((self._keys, samples, nearest))
        super()._rebuild(samples, nearest)


def test_neighbours_are_those_of_the_entries_that_leave() -> None:
    """Ids count from the first offloaded key, not from the prompt's first."""
    Learner.given.clear()
    lane, runner = LateLane(), InlineRunner()
    layer = LayerStore(SHAPE, 4, 2, torch.float32, torch.device("cpu"))
    q, (k, v) = tokens(37, rows=2)
    append(layer, k, v, torch.ones(2, 37, dtype=torch.bool).index_fill_(1, torch.arange(3), False))
    index = IndexConfig(kind="flat").params
    layer.seal(Placement(4, 8, rest=Demotion.OFFLOAD, index=lambda: Learner(index)))
    kv = KVCache(
        INFO, HybridConfig(cold={"index": {"kind": "graph", "list_length": 5, "check_top_k": 5}})
    )
    leaving = Offload(
        CudaExecutor(SyncExecutor(), lambda device: lane),
        layer,
        [Samples(row.unflatten(0, (2, 3))) for row in q],
        nearest=find_by(kv.ops, kv.means.method.needs.nearest_keys),
        is_prompt=True,
    )
    assert not leaving.arrived
    leaving.wait()
    leaving.end(runner)
    kv.close()
    assert len(Learner.given) == 2
    for row, (keys, samples, nearest) in enumerate(Learner.given):
        expected = q[row].unflatten(0, (2, 3))
        assert samples is not None
        assert nearest is not None
        assert torch.equal(samples, expected)
        assert torch.equal(keys, k[row, :, 7:27])
        scores = torch.einsum("hgmd,hnd->hgmn", expected, keys)
        assert torch.equal(nearest, scores.topk(5, -1).indices.int())


def test_on_the_host_the_index_finds_neighbours_itself() -> None:
    kv = KVCache(INFO, HybridConfig(index_build="wait", cold={"index": "graph"}, **SMALL))
    assert kv.means.method.needs.nearest_keys == 100
    attend(kv, *tokens(37))
    kv.layers.seal(0)
    assert "nearest_keys" not in kv.ops.served


# Failures


@pytest.mark.parametrize("rows", [1, 3])
def test_a_prompt_whose_end_fails_can_be_ended_again(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, now, _ = caches(page_size=4, sink_tokens=4, window_tokens=8, spare_tokens=8)
    prompt, steps = tokens(37, rows), [tokens(1, rows) for _ in range(9)]
    left, right = iter(range(2 * rows)), ColdChain.commit

    def commit(*arguments: Any) -> None:
        if next(left, None) == rows - 1:
            raise CapacityError("host memory ran out")
        right(*arguments)

    for kv in (late, now):
        attend(kv, *prompt)
    monkeypatch.setattr(ColdChain, "commit", commit)
    with pytest.raises(CapacityError):
        _sealed_and_settled(late)
    assert not late.layers[0].is_sealed
    late.check_integrity()
    for step in steps:
        outs = [attend(kv, *step) for kv in (late, now)]
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
    late.check_integrity()
    assert held(late).bounds


def test_a_checkpoint_for_which_memory_does_not_suffice_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, kv, _ = caches(**SMALL)
    for layer_idx in (0, 1):
        attend(kv, *tokens(37), layer_idx=layer_idx)
    branch = LayerStore.branch

    def fail_at_second(layer: LayerStore) -> LayerStore:
        if layer.shape.layer_idx == 1:
            raise CapacityError("host memory ran out")
        return branch(layer)

    monkeypatch.setattr(LayerStore, "branch", fail_at_second)
    before = every(kv)
    with pytest.raises(CapacityError):
        Checkpoint.of(kv.layers)
    assert every(kv) == before
    kv.check_integrity()


def test_a_cache_that_is_closed_keeps_what_was_leaving() -> None:
    late, now, _ = caches(**SMALL)
    prompt, step = tokens(37), tokens(1)
    for kv in (late, now):
        attend(kv, *prompt)
        kv.layers.seal(0)
        kv.close()
    outs = [attend(kv, *step) for kv in (late, now)]
    late.check_integrity()
    assert held(late).cold == held(now).cold
    assert outs[0].isfinite().all()


@pytest.mark.parametrize("method", ["streaming_llm", "hybrid"])
@pytest.mark.parametrize("num_layers", [1, 3, 7])
def test_layers_take_turns_when_pages_leave(method: str, num_layers: int) -> None:
    """No step moves a page of each; a layer keeps its window, and at most two pages more."""
    shapes = tuple(replace(SHAPE, layer_idx=idx) for idx in range(num_layers))
    info = ModelInfo(shapes, (ROTARY,) * num_layers)
    page, window = SMALL["page_size"], 16 * SMALL["page_size"]
    settings = {**settings_of(method), "window_tokens": window}
    kv = KVCache(info, HybridConfig(method=method, index_build="wait", **settings))

    def resident() -> list[int]:
        return [len(held(kv, layer=idx).resident) for idx in range(num_layers)]

    left = [0] * num_layers
    for step, new in enumerate((93, *[1] * 25)):
        q, entries = tokens(new)
        kv.layers.begin_forward()
        before = resident() if step else [0] * num_layers
        for idx in range(num_layers):
            attend(kv, q, entries, idx)
        kv.layers.end_forward()
        if step < 2:  # the first step ends the prompt
            continue
        fewer = [now <= was for now, was in zip(resident(), before, strict=True)]
        left = [count + one for count, one in zip(left, fewer, strict=True)]
        assert sum(fewer) <= -(-num_layers // page)
        inside = [now - SMALL["sink_tokens"] - window for now in resident()]
        assert all(0 <= more <= 2 * page for more in inside)
    assert min(left) >= 24 // page - 1
