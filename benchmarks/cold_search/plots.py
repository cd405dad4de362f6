"""Recall against time, and time against the number of keys, as figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cold_search.derive import first_cold

TARGET = {"metric": "recall", "value": 0.95}
COLOURS = {
    "graph": "#c0392b",
    "sketch": "#e67e22",
    "auto": "#8e44ad",
    "flat": "#1f5fa8",
    "faiss": "#2e7d32",
    "hnswlib": "#b8860b",
    "usearch": "#00838f",
    "pivot": "#6d4c41",
    "ivf": "#7a7a7a",
}
MARKS = "osD^vP*X"
Result = dict[str, Any]
Point = tuple[float, float]


def save_figures(document: dict[str, Any], folder: Path) -> list[Path]:
    """Writes `recall.svg`, `recall.png`, and with several sizes `growth.svg`, `growth.png`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "cold_search", "font.size": 9})
    from matplotlib import pyplot

    done = [row for row in document["rows"] if "recall" in row]
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"recall": _recall_figure(pyplot, done)}
    if len({row["n"] for row in done}) > 1:
        figures["growth"] = _growth_figure(pyplot, done)
    written = []
    for name, figure in figures.items():
        figure.text(0.01, 0.01, caption(document), fontsize=7, color="#555555")
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        for ending in ("svg", "png"):
            written.append(folder / f"{name}.{ending}")
            figure.savefig(written[-1], dpi=130, metadata={"Date": None} if ending == "svg" else {})
        pyplot.close(figure)
    return written


def caption(document: dict[str, Any]) -> str:
    """Hardware and sizes, in one line."""
    machine, settings = document["environment"], document["settings"]
    rate = statistics.mean(machine["stream_gbps"])
    return (
        f"{machine['cpu']['model']}, {settings['threads'][0]} thread, {rate:.0f} GB/s, L3 "
        f"{machine['cache_bytes'].get('l3', 0) / 2**20:.0f} MiB; {settings['queries']} positions "
        "after the prompt; cold: copies of the head in turn, caches emptied"
    )


def curve(rows: Iterable[Result]) -> list[Point]:
    """(time, recall) by time: every setting, averaged over seeds where it is the same."""
    by_setting: dict[str, list[Result]] = {}
    for row in rows:
        by_setting.setdefault(str(sorted(row["setting"].items())), []).append(row)
    most = max(map(len, by_setting.values()))
    points = [
        (statistics.mean(map(us, group)), statistics.mean(row["recall"] for row in group))
        for group in by_setting.values()
        if len(group) == most
    ]
    return sorted(points)


def us(row: Result) -> float:
    """The cold time, or the hot one where none was taken."""
    return first_cold(row) or float(row["hot_us"])


def growth(rows: Iterable[Result]) -> list[Point]:
    """(N, time) at the target recall, averaged over seeds; scans need no target."""
    by_size: dict[int, list[float]] = {}
    for row in rows:
        wanted = any(goal["reached"] and TARGET.items() <= goal.items() for goal in row["targets"])
        if wanted or (not row["setting"] and row["recall"] >= TARGET["value"] - 0.01):
            by_size.setdefault(row["n"], []).append(us(row))
    return sorted((float(n), statistics.mean(times)) for n, times in by_size.items())


def _recall_figure(pyplot: Any, rows: Sequence[Result]) -> Any:
    data = list(dict.fromkeys(row["data"] for row in rows))
    largest = max(row["n"] for row in rows)
    figure, panels = pyplot.subplots(1, len(data), figsize=(5 * len(data) + 3, 4.6), squeeze=False)
    for panel, name in zip(panels[0], data, strict=True):
        here = [row for row in rows if row["data"] == name and row["n"] == largest]
        _draw(panel, here, curve)
        panel.set(xscale="log", xlabel="µs per query head", ylabel="recall@100")
        panel.set_title(f"{name}, {largest:,} keys")
    _legend(panels[0][-1])
    return figure


def _growth_figure(pyplot: Any, rows: Sequence[Result]) -> Any:
    data = list(dict.fromkeys(row["data"] for row in rows))
    figure, panels = pyplot.subplots(1, len(data), figsize=(5 * len(data) + 3, 4.6), squeeze=False)
    for panel, name in zip(panels[0], data, strict=True):
        _draw(panel, [row for row in rows if row["data"] == name], growth)
        panel.set(xscale="log", yscale="log", xlabel="keys", ylabel="µs per query head")
        panel.set_title(f"{name}: recall@100 ≥ {TARGET['value']}")
    _legend(panels[0][-1])
    return figure


def _draw(panel: Any, rows: Sequence[Result], points_of: Any) -> None:
    """One line per row and mode, in the colour of its family."""
    drawn: dict[str, int] = {}
    for row, mode in dict.fromkeys((row["row"], row["mode"]) for row in rows):
        points = points_of([r for r in rows if (r["row"], r["mode"]) == (row, mode)])
        if not points:
            continue
        family = next((name for name in COLOURS if row.startswith(name)), "ivf")
        mark = MARKS[drawn.setdefault(family, 0) % len(MARKS)]
        drawn[family] += 1
        style = {"color": COLOURS[family], "marker": mark, "markersize": 4, "linewidth": 1.2}
        dashes = "-" if mode == "group" else ":"
        panel.plot(*zip(*points, strict=True), dashes, label=f"{row}, {mode}", **style)
    panel.grid(alpha=0.25, which="both", linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)


def _legend(panel: Any) -> None:
    """Beside the panel, where it covers no point."""
    panel.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
