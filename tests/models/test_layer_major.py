"""Layer-major prefill gives what one plain pass gives, and leaves the model as it was."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.api.building import from_layer
from hybrid_kv.errors import ConfigError
from hybrid_kv.models import layer_major
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.layer_major import LayerMajorPrefill, chunk_size, lie_on_host
from tests.contracts.architectures import PAD, VOCAB, build
from tests.contracts.edges.further_models import further_config
from tests.kit import every

PROMPT = 37
CLOSE = {"rtol": 0.0, "atol": 5e-4}
ALL = {"cold": {"top_k": "all"}, "sink_tokens": 4, "window_tokens": 8, "page_size": 4}


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(params=["llama", "gemma3", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


def build_further(model_type: str) -> PreTrainedModel:
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(further_config(model_type))
    return model.eval()


def ids(length: int = PROMPT, rows: int = 1) -> Tensor:
    return torch.randint(PAD + 1, VOCAB, (rows, length))


def config(chunk: int) -> hkv.HybridConfig:
    return hkv.HybridConfig(prefill_chunk_tokens=chunk, **ALL)


@pytest.mark.parametrize("chunk", [1, 7, 36, 37, 100])
def test_chunks_of_any_size_give_the_logits_and_tokens_of_one_pass(
    model: PreTrainedModel, chunk: int
) -> None:
    prompt = ids()
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    mask = torch.ones_like(prompt)
    want = model(prompt, **passing(DynamicCache(config=model.config))).logits
    tokens = model.generate(prompt, attention_mask=mask, **settings)
    with hkv.attach(model, config(chunk)) as runtime:
        found = model(prompt, **passing(runtime.cache())).logits
        torch.testing.assert_close(found, want, **CLOSE)
        cache = runtime.cache()
        found = model.generate(prompt, attention_mask=mask, **passing(cache), **settings)
        cache.check_integrity()
    assert torch.equal(found, tokens)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "lfm2"])
@pytest.mark.parametrize(("padding", "place"), [(0, "auto"), (9, "auto"), (9, "host")])
def test_states_of_a_fixed_size_pass_from_chunk_to_chunk(
    kind: str, padding: int, place: str
) -> None:
    model = build_further(kind)
    prompt = ids(rows=2)
    prompt[1, :padding] = PAD
    mask = (prompt != PAD).long()
    want = model(prompt, attention_mask=mask, **passing(DynamicCache(config=model.config))).logits
    parts = dict(model.named_modules())
    mixer = next(part for name, part in parts.items() if name.endswith((".linear_attn", ".conv")))
    seen: list[int] = []
    with hkv.attach(model, config(10).replace(prefill_states=place)) as runtime:
        undo = mixer.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
        found = model(prompt, attention_mask=mask, **passing(runtime.cache())).logits
        undo.remove()
    assert seen == [10, 10, 10, 7]
    torch.testing.assert_close(found[0], want[0], **CLOSE)
    torch.testing.assert_close(found[1, padding:], want[1, padding:], **CLOSE)


def test_a_long_later_turn_is_exact_after_the_spill(model: PreTrainedModel) -> None:
    turns = [ids(), ids(3), ids(60)]  # the last is longer than dense_extend_tokens
    plain = DynamicCache(config=model.config)
    want = [model(turn, **passing(plain)).logits for turn in turns]
    with hkv.attach(model, config(10)) as runtime:
        cache = runtime.cache()
        for turn, exact in zip(turns, want, strict=True):
            found = model(turn, **passing(cache)).logits
            torch.testing.assert_close(found, exact, **CLOSE)
            cache.check_integrity()
        assert any(row.cold for row in every(cache))


def test_each_layer_is_sealed_before_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    with hkv.attach(model, config(10)) as runtime:
        cache = runtime.cache()
        order: list[tuple[int, bool]] = []
        plain = cache.kv.attend

        def attend(layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            order.append((layer_idx, layer_idx == 0 or cache.kv.layers[layer_idx - 1].is_sealed))
            return plain(layer_idx, *args, **kwargs)

        monkeypatch.setattr(cache.kv, "attend", attend)
        model(ids(), **passing(cache))
    assert [layer for layer, _ in order] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(sealed for _, sealed in order)


def test_embeddings_of_the_caller_are_not_written_over(model: PreTrainedModel) -> None:
    embeds = model.get_input_embeddings()(ids())
    before = embeds.clone()
    want = model(inputs_embeds=embeds, use_cache=False).logits
    with hkv.attach(model, config(7)) as runtime:
        found = model(inputs_embeds=embeds, **passing(runtime.cache())).logits
    assert torch.equal(embeds, before)
    torch.testing.assert_close(found, want, **CLOSE)


@pytest.mark.parametrize("asked_by", ["argument", "configuration"])
def test_hidden_states_are_those_of_one_pass(
    model: PreTrainedModel, asked_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ids()
    want = model(prompt, output_hidden_states=True, use_cache=False).hidden_states
    asked: dict[str, Any] = {"output_hidden_states": True} if asked_by == "argument" else {}
    if asked_by != "argument":
        monkeypatch.setattr(model.config, "output_hidden_states", True)
    with hkv.attach(model, config(7)) as runtime:
        output = model(prompt, **passing(runtime.cache()), **asked)
    assert len(output.hidden_states) == len(want)
    for found, exact in zip(output.hidden_states, want, strict=True):
        torch.testing.assert_close(found, exact, **CLOSE)


@pytest.mark.parametrize("length", [40, 37])
def test_what_a_layer_tells_the_next_beside_its_hidden_states_is_of_all_chunks(length: int) -> None:
    """Zaya's routers take what those of the layer before have made of each token."""
    model, prompt = build_further("zaya"), ids(length)
    want = model(prompt, use_cache=False).logits
    with hkv.attach(model, config(10)) as runtime:
        found = model(prompt, **passing(runtime.cache())).logits
    torch.testing.assert_close(found, want, **CLOSE)


def test_router_logits_are_one_tensor_for_each_layer() -> None:
    model, prompt = build_further("mixtral"), ids(rows=2)
    mask = (torch.arange(PROMPT) >= torch.tensor([[0], [9]])).long()
    asked = {"attention_mask": mask, "output_router_logits": True}
    want = model(prompt, use_cache=False, **asked)
    with hkv.attach(model, config(10)) as runtime:
        found = model(prompt, **passing(runtime.cache()), **asked)
    assert len(found.router_logits) == len(want.router_logits)
    shown = mask.flatten().bool()
    for own, exact in zip(found.router_logits, want.router_logits, strict=True):
        torch.testing.assert_close(own[shown], exact[shown], **CLOSE)
    torch.testing.assert_close(found.aux_loss, want.aux_loss)


def test_an_error_in_a_chunk_does_not_leave_the_prompt_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    with hkv.attach(model, config(10)) as runtime:
        cache = runtime.cache()
        monkeypatch.setattr(
            cache.kv, "attend", lambda *args, **kwargs: (_ for _ in ()).throw(KeyError("chunk"))
        )
        with pytest.raises(KeyError, match="chunk"):
            model(ids(), **passing(cache))
        assert not cache.kv.more_prompt


class Decoder(nn.Module):
    """Just enough of a model to be wrapped."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Module()
        layer.self_attn = nn.Identity()
        layer.forward = lambda hidden: hidden + 1
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(8, 1)])
        self.norm = nn.LayerNorm(8)


def test_only_a_prompt_is_wrapped_and_every_forward_comes_back() -> None:
    decoder = Decoder()
    own = decoder.layers[0].__dict__["forward"]
    prefill, cache = (
        LayerMajorPrefill(decoder, 4),
        SimpleNamespace(),
    )
    for shape in ((1, 1), (7, 1), (2, 4)):
        with prefill.serving(cache, shape):
            assert decoder.layers[0].forward is own
            assert "forward" not in decoder.norm.__dict__
    for prompt in ((1, 5), (64, 1), None):
        with prefill.serving(cache, prompt):
            assert decoder.layers[0].forward is not own
            assert "forward" in decoder.norm.__dict__
        assert decoder.layers[0].__dict__["forward"] is own
        assert "forward" not in decoder.layers[1].__dict__
        assert "forward" not in decoder.norm.__dict__


def test_a_layer_is_done_once_for_all_chunks_and_left_out_without_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, worked = build("llama"), set[nn.Module]()
    widened = layer_major.widened

    def noted(layer: nn.Module, num_tokens: int) -> Any:
        worked.add(layer)
        return widened(layer, num_tokens)

    monkeypatch.setattr(layer_major, "widened", noted)
    seen: list[tuple[int, int]] = []
    (_, layers), *_ = layer_major.decoder_stacks(model)
    entering = torch.randn(1, PROMPT, model.config.hidden_size)
    with (
        hkv.attach(model, config(7)) as runtime,
        from_layer(model, 1, entering, lambda layer, out: seen.append((layer, out.shape[1]))),
    ):
        model(ids(), **passing(runtime.cache()))
    assert seen == [(number, PROMPT) for number in range(1, len(layers))]
    assert layers[0] not in worked
    assert layers[1] in worked
    assert "forward" not in layers[0].__dict__


@pytest.mark.parametrize(
    ("setting", "tokens", "size"),
    [(7, 999, 7), ("auto", 100, 256), ("auto", 4096, 512), ("auto", 10**6, 4096)],
)
def test_automatic_chunks_are_an_eighth_within_limits(setting: Any, tokens: int, size: int) -> None:
    assert chunk_size(setting, tokens) == size


@pytest.mark.parametrize("chunk", [7, 36])
@pytest.mark.parametrize("rows", [1, 2])
def test_states_on_the_host_give_the_same_logits(
    model: PreTrainedModel, chunk: int, rows: int
) -> None:
    prompt = ids(rows=rows)
    with hkv.attach(model, config(chunk)) as runtime:
        want = model(prompt, **passing(runtime.cache())).logits
    on_host = hkv.HybridConfig(prefill_chunk_tokens=chunk, prefill_states="host", **ALL)
    with hkv.attach(model, on_host) as runtime:
        cache = runtime.cache()
        assert torch.equal(model(prompt, **passing(cache)).logits, want)
        cache.check_integrity()
        assert model(ids(1, rows), **passing(cache)).logits.shape[:2] == (rows, 1)


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "glm4", "olmo2"],
)
def test_each_chunk_goes_to_the_weights_and_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights on "meta" stand for a GPU: what mixes it with the host's memory is refused there."""
    model, pieces = deepcopy(build(name)), []
    buffers = [(m, *named) for m in model.modules() for named in m.named_buffers(recurse=False)]
    model.to("meta")
    for module, buffer_name, buffer in buffers:  # of rotary embeddings: they follow their inputs
        setattr(module, buffer_name, buffer)

    def put(states: Tensor, start: int, piece: Tensor) -> None:
        assert (states.device.type, piece.device.type) == ("cpu", "meta")
        pieces.append((start, piece.shape[1]))

    def host_states(like: Tensor, num_tokens: int) -> Tensor:
        return torch.zeros(like.shape[0], num_tokens, like.shape[2])

    monkeypatch.setattr(layer_major, "put", put)
    monkeypatch.setattr(layer_major, "host_states", host_states)
    sealed = []
    layers = SimpleNamespace(seal_if_open=lambda idx, *, wait: sealed.append((idx, wait)))
    kv = SimpleNamespace(more_prompt=False, layers=layers)
    AttentionInterface.register("test_own_value", _attend_own_value)
    model.config.get_text_config()._attn_implementation = "test_own_value"
    prefill = LayerMajorPrefill(model, 16, "host")
    cache, prompt = (
        SimpleNamespace(kv=kv),
        ids().to("meta"),
    )
    with prefill.serving(cache, (1, PROMPT)):
        logits = model(prompt, use_cache=False, logits_to_keep=1).logits
    assert logits.device.type == "meta"
    count = model.config.num_hidden_layers
    assert pieces == [(0, 16), (16, 16), (32, 5)] * (count + 2)  # table, layers, norm
    assert sealed == [(idx, True) for idx in range(count)]


def _attend_own_value(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    own = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query + own).transpose(1, 2).contiguous(), None


def test_states_that_cannot_lie_on_the_host_are_refused() -> None:
    stack = nn.Module()
    stack.layers = nn.ModuleList([_Elsewhere("cpu")])
    with pytest.raises(ConfigError, match="prefill_states must be 'auto' or 'device'"):
        LayerMajorPrefill(stack, 5, "host")


@pytest.mark.parametrize(
    ("setting", "states", "layer_kv", "free", "on_host"),
    [
        ("auto", 4, 1, 9, False),
        ("auto", 4, 1, 8, True),
        ("auto", 1, 3, 8, True),
        ("device", 9, 9, 1, False),
        ("host", 1, 1, 99, True),
    ],
)
def test_states_lie_on_the_host_where_they_leave_too_little(
    setting: Any, states: int, layer_kv: int, free: int, on_host: bool
) -> None:
    assert lie_on_host(setting, states, layer_kv, free) == on_host


class _Elsewhere(nn.Module):
    """A decoder layer whose weights lie on another device than its input."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.self_attn, self.place = nn.Identity(), device

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        self.came_from = hidden.device.type
        return (hidden.to(self.place),)


@pytest.mark.parametrize("in_place", [True, False])
def test_hidden_states_move_to_another_device_once(in_place: bool) -> None:
    """They went back to the first device after every layer of the second, by way of the bus."""
    stack = nn.Module()
    stack.layers = nn.ModuleList([_Elsewhere(place) for place in ("cpu", "meta", "meta")])
    prefill = LayerMajorPrefill(stack, 5)
    kv = SimpleNamespace(more_prompt=False)
    cache = SimpleNamespace(kv=kv)
    hidden = torch.ones(1, PROMPT, 8)
    places = []
    with prefill.serving(cache, (1, PROMPT), in_place=in_place):
        for layer in stack.layers:
            (hidden,) = layer(hidden)
            places.append(hidden.device.type)
            assert hidden.shape == (1, PROMPT, 8)
    assert places == ["cpu", "meta", "meta"]
    assert [layer.came_from for layer in stack.layers] == ["cpu", "cpu", "meta"]
