"""Colours for light and dark pages, and how methods and phases are told apart.

The hues follow Okabe and Ito's set for colour-blind readers, darkened for white paper and
lightened for a dark one; markers and dashes tell the same without colour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybrid_kv.report.html.scene import Shape

Colours = dict[str, tuple[str, str]]

COLOURS: Colours = {
    "paper": ("#ffffff", "#14171b"),
    "panel": ("#f5f6f7", "#1d2126"),
    "ink": ("#16191d", "#eceef0"),
    "soft": ("#555c66", "#a9b1bb"),
    "rule": ("#d5d9de", "#3a4149"),
    "grid": ("#e8eaed", "#282d33"),
    "accent": ("#0a5fa8", "#6cb6ff"),
    "good": ("#0067b3", "#63b3ff"),
    "bad": ("#b64a00", "#ff9a57"),
    "loud": ("#8a4b00", "#ffc46b"),
    "loudpaper": ("#fff4de", "#33270f"),
    "s0": ("#3d434b", "#c9ced4"),
    "s1": ("#0062ad", "#5db0ff"),
    "s2": ("#c44e00", "#ff9552"),
    "s3": ("#00795a", "#45cfa4"),
    "s4": ("#9a4487", "#e79fd6"),
    "s5": ("#8f6a00", "#e3bb45"),
    "s6": ("#2489b8", "#97dbff"),
    "s7": ("#7b6a5a", "#bfae9c"),
    "p_search": ("#b64a00", "#e87b32"),
    "p_cold_attention": ("#eda63c", "#ffcb7d"),
    "p_select": ("#00417f", "#2f7ec7"),
    "p_resident_attention": ("#4d9bdc", "#8cc5f7"),
    "p_merge": ("#00795a", "#2fb389"),
    "p_transfer": ("#5fc3a4", "#9be6cf"),
    "p_wait": ("#9a4487", "#d286c0"),
    "p_model": ("#6c747e", "#7d8690"),
    "p_python": ("#a7aeb7", "#aeb6bf"),
    "p_other": ("#d3d7dc", "#535b64"),
    "h0": ("#f0f4f8", "#20272e"),
    "h1": ("#d8e6f2", "#1f3a52"),
    "h2": ("#b5d2ea", "#225178"),
    "h3": ("#86b8dd", "#2b6ca0"),
    "h4": ("#5598ca", "#4189c4"),
    "h5": ("#2f77b0", "#66a9de"),
    "h6": ("#195790", "#94c8f0"),
    "h7": ("#0c3a68", "#c3e2fa"),
    "h8": ("#061f3c", "#f3faff"),
}
"""Each name's colour on a light and on a dark page."""

METHOD_SLOTS = {
    "full": 0,
    "hybrid": 1,
    "retrieval_attention": 2,
    "graph": 2,
    "quest": 3,
    "flat": 4,
    "ivf": 5,
    "hnsw": 6,
    "streaming_llm": 7,
}
_SHAPES: tuple[Shape, ...] = (
    "cross",
    "circle",
    "square",
    "diamond",
    "up",
    "down",
    "circle",
    "square",
)
_DASHES: tuple[tuple[float, ...], ...] = (
    (2, 3),
    (),
    (),
    (7, 3),
    (3, 2),
    (9, 3, 2, 3),
    (1.5, 2.5),
    (12, 4),
)


@dataclass(frozen=True, slots=True)
class SeriesLook:
    """How a method is drawn in every figure."""

    colour: str
    shape: Shape
    dash: tuple[float, ...]


def looks(methods: Iterable[str]) -> dict[str, SeriesLook]:
    """A look for each method: known ones keep theirs on every page, others take what is free."""
    slots: dict[str, int] = {}
    names = list(dict.fromkeys(methods))
    for name in names:
        slot = METHOD_SLOTS.get(name)
        if slot is not None and slot not in slots.values():
            slots[name] = slot
    for name in names:
        if name not in slots:
            free = [slot for slot in range(1, 8) if slot not in slots.values()]
            slots[name] = free[0] if free else 1 + len(slots) % 7
    ordered = ((name, slots[name]) for name in names)
    return {name: SeriesLook(f"s{slot}", _SHAPES[slot], _DASHES[slot]) for name, slot in ordered}


def style_rules() -> str:
    """CSS classes f-NAME (fill) and k-NAME (stroke) of every colour."""
    return "".join(
        f".f-{name}{{fill:var(--{name})}}.k-{name}{{stroke:var(--{name})}}" for name in COLOURS
    )


def variables(dark: bool) -> str:
    """The colours as CSS custom properties."""
    return "".join(f"--{name}:{pair[dark]};" for name, pair in COLOURS.items())
