"""What serves a layer's cold keys while their index is built: digests on the device, or a scan."""

from __future__ import annotations

from functools import partial

import torch

from hybrid_kv.index.device_pages import DevicePages
from hybrid_kv.index.pages import with_room
from hybrid_kv.store import LayerKV
from hybrid_kv.store.live_index import MakeIndex
from hybrid_kv.types import bytes_per_token


def stand_in_for(layer: LayerKV, num_layers: int) -> MakeIndex | None:
    """Makes the stand-in that a sealed layer's placement asks for; None for the index's own.

    Args:
        num_layers: tiered layers of the model: "auto" takes digests if those of all layers fit
            beside all that stays resident, for no layer shall fail for what an earlier one took.
    """
    place, pool = layer.placement, layer.resident.pool
    if place is None or place.index is None or place.stand_in == "scan":
        return None
    if place.stand_in == "auto":
        if pool.device.type != "cuda":
            return None
        if num_layers * (digest_bytes(layer) + resident_bytes(layer)) > _free_bytes(pool.device):
            return None
    return partial(DevicePages, pool.ops, layer.page_size, pool.device)


def digest_bytes(layer: LayerKV) -> int:
    """Of all pages of a layer and those that follow: two rows each, as many bytes as one token's K
    and V.
    """
    pages = sum(with_room(-(-length // layer.page_size)) for length in layer.lengths)
    return pages * bytes_per_token(layer.shape, layer.resident.pool.dtype)


def resident_bytes(layer: LayerKV) -> int:
    """Of what a layer's placement keeps on the device, hot pages and their digests included."""
    place, size = layer.placement, layer.page_size
    if place is None:
        return 0
    kept = place.sink_tokens + place.window_tokens + place.spare_tokens + place.hot_tokens
    pages = layer.num_rows * (kept // size + 2)  # the window holds up to two pages more
    return pages * (size + 1) * bytes_per_token(layer.shape, layer.resident.pool.dtype)


def _free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that no process has taken; torch's own reserves are not counted."""
    return int(torch.cuda.mem_get_info(device)[0])
