"""Time, memory and tokens of packed weights of a real language model, beside plain ones.

SmolLM2-135M-Instruct (extra smollm2, Q4_1 with embeddings in Q8_0) in each way by a process of its
own: seconds to load with the tokenizer, memory beyond what an empty process has, a prompt, a token,
and how often the most likely token is that of plain float32 weights, on prose and on an answer that
these gave. Needs no network:

    .venv/bin/python benchmarks/real_model/packed.py --tokens 1024
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

if __name__ == "__main__":  # a script: the other benchmarks' folder is beside its own
    sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch

from benchmarks.real_model.text import prose
from hybrid_kv.errors import GgufWarning
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.gguf_model import smollm2_file
from hybrid_kv.models.load import load_model, load_tokenizer
from hybrid_kv.report.files import compact

WAYS: dict[str, dict[str, Any]] = {
    "plain float32": {"dtype": "float32", "dequantize": True},
    "plain bfloat16": {"dequantize": True},
    "packed float32": {"dtype": "float32"},
    "packed bfloat16": {},
    "exact float32": {"dtype": "float32", "exact_products": True},
    "exact bfloat16": {"exact_products": True},
}
ANSWER, STEPS = 160, 32
QUESTION = "\n\nExplain this text in detail."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="of prose")
    parser.add_argument("--way", choices=WAYS, help="this one, in this process")
    parser.add_argument("--folder", type=Path, help="where the first way leaves its logits")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measure(options.way, options.tokens, options.folder)))
        return
    rows = {}
    with TemporaryDirectory() as folder:
        for way in WAYS:
            call = [sys.executable, __file__, "--tokens", str(options.tokens), "--way", way]
            done = subprocess.run([*call, "--folder", folder], stdout=subprocess.PIPE, check=True)
            rows[way] = json.loads(done.stdout.splitlines()[-1])
            print(f"{way:16}", "  ".join(f"{k} {v:.4g}" for k, v in rows[way].items()), flush=True)
    if options.json is not None:
        options.json.write_text(compact(rows))


def measure(way: str, num_tokens: int, folder: Path) -> dict[str, float]:
    """One row of the table."""
    warnings.simplefilter("ignore", GgufWarning)
    process, begin = psutil.Process(), perf_counter()
    before = process.memory_info().rss
    model: Any = load_model("smollm2", device="cpu", **WAYS[way])
    tokenizer: Any = load_tokenizer("smollm2")
    row = {"load_s": perf_counter() - begin}
    ids = torch.as_tensor(prose(tokenizer, num_tokens))[None]
    with torch.inference_mode():
        cache = model(ids[:, :64]).past_key_values  # which reads all weights
        row["memory_of_file"] = (process.memory_info().rss - before) / smollm2_file().stat().st_size
        row["prompt_s"], output = _timed(lambda: model(ids))
        logits = output.logits[0].float()
        one = ids[:, :1]
        row["token_ms"] = 1e3 * min(
            _timed(lambda: model(one, **passing(cache)))[0] for _ in range(STEPS)
        )
        own = folder / "answer.pt"
        if not own.exists():
            text = tokenizer.decode(ids[0, :300]) + QUESTION
            asked = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            asked = torch.as_tensor(asked)[None]
            said = model.generate(asked, max_new_tokens=ANSWER, do_sample=False)
            torch.save((said, asked.shape[1], logits), own)
        said, start, expected = torch.load(own)
        if WAYS[way].get("dtype") == "float32" and WAYS[way].get("dequantize"):
            return row
        answer = model(said).logits[0, start - 1 : -1].argmax(-1)
        row["same_in_answer"] = float((answer == said[0, start:]).float().mean())
    row["same_in_prose"] = float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
    left = expected.log_softmax(-1)
    row["kl"] = float((left.exp() * (left - logits.log_softmax(-1))).sum(-1).mean())
    return row


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = perf_counter()
    result = call()
    return perf_counter() - begin, result


if __name__ == "__main__":
    main()
