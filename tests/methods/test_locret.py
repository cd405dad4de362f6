"""Locret: what trained heads say of queries, keys and values before RoPE, by hand in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.rotary import Rotary
from hybrid_kv.types import LayerShape
from tests.contracts.architectures import build
from tests.drive_method import ROTARY, drive
from tests.methods.eviction import PROMPT, Array, Heads, kept_sets, method, run, top
from tests.trained_heads import draw_heads

WINDOW, BUDGET = 32, 83


FEW = Rotary(ROTARY.frequencies[:20])
"""Channels that are turned: 40, of heads of any size."""


def turned_back(x: Tensor) -> Array:
    """[H, N, D] before RoPE: pairs of channels (i, i + 20) by -n * frequency."""
    given = x.double().numpy()
    half = len(FEW.frequencies)
    angle = -np.outer(np.arange(given.shape[1]), np.array(FEW.frequencies))
    a, b = given[..., :half], given[..., half : 2 * half]
    turned = (a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle))
    return np.concatenate([*turned, given[..., 2 * half :]], -1)


def scores(given: Heads, into: Tensor, out: Tensor) -> Array:
    """[Hkv, N] of the prompt."""
    q, k, v = given
    states = (turned_back(q), turned_back(k), v.double().numpy())
    found = []
    for n in range(PROMPT):
        x = np.concatenate([one[:, n].reshape(-1) for one in states])
        hidden = into.double().numpy() @ x
        found.append(out.double().numpy() @ (hidden / (1 + np.exp(-hidden))))
    return np.stack(found, 1)


def shape_of(given: Heads) -> LayerShape:
    q, k, _ = given
    return LayerShape(0, len(q), len(k), q.shape[-1])


def saved(path: Path, shape: LayerShape, prefix: str = "") -> str:
    into, out = draw_heads(shape)
    name = f"{prefix}layers.{shape.layer_idx}.self_attn"
    both = {f"{name}.fc1.weight": into, f"{name}.fc2.weight": out}
    if path.suffix == ".safetensors":
        save_file(both, path)
    else:
        torch.save(both, path)
    return str(path)


@pytest.mark.parametrize("sinks", [0, 16])
@pytest.mark.parametrize("file", ["heads.safetensors", "heads.bin"])
def test_the_best_by_the_trained_heads_stay(
    given: Heads, tmp_path: Path, sinks: int, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sinks:
        monkeypatch.setattr("hybrid_kv.methods.locret._TOKENS", 37)  # in pieces
    shape = shape_of(given)
    path = saved(tmp_path / file, shape, "model." if sinks else "")
    tested = method(
        "locret", heads=path, sink_tokens=sinks, window_tokens=WINDOW, budget_tokens=BUDGET
    )
    driven = run(tested, given, new=1, rotary=FEW)
    expected = scores(given, *draw_heads(shape))[:, : PROMPT - WINDOW]
    kept = kept_sets(driven.kept, shape.num_kv_heads)
    for head, own in zip(expected, kept, strict=True):
        assert own == top(head, BUDGET - WINDOW - sinks, range(sinks, len(head)))


def test_without_trained_heads_it_says_where_they_come_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"heads must be a file of trained heads, got none; name"):
        drive(method("locret", budget_tokens=200), rotary=ROTARY)
    assert drive(method("locret", budget_tokens="all")).error[-1] < 1e-6  # needs none
    with pytest.raises(ConfigError, match="No such file"):
        drive(method("locret", heads=str(tmp_path / "nowhere.bin")), rotary=ROTARY)


@pytest.mark.parametrize("file", ["heads.safetensors", "heads.bin"])
def test_a_file_of_another_kind_or_model_is_refused(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.write_text("no tensors at all")
    with pytest.raises(ConfigError, match="got none: it is no such file"):
        drive(method("locret", heads=str(path)), rotary=ROTARY)
    if path.suffix == ".bin":
        torch.save([torch.zeros(3)], path)
        with pytest.raises(ConfigError, match="must hold named tensors, got a list; name a"):
            drive(method("locret", heads=str(path)), rotary=ROTARY)
    saved(path, LayerShape(3, 6, 2, 72))
    with pytest.raises(ConfigError, match=r"must hold layers\.0\.self_attn\.fc1\.weight"):
        drive(method("locret", heads=str(path)), rotary=ROTARY)
    saved(path, LayerShape(0, 6, 2, 64))
    with pytest.raises(ConfigError, match=r"fc1 \[R, 720\] and fc2 \[2, R\], got \[24, 640\]"):
        drive(method("locret", heads=str(path)), rotary=ROTARY)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "locret"},
        {"method": "by_layer", "layers": {"0": "locret", "rest": "full"}},
        {"method": "chain", "first": "locret"},
    ],
)
def test_without_trained_heads_it_is_refused_before_a_model_is_loaded(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the weights were loaded and the prompt computed first."""
    monkeypatch.setattr("hybrid_kv.api.llm.load_model", lambda *_, **__: pytest.fail("was loaded"))
    wanted = r"method 'locret': heads must be a file of trained heads, got none; name"
    with pytest.raises(ConfigError, match=wanted):
        hkv.load("random:llama-3-8b", config=config)
    with pytest.raises(ConfigError, match=wanted):
        hkv.attach(build("llama"), config)


def test_a_model_that_cannot_be_turned_back_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "heads.bin", LayerShape(0, 6, 2, 72))
    with pytest.raises(ConfigError, match="layer 0 cannot be turned back"):
        drive(method("locret", heads=path))
