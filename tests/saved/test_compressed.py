"""Keys and values in 8 bits: what the file takes, what is lost, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hybrid_kv.errors import ConfigError
from hybrid_kv.saved import verify_context
from hybrid_kv.saved.file_blocks import relative_error, rounded, unrounded
from tests.kit import cache_of, held
from tests.saved.scene import INDEXES, SMALL, TEXT, loaded, long_model


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return long_model()


@pytest.mark.parametrize("head_dim", [1, 24, 72])
def test_no_number_is_further_away_than_half_a_step(dtype: torch.dtype, head_dim: int) -> None:
    x = torch.randn(2, 37, head_dim).to(dtype)
    x[0, 3] = 0
    codes, scales = rounded(x)
    assert codes.dtype is torch.int8
    back = unrounded(codes, scales, torch.float32)
    steps = x.float().abs().amax(-1) / 127
    assert bool(((back - x.float()).abs() <= 0.5001 * steps[..., None]).all())
    assert torch.equal(back[0, 3], torch.zeros(head_dim))
    assert relative_error(x, back) < 0.01
    assert relative_error(x, x) == 0
    assert relative_error(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)) == 0


METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "hybrid": {**SMALL, "cold": {"top_k": 5, "index": INDEXES["sketch"]}},
    "retrieval_attention": {**SMALL, "cold": {"top_k": 5, "index": INDEXES["graph"]}},
    "flat": {**SMALL, "cold": {"top_k": 5, "index": INDEXES["auto"]}},
    "kivi": {},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_compressed_context_is_opened(
    plain: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    with loaded(plain, method, **METHODS[method]) as llm:
        context = llm.context(TEXT)
        context.save(tmp_path / "plain.hkv")
        context.save(tmp_path / "a.hkv", compress="int8")
        manifest = verify_context(tmp_path / "a.hkv").manifest
        opened, exact = llm.open(tmp_path / "a.hkv"), llm.open(tmp_path / "plain.hkv")
        cache_of(opened).check_integrity()
        assert len(opened.ask("oak", max_new_tokens=6).token_ids) == 6
        for saved in manifest.layers:
            assert saved.int8 is not None
            told = {"k": saved.int8.k_error, "v": saved.int8.v_error}
            before, after = (held(one, saved.layer_idx).entries() for one in (exact, opened))
            pairs = zip(before, after, strict=True)
            for name, (x, back) in zip("kv", pairs, strict=True):
                assert 0 < relative_error(x, back) == pytest.approx(told[name])
                assert told[name] < 0.01
        blocks = [verify_context(tmp_path / n).manifest for n in ("plain.hkv", "a.hkv")]
        full, small = (sum(it.blocks[layer.kv].num_bytes for layer in it.layers) for it in blocks)
        assert small < 0.35 * full  # 24 + 4 of 96 bytes, float32
        opened.save(tmp_path / "again.hkv", compress="int8")
        again = verify_context(tmp_path / "again.hkv").manifest
        assert again.layers[0].int8.k_error < 1e-6  # rounding what is rounded loses nothing


def test_an_unknown_compression_is_refused(plain: PreTrainedModel, tmp_path: Path) -> None:
    with loaded(plain, "full") as llm:
        context = llm.context("oak sea")
        with pytest.raises(ConfigError, match="compress must be 'int8' or left out, got 'zip'"):
            context.save(tmp_path / "a.hkv", compress="zip")
    assert list(tmp_path.iterdir()) == []
