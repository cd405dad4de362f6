"""`hybrid-kv heads`: which KV heads look far back, for the method duo_attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_kv.cli.options import (
    Dequantize,
    Device,
    Dtype,
    ExactProducts,
    ModelArgument,
    ModelOptions,
    OutputOptions,
    Weights,
    count,
)


def heads(
    model: ModelArgument,
    *,
    text: Annotated[
        str, typer.Option("--text", metavar="FILE|-", help="The calibration text, read twice.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where scores go.")],
    tokens: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Tokens of the text that are read.")
    ] = 2048,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    dequantize: Dequantize = None,
    exact_products: ExactProducts = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Score a model's KV heads by how much they look up far back; a file for duo_attention."""
    import json

    from hybrid_kv.api.heads import observe_heads, observing
    from hybrid_kv.cli.files import find_prompt
    from hybrid_kv.cli.model_run import opened
    from hybrid_kv.errors import ConfigError

    found = find_prompt(None, text, None, 0)
    found.check(model)
    if not out.parent.is_dir():
        raise ConfigError(f"-o '{out}' must be a file in a folder that is there; make the folder")
    output = OutputOptions(quiet=quiet, debug=debug)
    options = ModelOptions(
        device=device,
        dtype=dtype,
        weights=weights,
        dequantize=dequantize,
        exact_products=exact_products,
    )
    with opened(model, options, observing(), output) as llm:
        scores = observe_heads(llm, found.text or "", tokens)
    out.write_text(json.dumps({"model": model, "tokens": tokens, "heads": scores}) + "\n")
    if not quiet:
        flat = sorted((score for layer in scores for score in layer), reverse=True)
        print(f"{len(scores)} layers, {len(flat)} KV heads; scores {flat[0]:.2f} to {flat[-1]:.2f}")
        print(f"use: --method duo_attention --set heads={out} --set retrieval_ratio=0.5")
