"""The document as Markdown, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_GIB = 2**30
_CONTEXTS = ("32k", "64k", "128k")
_END_TO_END = (
    *("system", "cap", "TTFT s", "prefill s", "index s", "TPOT ms", "phases ms"),
    *("peak GiB: allocated, reserved, outside", "host GiB: KV, index", "remarks"),
)
_HIDDEN_SETTINGS = ("device", "sizes", "system", "context", "cap_bytes", "by")


def markdown(document: dict[str, Any]) -> str:
    rows = document["rows"]
    of = {part: [row for row in rows if row["part"] == part] for part in _parts(rows)}
    lines = [f"# {document['label']}", "", *_about(document)]
    for context in _CONTEXTS:
        if found := of.pop(context, None):
            tokens = next((row["settings"].get("tokens") for row in found), None) or context
            lines += ["", f"## End to end, {tokens} tokens", ""]
            lines += _table(_END_TO_END, map(_end_to_end, found))
    if tests := of.pop("tests", None):
        lines += ["", "## Tests marked `gpu`", "", *map(_test, tests)]
    for part, found in of.items():
        lines += ["", f"## {part.capitalize()}", ""]
        lines += _table(("row", "settings", "values", "remarks"), map(_small, found))
    return "\n".join(lines) + "\n"


def _parts(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["part"] for row in rows))


def _about(document: dict[str, Any]) -> list[str]:
    machine, cap = document["machine"], document["cap_bytes"]
    environment, device = machine["environment"], machine["device"]
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v)
    lines = [
        f"- {document['date']}, commit {document['commit'] or 'unknown'}, model "
        f"`{document['model']}`, {document['elapsed_s']:.0f} s",
        f"- CPU: {environment['cpu']['model']}, {environment['cpu']['threads']} threads, "
        f"{environment['ram_bytes'] / _GIB:.0f} GiB; {versions}, CUDA {machine['cuda']}",
        f"- native engine: {document['engine']}",
    ]
    if device is not None:
        memory = f"{device['memory_bytes'] / _GIB:.1f} GiB"
        lines.append(f"- {device['name']}, {memory}, capability {device['capability']}")
    if device is not None and cap is not None:
        limit = f"{document['limit_bytes'] / _GIB:.1f}"
        lines.append(
            f"- Rows with a cap: torch's allocator was held to {limit} GiB, which is "
            f"{cap / _GIB:.0f} GiB less the context. That is a statement about memory; it says "
            "nothing about the speed of a smaller card."
        )
    if document["rehearsal"]:
        lines.append("- Tiny sizes: the times say that the code runs, and nothing else.")
    return lines


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def _end_to_end(row: dict[str, Any]) -> list[str]:
    values, cap = row["values"], row["settings"]["cap_bytes"]
    peaks = ("allocated_peak_bytes", "reserved_peak_bytes", "outside_bytes")
    host = ("host_kv_bytes", "host_index_bytes")
    phases = values.get("phases_ms", {}).items()
    return [
        row["settings"]["system"],
        "none" if cap is None else f"{cap / _GIB:.0f} GiB",
        *(_number(values.get(name)) for name in ("ttft_s", "prefill_s", "index_build_s")),
        _number(values.get("tpot_median_ms")),
        ", ".join(f"{name} {_number(ms)}" for name, ms in phases if ms),
        ", ".join(_gib(values.get(name)) for name in peaks),
        ", ".join(_gib(values.get(name)) for name in host),
        _remarks(row),
    ]


def _remarks(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['why']}"
    values = row["values"]
    notes = [f"{count} heads by {what}" for what, count in values.get("indexes", {}).items()]
    if values.get("filled"):
        notes.append("cache filled with random entries")
    return "; ".join(notes)


def _small(row: dict[str, Any]) -> list[str]:
    settings = {k: v for k, v in row["settings"].items() if k not in _HIDDEN_SETTINGS}
    values = {k: v for k, v in row["values"].items() if v is not None}
    return [row["name"], _pairs(settings), _pairs(values), _remarks(row)]


def _test(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"- {row['name']}: {_remarks(row)}"
    values = row["values"]
    counts = ", ".join(f"{values[name]} {name}" for name in ("passed", "failed", "skipped"))
    reasons = "".join(f"\n  - {n} skipped: {why}" for why, n in values["skip_reasons"].items())
    return f"- {row['name']}: {counts}{reasons}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _gib(size: int | None) -> str:
    return "–" if size is None else f"{size / _GIB:.2f}"


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
