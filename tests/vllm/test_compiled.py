"""vLLM with models that torch compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run scripts/check_engines")


from tests.vllm.test_engine import engine, folders, layers, prompts, tokens

_ = folders  # a fixture


def test_compiled_models_attend_as_well(folders: dict[str, Path]) -> None:
    """Compiled without our layers, of which a search is one more; the first tokens are few."""
    asked, compiled = prompts([5, 300, 1100, 5600]), {"enforce_eager": False, "max_model_len": 8192}
    stock = tokens(engine(folders["llama"], None, **compiled), asked)
    llm = engine(folders["llama"], {"budget": "1000", "window_tokens": 128}, **compiled)
    assert llm.llm_engine.vllm_config.compilation_config.mode
    ours = tokens(llm, asked)
    assert ours[:3] == stock[:3]
    assert ours[3][:2] == stock[3][:2]
    assert all(one.index is not None for one in layers(llm))
