"""A profile, told in sections: speed, where it goes, what it misses, memory, limits, troubles."""

from __future__ import annotations

import shlex
from functools import partial

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.audit_sections import context_panels, heads_section, quality_section
from hybrid_kv.report.html.elements import Child, Html, el, join
from hybrid_kv.report.html.entries import (
    Entry,
    by_context,
    by_name,
    cut_short,
    entries_of,
    measured,
    tiers,
)
from hybrid_kv.report.html.profile_figures import (
    limit_figure,
    memory_figure,
    phases_figure,
    plus_minus,
    tpot_figure,
    ttft_figure,
)
from hybrid_kv.report.html.profile_tables import (
    bytes_table,
    context_table,
    gaps_table,
    limit_table,
    memory_table,
    phases_table,
    settings_table,
    start_table,
)
from hybrid_kv.report.html.widgets import (
    Section,
    disclosure,
    facts,
    figure,
    note,
    table,
    tabs,
)
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.schema import ProfileReport


def profile_sections(report: ProfileReport, source: str, prefix: str) -> list[Section]:
    """All sections of a profile; `prefix` begins every anchor, `source` names the run's file."""
    entries = entries_of(report.rows)
    known = measured(entries)
    makers: list[tuple[str, str, Html | None]] = [
        ("latency", "Latency by context", _latency(entries, known, report, prefix)),
        ("phases", "Where a step goes", _phases(known, prefix)),
        ("quality", "What was missed, against time", quality_section(known, prefix)),
        ("heads", "Missed mass by layer and head", heads_section(entries, prefix)),
        ("memory", "Memory by tier", _memory(entries, prefix)),
        ("limit", "The limit of bandwidth, and the plan", _limit(known, report, prefix)),
        ("troubles", "Failed, skipped, interrupted", _troubles(entries, report)),
        ("settings", "Settings of every row", _settings(entries, report, source, prefix)),
    ]
    return [Section(f"{prefix}{name}", title, body) for name, title, body in makers if body]


MOST_MISSED = 0.05
"""Share of the softmax mass that a method may miss and still be called the fastest."""


def lead(report: ProfileReport) -> Html | None:
    """The finding in a sentence, at the longest context: the fastest method that misses little.

    What is faster and misses more, or was not audited, is told as well.
    """
    groups = by_context(measured(entries_of(report.rows)))
    if not groups:
        return None
    context, group = list(groups.items())[-1]
    ranked = sorted(group, key=_tpot)
    sound = [entry for entry in ranked if (_missed(entry) or 0) <= MOST_MISSED and _known(entry)]
    best = sound[0] if sound else ranked[0]
    among = f" of those that miss at most {numbers.percent(MOST_MISSED)} of the softmax mass"
    cut = " (interrupted)" if cut_short(best.row) else ""
    shown: list[Child] = [
        f"At {numbers.tokens(context)} tokens {best.name}{cut} was fastest{among * bool(sound)}: ",
        el("b", f"{numbers.short(best.row.tpot_ms)}\N{NO-BREAK SPACE}ms per token"),
    ]
    full = next((_tpot(entry) for entry in group if entry.name == "full"), None)
    if full and best.name != "full":
        shown.append(f", {numbers.ratio(full / _tpot(best))} the speed of full attention")
    if best.row.method != "full":
        shown.append(f"; it {_told(best)}")
    faster = [entry for entry in ranked if _tpot(entry) < _tpot(best)]
    told = "; ".join(
        f"{entry.name}, {numbers.milliseconds(_tpot(entry))}, {_told(entry)}" for entry in faster
    )
    return el("p", *shown, f". Faster: {told}." if told else ".", class_="lead")


def _tpot(entry: Entry) -> float:
    return entry.row.tpot_ms or 0.0


def _missed(entry: Entry) -> float | None:
    """What is missing after the estimate, or estimated too much; where that was not measured, what
    no exact attention read.
    """
    audit = entry.row.audit
    if audit is None:
        return None
    found = audit.mass_error or audit.missed_mass
    return None if found is None else abs(found.mean)


def _known(entry: Entry) -> bool:
    return entry.row.method == "full" or _missed(entry) is not None


def _told(entry: Entry) -> str:
    audit = entry.row.audit
    if audit is None or audit.missed_mass is None:
        return "was not audited"
    found = f"{numbers.percent(audit.missed_mass.mean)}{plus_minus(audit.missed_mass)}"
    return f"missed {found} of the softmax mass"


def _latency(
    entries: list[Entry], known: list[Entry], report: ProfileReport, prefix: str
) -> Html | None:
    if not known:
        return None
    whiskers = (
        "Markers: mean of the measured steps; whiskers: from the median to the 99th percentile."
    )
    hollow = " A hollow marker, † in tables, was interrupted." if any(map(_cut, known)) else ""
    parts = [
        figure(partial(tpot_figure, known), f"{prefix}tpot", whiskers + hollow),
        context_table(
            "TPOT, ms: methods by context",
            entries,
            prefix,
            lambda row: None if row.tpot_ms is None else numbers.short(row.tpot_ms),
        ),
    ]
    starts = [entry for entry in known if entry.row.ttft_s is not None]
    if starts:
        parts += [
            figure(partial(ttft_figure, starts), f"{prefix}ttft", "Prompt in, first token out."),
            context_table(
                "TTFT: methods by context",
                entries,
                prefix,
                lambda row: None if row.ttft_s is None else numbers.seconds(row.ttft_s),
            ),
        ]
    else:
        why = " KV was put in place, no prompt was computed." if report.fill == "synthetic" else ""
        parts.append(note(f"Time to first token was not measured.{why}"))
    panels = context_panels(
        known,
        lambda group, where: join(
            gaps_table(f"Gaps between tokens, {where}", group),
            start_table(f"Before the first token, {where}", group),
        ),
    )
    more = "Spread of steps, and what comes before the first token"
    parts.append(disclosure(more, tabs(f"{prefix}gaps", "Context", panels)))
    return join(*parts)


def _cut(entry: Entry) -> bool:
    return cut_short(entry.row)


def _phases(entries: list[Entry], prefix: str) -> Html | None:
    timed = [e for e in entries if any(value is not None for _, value in e.row.phases_ms)]
    if not timed:
        return None

    def body(group: list[Entry], where: str) -> Html:
        draw = partial(phases_figure, group, where)
        return join(
            figure(draw, f"{prefix}phases-{where}", "Mean of the measured steps."),
            phases_table(f"Phases, ms and share of the sum, {where}", group),
        )

    text = (
        "Retrieval chooses entries, attention reads them; wait is what a step waits for copies. "
        "“other” is what no phase accounts for, without the model’s products and Python where "
        "these were told apart."
    )
    return join(tabs(f"{prefix}ph", "Context", context_panels(timed, body)), note(text))


def _memory(entries: list[Entry], prefix: str) -> Html | None:
    kept = [entry for entry in entries if tiers(entry.row.memory_bytes)]
    if not kept:
        return None

    def body(group: list[Entry], where: str) -> Html:
        return join(
            figure(partial(memory_figure, group, where), f"{prefix}memory-{where}"),
            memory_table(f"Bytes by tier, {where}", group),
        )

    text = (
        "Device: peak of the accelerator’s allocator, weights included; none on a CPU. The peak of "
        "the process holds host KV, index and everything else that it ever held at once."
    )
    return join(tabs(f"{prefix}mem", "Context", context_panels(kept, body)), note(text))


def _limit(entries: list[Entry], report: ProfileReport, prefix: str) -> Html | None:
    kept = [
        entry
        for entry in entries
        if isinstance(entry.row, ProfileRow) and (entry.row.limit_ms or entry.row.predicted_ms)
    ]
    if not kept:
        return None

    def body(group: list[Entry], where: str) -> Html:
        return join(
            figure(
                partial(limit_figure, group, where),
                f"{prefix}limit-{where}",
                "At the right: measured over the limit.",
            ),
            limit_table(f"Measured, limit and prediction, {where}", group),
            disclosure("Bytes that a step reads", bytes_table(f"Bytes per token, {where}", group)),
        )

    text = (
        "The limit is the bytes that a step reads over the bandwidth measured on this machine "
        f"({rates(report)}); nothing can be faster without reading less."
    )
    return join(tabs(f"{prefix}lim", "Context", context_panels(kept, body)), note(text))


def rates(report: ProfileReport) -> str:
    """The bandwidths of the machine in words."""
    names = {"device": "device memory", "dram": "host memory", "gather": "random rows of 256 bytes"}
    names |= {"h2d": "host to device", "d2h": "device to host"}
    known = {name: getattr(report.bandwidth_gbps, key) for key, name in names.items()}
    return ", ".join(f"{name} {numbers.short(rate)} GB/s" for name, rate in known.items() if rate)


def _troubles(entries: list[Entry], report: ProfileReport) -> Html | None:
    rows = [
        [entry.place, entry.row.status, entry.row.reason or "no reason was given"]
        for entry in entries
        if isinstance(entry.row, ProfileRow) and entry.row.status != "ok"
    ]
    if not rows and not report.interrupted:
        return None
    words = "The sweep was interrupted; the rows are those that were measured."
    return join(
        note(words) if report.interrupted else None,
        table("Rows without a full result", ["row", "status", "reason"], rows, words=True)
        if rows
        else None,
    )


def _settings(entries: list[Entry], report: ProfileReport, source: str, prefix: str) -> Html:
    command = f"hybrid-kv profile --repeat {shlex.quote(source)}"
    rows = [
        disclosure(name, *(_row_settings(entry, prefix) for entry in group))
        for name, group in by_name(entries).items()
    ]
    return join(
        el("p", "The same measurement again:"),
        el("pre", el("code", command), class_="command"),
        disclosure("Arguments of the verb", settings_table("Arguments", dict(report.arguments))),
        *rows,
    )


def _row_settings(entry: Entry, prefix: str) -> Html:
    row = entry.row
    assert isinstance(row, ProfileRow)
    state = "" if row.status == "ok" else f" · {row.status}"
    parts = [settings_table(f"Settings of {entry.place}", dict(row.config))]
    if row.backends:
        served = ", ".join(f"{op}: {name}" for op, name in row.backends.items())
        parts.append(facts({"back ends": served}))
    if row.reason:
        parts.insert(0, note(row.reason))
    return disclosure(f"{entry.place}{state}", *parts, ident=f"{prefix}row-{entry.anchor}")
