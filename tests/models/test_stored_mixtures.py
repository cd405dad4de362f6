"""Checkpoints of GPTQ, AWQ and compressed-tensors whose experts are packed, one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from hybrid_kv.errors import ConfigError, ModelNotFoundError
from hybrid_kv.models.expert_names import merges_of
from hybrid_kv.models.load import load_model
from hybrid_kv.models.packed_experts import PackedExperts
from hybrid_kv.models.stored_codes import StoredCodes
from hybrid_kv.planning.plan import model_facts
from tests.models.stored_checkpoints import save_mixture
from tests.models.test_stored_codes import CHECKPOINTS, refused, tokens_of
from tests.ops.native.engines import needs_engine

EXPERTS = 11
"""More than ten, in whose names 10 comes before 2."""
TOKENS = torch.arange(1, 38)[None]
SIZES: dict[str, Any] = {
    **{"vocab_size": 77, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1},
    "num_experts_per_tok": 3,
}
MODELS: dict[str, tuple[PreTrainedConfig, str]] = {
    "qwen3": (
        Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=64, head_dim=32),
        "model.layers.1.mlp.experts.10.gate_proj",
    ),
    "mixtral": (
        MixtralConfig(**SIZES, num_local_experts=EXPERTS),
        "model.layers.1.block_sparse_moe.experts.10.w1",
    ),
    "qwen2": (
        Qwen2MoeConfig(
            **{**SIZES, "num_experts": EXPERTS, "moe_intermediate_size": 64},
            **{"shared_expert_intermediate_size": 128, "mlp_only_layers": [0]},
        ),
        "model.layers.1.mlp.shared_expert.gate_proj",
    ),
    "glm4": (
        Glm4MoeConfig(
            **{**SIZES, "n_routed_experts": EXPERTS, "moe_intermediate_size": 64, "head_dim": 32},
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        ),
        "model.layers.1.mlp.shared_experts.up_proj",
    ),
}


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-any-return]


def saved(path: Path, name: str, what: str, **options: Any) -> Path:
    pack, told, own = CHECKPOINTS[what]
    return save_mixture(path, model_of(MODELS[name][0]), pack, told, **own, **options)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


def error(made: PreTrainedModel, wanted: PreTrainedModel) -> float:
    truth = logits(wanted)
    return float((logits(made) - truth).norm() / truth.norm())


def experts_of(model: PreTrainedModel) -> list[PackedExperts]:
    return [one for one in model.modules() if isinstance(one, PackedExperts)]


def change(path: Path, how: Callable[[dict[str, Tensor]], object]) -> Path:
    """Changes the tensors of a checkpoint."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@needs_engine
@pytest.mark.parametrize("what", CHECKPOINTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_mixture_answers_as_its_plain_twin(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, name, what)
    numbers = load_file(path / "model.safetensors")
    assert any(key.startswith(f"{MODELS[name][1]}.") for key in numbers), "a name of the hub's"
    twin = load_model(path / "twin", device="cpu")
    monkeypatch.setattr(StoredCodes, "values", lambda *_: pytest.fail("experts are unpacked"))
    model = load_model(path, device="cpu", exact_products=True)
    packed = experts_of(model)
    assert len(packed) == (2 if name in ("qwen3", "mixtral") else 1)
    exact = "order" not in what and what not in ("awq", "compressed-zeros")
    assert {one.kind for one in packed} == {"Q8_0" if "8" in what else "Q4_0" if exact else "Q4_1"}
    assert error(model, twin) < (1e-4 if exact else 3e-3)
    assert tokens_of(model) == tokens_of(twin)


@pytest.mark.parametrize("what", CHECKPOINTS)
@pytest.mark.parametrize("name", MODELS)
def test_unpacked_a_mixture_is_its_plain_twin(name: str, what: str, tmp_path: Path) -> None:
    path = saved(tmp_path, name, what)
    plain = load_model(path / "twin", device="cpu").state_dict()
    model = load_model(path, device="cpu", dequantize=True)
    state = model.state_dict()
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[key], plain[key]) for key in plain)
    model.save_pretrained(tmp_path / "plain")
    again = load_model(tmp_path / "plain", device="cpu")
    assert torch.equal(logits(again), logits(model))
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == (
        load_file(path / "twin" / "model.safetensors").keys()
    )


@needs_engine
def test_experts_without_a_gate_are_read(tmp_path: Path) -> None:
    config = NemotronHConfig(
        **{**SIZES, "head_dim": 32, "mamba_num_heads": 4, "mamba_head_dim": 32},
        **{"layers_block_type": ["attention", "moe"], "n_routed_experts": EXPERTS},
        **{"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64},
        **{"n_groups": 1, "ssm_state_size": 16, "chunk_size": 16},
    )
    pack, told, own = CHECKPOINTS["gptq"]
    path = save_mixture(tmp_path, model_of(config), pack, told, **own)
    twin = load_model(path / "twin", device="cpu")
    model = load_model(path, device="cpu", exact_products=True)
    assert [[*one.kinds] for one in experts_of(model)] == [["up_proj", "down_proj"]]
    assert error(model, twin) < 1e-4
    assert error(load_model(path, device="cpu", dequantize=True), twin) == 0


@needs_engine
@pytest.mark.parametrize("dequantize", [False, True])
def test_tensors_of_an_expert_lie_in_any_files(dequantize: bool, tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral", "gptq-order")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {
        name: f"model-0000{1 + place % 3}-of-00003.safetensors" for place, name in enumerate(names)
    }
    for file in set(index.values()):
        part = {name: tensors[name] for name in names if index[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    file = path / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    options = {"dequantize": True} if dequantize else {"exact_products": True}
    model = load_model(path, device="cpu", **options)
    bound = 1e-6 if dequantize else 3e-3
    assert error(model, load_model(path / "twin", device="cpu")) < bound


@needs_engine
def test_names_may_lack_the_prefix_of_the_model(tmp_path: Path) -> None:
    path = saved(tmp_path, "qwen3", "gptq")
    change(path, lambda tensors: move(tensors, "model.", ""))
    model = load_model(path, device="cpu", exact_products=True)
    assert error(model, load_model(path / "twin", device="cpu")) < 1e-4


@needs_engine
def test_experts_of_a_layer_may_be_plain(tmp_path: Path) -> None:
    packed = re.compile(r"(self_attn\..*|layers\.1\..*)_proj\.weight")
    path = saved(tmp_path, "qwen3", "compressed", packed=packed)
    twin = load_model(path / "twin", device="cpu")
    model = load_model(path, device="cpu", exact_products=True)
    assert isinstance(model.get_submodule("model.layers.1.mlp.experts"), PackedExperts)
    plain = model.get_submodule("model.layers.0.mlp.experts")
    assert type(plain) is modeling_qwen3_moe.Qwen3MoeExperts
    assert error(model, twin) < 1e-4


@needs_engine
@pytest.mark.parametrize("dequantize", [False, True])
def test_layers_that_transformers_leaves_out_may_be_packed(
    dequantize: bool, tmp_path: Path
) -> None:
    """GLM 4.5 has one that foresees a second token."""

    def add(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            tensors[name.replace(".layers.1.", ".layers.46.")] = tensors[name].clone()

    path = change(saved(tmp_path, "glm4", "gptq"), add)
    model = load_model(path, device="cpu", dequantize=dequantize)
    assert len(experts_of(model)) == (0 if dequantize else 1)


@needs_engine
def test_layers_of_the_model_are_never_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger GLM 4.5 has a layer 46 of its own."""
    ignored = [r"model\.layers\.1.*"]
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", ignored)
    path = saved(tmp_path, "glm4", "gptq")
    assert len(experts_of(load_model(path, device="cpu"))) == 1


@needs_engine
@pytest.mark.parametrize("some", [range(3, 4), range(1, EXPERTS)])
def test_experts_may_have_an_order_or_none(some: range, tmp_path: Path) -> None:
    def order(tensors: dict[str, Tensor]) -> None:
        for e in some:
            for part in ("gate_proj", "down_proj"):
                groups = tensors[f"{MOE}.{e}.{part}.g_idx"]
                groups.copy_(groups[torch.randperm(len(groups))])

    path = change(saved(tmp_path, "qwen3", "gptq"), order)
    model = load_model(path, device="cpu", exact_products=True)
    assert error(model, load_model(path, device="cpu", dequantize=True)) < 1e-4


@needs_engine
def test_a_packed_router_is_unpacked(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=64, head_dim=32)
    pack, told, own = CHECKPOINTS["awq"]
    packed = re.compile(r"(_proj|mlp\.gate)\.weight")
    path = save_mixture(tmp_path, model_of(config), pack, told, packed, **own)
    twin = load_model(path / "twin", device="cpu")
    model = load_model(path, device="cpu", exact_products=True)
    name = "model.layers.1.mlp.gate.weight"
    assert torch.equal(model.get_parameter(name), twin.get_parameter(name))
    assert error(model, twin) < 3e-3


@needs_engine
def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ writes them for every matrix."""

    def add(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".scales")]:
            tensors[name.replace("scales", "bias")] = torch.zeros(tensors[name].shape[1]).half()

    path = change(saved(tmp_path, "mixtral", "gptq"), add)
    twin = load_model(path / "twin", device="cpu")
    assert error(load_model(path, device="cpu", exact_products=True), twin) < 1e-4
    assert error(load_model(path, device="cpu", dequantize=True), twin) == 0


@needs_engine
def test_one_expert_with_other_zeros_makes_the_kind_of_all(tmp_path: Path) -> None:
    """And of its own stack alone."""

    def shift(tensors: dict[str, Tensor]) -> None:
        tensors[f"{FIRST}.qzeros"] += 1  # of every eighth output by one step

    path = change(saved(tmp_path, "qwen3", "gptq"), shift)
    model = load_model(path, device="cpu", exact_products=True)
    first, second = experts_of(model)
    kinds = {"gate_proj": "Q4_1", "up_proj": "Q4_0", "down_proj": "Q4_0"}
    assert first.kinds == kinds
    assert first.kind == "Q4_1 and Q4_0"
    assert second.kind == "Q4_0"
    assert error(model, load_model(path, device="cpu", dequantize=True)) < 3e-3


@needs_engine
def test_a_plan_counts_the_blocks_of_packed_experts(tmp_path: Path) -> None:
    path = saved(tmp_path, "qwen3", "gptq")
    model = load_model(path, device="cpu", dtype="float32")
    facts = model_facts(path, device="cpu", dtype="float32")
    assert facts.weight_bytes == sum(weight.nbytes for weight in model.parameters())


@needs_engine
def test_a_packed_mixture_is_not_saved(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, "qwen3", "gptq"), device="cpu")
    with pytest.raises(ConfigError, match=r"^a model whose weights are packed in Q4_0 has no "):
        experts_of(model)[0].state_dict()
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "again")


# Refusals ---------------------------------------------------------------------------------------

MOE = "model.layers.0.mlp.experts"
FIRST = f"{MOE}.3.gate_proj"


def drop(tensors: dict[str, Tensor], start: str) -> None:
    for name in [name for name in tensors if name.startswith(start)]:
        del tensors[name]


def make_plain(tensors: dict[str, Tensor], matrix: str, shape: tuple[int, int]) -> None:
    drop(tensors, f"{matrix}.")
    tensors[f"{matrix}.weight"] = torch.ones(shape)


def move(tensors: dict[str, Tensor], start: str, to: str) -> None:
    for name in [name for name in tensors if name.startswith(start)]:
        tensors[name.replace(start, to)] = tensors.pop(name)


DAMAGED: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "an expert": (
        lambda tensors: drop(tensors, f"{MOE}.3."),
        f"tensor {FIRST}.qweight is missing",
    ),
    "the last expert": (
        lambda tensors: drop(tensors, f"{MOE}.{EXPERTS - 1}."),
        f"tensor {MOE}.{EXPERTS - 1}.gate_proj.qweight is missing",
    ),
    "one expert more": (
        lambda tensors: tensors.update(
            {f"{MOE}.11.up_proj.scales": tensors[f"{MOE}.0.up_proj.scales"].clone()}
        ),
        f"the model has no expert {MOE}.11",
    ),
    "an expert's number": (
        lambda tensors: move(tensors, f"{MOE}.3.", f"{MOE}.03."),
        f"tensor {MOE}.3.gate_proj.qweight is missing",
    ),
    "a matrix": (
        lambda tensors: drop(tensors, f"{MOE}.3.down_proj"),
        f"tensor {MOE}.3.down_proj.qweight is missing",
    ),
    "all of a matrix": (
        lambda tensors: [drop(tensors, f"{MOE}.{e}.down_proj") for e in range(EXPERTS)],
        f"tensor {MOE}.0.down_proj.qweight is missing",
    ),
    "scales": (
        lambda tensors: tensors.pop(f"{FIRST}.scales"),
        f"tensor {FIRST}.scales is missing",
    ),
    "an order": (
        lambda tensors: tensors.pop(f"{FIRST}.g_idx"),
        f"tensor {FIRST}.g_idx is missing",
    ),
    "another shape": (
        lambda tensors: tensors.update({f"{FIRST}.scales": torch.ones(3, 64).half()}),
        f"tensor {FIRST}.scales is [3, 64] instead of [2, 64]",
    ),
    "transposed": (
        lambda tensors: tensors.update({f"{FIRST}.qweight": torch.ones(8, 128).int()}),
        f"tensor {FIRST}.qweight is [8, 128] instead of [16, 64]",
    ),
    "a plain expert": (
        lambda tensors: make_plain(tensors, FIRST, (64, 128)),
        f"tensor {FIRST}.qweight is missing",
    ),
    "plain matrices": (
        lambda tensors: [
            make_plain(tensors, f"{MOE}.{e}.down_proj", (128, 64)) for e in range(EXPERTS)
        ],
        f"tensor {MOE}.0.down_proj.qweight is missing",
    ),
    "packed and plain": (
        lambda tensors: tensors.update({f"{FIRST}.weight": torch.ones(64, 128)}),
        f"matrix {FIRST} is stored both packed and plain",
    ),
    "a bias": (
        lambda tensors: tensors.update(
            {f"{MOE}.{e}.gate_proj.bias": torch.eye(EXPERTS, 64)[e] * (e == 3) for e in range(11)}
        ),
        f"matrix {FIRST} has a bias, for which there is no place",
    ),
    "groups beyond": (
        lambda tensors: tensors.update({f"{FIRST}.g_idx": torch.arange(128).int() // 32}),
        f"matrix {FIRST} has inputs of groups beyond its 2",
    ),
    "another layer": (
        lambda tensors: move(tensors, MOE, "model.layers.7.mlp.experts"),
        "the model has no experts model.layers.7.mlp.experts",
    ),
    "no number": (
        lambda tensors: move(tensors, f"{FIRST}.", f"{MOE}.x.gate_proj."),
        f"the model has matrix {MOE}.x.gate_proj in another form",
    ),
}


@needs_engine
@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("dequantize", [False, True])
def test_a_damaged_mixture_is_refused_in_one_sentence(
    what: str, dequantize: bool, tmp_path: Path
) -> None:
    how, why = DAMAGED[what]
    path = change(saved(tmp_path, "qwen3", "gptq"), how)
    text = refused(ModelNotFoundError, path, dequantize=dequantize)
    assert text == (
        f"model '{path}', packed by gptq, cannot be read: {why}; check that the download is "
        "complete, or take the model in 16 bits or as a GGUF file"
    )


@needs_engine
def test_experts_that_are_not_merged_are_refused(tmp_path: Path) -> None:
    """gpt-oss: rows of gate and up by turns."""
    sizes = {**SIZES, "num_local_experts": 4, "head_dim": 32}
    pack, told, own = CHECKPOINTS["gptq"]
    attention = re.compile("_proj.weight")
    path = save_mixture(tmp_path, model_of(GptOssConfig(**sizes)), pack, told, attention, **own)
    name = "model.layers.0.self_attn.q_proj"
    rest = "model.layers.0.mlp.experts.gate_up_projs.0"
    change(path, lambda tensors: move(tensors, name, rest))
    text = refused(ModelNotFoundError, path)
    assert f"the model has no linear layer {rest}" in text


@needs_engine
def test_experts_of_another_make_are_only_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, "qwen3", "gptq")
    twin = load_model(path / "twin", device="cpu")
    make = modeling_qwen3_moe.Qwen3MoeExperts.__init__

    def with_norm(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.has_post_expert_norm = True

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeExperts, "__init__", with_norm)
    text = refused(ModelNotFoundError, path)
    assert f"the model's {MOE} is a Qwen3MoeExperts, which only dequantize=True can read" in text
    model = load_model(path, device="cpu", dequantize=True)
    assert torch.equal(
        model.get_parameter(f"{MOE}.down_proj"), twin.get_parameter(f"{MOE}.down_proj")
    )


@needs_engine
@pytest.mark.parametrize("dequantize", [False, True])
def test_experts_without_a_weight_of_all_are_refused(
    dequantize: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, "qwen3", "gptq")
    make = modeling_qwen3_moe.Qwen3MoeExperts.__init__

    def otherwise(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.first = self.gate_up_proj
        del self.gate_up_proj

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeExperts, "__init__", otherwise)
    monkeypatch.setattr(
        modeling_qwen3_moe.Qwen3MoePreTrainedModel, "_init_weights", lambda *_: None
    )
    text = refused(ModelNotFoundError, path, dequantize=dequantize)
    assert f"the model's {MOE} has no weight gate_up_proj of all experts" in text


@pytest.mark.parametrize(
    "steps",
    [
        [MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)],
        [MergeModulelist(dim=0), Concatenate(dim=2)],
        [MergeModulelist(dim=1), Concatenate(dim=1)],
        [MergeModulelist(dim=0)],
    ],
)
def test_conversions_that_do_more_than_put_together_are_left_alone(
    steps: list[ConversionOps],
) -> None:
    parts = ["gate_proj", "up_proj"]
    patterns = [f"mlp.experts.*.{part}.weight" for part in parts]
    assert not list(merges_of([WeightConverter(patterns, "mlp.experts.gate_up_proj", steps)]))


@needs_engine
def test_zeros_of_8_bits_are_refused_by_name(tmp_path: Path) -> None:
    path = change(
        saved(tmp_path, "qwen3", "gptq-8"),
        lambda tensors: tensors[f"{FIRST}.qzeros"].add_(1),
    )
    assert f"matrix {FIRST} has zeros of 8 bits" in refused(ModelNotFoundError, path)
