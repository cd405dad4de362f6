"""Selection on the device, of one layer: codes made, searched by, and what they list attended."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.limits import ROUNDING, Difference, largest
from benchmarks.gpu_check.pools import normal
from benchmarks.gpu_check.record import NotHere, Recorder, need_cuda
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import gbps, timed, wall_us
from hybrid_kv.index._device_keys import SelectGoal, learn
from hybrid_kv.ops import Ops, get_ops
from hybrid_kv.ops.pinned import pinned_array
from hybrid_kv.ops.sketch_select import DeviceCodes
from hybrid_kv.runtime.select import CODE_BYTES
from hybrid_kv.transfer.graph_cache import CudaRecorder
from hybrid_kv.types import PartialAttention

_TOP_K, _WIDTH = 100, 1024


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    for size in CODE_BYTES:
        about = {"keys": sizes.keys, "code_bytes": size, "top_k": _TOP_K, "width": _WIDTH}
        layer = SearchedLayer(sizes, device, size)
        record.measure(f"make codes, {size} B", partial(layer.encoded, sizes), **about)
        record.measure(f"list and rank, {size} B", partial(layer.found, sizes), **about)
        record.measure(f"attend the best, {size} B", partial(layer.attended, sizes), **about)
        record.measure(f"all of a step, {size} B", partial(layer.stepped, sizes), **about)
        record.measure(f"all of a step, {size} B, recorded", partial(layer.played, sizes), **about)


class SearchedLayer:
    """Random keys, whose codes find little: times hang on counts, which are set."""

    def __init__(
        self, sizes: Sizes, device: torch.device, size: int, most_keys: int | None = None
    ) -> None:
        keys = min(sizes.keys, most_keys or sizes.keys)
        shape = (sizes.kv_heads, keys, sizes.dim)
        self.device, self.ops = device, get_ops("auto")
        self.near = normal(shape, sizes.dtype, device)
        self.k, self.v = (pinned_array(shape, sizes.dtype) for _ in "kv")
        self.k.copy_(self.near)
        self.v.copy_(self.near)
        self.q = normal((sizes.kv_heads, sizes.group, sizes.dim), sizes.dtype, device)
        samples = normal((sizes.kv_heads, sizes.group, 256, sizes.dim), sizes.dtype, device)
        made = learn(self.near, samples, size, SelectGoal(_TOP_K, 0.9, 0.9))
        assert made is not None
        learned, codes = made
        self.codes: DeviceCodes = learned.codes_for(keys, 4096, sizes.dtype)
        self.codes.codes.copy_(codes)
        self.codes.wanted.fill_(200)
        self.codes.state.fill_(keys)

    def encoded(self, sizes: Sizes) -> dict[str, Any]:
        call = partial(self.ops.encode_sketch, self.codes, self.near, 0)
        return self._with(gbps(timed([call], self.device, rounds=2, least=1), self.near.nbytes))

    def found(self, sizes: Sizes) -> dict[str, Any]:
        values = timed(
            [partial(self.find, self.ops)], self.device, rounds=sizes.rounds, least=sizes.calls
        )
        listed = (self.find(self.ops).ids >= 0).sum(-1).float().mean()
        return {**self._with(gbps(values, self.codes.codes.nbytes)), "listed": float(listed)}

    def attended(self, sizes: Sizes) -> dict[str, Any]:
        found = self.find(self.ops)
        limit = self.ops.best_limit(found.scores, _TOP_K)
        call = partial(self.ops.attend_candidates, found, self.v, limit, scale=0.1)
        return self._with(timed([call], self.device, rounds=sizes.rounds, least=sizes.calls))

    def stepped(self, sizes: Sizes) -> dict[str, Any]:
        call = partial(self.step, self.ops, self.q)
        return self._with(timed([call], self.device, rounds=sizes.rounds, least=sizes.calls))

    def played(self, sizes: Sizes) -> dict[str, Any]:
        """The same as one graph; its host time is what a launch takes."""
        need_cuda(self.device)
        launched = self.step(self.ops, self.q)
        if (served := self.ops.served["find_by_sketch"]) != "triton":
            raise NotHere(f"what is captured must not copy from the host, and {served} served")
        recording = CudaRecorder(self.device).record(partial(self.step, self.ops), self.q)
        values = timed([recording.play], self.device, rounds=sizes.rounds, least=sizes.calls)
        worst = largest(recording.part.out, launched.out)
        whole = wall_us(self._played_and_waited(recording.play), rounds=sizes.rounds)
        differs = Difference(worst, ROUNDING[sizes.dtype])  # lists come in any order
        return {**values, "largest_difference": differs, "waited_us": whole["us"]}

    def _played_and_waited(self, play: Any) -> Any:
        def work() -> None:
            play()
            torch.cuda.synchronize(self.device)

        return work

    def find(self, ops: Ops) -> Any:
        return ops.find_by_sketch(self.codes, self.q, self.k, new=1, width=_WIDTH)

    def step(self, ops: Ops, q: Tensor) -> PartialAttention:
        found = ops.find_by_sketch(self.codes, q, self.k, new=1, width=_WIDTH)
        limit = ops.best_limit(found.scores, _TOP_K)
        return ops.attend_candidates(found, self.v, limit, scale=0.1)

    def _with(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "served_by": self.ops.served.get("find_by_sketch")}
