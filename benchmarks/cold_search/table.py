"""Results as lines for people."""

from __future__ import annotations

from typing import Any

from benchmarks.cold_search.derive import first_cold

_COLUMNS = ("scanned", "KB/q", "hot us", "cold us", "build s", "B/key", "x faiss", "x int8")
HEADER = f"{'row':<60} recall   p5  m/orac  mass" + "".join(f"{name:>9}" for name in _COLUMNS)


def describe(about: dict[str, Any]) -> str:
    """One head in one line."""
    return (
        f"{about['data']}, N {about['n']}, D {about['head_dim']}, group {about['group']}, seed "
        f"{about['seed']}: distance ratio {about['distance_ratio']:.1f}, top-100 mass "
        f"{about['top100_mass']:.2f}, top-1000 mass {about['top1000_mass']:.2f}, hub share "
        f"{about['hub_share']:.2f}, effective dim {about['effective_dim']:.1f}"
    )


def line(result: dict[str, Any]) -> str:
    """One result in one line, in the columns of `HEADER`."""
    name = " ".join(
        [result["row"], result["mode"], *(f"{k}={v}" for k, v in result["setting"].items())]
    )
    for target in result["targets"]:
        sign = ">=" if target["reached"] else "never"
        name += f" {target['metric'].partition('_')[0]}{sign}{target['value']:g}"
    cells = (
        _cell(result["scanned_ratio"], ".2%"),
        _cell(result["bytes_read"], ".0f", 1 / 1024),
        _cell(result["hot_us"], ".1f"),
        _cell(first_cold(result), ".1f"),
        _cell(result["build_s"], ".2f"),
        _cell(result["bytes_per_key"], ".0f"),
        _cell(result.get("hot_over_faiss_flat"), ".1f"),
        _cell(result.get("cold_over_int8_flat"), ".2f"),
    )
    return (
        f"{name:<60} {result['recall']:.3f} {result['recall_p5']:.2f}  "
        f"{result['mass_over_oracle']:.3f}  {result['mass']:.3f}{''.join(cells)}"
    )


def auto_lines(auto: dict[str, Any]) -> str:
    """How `auto` compares, a line for every number of threads, hot and cold."""
    if "absent" in auto:
        return f"auto: {auto['absent']}"
    return "\n".join(
        f"auto serves {auto['serves'][threads]} with {threads} threads: {found['auto_us']:.1f} us "
        f"{heat}; flat {found['flat_us']:.1f}, sketch {found['sketch_us']:.1f}, graph "
        f"{found['graph_us']:.1f}; auto / best {found['auto_over_better']:.3f} of the medians, "
        f"{found['auto_over_better_by_turn']:.3f} by turn"
        for heat in ("hot", "cold")
        for threads, found in auto[heat].items()
    )


def _cell(value: float | None, form: str, scale: float = 1) -> str:
    return format("-" if value is None else format(value * scale, form), ">9")
