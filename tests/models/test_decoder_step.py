"""Decoder layers of decode steps, which the engine computes around their attention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.joined import JoinedCache
from hybrid_kv.models.packed_linear import PackedLinear, packed
from hybrid_kv.ops.native.decoder import BoundDecoder
from tests.contracts.architectures import scale_weights
from tests.contracts.edges.calls import anatomy
from tests.models.engine_products import engine_wins
from tests.models.folder import tokenizer
from tests.ops.native.engines import needs_engine
from tests.pairs import in_pairs
from tests.tolerances import TOLERANCES

pytestmark = needs_engine
TIERED = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8, "cold": {"top_k": "all"}}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "shared_expert_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "mistral": {"sliding_window": None, "head_dim": 40},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "granite": {"residual_multiplier": 0.6, "attention_multiplier": 0.3},
    "ministral": {"head_dim": 24, "sliding_window": 12},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "phi3": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "gemma": {"head_dim": 24},
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 3.0, "sliding_window": 12},
    "gemma3_text": {"head_dim": 40, "sliding_window": 12},
    "mixtral": {"num_local_experts": 4, "head_dim": 24},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 24, "sliding_window": 12},
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS | {"head_dim": 16, "mlp_only_layers": [1]},
}
MIXTURES = {"mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe"}
"""Whose feed-forward is called as it is."""
LOGITS: Any = {"atol": 2e-2, "rtol": 1e-2}
PACKED: Any = {"atol": 2e-3, "rtol": 1e-3}
"""Of logits of about 1: where inputs differ in the last bit, their 8 bits may."""
KINDS = ["Q8_0", "Q4_1", torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fast_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_wins(monkeypatch)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Shapes of hidden states [B, T, hidden] with which the engine computed a layer."""
    seen: list[list[int]] = []
    own = BoundDecoder.outputs

    def outputs(self: BoundDecoder, hidden: Tensor, *args: Any) -> Tensor:
        seen.append(list(hidden.shape))
        return own(self, hidden, *args)

    monkeypatch.setattr(BoundDecoder, "outputs", outputs)
    return seen


def made(
    family: str = "llama", kind: torch.dtype | str = "Q8_0", exact: bool = True, **settings: Any
) -> Any:
    """A model of three layers, of sizes that fill no vector."""
    sizes = {
        **{"vocab_size": 12, "hidden_size": 96, "intermediate_size": 160},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 256, "tie_word_embeddings": False},
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = AutoConfig.for_model(family, **sizes | FAMILIES[family] | settings)
        model = AutoModelForCausalLM.from_config(config).eval()
        scale_weights(model)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "sinks")):
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
    if isinstance(kind, torch.dtype):
        return model.to(kind)
    for path, module in list(model.model.layers.named_modules()):
        if type(module) is nn.Linear:
            blocks = packed(module.weight.detach(), kind)
            new = PackedLinear(kind, blocks, module.in_features, module.bias, exact=exact)
            model.model.layers.set_submodule(path, new)
    return model


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(1, 12, (rows, tokens), generator=torch.Generator().manual_seed(rows))


def logits(model: Any, rows: int = 1, new: int = 1, mask: Tensor | None = None) -> Tensor:
    """Of a step behind a prompt of 37 tokens, through our cache."""
    tokens = ids(rows, 37 + new)
    with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        masks = [None, None] if mask is None else [mask[:, :37], mask]
        model(tokens[:, :37], attention_mask=masks[0], **passing(cache))
        return model(tokens[:, 37:], attention_mask=masks[1], **passing(cache)).logits


def watched(model: Any) -> list[str]:
    """Listens inside of each layer, which must be left alone then; what was heard."""
    heard: list[str] = []
    for layer in model.model.layers:
        part = layer.self_attn if model.config.model_type in MIXTURES else layer.mlp
        part.register_forward_hook(lambda *_: heard.append("part"))
    return heard


@pytest.mark.parametrize(
    ("family", "kind", "shape"),
    in_pairs(list(FAMILIES), KINDS, [(1, 1), (3, 1), (1, 5), (2, 4)]),
    ids=str,
)
def test_a_step_gives_the_logits_of_the_models_own_layers(
    family: str,
    kind: torch.dtype | str,
    shape: tuple[int, int],
    computed: list[list[int]],
) -> None:
    rows, new = shape
    model = made(family, kind)
    before = anatomy(model)
    found = logits(model, rows, new)
    assert computed == [[rows, new, 96]] * 3
    assert anatomy(model) == before
    heard = watched(model)
    own = logits(model, rows, new)
    assert len(computed) == 3
    assert heard
    torch.testing.assert_close(found, own, **(LOGITS if kind in TOLERANCES else PACKED))


def test_whoever_listens_to_experts_hears_them(computed: list[list[int]]) -> None:
    """They are called as modules; a step asks for the routers' logits as well."""
    model, heard = made("qwen3_moe", torch.bfloat16), list[Tensor]()
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *told: heard.append(told[2][0]))
    logits(model)
    assert [len(one) for one in heard][-1] == 1, "of the step"
    assert len(computed) == 3


@pytest.mark.parametrize("exact", [True, False])
def test_greedy_tokens_are_those_of_the_models_own_layers(
    exact: bool, computed: list[list[int]]
) -> None:
    def answer(model: PreTrainedModel) -> list[int]:
        with hkv.load(model, tokenizer=tokenizer(), config=hkv.HybridConfig(**TIERED)) as llm:
            return llm.generate(ids(1, 37), max_new_tokens=24).token_ids

    model = made(exact=exact)
    found = answer(model)
    assert computed == [[1, 1, 96]] * 3 * 23, "the prompt is not computed so"
    watched(model)
    assert answer(model) == found


def test_heads_of_which_a_part_or_the_whole_is_rotated(computed: list[list[int]]) -> None:
    for share in (0.25, 1.0):
        model = made("phi3", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": share})
        found = logits(model)
        watched(model)
        torch.testing.assert_close(found, logits(model), **PACKED)
    assert len(computed) == 6


def test_padding_and_rows_of_other_lengths(computed: list[list[int]]) -> None:
    mask = torch.ones(2, 38, dtype=torch.int64)
    mask[0, :11] = 0
    model = made("qwen3")
    found = logits(model, 2, 1, mask)
    assert len(computed) == 3
    watched(model)
    torch.testing.assert_close(found, logits(model, 2, 1, mask), **PACKED)


def test_prompts_gradients_and_autocast_are_left_to_the_model(computed: list[list[int]]) -> None:
    model = made(kind=torch.bfloat16)
    logits(model, 1, 9)  # more than few
    model.train()
    logits(model)
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        logits(model)
    assert not computed


# What may change between two steps


def test_how_exact_packed_products_are_may_change_between_two_steps(
    computed: list[list[int]],
) -> None:
    model, found = made(), []
    with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        model(ids(1, 37), **passing(cache))
        for exact in (True, True, False, True):
            for module in model.modules():
                if isinstance(module, PackedLinear):
                    module.exact = exact
            found.append(model(ids(1, 1), **passing(cache)).logits)
            cache.crop(-1)
    assert len(computed) == 12
    for one, exact in zip(found, (True, True, False, True), strict=True):
        assert torch.equal(one, found[0]) == exact


def _other_weight(layer: Any) -> None:
    layer.mlp.up_proj.weight = nn.Parameter(torch.randn(160, 96).bfloat16(), requires_grad=False)


def _other_data(layer: Any) -> None:
    layer.self_attn.o_proj.weight.data = torch.randn(96, 96).bfloat16()


def _transposed(layer: Any) -> None:
    layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data.t()


def _other_numbers(layer: Any) -> None:
    layer.mlp.down_proj.weight.data.fill_(0.25)


def _other_norm(layer: Any) -> None:
    layer.input_layernorm.weight.data = torch.randn(96).bfloat16()


def _other_epsilon(layer: Any) -> None:
    layer.post_attention_layernorm.variance_epsilon = 2.0


def _no_bias(layer: Any) -> None:
    layer.self_attn.q_proj.bias = None


def _packed(layer: Any) -> None:
    blocks = packed(torch.randn(96, 160), "Q8_0")
    layer.mlp.down_proj = PackedLinear("Q8_0", blocks, 160, exact=True)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _other_module(layer: Any) -> None:
    module = Doubled(96, 160).bfloat16()
    module.load_state_dict(layer.mlp.gate_proj.state_dict())
    layer.mlp.gate_proj = module


def _other_class(layer: Any) -> None:
    layer.mlp.gate_proj.__class__ = Doubled


def _parametrised(layer: Any) -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    nn.utils.parametrize.register_parametrization(layer.mlp.up_proj, "weight", Halved())


def _other_forward(layer: Any) -> None:
    own = layer.self_attn.v_proj.forward
    layer.self_attn.v_proj.forward = lambda x: 3 * own(x)


def _forward_of_the_layer(layer: Any) -> None:
    own = layer.forward
    layer.forward = lambda hidden, **kwargs: own(3 * hidden, **kwargs)


def _other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.ReLU()


def _other_inputs(layer: Any) -> None:
    layer.mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def _other_multiplier(layer: Any) -> None:
    layer.residual_multiplier = 2.0


def _no_residuals(layer: Any) -> None:
    layer.residual_multiplier = 0.0


def _other_eps(layer: Any) -> None:
    layer.post_feedforward_layernorm.eps = 2.0


def _other_norm_behind(layer: Any) -> None:
    layer.post_feedforward_layernorm.weight.data = torch.randn(96).bfloat16()


def _other_division(layer: Any) -> None:
    layer.pre_feedforward_layernorm._norm = lambda x: x / 3


def _other_softcap(layer: Any) -> None:
    layer.self_attn.attn_logit_softcapping = 0.1


def _other_function(layer: Any) -> None:
    layer.mlp.act_fn.act = torch.relu


def _no_rotation(layer: Any) -> None:
    layer.self_attn.use_rope = not layer.self_attn.use_rope


class Tripled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def _other_dropout(layer: Any) -> None:
    layer.resid_attn_dropout = Tripled().eval()


def _all_dropped(layer: Any) -> None:
    layer.resid_mlp_dropout.p = 1.0
    layer.resid_mlp_dropout.train()


def _other_gate(layer: Any) -> None:
    layer.mlp.activation_fn = nn.ReLU()


def _other_fused(layer: Any) -> None:
    layer.self_attn.qkv_proj.weight.data = torch.randn(192, 96).bfloat16()


CHANGES: dict[Callable[[Any], None], str] = {
    **dict.fromkeys(
        [
            *(_other_weight, _other_data, _transposed, _other_numbers, _other_norm),
            *(_other_epsilon, _no_bias, _packed, _other_module, _other_class, _parametrised),
            *(_other_forward, _forward_of_the_layer, _other_activation, _other_inputs),
        ],
        "llama",
    ),
    **dict.fromkeys([_other_multiplier, _no_residuals], "granite"),
    _no_rotation: "smollm3",
    **dict.fromkeys([_other_dropout, _all_dropped, _other_gate, _other_fused], "phi3"),
    **dict.fromkeys(
        [_other_eps, _other_norm_behind, _other_division, _other_softcap, _other_function], "gemma2"
    ),
}
"""And the family of a layer that has what is changed."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__.lstrip("_"))
def test_what_was_changed_between_two_steps_counts(
    change: Callable[[Any], None], computed: list[list[int]]
) -> None:
    found = []
    for is_changed, is_watched in ((True, False), (True, True), (False, True)):
        model = made(CHANGES[change], kind=torch.bfloat16)
        with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
            cache = runtime.cache()
            model(ids(1, 37), **passing(cache))
            model(ids(1, 1), **passing(cache))
            assert computed
            with torch.random.fork_rng(), torch.inference_mode(False):
                torch.manual_seed(5)
                if is_changed:
                    change(model.model.layers[1])
            if is_watched:
                watched(model)
            found.append(model(ids(1, 1), **passing(cache)).logits)
    ours, changed, unchanged = found
    torch.testing.assert_close(ours, changed, **TOLERANCES[torch.bfloat16])
    with pytest.raises(AssertionError):  # else it shows nothing
        torch.testing.assert_close(unchanged, changed, **TOLERANCES[torch.bfloat16])


def test_biases_beside_packed_weights_are_read_anew(computed: list[list[int]]) -> None:
    model = made().to(torch.bfloat16)
    found = []
    with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        model(ids(1, 37), **passing(cache))
        for value in (0.0, 3.0):
            model.model.layers[0].mlp.down_proj.bias.fill_(value)
            found.append(model(ids(1, 1), **passing(cache)).logits)
            cache.crop(-1)
    assert len(computed) == 6
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("family", "owner", "name", "in_a_step"),
    [
        ("llama", modeling_llama.LlamaMLP, "forward", 3),
        ("gemma2", modeling_gemma2.Gemma2RMSNorm, "_norm", 13),  # with the model's last norm
        ("llama", PackedLinear, "forward", 21),
        ("llama", SiLUActivation, "forward", 3),
    ],
)
def test_what_somebody_puts_into_a_class_is_called(
    family: str,
    owner: Any,
    name: str,
    in_a_step: int,
    computed: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made(family)
    with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        model(ids(1, 37), **passing(cache))
        model(ids(1, 1), **passing(cache))
        assert len(computed) == 3
        calls = []
        own = getattr(owner, name)

        def noted(self: Any, x: Tensor) -> Tensor:
            calls.append(x.shape)
            return own(self, x)

        monkeypatch.setattr(owner, name, noted)
        model(ids(1, 1), **passing(cache))
    assert len(calls) == in_a_step
    assert len(computed) == 3


def test_hooks_of_a_layer_see_what_goes_in_and_comes_out(computed: list[list[int]]) -> None:
    model, seen = made(), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: seen.append(out))
    found = logits(model)
    assert len(computed) == 3
    assert [list(one.shape) for one in seen[-3:]] == [[1, 1, 96]] * 3
    last = model.lm_head(model.model.norm(seen[-1]))
    torch.testing.assert_close(last, found)


def test_hooks_registered_elsewhere_between_steps_cost_no_binding(
    computed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, bound = made(), []
    own = BoundDecoder.__init__

    def made_anew(self: BoundDecoder, *args: Any, **kwargs: Any) -> None:
        bound.append(self)
        own(self, *args, **kwargs)

    monkeypatch.setattr(BoundDecoder, "__init__", made_anew)
    with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        model(ids(1, 37), **passing(cache))
        for _ in range(3):
            nn.Linear(2, 2).register_forward_hook(lambda *_: None)
            model(ids(1, 1), **passing(cache))
    assert len(bound) == 3
    assert len(computed) == 9


def test_hidden_states_can_be_asked_for(computed: list[list[int]]) -> None:
    model = made("qwen2")
    tokens = ids(1, 38)
    with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        model(tokens[:, :37], **passing(cache))
        found = model(tokens[:, 37:], output_hidden_states=True, **passing(cache)).hidden_states
        cache.crop(-1)
        again = model(tokens[:, 37:], output_hidden_states=True, **passing(cache)).hidden_states
        del computed[:]
        model(ids(1, 1), **passing(cache))
        assert len(computed) == 3, "hooks that transformers left there hear nothing now"
        cache.crop(-2)
        later = model(tokens[:, 37:], output_hidden_states=True, **passing(cache)).hidden_states
        for one in (again, later):
            torch.testing.assert_close(one, found)
    with torch.inference_mode():
        own = model(tokens, output_hidden_states=True).hidden_states
    assert len(found) == len(own) == 4
    for mine, theirs in zip(found, own, strict=True):
        torch.testing.assert_close(mine, theirs[:, 37:], atol=1e-3, rtol=1e-3)


def test_an_error_inside_of_a_step_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made()
    before = anatomy(model)
    own = logits(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("in mid-layer")

    with monkeypatch.context() as patched:
        patched.setattr(BoundDecoder, "outputs", fail)
        with pytest.raises(RuntimeError, match="in mid-layer"):
            logits(model)
    assert anatomy(model) == before
    torch.testing.assert_close(logits(model), own)


def test_a_copy_that_is_made_in_a_step_has_its_own_forwards(computed: list[list[int]]) -> None:
    model, copies = made(), []
    with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        model(ids(1, 37), **passing(cache))
        layers = model.model.layers
        hook = layers[0].register_forward_hook(lambda *_: copies.append(deepcopy(layers[1])))
        model(ids(1, 1), **passing(cache))
        hook.remove()
    assert len(computed) == 3
    hidden = torch.randn(1, 5, 96)
    places = torch.arange(5)[None]
    turns = model.model.rotary_emb(hidden, places)
    with torch.inference_mode():
        found, own = (one(hidden, position_embeddings=turns) for one in (copies[0], layers[1]))
    torch.testing.assert_close(found, own, **PACKED)  # the copy has our attention without a cache


def test_another_thread_that_calls_a_layer_in_a_step_gets_its_own(
    computed: list[list[int]],
) -> None:
    """It has no cache of ours, and the engine's calls are the step's."""
    model = made()
    layer, config = model.model.layers[1], model.config
    hidden = torch.randn(1, 1, 96)
    turns = model.model.rotary_emb(hidden, torch.zeros(1, 1, dtype=torch.int64))
    found: list[Tensor] = []

    def call(*_: Any) -> None:
        attention, config._attn_implementation = config._attn_implementation, "sdpa"
        with torch.inference_mode():
            found.append(layer(hidden, position_embeddings=turns))
        config._attn_implementation = attention

    def beside(*_: Any) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        model(ids(1, 37), **passing(cache))
        handle = model.model.layers[0].register_forward_pre_hook(beside)
        model(ids(1, 1), **passing(cache))
        handle.remove()
    assert len(computed) == 3
    call()
    torch.testing.assert_close(found[-1], found[-2])


def test_a_part_that_the_user_compiled_stays_compiled(computed: list[list[int]]) -> None:
    model, graphs = made(kind=torch.bfloat16), []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.model.layers[1].mlp.compile(backend=note)
    logits(model)
    assert len(computed) == 2
    assert graphs


def _whole(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def _in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def _base(model: Any) -> Any:
    model.model.compile(backend="eager")
    return model


def _bases_forward(model: Any) -> Any:
    model.model.forward = torch.compile(model.model.forward, backend="eager")
    return model


@pytest.mark.parametrize("way", [_whole, _in_place, _base, _bases_forward])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_model_that_the_user_compiles_answers_as_one_that_is_not(
    way: Callable[[Any], Any], order: str, computed: list[list[int]]
) -> None:
    torch._dynamo.reset()
    model = made("qwen3", num_hidden_layers=2)
    want = [logits(model), logits(model, 1, 5)]
    tokens = [ids(1, 38), ids(1, 42)]
    del computed[:]
    with torch.inference_mode():
        call = way(model) if order == "before" else model
        with hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
            call = way(model) if order == "after" else call
            for asked, wanted in zip(tokens, want, strict=True):
                cache = runtime.cache()
                call(asked[:, :37], **passing(cache))
                found = call(asked[:, 37:], **passing(cache)).logits
                torch.testing.assert_close(found, wanted, **PACKED)
    in_graph = (way, order) == (_bases_forward, "before")  # which has the layers' own operations
    assert len(computed) == (0 if in_graph else 4)
    torch._dynamo.reset()


def test_rows_of_joined_caches_answer_as_alone(computed: list[list[int]]) -> None:
    model = made("qwen2")
    lengths = (5, 40, 73)
    with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:

        def begun() -> list[Any]:
            caches = [runtime.cache() for _ in lengths]
            for cache, length in zip(caches, lengths, strict=True):
                model(ids(1, length), **passing(cache))
            return caches

        tokens = torch.tensor([[3], [5], [7]])
        alone = [
            model(tokens[row : row + 1], **passing(cache)).logits
            for row, cache in enumerate(begun())
        ]
        joined = JoinedCache(begun())
        where = torch.tensor(joined.positions)
        del computed[:]
        found = model(tokens, position_ids=where, **passing(joined)).logits
    assert computed == [[3, 1, 96]] * 3
    torch.testing.assert_close(found, torch.cat(alone), **PACKED)


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_windows_of_transformers_own(family: str, computed: list[list[int]]) -> None:
    model = made(family, sliding_window=16)
    found = logits(model, 1, 3)
    assert len(computed) == 3
    watched(model)
    torch.testing.assert_close(found, logits(model, 1, 3), **PACKED)
