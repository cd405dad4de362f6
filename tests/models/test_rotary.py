"""How models turn their queries, found out by asking them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.support import find_rotary, inspect_model
from hybrid_kv.rotary import Rotary
from hybrid_kv.types import Needs
from tests.contracts.architectures import ARCHITECTURES, VOCAB, build
from tests.tolerances import TOLERANCES

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def small(name: str, **changes: Any) -> PreTrainedModel:
    config = getattr(transformers, name)(**{**SMALL, **changes})
    return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-any-return]


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


def found(model: PreTrainedModel) -> list[Rotary]:
    return list(find_rotary(model, inspect_model(model)))


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "mistral"])
def test_every_architecture_of_the_matrix_is_understood(name: str) -> None:
    rotaries = found(build(name))
    assert rotaries
    for rotary in rotaries:
        assert rotary.reason == ""
        assert rotary.interleaved == (name == "glm4")


@pytest.mark.parametrize(
    ("name", "changes", "pairs", "interleaved"),
    [
        ("PhiConfig", {"partial_rotary_factor": 0.5}, 4, False),
        ("StableLmConfig", {}, 2, False),
        ("CohereConfig", {}, 8, True),
        ("LlamaConfig", rope("linear", factor=4.0), 8, False),
        ("LlamaConfig", rope("yarn", factor=4.0, original_max_position_embeddings=128), 8, False),
    ],
)
def test_partial_and_scaled_rotations_are_understood(
    name: str, changes: dict[str, Any], pairs: int, interleaved: bool
) -> None:
    for rotary in found(small(name, **changes)):
        assert (len(rotary.frequencies), rotary.interleaved) == (pairs, interleaved)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Qwen2Config", rope("dynamic", factor=4.0), "of type dynamic depends on the length"),
        ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 64}, "in a way that is not known"),
    ],
)
def test_what_is_not_understood_says_why(name: str, changes: dict[str, Any], reason: str) -> None:
    for rotary in found(small(name, **changes)):
        assert rotary.frequencies == ()
        assert reason in rotary.reason


def test_layers_without_positions_are_told_apart() -> None:
    model = small("SmolLM3Config", no_rope_layers=[1, 1, 0, 1])
    reasons = [rotary.reason for rotary in found(model)]
    assert reasons == ["", "", "the layer does not turn its queries", ""]


def test_norms_behind_the_rotation_are_not_taken_for_one() -> None:
    model = small("HunYuanDenseV1Config", head_dim=16)
    for name, weight in model.named_parameters():
        if "query_layernorm" in name:
            torch.nn.init.uniform_(weight, 0.1, 3.0)
    assert {rotary.reason for rotary in found(model)} == {
        "the layer turns its queries in a way that is not known"
    }


def test_asking_leaves_no_trace() -> None:
    model = build("llama")
    before = model.config._attn_implementation
    tokens = torch.arange(1, 9)[None]
    logits = model(tokens).logits
    found(model)
    assert model.config._attn_implementation == before
    assert not model.training
    assert torch.equal(model(tokens).logits, logits)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (RuntimeError("no such thing\nat all"), "(RuntimeError: no such thing)"),
        (KeyError(), "(KeyError)"),
        (ValueError("x" * 999), f"(ValueError: {'x' * 160})"),
    ],
)
def test_a_model_that_raises_is_served_without_and_says_what_it_raised(
    raised: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen3")

    info = inspect_model(model)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise raised

    monkeypatch.setattr(model, "forward", broken)
    assert {r.reason for r in find_rotary(model, info)} == {f"the model cannot be asked {told}"}
    assert model.config._attn_implementation != "hybrid_kv_probe"


@pytest.mark.parametrize("padded", [0, 5])
def test_indexes_learn_from_queries_where_decoding_will_ask(
    padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an index is given equals the model's own queries at those positions."""
    given: list[Tensor] = []
    rebuild = FlatIndex._rebuild

    def spy(index: FlatIndex, samples: Tensor, nearest: Tensor | None) -> None:
        given.append(samples)
        rebuild(index, samples, nearest)

    needs = Needs(8, 4, horizon_tokens=64)
    monkeypatch.setattr(FlatIndex, "needs", classmethod(lambda cls, params: needs))
    monkeypatch.setattr(FlatIndex, "_rebuild", spy)
    model = build("llama")
    tokens = torch.randint(1, VOCAB, (1, 37))
    mask = torch.ones_like(tokens)
    mask[:, :padded] = 0
    settings = {"sink_tokens": 4, "window_tokens": 4, "page_size": 4}
    config = hkv.HybridConfig(method="flat", dense_extend_tokens=1, **settings)
    with hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        cache.kv.means.watched = Needs(8, 4)
        options = {"max_new_tokens": 2, "do_sample": False}
        model.generate(tokens, attention_mask=mask, **passing(cache), **options)
        evidence = cache.kv.layers[0].prompt.evidence()[0]
        rotary = runtime.info.rotary_of(0)
    samples = evidence.samples(2, rotary)
    assert samples is not None
    count = 37 - padded
    ahead = samples.ahead(count, 64)
    assert evidence.num_tokens == count
    assert ahead.horizon == 64
    assert torch.equal(given[0], ahead.queries)
    # The first token's hidden state needs no context: the model itself can ask it elsewhere.
    place = int(ahead.positions[0])
    seen: list[Tensor] = []
    layer = model.model.layers[0].self_attn
    layer.q_proj.register_forward_hook(lambda _, __, out: seen.append(out))
    model(tokens[:, padded : padded + 1])
    q = seen[0].view(1, 1, 6, -1).transpose(1, 2)
    cos, sin = model.model.rotary_emb(q, torch.tensor([[place]]))
    half = q.shape[-1] // 2
    expected = q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin
    got = given[0].flatten(0, 1)[:, 0]
    torch.testing.assert_close(got, expected[0, :, 0], **TOLERANCES[torch.float32])
