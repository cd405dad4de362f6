"""A decode step, or a prompt, in hybrid_kv: one process, one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from time import perf_counter, process_time
from typing import Any

from hybrid_kv.models.cache_state import passing

SIDES: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "hybrid": {"method": "hybrid"},
    "flat int8": {"method": "flat", "cold": {"index": {"precision": "int8"}}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=list(SIDES), required=True)
    parser.add_argument("--gguf", help="a model whose weights stay packed; else bf16 ones")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompt", action="store_true", help="computes it: time to first token")
    args = parser.parse_args()
    os.environ["HYBRID_KV_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(args.threads)

    import torch

    import hybrid_kv as hkv
    from hybrid_kv.eval.filling import SyntheticContext, filled_cache
    from hybrid_kv.models import few_tokens
    from hybrid_kv.models.load import load_model

    torch.set_num_threads(args.threads)
    model: Any = _model(args.layers) if args.gguf is None else load_model(args.gguf, device="cpu")
    times: list[tuple[float, float]] = []
    with hkv.attach(model, hkv.HybridConfig(**SIDES[args.side])) as runtime, torch.inference_mode():

        def timed(ids: torch.Tensor, cache: Any) -> None:
            begin, begin_cpu = perf_counter(), process_time()
            logits = model(ids, **passing(cache), logits_to_keep=1).logits
            times.append((1e3 * (perf_counter() - begin), 1e3 * (process_time() - begin_cpu)))
            if not torch.isfinite(logits).all():
                sys.exit("the logits are not finite")

        if args.prompt:
            timed(torch.arange(args.context)[None] % 4096, runtime.cache())
        else:
            # Trials and first calls are not what is measured, as in the other side's three tokens.
            warm = args.steps // 4 + 2
            context = SyntheticContext(runtime.info, args.context, max_steps=args.steps + warm)
            cache = filled_cache(runtime, context)
            for _ in range(args.steps + warm):
                timed(torch.ones(1, 1, dtype=torch.int64), cache)
            del times[:warm]
    multiplied = {
        f"{list(found.shape)} x {found.tokens}": "engine" if trial.pays else "torch"
        for found, trial in few_tokens._trials.items()
    }
    print(json.dumps({"times_ms": times, "system": hkv.__version__, "weights": multiplied}))


def _model(layers: int) -> Any:
    """Random bf16 weights of so many layers."""
    import torch
    from transformers import AutoModelForCausalLM

    from hybrid_kv.models.shapes import random_config

    shape: Any = random_config("llama-3-8b", layers)
    shape.vocab_size = 4096
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()


if __name__ == "__main__":
    main()
