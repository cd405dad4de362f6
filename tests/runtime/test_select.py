"""Selection on the device, with the host's memory in the place of the device's."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError, DeviceSelectWarning
from hybrid_kv.index import _device_keys, device_sketch
from hybrid_kv.models.rollback import Checkpoint
from hybrid_kv.ops.tail import AttendedSums, Tail
from hybrid_kv.plugins import Placement
from hybrid_kv.runtime import KVCache, select
from hybrid_kv.runtime.select import CODE_BYTES, Selectors, code_bytes, resident_bytes
from hybrid_kv.store import LayerStore
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.transfer.graph_cache import CapturedGraph, WorkRecorder
from hybrid_kv.types import LayerShape, ModelInfo, PartialAttention
from tests.index.sketch_heads import seen_heads
from tests.kit import Held, held, sized
from tests.oracle import softmax_attention, spread
from tests.store.scene import append
from tests.tolerances import TOLERANCES
from tests.transfer.late import LateLane

PAGE, SINKS, SCALE, HEADS, GROUP, DIM = 37, 37, 0.1, 2, 3, 72
SHAPE = LayerShape(0, HEADS * GROUP, HEADS, DIM)


class Scene:
    """A cache whose device selects, and everything it ever stored."""

    def __init__(
        self,
        prompt: int = 3000,
        lane: LateLane | None = None,
        backend: str = "auto",
        recorder: WorkRecorder | None = None,
        **cold: Any,
    ) -> None:
        cold = {"top_k": 20, "select": "device", "index": {"kind": "sketch"}, **cold}
        config = HybridConfig(
            method="retrieval_attention",
            page_size=PAGE,
            sink_tokens=SINKS,
            window_tokens=2 * PAGE,
            backend=backend,
            cold=cold,
        )
        moving = CudaExecutor(SyncExecutor(), lambda device: lane, lambda device: recorder)
        self.cache = KVCache(ModelInfo((SHAPE,)), config, moving)
        keys, samples, later = seen_heads(HEADS, prompt, dim=DIM, group=GROUP, positions=prompt)
        self.k, self.v = keys, torch.randn(HEADS, prompt, DIM)
        self.later = later
        self.steps, self.is_branched = 0, False
        q = samples.flatten(0, 1)
        self.cache.attend(0, q[None], (self.k[None], self.v[None]), None, scale=SCALE)

    def step(self, new: int = 1) -> tuple[Tensor, Tensor]:
        """The queries [Hq, T, D] of a step and its output."""
        q = self.later[:, :, self.steps : self.steps + new].flatten(0, 1)
        self.steps += new
        k = self.k[:, torch.randint(self.k.shape[1], (new,))] + 0.1 * torch.randn(HEADS, new, DIM)
        v = torch.randn(HEADS, new, DIM)
        self.cache.layers.seal_if_open(0)
        self.cold = len(self.row.cold)  # what leaves when the step ends was resident
        part = self.cache.attend(0, q[None], (k[None], v[None]), None, scale=SCALE)
        self.k, self.v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)
        if not self.is_branched:
            self.cache.check_integrity()
        return q, part.out[0]

    @property
    def row(self) -> Held:
        return held(self.cache)

    def expect_best(self, q: Tensor, out: Tensor, top_k: int, *, estimates: bool = False) -> None:
        """Attention over what is resident and the `top_k` best of the others for each query, and
        over what is left as it is estimated, if it is.
        """
        first = SINKS
        stop = first + self.cold
        new, length = q.shape[1], self.k.shape[1]
        visible = torch.arange(length) <= torch.arange(length - new, length)[:, None]
        visible = visible.expand(len(q), -1, -1).clone()
        k, v = (spread(t[None], len(q))[0] for t in (self.k, self.v))
        scores = q @ k[:, first:stop].mT
        best = torch.zeros_like(scores, dtype=torch.bool)
        best.scatter_(-1, scores.topk(min(top_k, stop - first)).indices, value=True)
        visible[..., first:stop] = best
        exact, lse = softmax_attention(q, k, v, scale=SCALE, softcap=None, visible=visible)
        if estimates:
            lowest = SCALE * scores.topk(top_k).values[..., -1]
            for extent in self.row.extents:
                end = min(stop, first + extent.length)
                if end == first:  # what left as the step ended
                    break
                learned = slice(first, first + extent.moments.count)
                known = Tail.of(self.k[:, learned], self.v[:, learned])
                taken = visible[..., first:end].float()
                sums = taken.sum(-1), (taken * (q @ k[:, first:end].mT)).sum(-1)
                asked = [
                    t.unflatten(0, (HEADS, GROUP)).flatten(1, 2)
                    for t in (q, *sums, lowest, taken @ v[:, first:end])
                ]
                attended = AttendedSums(*asked[1:3])
                part = known.attend(asked[0], end - first, attended, asked[3], scale=SCALE)
                guess = part.without(asked[4])
                more = guess.lse.view(lse.shape).double()
                share = torch.sigmoid(lse - more)[..., None]
                exact = share * exact + (1 - share) * guess.out.view(exact.shape).double()
                first, lse = end, torch.logaddexp(lse, more)
        torch.testing.assert_close(out.double(), exact, **TOLERANCES[torch.float32])


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys have room among the candidates, so that the best are found for certain."""
    monkeypatch.setattr(_device_keys, "_LEAST_WIDTH", 4096)


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("new", [1, 3])
def test_what_has_room_is_ranked_exactly(new: int, late: bool) -> None:
    scene = Scene(lane=LateLane() if late else None)
    for _ in range(4):
        scene.expect_best(*scene.step(new), 20)
    assert {head["serves"] for head in scene.row.extents[0].index.describe()} == {"device sketch"}


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("new", [1, 3])
def test_what_is_left_is_estimated_by_its_moments(new: int) -> None:
    scene = Scene(estimate="gaussian")
    for _ in range(4):
        scene.expect_best(*scene.step(new), 20, estimates=True)


@pytest.mark.usefixtures("roomy")
def test_what_is_left_of_each_extent_is_estimated_by_its_own_moments() -> None:
    scene = Scene(900, estimate="gaussian")
    scene.step()
    before, scene.is_branched = Checkpoint.of(scene.cache.layers), True
    for _ in range(4):
        scene.expect_best(*scene.step(20), 20, estimates=True)
    assert len(scene.row.extents) == 2, "a shared extent is followed by one of its own"
    del before


def recalls(scene: Scene, steps: int) -> float:
    """Of steps of one token: the share of the exact best entries that are attended."""
    shares = []
    for _ in range(steps):
        found: dict[int, Any] = {}
        q = scene.later[:, :, scene.steps]
        scene.steps += 1
        layer = scene.cache.layers[0]
        step = layer.steps.make(
            layer.held, q.flatten(0, 1)[None, :, None], SCALE, None, found=found
        )
        layer.steps.attend(step)
        (part,) = found[0][1].parts
        exact = (q @ part.extent.keys.mT).topk(20).indices
        shares.append((exact[..., None] == part.ids[:, :, None]).any(-1).float().mean())
    return float(torch.stack(shares).mean())


@pytest.mark.parametrize("index", ["sketch", "auto"])
def test_most_of_the_best_are_found_by_their_codes(index: str) -> None:
    scene = Scene(12_000, index=sized(index, check_top_k=20))
    scene.step()
    (extent,) = scene.row.extents
    codes = extent.index.serving.codes
    assert extent.index.serving.learned.width(20) < extent.length / 4
    assert codes.state.tolist() == [extent.length, extent.length]
    assert recalls(scene, 20) > 0.95
    heads = extent.index.describe()
    assert all(head["recall"] >= 0.9 for head in heads)
    assert [head["lost_candidates"] for head in heads] == [0, 0]
    size = codes.codes.numel() // codes.codes.shape[1] // HEADS
    assert heads[0]["reason"] == f"codes of {size} B a key fit"


def test_later_keys_are_found_as_they_are_and_then_by_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_device_keys, "LATER_KEYS", 2 * PAGE)
    scene = Scene(5000)
    coded = []
    for _ in range(5):
        for _ in range(PAGE):
            scene.step()
        codes = scene.row.extents[0].index.serving.codes
        seen, encoded = codes.state.tolist()
        coded.append(encoded - coded[0] if coded else encoded)
        assert seen - encoded <= 2 * PAGE
        later = torch.arange(encoded, seen)
        keys = scene.row.extents[0].k
        assert torch.equal(codes.recent[:, later % (2 * PAGE)], keys[:, later])
        assert recalls(scene, 3) > 0.95
    assert coded[1] == 0
    assert coded[-1] > 0


@pytest.mark.usefixtures("roomy")
def test_a_row_that_goes_back_or_forks_sees_what_it_stored() -> None:
    scene = Scene(900)
    scene.expect_best(*scene.step(), 20)
    scene.cache.layers[0].crop(301)
    scene.k, scene.v = scene.k[:, :-301], scene.v[:, :-301]
    scene.expect_best(*scene.step(), 20)
    for _ in range(3):  # what is written over is coded anew
        scene.expect_best(*scene.step(20), 20)
    before, scene.is_branched = Checkpoint.of(scene.cache.layers), True
    kept = scene.k, scene.v
    for _ in range(3):
        scene.expect_best(*scene.step(20), 20)
    assert len(scene.row.extents) == 2, "a shared extent is followed by one of its own"
    before.restore(scene.cache.layers)
    scene.is_branched, (scene.k, scene.v) = False, kept
    scene.expect_best(*scene.step(), 20)


@pytest.mark.parametrize("prompt", [5, PAGE, 4 * PAGE, 4 * PAGE + 1])
def test_a_prompt_of_any_length_is_served(prompt: int) -> None:
    scene = Scene(prompt)
    for new in (1, 2, 1):
        scene.expect_best(*scene.step(new), 20)


@pytest.mark.parametrize("estimate", ["none", "gaussian"])
def test_a_step_asks_nothing_of_the_device_and_sends_nothing(
    estimate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither launch waits: no value is looked at, no shape hangs on one, nothing is moved."""
    scene = Scene(estimate=estimate)
    scene.step()
    looked = Operations()
    refuse = lambda *_: pytest.fail("something travels")  # noqa: E731
    for name in ("send", "deliver", "to_device", "keep"):
        monkeypatch.setattr(type(scene.cache.executor), name, refuse)
    q = scene.later[:, :, 7].flatten(0, 1)[None, :, None]
    layer = scene.cache.layers[0]
    step = layer.steps.make(layer.held, q, SCALE, None)
    with looked:
        layer.steps.attend(step)
    assert looked.names & {"aten.sort", "aten.scatter_"}, "the search was watched"
    assert not looked.names & WAITS, "a thread would wait for the device"


class Operations(TorchDispatchMode):
    """The names of all that torch is told, views aside: each of the others is a launch, or some."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> set[str]:
        return set(self.counts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


WAITS = {
    *("aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.nonzero", "aten.unique2"),
    *("aten._unique2", "aten.masked_select", "aten.equal", "aten.repeat_interleave"),
}


class Played:
    """Records operations on the host: played again they see new values and no Python."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def record(self, work: Any, given: Tensor) -> CapturedGraph:
        self.recorded += 1
        own = given.clone()
        graph = make_fx(lambda q: tuple(work(q)))(own)
        part = PartialAttention(*(torch.empty_like(t) for t in graph(own)))

        def play() -> None:
            self.played += 1
            for to, value in zip(part, graph(own), strict=True):
                to.copy_(value)

        return CapturedGraph(play, own, part)


@pytest.mark.parametrize("estimate", ["none", "gaussian"])
def test_a_recorded_step_is_played_for_the_steps_that_follow(estimate: str) -> None:
    """Through pages that leave the window, so that lengths change beneath the recording."""
    recorder, outputs = Played(), []
    for records in (False, True):
        torch.manual_seed(7)
        given = recorder if records else None
        scene = Scene(1200, backend="reference", recorder=given, estimate=estimate)
        before = scene.step()
        first = len(scene.row.cold)
        outputs.append([before[1], *(scene.step()[1] for _ in range(2 * PAGE))])
        assert len(scene.row.cold) == first + 2 * PAGE
    for played, launched in zip(*outputs, strict=True):
        torch.testing.assert_close(played, launched, **TOLERANCES[torch.float32])
    assert scene.row.extents[0].index.serving.learned.width(20) < first
    assert recorder.recorded == 1
    assert recorder.played == 2 * PAGE


@pytest.mark.usefixtures("roomy")
def test_a_step_that_cannot_be_recorded_is_launched_with_one_sentence() -> None:
    class Refuses:
        def record(self, work: Any, given: Tensor) -> CapturedGraph:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    scene = Scene(900, recorder=Refuses())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(4):
            scene.expect_best(*scene.step(), 20)
    (said,) = (one.message for one in warned if one.category is DeviceSelectWarning)
    assert "CUDA graph (operation not permitted when stream is capturing);" in str(said)


@pytest.mark.usefixtures("roomy")
def test_after_work_that_could_not_be_recorded_other_work_still_is() -> None:
    """Regression: one refusal, such as memory unlocked meanwhile, ended all recording for good."""

    class RefusesOnce(Played):
        def record(self, work: Any, given: Tensor) -> CapturedGraph:
            if not self.refused:
                self.refused = True
                raise RuntimeError("as a test")
            return super().record(work, given)

    recorder = RefusesOnce()
    recorder.refused = False  # type: ignore[attr-defined]
    scene = Scene(900, backend="reference", recorder=recorder, estimate="gaussian")

    def steps() -> None:
        for _ in range(4):
            scene.step()

    with pytest.warns(DeviceSelectWarning, match="CUDA graph"):
        steps()
    assert recorder.recorded == 0
    for length in (301, 201, 101):  # moments are taken anew: other work, unless they lie as before
        scene.cache.layers[0].crop(length)
        steps()
        if recorder.recorded:
            break
    assert recorder.recorded == 1


@pytest.mark.usefixtures("roomy")
def test_a_device_that_fills_up_leaves_the_layer_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    monkeypatch.setattr(device_sketch, "learn", full)
    scene = Scene(900)
    with pytest.warns(DeviceSelectWarning, match="layer 0 cannot select on cpu") as warned:
        scene.expect_best(*scene.step(), 20)
    assert len(warned) == 1
    serving = scene.row.extents[0].index.describe()
    assert {head["serves"] for head in serving} <= {"sketch", "flat"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"index": "graph"}, "kind sketch or auto, got graph"),
        ({"index": "sketch", "min_share": 0.1}, "min_share or shared"),
        ({"index": "auto", "max_tokens": 400}, "max_tokens"),
    ],
)
def test_what_the_device_cannot_do_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HybridConfig(method="retrieval_attention", cold={"select": "device", **settings})
    HybridConfig(method="retrieval_attention", cold=settings)


def test_copies_are_the_host_s_business() -> None:
    cold = {"select": "device", "index": "sketch"}
    with pytest.raises(ConfigError, match="keeps entries of its choice"):
        HybridConfig(method="snapkv", demote="offload", cold=cold)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_where_pinned_memory_was_refused_the_host_searches(
    is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels would not reach the keys, and copying what counts would be waited for; with "device"
    that is what was asked for.
    """
    made = object()
    monkeypatch.setattr(select, "sketch_of", lambda *_: made)
    monkeypatch.setattr(Tensor, "is_pinned", lambda *_: is_pinned)
    store, keys = FakeDevice(2**40, monkeypatch).store, torch.zeros(HEADS, 2**15, DIM)
    assert store.placement is not None
    for wanted, found in (("auto", made if is_pinned else None), ("device", made)):
        store.placement = replace(store.placement, select=wanted)
        learn = Selectors(1).of(store)
        assert learn is not None
        assert learn(keys, keys[:, None, :64], keys) is found


class FakeDevice:
    """A layer on a CUDA device with so much free memory."""

    def __init__(self, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        store = LayerStore(SHAPE, PAGE, 1, torch.float32, torch.device("cpu"))
        tokens = torch.zeros(1, HEADS, 8192, DIM)
        append(store, tokens, tokens)
        index = HybridConfig(method="hybrid").cold.index.build
        store.seal(Placement(index=index, select="auto"))
        store.resident.pool.device = torch.device("cuda")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**40))
        self.store = store


def test_codes_are_as_large_as_fit_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = 3
    store = FakeDevice(0, monkeypatch).store
    assert Selectors(layers).of(store) is None, "not even the smallest"
    found = []
    for size in CODE_BYTES:
        needed = layers * (code_bytes(store, size) + resident_bytes(store)) + 2**30
        store = FakeDevice(needed, monkeypatch).store
        selectors = Selectors(layers)
        made = selectors.of(store)
        assert made is not None
        found.append(made.args[-1])
        FakeDevice(0, monkeypatch)  # what the first layers took is not asked about again
        assert selectors.of(store) is not None
    assert found == list(CODE_BYTES)


def test_the_host_searches_on_a_cpu_unless_the_device_is_asked_for() -> None:
    scene = Scene(900, select="auto")
    scene.step()
    assert not scene.row.extents[0].index.serving.selects
