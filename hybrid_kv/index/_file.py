"""The container of saved indexes, specified in docs/index-file.md, and sketches in it.

It holds named arrays with checksums. Whatever a file holds is read as hostile.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor

from hybrid_kv.errors import FileFormatError
from hybrid_kv.index._sketch_head import HeadSketch, Placing, Potential, restored_tier
from hybrid_kv.index._sketch_learn import SketchReport
from hybrid_kv.ops.sketch_codes import SketchMap, SketchPlan, SketchTier

MAGIC = b"HKVINDEX"

VERSION = 2

_ALIGNMENT = 64

_PREFIX = struct.Struct("<8sIIQ")
"""Magic, version, CRC-32 of the header, bytes of the header."""

_MAX_HEADER_BYTES = 64 * 2**20

_DTYPES = frozenset({"uint8", "int8", "int32", "int64", "float32"})


def write_arrays(
    path: Path, kind: str, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Writes `arrays` and the JSON-ready `meta`; an interrupted write leaves the old file.

    Raises:
        OSError: the file cannot be written.
    """
    entries, offset = [], 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array)
        entries.append(
            {
                "name": name,
                "dtype": data.dtype.name,
                "shape": list(data.shape),
                "offset": offset,
                "crc32": zlib.crc32(data.data.cast("B") if data.size else b""),
            }
        )
        offset += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = json.dumps({"kind": kind, "meta": dict(meta), "arrays": entries}).encode()
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.write(_PREFIX.pack(MAGIC, VERSION, zlib.crc32(header), len(header)))
            file.write(header)
            for array in arrays.values():
                data = np.ascontiguousarray(array)
                file.write(data.tobytes())
                file.write(b"\0" * (-data.nbytes % _ALIGNMENT))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_arrays(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Reads what `write_arrays` wrote; every byte that is used was checked.

    Raises:
        FileFormatError: the file is damaged, truncated, of another kind or of a newer version.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    header, start = _read_header(path, content)
    if header.get("kind") != kind:
        raise FileFormatError(
            f"{path} holds an index of kind {header.get('kind')!r}, expected '{kind}'; "
            "open it with that kind"
        )
    arrays: dict[str, NDArray[Any]] = {}
    unread = len(content) - start  # arrays that overlapped could make much of a small file
    try:
        for entry in header["arrays"]:
            array = _read_array(path, content, start, entry)
            unread -= array.nbytes
            if unread < 0:
                raise _damaged(path, "its arrays overlap")
            arrays[entry["name"]] = array
        meta = dict(header["meta"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, f"its header is not complete ({error})") from None
    return meta, arrays


@contextmanager
def refusing_what_is_damaged(path: Path) -> Iterator[None]:
    """Turns what a file's content raises, when it is made sense of, into FileFormatError."""
    try:
        yield
    except FileFormatError:
        raise
    except KeyError as error:
        raise _damaged(path, f"it lacks {error}") from None
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise FileFormatError(f"{path} is damaged ({reason}); build the index again") from None


def fingerprint(keys: Tensor, count: int) -> dict[str, Any]:
    """Names the first `count` keys that an index was made for, from 1024 spread rows."""
    rows = keys[:, : count : max(1, count // 1024)].contiguous().view(torch.uint8)
    shape = [keys.shape[0], count, keys.shape[2]]
    crc = zlib.crc32(rows.numpy().tobytes())
    return {"shape": shape, "dtype": str(keys.dtype).removeprefix("torch."), "crc32": crc}


def check_fingerprint(path: Path, saved: dict[str, Any], keys: Tensor, count: int) -> None:
    """Raises FileFormatError unless keys begin with those that were `saved`, `count` of them."""
    if not 0 <= count <= keys.shape[1] or saved != fingerprint(keys, count):
        raise FileFormatError(
            f"{path} was made for other keys ({saved['shape']}), got {list(keys.shape)}; load it "
            "with the context it was saved with"
        )


def _read_header(path: Path, content: bytes) -> tuple[dict[str, Any], int]:
    if len(content) < _PREFIX.size or content[: len(MAGIC)] != MAGIC:
        raise FileFormatError(f"{path} is not a hybrid_kv index; give a file that `save` has made")
    _, version, crc, size = _PREFIX.unpack_from(content)
    if version != VERSION:
        raise FileFormatError(
            f"{path} has format version {version}, this package reads {VERSION}; build the index "
            "again or use the package that wrote it"
        )
    stop = _PREFIX.size + size
    if size > _MAX_HEADER_BYTES or stop > len(content):
        raise _damaged(path, "its header is cut off")
    header = content[_PREFIX.size : stop]
    if zlib.crc32(header) != crc:
        raise _damaged(path, "the checksum of its header does not fit")
    try:
        found = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise _damaged(path, "its header is not an object")
    return found, stop


def _read_array(path: Path, content: bytes, start: int, entry: dict[str, Any]) -> NDArray[Any]:
    name, shape, offset = entry["name"], tuple(entry["shape"]), entry["offset"]
    if entry["dtype"] not in _DTYPES or offset < 0 or any(size < 0 for size in shape):
        raise _damaged(path, f"array '{name}' is described wrongly")
    dtype = np.dtype(entry["dtype"])
    count = int(np.prod(shape, dtype=object))
    begin, size = start + offset, count * dtype.itemsize
    if begin + size > len(content):
        raise _damaged(path, f"array '{name}' is cut off")
    data = memoryview(content)[begin : begin + size]
    if zlib.crc32(data) != entry["crc32"]:
        raise _damaged(path, f"the checksum of array '{name}' does not fit")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _damaged(path: Path, what: str) -> FileFormatError:
    return FileFormatError(f"{path} is damaged: {what}; build the index again")


CODES = 1
"""Version of the codes, of their meaning and layout; every engine makes and reads the same."""
_MAP = ("key_map", "key_offset", "query_map")
_POTENTIAL = ("of_keys", "weights", "scale", "thresholds")


def sketches_to_file(
    params: BaseModel,
    reports: Sequence[SketchReport],
    sketches: Mapping[int, HeadSketch],
    keys: Tensor,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """See `SavedIndex.to_file`: codes, maps and reports.

    Args:
        keys: [Hkv, N, D], those that have codes.
    """
    arrays = {
        f"{head}.{name}": array.numpy()
        for head, sketch in sketches.items()
        for name, array in _arrays_of(sketch).items()
    }
    meta = {
        "params": params.model_dump(mode="json"),
        "reports": [report.to_dict() for report in reports],
        "codes": CODES,
        "keys": fingerprint(keys, keys.shape[1]),
        "sketches": {str(head): _described(sketch) for head, sketch in sketches.items()},
    }
    return meta, arrays


def sketches_from_file(
    path: Path,
    kind: type[BaseModel],
    meta: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    keys: Tensor,
) -> tuple[BaseModel, tuple[SketchReport, ...], dict[int, HeadSketch]]:
    """Parameters of a kind, reports and sketches by head, as a file has them for these keys.

    Raises:
        FileFormatError: it is damaged, of another version, or was made for other keys.
    """
    with refusing_what_is_damaged(path):
        if meta["codes"] != CODES:
            raise FileFormatError(
                f"{path} has codes of version {meta['codes']}, this package reads {CODES}; build "
                "the index again or use the package that wrote it"
            )
        params = kind.model_validate(meta["params"])
        reports = tuple(SketchReport.from_dict(report) for report in meta["reports"])
        sketches = {
            int(head): _sketch_of(head, what, arrays) for head, what in meta["sketches"].items()
        }
        saved = int(meta["keys"]["shape"][1])
        check_fingerprint(path, meta["keys"], keys, saved)
        _check(sketches, len(reports), keys, saved)
    return params, reports, sketches


def _arrays_of(sketch: HeadSketch) -> dict[str, Tensor]:
    """The arrays of one head, by their names in docs/index-file.md."""
    arrays: dict[str, Tensor] = {}
    for number, tier in enumerate(sketch.tiers):
        parts = {name: getattr(tier.map, name) for name in _MAP} | {"codes": tier.codes}
        if tier.ids is not None:
            parts["ids"] = tier.ids
        arrays |= {f"{number}.{name}": array for name, array in parts.items()}
    if sketch.mean is not None:
        arrays["mean"] = sketch.mean
    if (placing := sketch.placing) is not None:
        arrays |= {name: getattr(placing.potential, name) for name in _POTENTIAL}
        arrays["cuts"] = placing.cuts
    return arrays


def _described(sketch: HeadSketch) -> dict[str, Any]:
    """Facts of one head that are no arrays."""
    tiers = [{"groups": tier.map.plan.groups, "count": tier.count} for tier in sketch.tiers]
    return {"num_rerank": sketch.num_rerank, "tiers": tiers}


def _sketch_of(head: str, what: Mapping[str, Any], arrays: Mapping[str, Any]) -> HeadSketch:
    """One head's sketch as a file holds it; raises whatever is wrong with it by itself."""
    own = {
        name.removeprefix(f"{head}."): torch.from_numpy(array)
        for name, array in arrays.items()
        if name.startswith(f"{head}.")
    }
    tiers = [_tier_of(number, tier, own) for number, tier in enumerate(what["tiers"])]
    if not tiers or not 1 <= (num_rerank := int(what["num_rerank"])) < 2**31:
        raise ValueError("a sketch must have tiers, and rank at least one key")
    mean = own.get("mean")
    if mean is not None and (mean.dtype != torch.float32 or not bool(torch.isfinite(mean).all())):
        raise ValueError("the mean of the keys must be of finite float32 numbers")
    return HeadSketch(tiers, num_rerank, _placing_of(own) if len(tiers) > 1 else None, mean)


def _check(sketches: Mapping[int, HeadSketch], num_reports: int, keys: Tensor, count: int) -> None:
    """Raises ValueError unless the sketches are of the first `count` keys [Hkv, N, D]."""
    if num_reports != len(keys) or not all(0 <= head < len(keys) for head in sketches):
        raise ValueError(f"{num_reports} reports and sketches of {list(sketches)}")
    for head, sketch in sketches.items():
        rows = [_rows(tier) for tier in sketch.tiers]
        if not torch.equal(torch.cat(rows).sort().values, torch.arange(count)):
            raise ValueError(f"the tiers of head {head} must hold {count} keys, each once")
        placing = () if sketch.placing is None else (sketch.placing.potential.of_keys,)
        for array in (*placing, *(tier.map.key_map for tier in sketch.tiers)):
            if array.shape[1] != keys.shape[2]:
                raise ValueError(f"head {head} is of keys of {array.shape[1]} channels")
        if sketch.mean is not None and sketch.mean.shape != keys.shape[2:]:
            raise ValueError(f"head {head} has a mean of {list(sketch.mean.shape)}")


def _tier_of(number: int, what: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> SketchTier:
    plan = SketchPlan(tuple((int(dims), int(bits)) for dims, bits in what["groups"]))
    sketch_map = SketchMap(plan, *(arrays[f"{number}.{name}"] for name in _MAP))
    codes, ids = arrays[f"{number}.codes"], arrays.get(f"{number}.ids")
    return restored_tier(sketch_map, codes, ids, int(what["count"]))


def _placing_of(arrays: Mapping[str, Tensor]) -> Placing:
    of_keys, weights, scale, thresholds = (arrays[name] for name in _POTENTIAL)
    cuts = arrays["cuts"]
    expected = (of_keys.shape[0], scale.shape[0])
    if tuple(weights.shape) != expected or weights.dtype != torch.int8:
        raise ValueError(f"weights must be int8 {list(expected)}, got {list(weights.shape)}")
    if thresholds.shape != scale.shape or scale.dim() != 1 or not len(scale):
        raise ValueError(f"thresholds must be {list(scale.shape)}, got {list(thresholds.shape)}")
    for array in (of_keys, scale, thresholds, cuts):
        if array.dtype != torch.float32 or not bool(torch.isfinite(array).all()):
            raise ValueError("a potential must be of finite float32 numbers")
    if cuts.dim() != 1 or not bool((cuts.diff() >= 0).all()):
        raise ValueError("cuts between tiers must ascend")
    return Placing(Potential(of_keys, weights, scale, thresholds), cuts)


def _rows(tier: SketchTier) -> Tensor:
    return torch.arange(tier.count) if tier.ids is None else tier.ids.long()
