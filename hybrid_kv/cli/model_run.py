"""Loading a model and running one generation, with bars, and with Ctrl-C that keeps the text."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from hybrid_kv.api import LLM, Generation, load
from hybrid_kv.cli.display import prefill_bar, waiting
from hybrid_kv.cli.options import CacheOptions, ModelOptions, OutputOptions
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import WeightsWarning

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A generation and whether the user ended it early."""

    generation: Generation
    interrupted: bool


@contextmanager
def opened(
    model: str,
    options: ModelOptions,
    config: HybridConfig,
    output: OutputOptions,
    layers: int | None = None,
    cache: CacheOptions | None = None,
) -> Iterator[LLM]:
    """The model, loaded and attached."""
    more: dict[str, Any] = {} if cache is None else cache.as_options()
    silence_transformers(output)
    # Bars of a download are the hub's own; a spinner would draw over them.
    local = model in ("needle", "smollm2") or model.startswith("random:") or Path(model).exists()
    with waiting(f"loading {model}", output) if local else _nothing(), told_in_a_line(output):
        llm = load(
            model,
            config=config,
            device=options.device,
            dtype=options.dtype,
            layers=layers,
            weights=options.weights,
            dequantize=bool(options.dequantize),
            exact_products=bool(options.exact_products),
            **more,
        )
    with llm:
        yield llm


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def told_in_a_line(output: OutputOptions) -> Iterator[None]:
    """Says a warning about weights in a line of ours, or not at all with --quiet."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", WeightsWarning)
        yield
    for warning in caught:
        if not issubclass(warning.category, WeightsWarning):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        elif not output.quiet:
            print(f"hybrid-kv: {warning.message}", file=sys.stderr)


def silence_transformers(output: OutputOptions) -> None:
    """Leaves stderr to us; --debug lets transformers speak."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not sys.stderr.isatty() or output.quiet:
        disable_progress_bars()
    if not output.debug:
        logging.set_verbosity_error()


def run(
    start: Callable[..., Any], options: dict[str, Any], write: Write | None, output: OutputOptions
) -> Outcome:
    """Runs `generate` or `send` of the API.

    Args:
        start: takes `stream`, `cancel`, `on_prefill` and the options.
        write: takes pieces of text as they come; None waits for the end.
    """
    with cancel_on_ctrl_c() as cancel, prefill_bar(output) as report:
        options = {**options, "cancel": cancel, "on_prefill": report}
        if write is None:
            generation = start(**options)
        else:
            stream = start(stream=True, **options)
            try:
                for piece in stream:
                    write(piece)
            finally:
                stream.close()
            generation = stream.result
    return Outcome(generation, cancel.is_set())


@contextmanager
def ended_by_ctrl_c(
    output: OutputOptions, model: nn.Module | None = None
) -> Iterator[Callable[[], None]]:
    """A check for a sweep to make between two steps: KeyboardInterrupt once Ctrl-C was pressed.

    What a signal handler raises may surface inside a destructor, which swallows it; a check does
    not. It is made once more at the end. The second Ctrl-C interrupts at once all the same.

    Args:
        model: makes the check before each forward.
    """
    told = "" if output.quiet else "ending after this step; Ctrl-C again ends at once\n"
    with cancel_on_ctrl_c(told) as cancel, ExitStack() as kept:

        def check(*_: Any) -> None:
            if cancel.is_set():
                raise KeyboardInterrupt

        if model is not None:
            kept.callback(model.register_forward_pre_hook(check).remove)
        yield check
        check()


def checked(tell: Callable[..., None] | None, check: Callable[[], None]) -> Callable[..., None]:
    """Progress callback that also makes the check, around the given one."""

    def told(*news: Any) -> None:
        if tell is not None:
            tell(*news)
        check()

    return told


@contextmanager
def cancel_on_ctrl_c(told: str = "") -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts at once.

    Args:
        told: what the first one writes on stderr.
    """
    cancel = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield cancel
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()
        os.write(2, told.encode())  # a stream may be in the middle of a write of its own

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, previous)


def write_now(piece: str) -> None:
    """Text on stdout, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()
