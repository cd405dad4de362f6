"""Reading on from a context that was computed before, and without what only the audit tells."""

from __future__ import annotations

import hybrid_kv as hkv
from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.measure import EvalTarget, reading
from hybrid_kv.contest.prompts import PrefilledPrompt, Prompt, PromptBuilder, SharedPrompt
from hybrid_kv.eval.needle import filler
from hybrid_kv.planning.plan import model_facts
from hybrid_kv.types import Needs


class Kept:
    """A context whose cache is closed."""

    def __init__(self, prompt: PrefilledPrompt) -> None:
        self._prompt = prompt

    def context(self) -> PrefilledPrompt:
        return self._prompt


def test_a_kept_context_reads_as_the_shared_one_and_looks_change_nothing(
    llm: hkv.LLM, folder: str
) -> None:
    ids = filler(157, 3).tolist()
    prompt = Prompt(ids[:131], text=tuple(ids[131:]))
    place = EvalTarget(
        llm.runtime, model_facts(folder, dtype="float32"), PromptBuilder(llm.require_tokenizer())
    )
    config = HybridConfig(
        method="flat", sink_tokens=8, window_tokens=16, page_size=8, cold={"top_k": 9}
    )
    shared = SharedPrompt(llm.runtime, prompt.context, Needs())
    whole, _ = reading(place, config, shared, prompt, 8, None)
    kept = Kept(shared.context())
    shared.close()
    plain, _ = reading(place, config, kept, prompt, 8, None, looked=False, timed=2)
    assert plain["nats"] == whole["nats"]
    assert plain["counters"].attended_tokens == whole["counters"].attended_tokens
    assert plain["counters"].read_bytes
    assert whole["counters"].missed_mass is not None
    assert plain["counters"].missed_mass is None
