"""Missed softmax mass by layer and KV head, in steps that are the same for every row and run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.figures.frame import SMALL
from hybrid_kv.report.html.scene import Box, Scene, Text
from hybrid_kv.report.run import AuditedHead

EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Where one colour ends and the next begins: h0 is below the first, h8 above the last."""


def heat_figure(name: str, title: str, heads: Sequence[AuditedHead], width: float = 360) -> Scene:
    """Layers downwards, KV heads to the right; heads that were not looked at stay empty."""
    layers = sorted({head.layer for head in heads})
    columns = range(max((head.kv_head for head in heads), default=0) + 1)
    scene = Scene(name, title, _describe(heads), width, 0)
    left, top = 40.0, 62.0
    wide = (width - left) / len(columns)
    high = min(22.0, max(9.0, 520 / max(1, len(layers))))
    _legend(scene, width)
    rows = {layer: top + row * high for row, layer in enumerate(layers)}
    for head in columns:
        if head % max(1, len(columns) // 8) == 0:
            x = left + (head + 0.5) * wide
            scene.add(Text(x, top - 6, str(head), "soft", SMALL, "middle"))
    scene.add(Text(0, top - 6, "layer", "soft", SMALL))
    for row, (layer, y) in enumerate(rows.items()):
        if row % max(1, -(-14 // int(high))) == 0:
            scene.add(Text(left - 8, y + high / 2 + 4, str(layer), "soft", SMALL, "end"))
    for head_ in heads:
        x, y = left + head_.kv_head * wide, rows[head_.layer]
        colour = f"h{bisect_right(EDGES, head_.missed_mass)}"
        scene.add(Box(x, y, wide - 1, high - 1, colour, _tip(head_)))
    scene.height = top + high * len(layers) + 4
    return scene


def _legend(scene: Scene, width: float) -> None:
    wide = width / (len(EDGES) + 1)
    for step in range(len(EDGES) + 1):
        scene.add(Box(step * wide, 0, wide - 1, 12, f"h{step}"))
    for step, edge in enumerate(EDGES):
        text = f"{100 * edge:g}{'%' if step == len(EDGES) - 1 else ''}"
        scene.add(Text((step + 1) * wide - 0.5, 25, text, "soft", SMALL, "middle"))


def _tip(head: AuditedHead) -> str:
    recall = "" if head.recall_at_k is None else f", recall {numbers.percent(head.recall_at_k)}"
    return (
        f"layer {head.layer}, KV head {head.kv_head}: missed mass "
        f"{numbers.percent(head.missed_mass)}{recall}, looks {head.looks}"
    )


def _describe(heads: Sequence[AuditedHead]) -> str:
    if not heads:
        return "No head was looked at."
    worst = max(heads, key=lambda head: head.missed_mass)
    return (
        f"Missed softmax mass of {len(heads)} heads; the worst is {_tip(worst)}. "
        "The worst heads are in the table beside."
    )
