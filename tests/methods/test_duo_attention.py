"""DuoAttention: whose entries stay, where the choice comes from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.plugins import Method
from hybrid_kv.types import LayerShape, ModelInfo
from tests.drive_method import drive, heads

SINKS, WINDOW, PROMPT = 16, 32, 173


def method(**settings: Any) -> Method:
    sizes = {"page_size": 16, "sink_tokens": SINKS, "window_tokens": WINDOW}
    built: Method = HybridConfig(method="duo_attention", **{**sizes, **settings}).build()
    return built


@pytest.mark.parametrize("masks", [[1, 0], [0, 1], [0, 0], [1, 1]])
def test_retrieval_heads_keep_everything_and_streaming_heads_nothing(masks: list[int]) -> None:
    driven = drive(method(heads=[masks]), prompt=PROMPT, new=60)
    kept = driven.kept
    assert kept is not None
    gone = PROMPT - SINKS - WINDOW + 48  # three pages of the answer
    assert kept.lengths == tuple(gone * mask for mask in masks)
    for head, mask in enumerate(masks):
        of_head = torch.stack(driven.out)[:, 3 * head : 3 * head + 3]
        exact = torch.stack(driven.exact)[:, 3 * head : 3 * head + 3]
        assert ((of_head - exact).abs().max() < 1e-9) == bool(mask)
        assert int(driven.lost[head].sum()) == gone * (not mask)


def test_memory_of_streaming_heads_is_free() -> None:
    one = drive(method(heads=[[1, 0]]), prompt=3000, new=1).kept
    both = drive(method(heads=[[1, 1]]), prompt=3000, new=1).kept
    assert one is not None
    assert both is not None
    assert one.nbytes == pytest.approx(both.nbytes / 2, rel=0.01)
    assert both.nbytes == pytest.approx(2 * (3000 - SINKS - WINDOW) * (2 * 4 * 72 + 8), rel=0.01)


def test_what_streaming_heads_drop_may_go_to_the_cold_tier() -> None:
    driven = drive(method(heads=[[1, 0]], demote="offload"), prompt=PROMPT, new=60)
    assert not driven.lost.any()
    assert max(driven.error) < 1e-9


@pytest.mark.parametrize("prompt", [5, 37, PROMPT])
def test_all_heads_retrieve_at_a_full_budget(prompt: int) -> None:
    opened = type(method()).full_budget(method().params)
    driven = drive(type(method())(opened), prompt=prompt, new=60)
    assert not driven.lost.any()
    assert max(driven.error) < 1e-9


def test_the_prompt_shows_which_head_looks_back() -> None:
    q, k, v = heads(PROMPT + 20, num_q_heads=6, num_kv_heads=2, head_dim=72)
    wanted = torch.nn.functional.normalize(torch.randn(72), dim=0)
    k[1, 60] = 30 * wanted  # one key between sinks and window
    q[4] = 3 * wanted  # for one query head of three
    driven = drive(method(), prompt=PROMPT, new=20, given=(q, k, v))
    assert driven.kept is not None
    assert driven.kept.state["retrieves"].tolist() == [False, True]
    weights = torch.zeros(6)
    for head in range(6):
        for query in range(PROMPT - 64, PROMPT):
            logits = k[head // 3, : query + 1] @ q[head, query] * 72**-0.5
            weights[head] += logits.softmax(0)[SINKS : PROMPT - WINDOW].sum() / 64
    expected = weights.view(2, 3).amax(1)
    torch.testing.assert_close(driven.kept.state["scores"], expected, rtol=1e-4, atol=1e-5)
    assert driven.kept.lengths[0] == 0


def of_layers(given: object, ratio: float | None = None, layers: int = 3) -> list[list[bool]]:
    info = ModelInfo(tuple(LayerShape(2 * idx, 6, 2, 72) for idx in range(layers)))
    duo = method(heads=given, retrieval_ratio=ratio)
    duo.open(info)
    left = drive(method(heads=[[1, 1]]), new=1).kept
    assert left is not None
    found = [duo.absorb(2 * idx, 0, None, left, None) for idx in range(layers)]
    return [[length > 0 for length in one.lengths] for one in found if one is not None]


def test_scores_of_all_layers_compete() -> None:
    scores = [[0.1, 0.9], [0.2, 0.8], [0.3, 0.4]]
    assert of_layers(scores) == [[False, True], [False, True], [False, True]]
    assert of_layers(scores, 1 / 3) == [[False, True], [False, True], [False, False]]
    assert of_layers(scores, 2 / 3) == [[False, True], [False, True], [True, True]]


def test_masks_are_followed_whatever_their_number() -> None:
    masks = [[1, 1], [0, 1], [1, 1]]
    assert of_layers(masks) == [[bool(mask) for mask in layer] for layer in masks]


@pytest.mark.parametrize("wrap", [True, False])
def test_scores_are_read_from_a_file(tmp_path: Path, wrap: bool) -> None:
    scores = [[0.1, 0.9], [0.2, 0.8], [0.3, 0.4]]
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"heads": scores, "model": "m"} if wrap else scores))
    assert of_layers(str(path), 1 / 3) == of_layers(scores, 1 / 3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[1, 0]]", "must have a list for each of the model's 3 layers, got 1; make them with"),
        ("{}", "must have a list for each of the model's 3 layers, got dict"),
        ("[[1, 0], [1], [1, 0]]", "must have 2 numbers in list 1, one for each KV head, got 1"),
        ("[[1, 0], 7, [1, 0]]", "must have 2 numbers in list 1, one for each KV head, got 7"),
        ('[[1, 0], [1, "x"], [1, 0]]', "must hold numbers between 0 and 1, got [1, 'x'] in list 1"),
        ("[[1, 0], [1, 3], [1, 0]]", "must hold numbers between 0 and 1, got [1, 3] in list 1"),
        ("[[1, NaN], [1, 1], [1, 0]]", "must hold numbers between 0 and 1, got [1, nan] in list 0"),
        ("[[1,", "must be a JSON file of scores by layer, got none: Expecting value"),
    ],
)
def test_what_are_no_scores_of_this_model_is_refused(
    tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "heads.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        of_layers(str(path))
    assert str(refusal.value).startswith(f"heads '{path}' {sentence}")


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="got none: No such file or directory; make one with"):
        of_layers("nowhere.json")


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_ratio_that_cannot_be_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"^retrieval_ratio: input should be"):
        method(retrieval_ratio=ratio)


def test_layers_share_a_ratio_that_no_layer_can_have() -> None:
    """A fourth of two heads is one in every second layer."""
    q, k, v = heads(PROMPT + 1, num_q_heads=6, num_kv_heads=2, head_dim=72)
    counts = []
    for layer in range(6):
        duo = method(retrieval_ratio=0.25)
        kept = drive(duo, prompt=PROMPT, new=1, layer_idx=layer, num_layers=6, given=(q, k, v)).kept
        assert kept is not None
        counts.append(int(kept.state["retrieves"].sum()))
    assert sum(counts) == 3
    assert max(counts) == 1
