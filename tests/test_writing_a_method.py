"""The template of docs/writing-a-method.md is a method that works, of at most 40 lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.plugin import load_plugin
from hybrid_kv.plugins import METHODS
from hybrid_kv.testing import check_index, check_method
from tests.contracts.architectures import build
from tests.contracts.edges.calls import expected, greedy, prompt
from tests.drive_method import drive
from tests.kit import every

TEXT = (Path(__file__).parents[1] / "docs/writing-a-method.md").read_text()


@pytest.fixture
def code(tmp_path: Path, own_plugins: None) -> str:
    found = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    for name, text in zip(("my_method", "my_index"), found, strict=True):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        load_plugin(str(path))
    return str(found[0])


def test_the_template_has_at_most_40_lines(code: str) -> None:
    assert len([line for line in code.splitlines() if line.strip()]) <= 40


def test_the_templates_pass_the_kit(code: str) -> None:
    check_method("heaviest", budget=64)
    check_index("strided")
    config = hkv.HybridConfig(method="heaviest").at_budget("5%", 8000)
    assert config.budget == 400 - 16 - 64 - 8


def test_the_template_equals_full_attention_at_a_full_budget(code: str) -> None:
    model = build("llama")
    config = hkv.HybridConfig(
        method="heaviest", page_size=4, sink_tokens=4, window_tokens=8, budget=3
    )
    with hkv.attach(model, config.opened()) as runtime:
        cache = runtime.cache()
        assert torch.equal(greedy(model, prompt(), cache), expected(model, prompt()))
        assert not any(row.lost for row in every(cache))
    with hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        greedy(model, prompt(), cache)
        cache.check_integrity()
        assert all(row.lost > 0 for row in every(cache))


def test_the_template_keeps_what_the_last_queries_look_at(code: str) -> None:
    kind = METHODS["heaviest"].factory
    given = {"budget": 7, "sink_tokens": 16, "window_tokens": 16}
    driven = drive(kind(kind.Params(**given)), prompt=173, new=40)
    assert driven.kept is not None
    own = driven.kept.head(0)[2]
    assert len(own) == 7 + 32
    q, k = driven.q[:3, 141:173], driven.k[0, :173]
    logits = q @ k.T * 72**-0.5
    hidden = torch.arange(173) > torch.arange(141, 173)[:, None]
    mass = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum((0, 1))
    best = 16 + mass[16 : 173 - 16].topk(7).indices
    assert set(own[:7].tolist()) == set(best.tolist())
