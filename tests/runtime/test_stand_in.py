"""While a graph is built: pages chosen on the device serve, exactly what they hold is attended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hybrid_kv
from benchmarks.common.accuracy import ask_all
from hybrid_kv import attach
from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.needle import make_sample
from hybrid_kv.eval.prefilled import prefill
from hybrid_kv.index import device_pages, pages
from hybrid_kv.ops.native import engine_state
from hybrid_kv.plugins import Placement, StandIn
from hybrid_kv.runtime import KVCache
from hybrid_kv.runtime.stand_in import StandIns, digest_bytes, resident_bytes
from hybrid_kv.store import LayerKV
from hybrid_kv.transfer import CudaExecutor, SyncExecutor
from hybrid_kv.types import LayerShape, ModelInfo, Needs
from tests.oracle import softmax_attention, spread
from tests.store.scene import HeldBuild, layer
from tests.tolerances import TOLERANCES
from tests.transfer.late import LateLane

PAGE, SINKS, PROMPT, SCALE = 16, 16, 1300, 0.3
SHAPE = LayerShape(0, 6, 2, 72)
NEEDLE = Path(hybrid_kv.__file__).parent / "assets" / "needle"

needs_engine = pytest.mark.skipif(
    engine_state().isa is None, reason=f"no native engine: {engine_state().detail}"
)


class Later(SyncExecutor):
    """Holds builds back until a test lets them go."""

    def __init__(self) -> None:
        self.held: list[HeldBuild] = []

    def background(self, work: Callable[[], None]) -> Future[None]:
        self.held.append(HeldBuild(work))
        return self.held[-1].future


HOT = {"hot_tokens": 5 * PAGE, "page_budget": "all"}


class Scene:
    """A cache whose graph is not built yet, and everything it ever stored."""

    def __init__(self, lane: LateLane | None = None, **settings: Any) -> None:
        cold = {"top_k": 5, "stand_in": "pages", "index": {"kind": "graph", "min_keys": 500}}
        cold |= settings.pop("cold", {})
        config = HybridConfig(
            page_size=PAGE, sink_tokens=SINKS, window_tokens=2 * PAGE, cold=cold, **settings
        )
        self.executor = Later()
        moving = CudaExecutor(self.executor, lambda device: lane)
        self.cache = KVCache(ModelInfo((SHAPE,)), config, moving)
        self.k, self.v = torch.randn(2, 2, PROMPT, 72)
        self.cache.attend(
            0, torch.randn(1, 6, PROMPT, 72), (self.k[None], self.v[None]), None, scale=SCALE
        )

    def step(self, new: int = 1) -> tuple[Tensor, Tensor]:
        """The queries [Hq, T, D] of a step and its output."""
        q, k, v = torch.randn(6, new, 72), torch.randn(2, new, 72), torch.randn(2, new, 72)
        part = self.cache.attend(0, q[None], (k[None], v[None]), None, scale=SCALE)
        self.k, self.v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)
        self.cache.check_integrity()
        return q, part.out[0]

    def crop(self, count: int) -> None:
        self.cache.layers[0].crop(count)
        self.k, self.v = self.k[:, :-count], self.v[:, :-count]

    def expect(self, q: Tensor, out: Tensor, seen: Tensor | None = None) -> None:
        """Attention over the entries seen [Hkv, T, n] (None: all), each token up to itself."""
        new, length = q.shape[1], self.k.shape[1]
        visible = torch.arange(length) <= torch.arange(length - new, length)[:, None]
        visible = visible.expand(6, -1, -1)
        if seen is not None:
            visible = visible & seen.repeat_interleave(3, 0)
        k, v = (spread(t[None], 6)[0] for t in (self.k, self.v))
        exact, _ = softmax_attention(q, k, v, scale=SCALE, softcap=None, visible=visible)
        torch.testing.assert_close(out.double(), exact, **TOLERANCES[torch.float32])

    @property
    def serving(self) -> set[str]:
        (span,) = self.cache.stores[0].rows[0].chain.spans
        assert span.extent.index is not None
        return {head["serves"] for head in span.extent.index.describe()}


@needs_engine
@pytest.mark.parametrize("new", [1, 3])
def test_the_tokens_of_the_best_pages_are_attended(
    new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_pages, "_TOKENS", 8 * PAGE - 3)
    scene = Scene(method="retrieval_attention")
    scene.step()  # seals
    cold = scene.cache.stores[0].rows[0].chain.num_tokens
    q, out = scene.step(new)
    assert scene.serving == {"pages"}
    pages = scene.k[:, SINKS : SINKS + cold].unflatten(1, (-1, PAGE)).double()
    grouped = q.unflatten(0, (2, 3)).double()[:, :, :, None]
    bounds = torch.maximum(
        grouped * pages.amin(2)[:, None, None], grouped * pages.amax(2)[:, None, None]
    )
    best = bounds.sum(-1).amax(1)  # [Hkv, T, P]
    best[..., -1] = torch.inf  # the newest page is always read
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(8).indices, value=True)
    seen = torch.ones(2, new, scene.k.shape[1], dtype=torch.bool)
    seen[..., SINKS : SINKS + cold] = chosen.repeat_interleave(PAGE, -1)
    scene.expect(q, out, seen)


@needs_engine
@pytest.mark.parametrize("more", [{}, {"cold": {"attend": "fetch"}}, HOT])
@pytest.mark.parametrize("late", [False, True])
def test_with_all_pages_chosen_nothing_is_missed_also_after_a_crop(
    more: dict[str, Any], late: bool
) -> None:
    scene = Scene(LateLane() if late else None, method="hybrid", **more)
    for new in (1, 3, 20):
        scene.expect(*scene.step(new))
    scene.crop(101)  # into the cold tier, within a page
    scene.expect(*scene.step())
    assert scene.serving == {"pages"}, "the row sees less of the same extent"
    assert scene.cache.work.scored > 0


@needs_engine
def test_questions_are_answered_while_graphs_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the context is read; with a fiftieth, most answers are wrong."""
    monkeypatch.setattr(SyncExecutor, "background", lambda self, work: Future())
    model = AutoModelForCausalLM.from_pretrained(NEEDLE).eval()
    sample = make_sample("key_value", 3000, num_records=48, num_questions=20, seed=91)
    cold = {"top_k": 16, "stand_in": "pages", "index": {"kind": "graph", "min_keys": 500}}
    config = HybridConfig(page_size=PAGE, sink_tokens=SINKS, window_tokens=4 * PAGE, cold=cold)
    with attach(model, config) as runtime:
        prompt = prefill(runtime, sample.context, Needs(64, 64))
        found = {}
        for tokens in (64, 1024):
            monkeypatch.setattr(device_pages, "_TOKENS", tokens)
            found[tokens] = ask_all(runtime, config, prompt, sample.questions)
    assert found[64].correct < 12
    assert found[1024].correct == found[1024].asked == 20
    assert found[1024].attended_ratio < 0.4


@needs_engine
def test_the_graph_takes_over_when_it_is_ready() -> None:
    scene = Scene(method="retrieval_attention")
    scene.step()
    assert scene.serving == {"pages"}
    for build in scene.executor.held:
        build.run()
    before = scene.cache.work.retrieved
    scene.step()
    assert scene.serving <= {"graph", "flat"}
    assert scene.cache.work.retrieved - before == 6 * 5, "top_k of each query head"


def sealed(stand_in: StandIn) -> LayerKV:
    store = layer(rows=2)
    store.rows[0].length, store.rows[1].length = 37, 5
    index = lambda: pytest.fail("nothing is built")  # noqa: E731
    store.seal(Placement(index=index, stand_in=stand_in, hot_tokens=12))
    return store


def test_on_a_cpu_the_index_names_its_stand_in_unless_pages_are_asked_for() -> None:
    assert StandIns(1).of(sealed("auto")) is None
    assert StandIns(1).of(sealed("scan")) is None
    make = StandIns(1).of(sealed("pages"))
    assert make is not None
    assert make(torch.randn(2, 8, 3))().on_device


@pytest.mark.parametrize(("lacking", "fits"), [(0, True), (1, False)])
def test_on_a_gpu_pages_serve_where_the_digests_of_all_layers_fit_beside_what_stays(
    lacking: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layers, token = sealed("auto"), 7, 2 * 2 * 3 * 4
    assert digest_bytes(store) == (10 + 64 + 2 + 64) * token, "with room for pages to come"
    # By row: 3 hot pages and the 2 of the window, with a digest each.
    assert resident_bytes(store) == 2 * (3 + 2) * (4 + 1) * token
    store.resident.pool.device = torch.device("cuda")
    room = (layers * (140 + 50) * token - lacking, 2**40)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: room)
    stand_ins = StandIns(layers)
    assert (stand_ins.of(store) is not None) == fits
    # By the next layer the first ones have taken their share of what was free.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40 - room[0], 2**40))
    assert (stand_ins.of(store) is not None) == fits, "decided once for a prompt"


@needs_engine
def test_digests_are_taken_before_the_keys_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were read back from the host: 268 MB a layer at 128K."""
    scene = Scene(LateLane(), method="retrieval_attention")
    read = lambda *_: pytest.fail("keys are read back")  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(pages.PagesIndex, "_write_whole", read)
        scene.step()
    (span,) = scene.cache.stores[0].rows[0].chain.spans
    assert span.extent.index is not None
    serving = span.extent.index._serving
    assert isinstance(serving, device_pages.DevicePages)
    again = device_pages.DevicePages(scene.cache.ops, PAGE, torch.device("cpu"))
    again.build(span.extent.keys, None)
    count = again._num_pages
    assert torch.equal(serving._digests[:, :count], again._digests[:, :count])
