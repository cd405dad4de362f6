"""What serves a layer's cold keys while their index is built: digests on the device, or a scan."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hybrid_kv.index.device_pages import DevicePages
from hybrid_kv.index.pages import with_room
from hybrid_kv.ops import Ops
from hybrid_kv.store import LayerKV, StandInFor
from hybrid_kv.store.live_index import MakeIndex
from hybrid_kv.types import Demotion, bytes_per_token


class StandIns:
    """Chooses for the layers of one prompt, all alike: the first one that is sealed decides.

    What is free shrinks while layers take what was counted for them. Asked again, the same rule
    would change its mind in the middle of the prompt.

    Args:
        num_layers: tiered layers of the model: "auto" takes digests if those of all layers fit
            beside all that stays resident, for no layer shall fail for what an earlier one took.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._fits: dict[torch.device, bool] = {}

    def of(self, layer: LayerKV) -> StandInFor | None:
        """Makes the stand-in that a sealed layer's placement asks for; None for the index's own."""
        place, pool = layer.placement, layer.resident.pool
        if place is None or place.index is None or place.stand_in == "scan":
            return None
        if place.rest is Demotion.ABSORB:  # leaves token by token: there are no pages to digest
            return None
        if place.stand_in == "auto":
            if pool.device.type != "cuda":
                return None
            if pool.device not in self._fits:
                needed = self._num_layers * (digest_bytes(layer) + resident_bytes(layer))
                self._fits[pool.device] = needed <= free_bytes(pool.device)
            if not self._fits[pool.device]:
                return None
        # Not the layer, which will keep this: a cycle would hold its memory when it is dropped.
        return partial(_pages_of, pool.ops, layer.page_size, pool.device)


def _pages_of(ops: Ops, size: int, device: torch.device, k: Tensor) -> MakeIndex:
    """Digests of keys [Hkv, N, D], whole pages, taken where they still lie: so nothing has to be
    read back from the host.
    """
    pages = k.unflatten(1, (-1, size))
    digests = torch.cat([pages.amax(2), pages.amin(2)], -1)
    return partial(DevicePages, ops, size, device, digests)


def digest_bytes(layer: LayerKV) -> int:
    """Of all pages of a layer and those that follow: two rows each, as many bytes as one token's K
    and V.
    """
    lengths = [row.length for row in layer.rows]
    pages = sum(with_room(-(-length // layer.page_size)) for length in lengths)
    return pages * bytes_per_token(layer.shape, layer.resident.pool.dtype)


def resident_bytes(layer: LayerKV) -> int:
    """Of what a layer's placement keeps on the device, hot pages and their digests included."""
    place, size = layer.placement, layer.page_size
    if place is None:
        return 0
    kept = place.sink_tokens + place.window_tokens + place.spare_tokens + place.hot_tokens
    pages = len(layer.rows) * (kept // size + 2)  # the window holds up to two pages more
    return pages * (size + 1) * bytes_per_token(layer.shape, layer.resident.pool.dtype)


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that no process has taken; torch's own reserves are not counted."""
    return int(torch.cuda.mem_get_info(device)[0])
