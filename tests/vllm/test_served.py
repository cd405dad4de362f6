"""vLLM in processes of its own, as a server has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run scripts/check_engines")

from benchmarks.vllm_tokens.models import save_random
from hybrid_kv.vllm.counters import FOLDER

RUN = """
import json, sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        max_model_len=1024, block_size=128, disable_log_stats=False,
        additional_config={"hybrid_kv": {"budget": "all", "audit_every": 2}},
    )
    params = SamplingParams(max_tokens=9, temperature=0, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": list(range(300))}], params, use_tqdm=False)
    shown = {one.name: one.value for one in llm.get_metrics() if "hybrid_kv" in one.name}
    print("counted", json.dumps(shown))
"""


def test_the_front_end_shows_what_the_engine_counts(tmp_path: Path) -> None:
    """The plug-in is loaded by vLLM itself, in each process."""
    save_random("llama", tmp_path)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    plain = {name: value for name, value in os.environ.items() if name != FOLDER}
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=plain | own | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [one for one in run.stdout.splitlines() if one.startswith("counted")]
    shown = json.loads(line.removeprefix("counted"))
    own = {name.removeprefix("vllm:hybrid_kv_"): value for name, value in shown.items()}
    assert (own["decodes"], own["prompt_tokens"]) == (2 * 8, 2 * 300)
    assert own["read_entries"] == own["context_entries"] == 2 * sum(range(301, 309))
    assert (own["audit_looks"], own["audit_missed_mass"]) == (4, 0)
