"""Facts of a saved context, told without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hybrid_kv.cli.display import console, facts_table, human_bytes, human_seconds
from hybrid_kv.cli.files import write_report
from hybrid_kv.cli.options import OutputOptions
from hybrid_kv.report import probe_environment
from hybrid_kv.report.schema import ContextAudit, ContextReport
from hybrid_kv.saved.manifest import Manifest, read_manifest


def print_facts(path: Path, output: OutputOptions) -> None:
    """Prints them, and writes them where --json says."""
    report = facts_of(path)
    if not output.json_only:
        table = facts_table("bold")
        for name, value in _lines(report):
            table.add_row(name, value)
        console().print(table)
    write_report(report, output)


def facts_of(path: Path) -> ContextReport:
    """Facts in the manifest of a context.

    Raises:
        FileFormatError, ReadError: there is none that can be read.
    """
    manifest = read_manifest(path)
    layers, extents = manifest.layers, [ext for it in manifest.layers for ext in it.extents]
    heads = [head for extent in extents for head in extent.heads]
    losses = [layer.int8 for layer in layers if layer.int8 is not None]
    return ContextReport(
        environment=probe_environment(),
        path=str(path),
        package=manifest.package,
        source=manifest.source,
        method=manifest.config["method"],
        config=manifest.config,
        dtype=manifest.dtype,
        page_size=manifest.page_size,
        num_layers=manifest.num_layers,
        num_tokens=manifest.num_tokens,
        is_chat=manifest.messages is not None,
        prefill_s=manifest.prefill_s,
        num_bytes=_bytes_by_part(path, manifest),
        dropped_tokens=max((layer.length - layer.num_entries for layer in layers), default=0),
        indexed_keys=sum(ext.length for ext in extents if ext.index is not None),
        unindexed_keys=sum(ext.length for ext in extents if ext.index is None),
        index_heads=Counter(head.serves for head in heads),
        check_recall=min((it.recall for it in heads if it.recall is not None), default=None),
        check_mass=min((it.mass for it in heads if it.mass is not None), default=None),
        audit=_audit(manifest),
        compress="int8" if losses else None,
        k_error=max((loss.k_error for loss in losses), default=0.0),
        v_error=max((loss.v_error for loss in losses), default=0.0),
    )


def _audit(manifest: Manifest) -> ContextAudit | None:
    if (found := manifest.audit) is None:
        return None
    return ContextAudit(
        looks=found.looks,
        recall_at_k=found.recall,
        missed_mass=found.missed_mass,
        missed_by_index=found.missed_by_index,
        output_error=found.output_error,
        mass_error=found.mass_error,
    )


def _bytes_by_part(path: Path, manifest: Manifest) -> dict[str, int]:
    kv = {layer.kv for layer in manifest.layers} | {layer.kv for layer in manifest.windows}
    kept = {layer.kept for layer in manifest.layers}
    states = {layer.states for layer in manifest.states}
    parts = {
        "keys and values": 0,
        "states": 0,
        "index": 0,
        "samples": 0,
        "kept by the method": 0,
        "other": 0,
    }
    for name, block in manifest.blocks.items():
        if name in kv:
            part = "keys and values"
        elif name in states:
            part = "states"
        elif name in kept:
            part = "kept by the method"
        elif name.endswith(".index"):
            part = "index"
        else:
            part = "samples" if "-samples" in name else "other"
        parts[part] += block.num_bytes
    parts["other"] += (path / "manifest.json").stat().st_size
    return parts


def _lines(report: ContextReport) -> Iterator[tuple[str, str]]:
    kind = "messages" if report.is_chat else "raw text"
    yield "tokens", f"{report.num_tokens:,} of {kind}, {report.num_layers} layers"
    parts = [f"{name} {human_bytes(count)}" for name, count in report.num_bytes.items() if count]
    yield "bytes", f"{human_bytes(sum(report.num_bytes.values()))}: {', '.join(parts)}"
    if report.compress is not None:
        errors = f"{report.k_error:.2%} of keys and {report.v_error:.2%} of values"
        yield "compressed", f"{report.compress}, error {errors} in the worst layer"
    index = f"{report.indexed_keys:,} keys in saved indexes"
    if report.unindexed_keys:
        index += f", {report.unindexed_keys:,} without (none needed, or built when it is opened)"
    yield "index", index
    if report.index_heads:
        heads = ", ".join(
            f"{count} by {kind}" for kind, count in sorted(report.index_heads.items())
        )
        yield "heads", f"{heads} (of all layers)"
    if report.check_recall is not None and report.check_mass is not None:
        told = f"recall {report.check_recall:.3f}, mass {report.check_mass:.4f}"
        yield "self-check", f"{told} of the worst head, on queries held out when it was made"
    yield "audit", _audit_line(report.audit)
    if report.dropped_tokens:
        yield "dropped", f"{report.dropped_tokens:,} tokens, by the method"
    yield "method", f"{report.method}, page_size {report.page_size}, {report.dtype}"
    yield "model", report.source or "unknown"
    if report.prefill_s is not None:
        yield "prefill", human_seconds(report.prefill_s)
    yield "written by", f"hybrid_kv {report.package}"


def _audit_line(audit: ContextAudit | None) -> str:
    if audit is None:
        return "none before it was saved; ask with --set audit_every=8 to look"
    recall = "" if audit.recall_at_k is None else f"recall {audit.recall_at_k:.3f}, "
    mass = "" if audit.mass_error is None else f"mass error {audit.mass_error:+.4f}, "
    return (
        f"{recall}missed mass {audit.missed_mass:.4f} ({audit.missed_by_index:.4f} by the index), "
        f"{mass}output error {audit.output_error:.3f}, {audit.looks} looks before it was saved"
    )
