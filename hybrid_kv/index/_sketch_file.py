"""Sketches as arrays of an index file, and back; whatever a file holds is read as hostile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor

from hybrid_kv.errors import FileFormatError
from hybrid_kv.index._file import check_fingerprint, fingerprint, refusing_what_is_damaged
from hybrid_kv.index._sketch_head import HeadSketch, Placing, Potential, restored_tier
from hybrid_kv.index._sketch_learn import SketchReport
from hybrid_kv.ops.sketch_codes import SketchMap, SketchPlan, SketchTier

CODES = 1
"""Version of the codes, of their meaning and layout; every engine makes and reads the same."""
_MAP = ("key_map", "key_offset", "query_map")
_POTENTIAL = ("of_keys", "weights", "scale", "thresholds")


def written(
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


def read(
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
