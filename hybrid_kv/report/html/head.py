"""What was run, on what: the top of a page, and what must be said loudly."""

from __future__ import annotations

from hybrid_kv.report.environment import Environment
from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.elements import Child, Html, el, join
from hybrid_kv.report.html.profile_sections import lead, rates
from hybrid_kv.report.html.widgets import facts
from hybrid_kv.report.schema import ProfileReport


def profile_head(report: ProfileReport, source: str) -> Html:
    """Model, machine and measurement, after the finding and the warnings."""
    layers = str(report.layers)
    if report.shape_layers is not None:
        layers = f"{report.layers} of {report.shape_layers} layers"
    fill = "computed from a prompt" if report.fill == "prefill" else "synthetic"
    return join(
        *warnings(report),
        lead(report),
        facts(
            {
                "Model": report.model,
                "Layers": layers,
                "KV": fill,
                "Tokens measured": f"{report.new_tokens}, after {report.warmup_tokens} to warm up",
                **machine(report.environment),
                "Threads": ", ".join(f"{name} {count}" for name, count in report.threads.items()),
                "Bandwidth": rates(report),
                "Measuring a phase": f"{report.recorder_us:g} µs",
                "File": source,
            }
        ),
    )


def warnings(report: ProfileReport) -> list[Html]:
    """What a reader must know before any number."""
    found = []
    if report.fill == "synthetic":
        found.append(
            _loud(
                "Synthetic KV.",
                "The cache was filled with made-up, attention-like keys and values put in place; "
                "no prompt was computed, and the tokens mean nothing. Times, bytes and what the "
                "audit found are of such data.",
            )
        )
    if report.shape_layers is not None:
        found.append(
            _loud(
                f"{report.layers} of {report.shape_layers} layers.",
                "The model was cut down: times and bytes are of the layers that were run, not of "
                "the whole model.",
            )
        )
    if report.interrupted:
        found.append(_loud("Interrupted.", "The sweep was ended early; the rest is missing."))
    return found


def _loud(title: str, text: str) -> Html:
    return el("p", el("b", title), " ", text, class_="loud", role="note")


def machine(environment: Environment) -> dict[str, Child]:
    """Processor, memory, device and versions, as facts."""
    cpu = environment.cpu
    versions = ", ".join(
        f"{name} {version}" for name, version in environment.versions.items() if version
    )
    return {
        "Device": environment.device or "none",
        "Processor": f"{cpu.model}, {cpu.cores} cores, {cpu.threads} threads",
        "Instructions": ", ".join(cpu.features) or None,
        "Host memory": numbers.size(environment.ram_bytes),
        "System": environment.platform,
        "Versions": versions,
    }
