"""Index files that somebody made to do harm: damaged in places that count, with checksums that fit.

`mutate` takes its decisions from a function, so that a property test, a fuzzer and plain random
numbers can all drive it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, FileFormatError, NonFiniteError
from hybrid_kv.index._base import SavedIndex
from hybrid_kv.index._sketch_head import HeadSketch, Placing, SketchMaker
from hybrid_kv.index._sketch_learn import SketchReport
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.index.auto import AutoIndex, Part
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.index.pages import BlocksIndex
from hybrid_kv.index.sketch import SketchIndex
from hybrid_kv.ops.key_graph import BuildParams, KeyGraph
from hybrid_kv.ops.native.graph import project
from hybrid_kv.ops.sketch_codes import SketchPlan

Choose = Callable[[int], int]
"""A number from 0 to below its argument, which is at least 1."""
HEADS, NUM_KEYS, DIM = 2, 60, 8
_PREFIX = struct.Struct("<8sIIQ")
_DEEP = "\0deep"
_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 17, 59, 60, 61, 255, 256, 257, 65535, 65536),
    *(2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 10**30, 1e308, 0.5, -0.5),
    *(float("inf"), float("nan"), "", "x", "0", "int32", "uint8", "float16", _DEEP),
    *([], {}, [[]], [0], [10**30, 0], [0, 10**30], [2**62, 2**62, 0], [-1], [1] * 70),
)
_WORDS = (0, 1, -1, -2, 16, 59, 60, 61, 255, 2**16, 2**31 - 1, -(2**31), 0x7FFF7FFF, 0x003C003B)


def keys_of_file() -> Tensor:
    """[HEADS, NUM_KEYS, DIM], which the files below are over."""
    return torch.randn(HEADS, NUM_KEYS, DIM, generator=torch.Generator().manual_seed(0))


def seeds(folder: Path, degrees: tuple[int, ...] = (4, 16, 17)) -> list[bytes]:
    """Sound files: graphs whose lists have slots to spare or have not, one of no graph at all;
    sketches, uniform and in tiers; a layer of both kinds; blocks.
    """
    keys = keys_of_file()
    files = []
    for degree in (*degrees, 0):
        index = GraphIndex(GraphIndex.Params(min_keys=NUM_KEYS + 1))
        index.build(keys, None)
        if degree:
            index._serve(tuple(_graph(head, degree) for head in keys))
        path = folder / "seed.hkv"
        index.save(path)
        files.append(path.read_bytes())
    path = folder / "seed.hkv"
    files += [_sketch_file(path, with_tiers) for with_tiers in (False, True)]
    files.append(_mixed_file(path, SketchIndex.load(path, keys)))
    blocks = BlocksIndex(BlocksIndex.Params(page_size=16))
    blocks.build(keys, keys[:, None, :40])
    blocks.save(path)
    return [*files, path.read_bytes()]


def _mixed_file(path: Path, sketched: SketchIndex) -> bytes:
    """The first head by its sketch, the second by a graph."""
    keys = keys_of_file()
    report, params = HeadReport("graph", "for a test", 7), sketched.params
    graph = GraphIndex.serving(GraphIndex.Params(), keys[1:], [report], [_graph(keys[1], 4)])
    own = SketchIndex.serving(params, keys[:1], sketched.reports[:1], sketched._coded.sketches)
    index = AutoIndex(AutoIndex.Params())
    index.build(keys, None)
    index._parts = (Part(slice(1, 2), graph), Part(slice(0, 1), own))
    index.save(path)
    return path.read_bytes()


def _sketch_file(path: Path, with_tiers: bool) -> bytes:
    keys = keys_of_file()
    index = SketchIndex(SketchIndex.Params(min_keys=NUM_KEYS + 1))
    index.build(keys, None)
    index.reports = (SketchReport("sketch", "for a test"), SketchReport("flat", "for a test"))
    maker = SketchMaker(keys[0], keys[0, :40])
    plans = [SketchPlan(groups) for groups in (((4, 8),), ((8, 4),))]
    placing = Placing(maker.potential, maker.potential.of(keys[0]).median()[None])
    maps = [maker.map_of(plan) for plan in plans[: 1 + with_tiers]]
    sketch = HeadSketch.of(maps, keys[0], placing if with_tiers else None)
    sketch.num_rerank = 17
    index._serve({0: sketch})
    index.save(path)
    return path.read_bytes()


def _graph(keys: Tensor, degree: int) -> KeyGraph:
    lists = (keys[:40] @ keys.T).topk(9).indices.int()
    return project(lists, keys, keys[:40], BuildParams(max_degree=degree))


def mutate(content: bytes, choose: Choose) -> bytes:
    """One to four changes; in three of four cases every checksum fits again."""
    header, payload = _opened(content)
    for _ in range(1 + choose(4)):
        match choose(6):
            case 0 | 1:
                _change_value(header, choose)
            case 2 | 3:
                _change_word(payload, choose)
            case 4:
                _move_array(header, choose)
            case _:
                if payload:
                    payload = payload[: choose(len(payload))]
    if choose(4):
        _seal(header, payload)
    text = bytearray(json.dumps(header).encode())
    if choose(20) == 0:
        text[choose(len(text))] ^= 1 << choose(8)
    return _closed(bytes(text), payload)


def load_and_search(path: Path, keys: Tensor, queries: Tensor) -> bool:
    """Whether the file loads; if it does, its searches find keys that exist, or refuse to search.

    Raises:
        AssertionError: it found something else; anything else that `load` should not raise.
    """
    loaded = (_loaded(kind, path, keys) for kind in _KINDS)
    index = next(filter(None, loaded), None)
    if index is None:
        return False
    index.describe()
    for known in (keys, torch.cat([keys, keys[:, :7]], dim=1)):  # also after it has grown
        try:
            index.add(known)
            found = index.search(queries, 5)
        except (ConfigError, NonFiniteError):  # settings and maps are the user's to check
            return True
        assert int(found.ids.min()) >= -1
        assert int(found.ids.max()) < known.shape[1]
    return True


_KINDS: tuple[type[SavedIndex], ...] = (GraphIndex, SketchIndex, AutoIndex, BlocksIndex)


def _loaded(kind: type[SavedIndex], path: Path, keys: Tensor) -> SavedIndex | None:
    try:
        return kind.load(path, keys)
    except FileFormatError:
        return None


def _opened(content: bytes) -> tuple[dict[str, Any], bytearray]:
    size = _PREFIX.unpack_from(content)[3]
    header: dict[str, Any] = json.loads(content[_PREFIX.size : _PREFIX.size + size])
    return header, bytearray(content[_PREFIX.size + size :])


def _closed(text: bytes, payload: bytearray) -> bytes:
    deep = b"[" * 100_000 + b"]" * 100_000
    text = text.replace(json.dumps(_DEEP).encode(), deep)
    text += b" " * (-(_PREFIX.size + len(text)) % 64)
    return _PREFIX.pack(b"HKVINDEX", 2, zlib.crc32(text), len(text)) + text + bytes(payload)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a JSON value."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    return [place for key, item in items for place in ((value, key), *_places(item))]


def _change_value(header: dict[str, Any], choose: Choose) -> None:
    places = _places(header)
    if not places:
        return
    container, key = places[choose(len(places))]
    if choose(8) == 0:
        del container[key]
    else:
        container[key] = json.loads(json.dumps(_VALUES[choose(len(_VALUES))]))


def _change_word(payload: bytearray, choose: Choose) -> None:
    if len(payload) < 4:
        return
    at = choose(len(payload) // 2 - 1) * 2
    struct.pack_into("<i", payload, at, _WORDS[choose(len(_WORDS))])


def _move_array(header: dict[str, Any], choose: Choose) -> None:
    arrays = header.get("arrays")
    if not isinstance(arrays, list) or not arrays:
        return
    one, other = arrays[choose(len(arrays))], arrays[choose(len(arrays))]
    if isinstance(one, dict) and isinstance(other, dict):
        name = ("name", "dtype", "shape", "offset")[choose(4)]
        if name in other:
            one[name] = other[name]


def _seal(header: dict[str, Any], payload: bytearray) -> None:
    """Gives each array that lies in the payload its checksum."""
    arrays = header.get("arrays")
    for entry in arrays if isinstance(arrays, list) else []:
        try:
            size = {"uint8": 1, "int8": 1, "int32": 4, "int64": 8, "float32": 4}[entry["dtype"]]
            for extent in entry["shape"]:
                size *= extent
            begin = entry["offset"]
            if 0 <= begin <= begin + size <= len(payload):
                entry["crc32"] = zlib.crc32(payload[begin : begin + size])
        except (KeyError, TypeError):
            continue
