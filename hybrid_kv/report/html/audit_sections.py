"""What the search missed: against time, and by layer and head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.elements import Html, el, join
from hybrid_kv.report.html.entries import Entry, by_context
from hybrid_kv.report.html.profile_figures import heads_figure, qualities, quality_figure
from hybrid_kv.report.html.profile_tables import quality_table, worst_heads_table
from hybrid_kv.report.html.widgets import HALF, NARROW, figure, note, tabs


def context_panels(
    entries: Sequence[Entry], body: Callable[[list[Entry], str], Html]
) -> list[tuple[str, Html]]:
    """A panel per context."""
    groups = by_context(entries).items()
    return [
        (numbers.tokens(context), body(group, numbers.tokens(context))) for context, group in groups
    ]


def quality_section(entries: list[Entry], prefix: str) -> Html | None:
    """Recall and attended mass against time, and what the audit found; None without an audit."""
    if not any(entry.row.audit for entry in entries):
        return None

    def body(group: list[Entry], where: str) -> Html:
        figures = [
            figure(
                partial(quality_figure, group, quality, where),
                f"{prefix}{quality}-{where}",
                "Up and left is better.",
                HALF,
            )
            for quality in qualities(group)
        ]
        return join(
            el("div", *figures, class_="pair"),
            quality_table(f"What the audit found, {where}", group),
        )

    text = (
        "The audit attends single heads exactly, in rotation. Bars and ± are 95% confidence "
        "intervals of the mean, absent where there was one look. Recall@k: of the exact best cold "
        "entries, as many as the budget has. Missed mass: of the softmax over all stored "
        "entries. Output error: relative L2 distance of a head’s output."
    )
    groups = [entry for entry in entries if entry.row.tpot_ms is not None]
    audited = {e.row.context_tokens for e in groups if e.row.audit}
    kept = [entry for entry in groups if entry.row.context_tokens in audited]
    return join(tabs(f"{prefix}q", "Context", context_panels(kept, body)), note(text))


def heads_section(entries: Iterable[Entry], prefix: str) -> Html | None:
    """A heat map for each row with an audit, chosen from a grid of methods and contexts."""
    order = list(entries)
    audited = [entry for entry in order if entry.row.audit and entry.row.audit.heads]
    if not audited:
        return None
    panels = []
    for entry in audited:
        assert entry.row.audit is not None
        anchor = f"{prefix}heat-{entry.anchor}"
        hint = "Layers down, KV heads across; the scale’s steps are in %."
        map_ = figure(partial(heads_figure, entry), anchor, hint, NARROW)
        heads = worst_heads_table(entry.row.audit.heads)
        panels.append((entry.place, el("div", map_, heads, class_="beside")))

    def picker(buttons: Sequence[Html]) -> Html:
        own: dict[str, list[Html]] = {entry.name: [] for entry in order}
        for button, entry in zip(buttons, audited, strict=True):
            own[entry.name].append(button)
        found = ((name, chips) for name, chips in own.items() if chips)
        rows = (el("div", el("span", name, class_="name"), *chips) for name, chips in found)
        return el("div", *rows, class_="grid")

    worst = max(range(len(audited)), key=lambda i: _missed(audited[i]))
    short = [numbers.tokens(entry.row.context_tokens) for entry in audited]
    chosen = tabs(f"{prefix}hh", "Row", panels, chosen=worst, short=short, picker=picker)
    text = "Shown first: the row that missed most. Empty cells were not looked at."
    return join(chosen, note(text))


def _missed(entry: Entry) -> tuple[float, int]:
    audit = entry.row.audit
    missed = audit.missed_mass.mean if audit and audit.missed_mass else 0.0
    return missed, entry.row.context_tokens
