"""A profile, told in sections: speed, where it goes, what it misses, memory, limits, troubles."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.page_blocks import (
    WIDTH,
    Abreast,
    Details,
    FactList,
    Figure,
    PageBlock,
    Panel,
    Pre,
    Section,
    Strong,
    Table,
    Tabs,
    Words,
    loud,
    note,
)
from hybrid_kv.report.html.page_entries import (
    Entry,
    by_context,
    by_name,
    cut_short,
    entries_of,
    measured,
    tiers,
)
from hybrid_kv.report.html.pictures import (
    limit_figure,
    memory_figure,
    phases_figure,
    qualities,
    quality_figure,
    tpot_figure,
    ttft_figure,
)
from hybrid_kv.report.html.tables import (
    bytes_table,
    context_table,
    gaps_table,
    heat_table,
    limit_table,
    machine,
    memory_table,
    phases_tables,
    plus_minus,
    quality_table,
    settings_table,
    start_table,
    worst_heads_table,
)
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.schema import ProfileReport


def profile_head(report: ProfileReport, source: str) -> list[PageBlock]:
    """Model, machine and measurement, after the finding and the warnings."""
    layers = str(report.layers)
    if report.shape_layers is not None:
        layers = f"{report.layers} of {report.shape_layers} layers"
    facts = {
        "Model": report.model,
        "Layers": layers,
        "KV": "computed from a prompt" if report.fill == "prefill" else "synthetic",
        "Tokens measured": f"{report.new_tokens}, after {report.warmup_tokens} to warm up",
        **machine(report.environment),
        "Threads": ", ".join(f"{name} {count}" for name, count in report.threads.items()),
        "Bandwidth": rates(report),
        "Measuring a phase": f"{report.recorder_us:g} µs",
        "File": source,
    }
    finding = lead(report)
    return [*warnings(report), *([] if finding is None else [finding]), FactList(facts)]


def warnings(report: ProfileReport) -> list[Words]:
    """Warnings that a reader must know before any number."""
    found = []
    if report.fill == "synthetic":
        found.append(
            loud(
                "Synthetic KV.",
                "The cache was filled with made-up, attention-like keys and values put in place; "
                "no prompt was computed, and the tokens mean nothing. Times, bytes and what the "
                "audit found are of such data.",
            )
        )
    if report.shape_layers is not None:
        found.append(
            loud(
                f"{report.layers} of {report.shape_layers} layers.",
                "The model was cut down: times and bytes are of the layers that were run, not of "
                "the whole model.",
            )
        )
    if report.interrupted:
        found.append(loud("Interrupted.", "The sweep was ended early; the rest is missing."))
    return found


def rates(report: ProfileReport) -> str:
    """The bandwidths of the machine in words."""
    names = {"device": "device memory", "dram": "host memory", "gather": "random rows of 256 bytes"}
    names |= {"h2d": "host to device", "d2h": "device to host"}
    known = {name: getattr(report.bandwidth_gbps, key) for key, name in names.items()}
    return ", ".join(f"{name} {numbers.short(rate)} GB/s" for name, rate in known.items() if rate)


MOST_MISSED = 0.05
"""Share of the softmax mass that a method may miss and still be called the fastest."""


def lead(report: ProfileReport) -> Words | None:
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
    shown: list[str | Strong] = [
        f"At {numbers.tokens(context)} tokens {best.name}{cut} was fastest{among * bool(sound)}: ",
        Strong(f"{numbers.short(best.row.tpot_ms)}\N{NO-BREAK SPACE}ms per token"),
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
    return Words((*shown, f". Faster: {told}." if told else "."), "lead")


def _tpot(entry: Entry) -> float:
    return entry.row.tpot_ms or 0.0


def _missed(entry: Entry) -> float | None:
    """Mass that is missing after the estimate, or estimated too much; where that was not measured,
    what no exact attention read.
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


def profile_sections(report: ProfileReport, source: str, prefix: str) -> list[Section]:
    """All sections of a profile; `prefix` begins every anchor, `source` names the run's file."""
    entries = entries_of(report.rows)
    known = measured(entries)
    makers: list[tuple[str, str, list[PageBlock]]] = [
        ("latency", "Latency by context", _latency(entries, known, report, prefix)),
        ("phases", "Where a step goes", _phases(known, prefix)),
        ("quality", "What was missed, against time", _quality(known, prefix)),
        ("heads", "Missed mass by layer and head", heads_blocks(entries, prefix)),
        ("memory", "Memory by tier", _memory(entries, prefix)),
        ("limit", "The limit of bandwidth, and the plan", _limit(known, report, prefix)),
        ("troubles", "Failed, skipped, interrupted", _troubles(entries, report)),
        ("settings", "Settings of every row", _settings(entries, report, source, prefix)),
    ]
    return [Section(f"{prefix}{name}", title, blocks) for name, title, blocks in makers if blocks]


def by_panels(
    ident: str, entries: Sequence[Entry], body: Callable[[list[Entry], str], list[PageBlock]]
) -> Tabs:
    """A panel per context."""
    groups = {numbers.tokens(context): group for context, group in by_context(entries).items()}
    panels = [Panel(where, body(group, where)) for where, group in groups.items()]
    return Tabs(ident, "Context", panels)


def _latency(
    entries: list[Entry], known: list[Entry], report: ProfileReport, prefix: str
) -> list[PageBlock]:
    if not known:
        return []
    whiskers = (
        "Markers: mean of the measured steps; whiskers: from the median to the 99th percentile."
    )
    hollow = " A hollow marker, † in tables, was interrupted."
    caption = whiskers + hollow * any(cut_short(entry.row) for entry in known)
    drawn: list[PageBlock] = [Figure(tpot_figure(known, WIDTH), f"{prefix}tpot", caption)]
    tables: list[PageBlock] = [
        context_table(
            "TPOT, ms: methods by context",
            entries,
            prefix,
            lambda row: None if row.tpot_ms is None else numbers.short(row.tpot_ms),
        )
    ]
    starts = [entry for entry in known if entry.row.ttft_s is not None]
    if starts:
        caption = "Prompt in, first token out."
        drawn.append(Figure(ttft_figure(starts, WIDTH), f"{prefix}ttft", caption))
        tables.append(
            context_table(
                "TTFT: methods by context",
                entries,
                prefix,
                lambda row: None if row.ttft_s is None else numbers.seconds(row.ttft_s),
            )
        )
    else:
        why = " KV was put in place, no prompt was computed." if report.fill == "synthetic" else ""
        tables.append(note(f"Time to first token was not measured.{why}"))
    spread = by_panels(
        f"{prefix}gaps",
        known,
        lambda group, where: [
            gaps_table(f"Gaps between tokens, {where}", group),
            start_table(f"Before the first token, {where}", group),
        ],
    )
    more = "Spread of steps, and what comes before the first token"
    return [Abreast(drawn), *tables, Details(more, [spread])]


def _phases(entries: list[Entry], prefix: str) -> list[PageBlock]:
    timed = [e for e in entries if any(value is not None for _, value in e.row.phases_ms)]
    if not timed:
        return []

    def body(group: list[Entry], where: str) -> list[PageBlock]:
        picture = phases_figure(group, where, WIDTH)
        drawn = Figure(picture, f"{prefix}phases-{where}", "Mean of the measured steps.")
        return [
            Abreast([drawn, *phases_tables(f"Phases, ms and share of the sum, {where}", group)])
        ]

    text = (
        "Retrieval chooses entries, attention reads them; wait is what a step waits for copies. "
        "“other” is what no phase accounts for, without the model’s products and Python where "
        "these were told apart."
    )
    return [by_panels(f"{prefix}ph", timed, body), note(text)]


def _quality(entries: list[Entry], prefix: str) -> list[PageBlock]:
    if not any(entry.row.audit for entry in entries):
        return []

    def body(group: list[Entry], where: str) -> list[PageBlock]:
        figures = [
            Figure(
                quality_figure(group, quality, where, WIDTH),
                f"{prefix}{quality}-{where}",
                "Up and left is better.",
            )
            for quality in qualities(group)
        ]
        return [Abreast(figures), quality_table(f"What the audit found, {where}", group)]

    text = (
        "The audit attends single heads exactly, in rotation. Bars and ± are 95% confidence "
        "intervals of the mean, absent where there was one look. Recall@k: of the exact best cold "
        "entries, as many as the budget has. Missed mass: of the softmax over all stored "
        "entries. Output error: relative L2 distance of a head’s output."
    )
    audited = {e.row.context_tokens for e in entries if e.row.audit}
    kept = [entry for entry in entries if entry.row.context_tokens in audited]
    return [by_panels(f"{prefix}q", kept, body), note(text)]


def heads_blocks(entries: Sequence[Entry], prefix: str) -> list[PageBlock]:
    """A heat map for each row with an audit, chosen from a grid of methods and contexts."""
    audited = [entry for entry in entries if entry.row.audit and entry.row.audit.heads]
    if not audited:
        return []
    panels = []
    for entry in sorted(audited, key=lambda entry: [e.name for e in entries].index(entry.name)):
        assert entry.row.audit is not None
        blocks = [Abreast([heat_table(entry), worst_heads_table(entry.row.audit.heads)])]
        short = numbers.tokens(entry.row.context_tokens)
        panels.append((entry, Panel(entry.place, blocks, short, entry.name)))
    worst = max(range(len(panels)), key=lambda i: _most_missed(panels[i][0]))
    text = (
        "Shown first: the row that missed most. Cells with a dash were not looked at; the scale’s "
        "steps are .1, .2, .5, 1, 2, 5, 10 and 20%."
    )
    return [Tabs(f"{prefix}hh", "Row", [panel for _, panel in panels], worst), note(text)]


def _most_missed(entry: Entry) -> tuple[float, int]:
    audit = entry.row.audit
    missed = audit.missed_mass.mean if audit and audit.missed_mass else 0.0
    return missed, entry.row.context_tokens


def _memory(entries: list[Entry], prefix: str) -> list[PageBlock]:
    kept = [entry for entry in entries if tiers(entry.row.memory_bytes)]
    if not kept:
        return []

    def body(group: list[Entry], where: str) -> list[PageBlock]:
        drawn = Figure(memory_figure(group, where, WIDTH), f"{prefix}memory-{where}")
        return [Abreast([drawn, memory_table(f"Bytes by tier, {where}", group)])]

    text = (
        "Device: peak of the accelerator’s allocator, weights included; none on a CPU. The peak of "
        "the process holds host KV, index and everything else that it ever held at once."
    )
    return [by_panels(f"{prefix}mem", kept, body), note(text)]


def _limit(entries: list[Entry], report: ProfileReport, prefix: str) -> list[PageBlock]:
    kept = [
        entry
        for entry in entries
        if isinstance(entry.row, ProfileRow) and (entry.row.limit_ms or entry.row.predicted_ms)
    ]
    if not kept:
        return []

    def body(group: list[Entry], where: str) -> list[PageBlock]:
        picture = limit_figure(group, where, WIDTH)
        caption = "At the right: measured over the limit."
        drawn = Figure(picture, f"{prefix}limit-{where}", caption)
        read = bytes_table(f"Bytes per token, {where}", group)
        found = limit_table(f"Measured, limit and prediction, {where}", group)
        return [Abreast([drawn, found]), Details("Bytes that a step reads", [read])]

    text = (
        "The limit is the bytes that a step reads over the bandwidth measured on this machine "
        f"({rates(report)}); nothing can be faster without reading less."
    )
    return [by_panels(f"{prefix}lim", kept, body), note(text)]


def _troubles(entries: list[Entry], report: ProfileReport) -> list[PageBlock]:
    rows = [
        [entry.place, entry.row.status, entry.row.reason or "no reason was given"]
        for entry in entries
        if isinstance(entry.row, ProfileRow) and entry.row.status != "ok"
    ]
    words = "The sweep was interrupted; the rows are those that were measured."
    found: list[PageBlock] = [note(words)] if report.interrupted else []
    if rows:
        head = ["row", "status", "reason"]
        found.append(Table("Rows without a full result", head, rows, words=True))
    return found


def _settings(
    entries: list[Entry], report: ProfileReport, source: str, prefix: str
) -> list[PageBlock]:
    return [
        Words(("The same measurement again:",)),
        Pre(f"hybrid-kv profile --repeat {shlex.quote(source)}"),
        Details("Arguments of the verb", [settings_table("Arguments", report.arguments)]),
        *(
            Details(name, [_row_settings(entry, prefix) for entry in group])
            for name, group in by_name(entries).items()
        ),
    ]


def _row_settings(entry: Entry, prefix: str) -> PageBlock:
    row = entry.row
    assert isinstance(row, ProfileRow)
    state = "" if row.status == "ok" else f" · {row.status}"
    blocks: list[PageBlock] = [settings_table(f"Settings of {entry.place}", row.config)]
    if row.backends:
        served = ", ".join(f"{op}: {name}" for op, name in row.backends.items())
        blocks.append(FactList({"back ends": served}))
    if row.reason:
        blocks.insert(0, note(row.reason))
    return Details(f"{entry.place}{state}", blocks, f"{prefix}row-{entry.anchor}")
