"""The end of the demo: a decode step of one layer of a large model, full attention and `hybrid`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from rich.console import Console
from rich.text import Text

from hybrid_kv.cli.display import human_bytes, human_seconds, note, percent, waiting
from hybrid_kv.cli.options import OutputOptions
from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.one_layer import (
    LAYER_DTYPE,
    LLAMA_3_8B,
    LayerSteps,
    layer_bytes,
    make_context,
    measure_steps,
)
from hybrid_kv.ops.host_memory import free_memory
from hybrid_kv.report.schema import LayerReport, LayerRun
from hybrid_kv.types import bytes_per_token

_SHAPE = "Llama-3-8B"
_STEPS = 24
_BAR_CELLS = 40
_SCAN = {"index": {"kind": "flat", "precision": "int8"}}
"""What serves by default from the first token on; learning a sketch would take a minute."""


def decode_layer(
    num_tokens: int, output: OutputOptions, check: Callable[[], None]
) -> LayerReport | None:
    """Measures the layer; None, with a note, where memory is short.

    Args:
        check: called between steps; what it raises ends the measurement.
    """
    needed, free = layer_bytes(num_tokens), free_memory()
    if needed > free.num_bytes:
        note(
            f"the layer of {_SHAPE} at {num_tokens:,} tokens is left out: it needs {needed:,} "
            f"bytes, {free}; --layer-context takes a smaller number",
            output,
        )
        return None
    note(f"decoding one layer of {_SHAPE} at {num_tokens:,} made-up tokens", output)
    with waiting("making up keys and values", output):
        context = make_context(num_tokens, _STEPS)
        exact = measure_steps(context, HybridConfig(method="full"), check=check)
        tiered = measure_steps(context, HybridConfig(method="hybrid", cold=_SCAN), check=check)
    return LayerReport(
        shape=_SHAPE,
        context_tokens=num_tokens,
        kv_bytes=num_tokens * bytes_per_token(LLAMA_3_8B, LAYER_DTYPE),
        steps=_STEPS,
        runs=(_described(exact, exact), _described(tiered, exact)),
    )


def _described(steps: LayerSteps, exact: LayerSteps) -> LayerRun:
    return LayerRun(
        config=steps.config.flat(),
        method=steps.config.method,
        step_ms=1e3 * median(steps.step_s),
        attended_ratio=steps.attended_ratio,
        mass=steps.mass(exact),
        device_kv_bytes=steps.device_kv_bytes,
        host_bytes=steps.host_bytes,
    )


def print_layer(out: Console, layer: LayerReport) -> None:
    """Two bars as long as a step takes, and what that buys in a sentence."""
    full, tiered = layer.runs
    out.print(
        f"One attention layer of {layer.shape} at {layer.context_tokens:,} tokens (made-up KV, "
        f"{human_bytes(layer.kv_bytes)}), a decode step on the CPU:"
    )
    longest = max(run.step_ms for run in layer.runs)
    for run, colour in ((full, "red"), (tiered, "green")):
        cells = max(1, round(_BAR_CELLS * run.step_ms / longest))
        bar = "█" * cells + " " * (_BAR_CELLS - cells)
        name = "full attention" if run is full else run.method
        line = Text.assemble((f"{name:<15}", "bold"), (bar, colour))
        out.print(line.append(f" {human_seconds(run.step_ms / 1e3)}"))
    ratio = full.step_ms / tiered.step_ms
    gain = f"{ratio:.1f} times as fast" if ratio >= 1 else f"{1 / ratio:.1f} times as slow"
    out.print(
        Text.assemble(
            (f"{tiered.method} is {gain}", "green" if ratio >= 1 else "yellow"),
            f": it attends {percent(tiered.attended_ratio)} of the tokens with "
            f"{percent(tiered.mass)} of the attention's mass, and keeps "
            f"{human_bytes(tiered.device_kv_bytes)} on the device tier, not "
            f"{human_bytes(full.device_kv_bytes)}.",
        )
    )
