"""Experts whose weights stay packed, of GGUF files and as checkpoints are read."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Mxfp4Config,
    NemotronHConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

pytest.importorskip("gguf", reason="the package gguf is not installed")

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError, ModelNotFoundError, ShapeError
from hybrid_kv.models.load import load_model
from hybrid_kv.models.packed_experts import (
    PackedExperts,
    PackedStack,
    can_be_packed,
    rows_of,
)
from hybrid_kv.models.packed_linear import packed, unpacked
from hybrid_kv.models.prompt_layers import MIN_TOKENS
from hybrid_kv.planning.plan import model_facts
from tests.models.test_gguf_architectures import assert_as_transformers, write
from tests.models.test_packed_prompts import OWN, WIDE, trials_end
from tests.models.test_weights import SIZES, saved
from tests.ops.native.engines import needs_engine

pytestmark = needs_engine
EXPERTS, CHOSEN, HIDDEN, INNER = 5, 2, 64, 32


def plain_experts() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INNER, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.2)
    return experts.eval().requires_grad_(False)


def of_plain(
    experts: nn.Module, *, exact: bool = True, is_whole: bool = False, is_ordered: bool = False
) -> PackedExperts:
    """The packed form of experts, whose own weights become what the blocks hold.

    is_whole: the gate and what it gates are one weight, as in a checkpoint; else two, as in a file.
    is_ordered: columns of each expert and stack have an order of their own.
    """

    def stack(weight: Tensor, kind: str) -> PackedStack:
        order = torch.arange(weight.shape[-1]).expand(EXPERTS, -1)
        if is_ordered:
            order = torch.rand(order.shape).argsort(1)
        place = order[:, None].expand_as(weight)
        blocks = packed(weight.gather(2, place).flatten(0, 1), kind)
        weight.scatter_(2, place, unpacked(blocks, kind).view_as(weight))
        return PackedStack(kind, blocks, weight.shape[-1], order if is_ordered else None)

    up, down = experts.get_parameter("gate_up_proj"), experts.get_parameter("down_proj")
    if is_whole:
        parts = {"gate_up_proj": stack(up, "Q4_1")}
    else:
        gate, gated = up.split(INNER, dim=1)
        parts = {"gate_proj": stack(gate, "Q4_1"), "up_proj": stack(gated, "Q8_0")}
    return PackedExperts(copy.deepcopy(experts), parts, stack(down, "Q8_0"), exact=exact)


def routed(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, each one's experts, and their shares; the third expert gets none."""
    draw = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, EXPERTS, generator=draw).index_fill(1, torch.tensor([2]), -1.0)
    index = chosen.topk(CHOSEN).indices
    shares = torch.rand(tokens, CHOSEN, generator=draw)
    return torch.randn(tokens, HIDDEN, generator=draw).to(dtype), index, shares


@pytest.mark.parametrize("tokens", [0, 1, 3, 70, 8_201])
@pytest.mark.parametrize(
    "form", [{}, {"is_whole": True}, {"is_ordered": True}, {"is_whole": True, "is_ordered": True}]
)
def test_tokens_get_the_sum_of_their_experts(
    tokens: int, form: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_kv.models.packed_experts._PIECE", 2**12)
    plain = plain_experts()
    experts = of_plain(plain, **form)
    inputs = routed(tokens)
    out, wanted = experts(*inputs), plain(*inputs)
    assert out.shape == wanted.shape
    assert (out - wanted).norm() <= 2e-4 * wanted.norm()


def test_experts_without_a_gate_have_an_activation() -> None:
    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": INNER, "n_routed_experts": EXPERTS, "hidden_size": HIDDEN}
    config = NemotronHConfig(**sizes)
    config._experts_implementation = "eager"
    plain = NemotronHExperts(config).requires_grad_(False)
    made = {}
    for name, weight in plain.named_parameters():
        blocks = packed(nn.init.normal_(weight, std=0.2).flatten(0, 1), "Q8_0")
        weight.copy_(unpacked(blocks, "Q8_0").view_as(weight))
        made[name] = PackedStack("Q8_0", blocks, weight.shape[-1])
    down, inputs = made.pop("down_proj"), routed(9)
    wanted = plain(*inputs)
    assert (PackedExperts(plain, made, down, exact=True)(*inputs) - wanted).norm() < (
        2e-4 * wanted.norm()
    )


def of_gpt_oss(*, is_whole: bool) -> tuple[nn.Module, PackedExperts]:
    """Experts with biases and clamped gates, and their packed form. is_whole: as of `of_plain`."""
    torch.manual_seed(0)
    sizes = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INNER}
    config = GptOssConfig(**sizes)
    config._experts_implementation = "eager"
    plain = GptOssExperts(config).requires_grad_(False)
    for name, weight in plain.named_parameters():
        nn.init.normal_(weight, std=5.0 if name.endswith("bias") else 0.2)

    def stack(weight: Tensor) -> PackedStack:
        blocks = packed(weight.flatten(0, 1), "Q8_0")
        weight.copy_(unpacked(blocks, "Q8_0").view_as(weight))
        return PackedStack("Q8_0", blocks, weight.shape[-1])

    up, down = rows_of(plain, "gate_up_proj"), rows_of(plain, "down_proj")
    halves = {"gate_proj": up[:, ::2], "up_proj": up[:, 1::2]}
    parts = {"gate_up_proj": stack(up)} if is_whole else {k: stack(v) for k, v in halves.items()}
    return plain, PackedExperts(copy.deepcopy(plain), parts, stack(down), exact=True)


@pytest.mark.parametrize("is_whole", [False, True])
def test_gates_of_gpt_oss_are_clamped_and_its_experts_have_biases(is_whole: bool) -> None:
    plain, experts = of_gpt_oss(is_whole=is_whole)
    for tokens in (1, 3, 9):
        inputs = routed(tokens)
        wanted = plain(*inputs)
        assert (experts(*inputs) - wanted).norm() <= 2e-4 * wanted.norm()
    inputs, other = routed(2), torch.randn(EXPERTS, 2 * INNER)
    for one in (plain, experts):
        one.get_parameter("gate_up_proj_bias").data = other
        one.get_parameter("down_proj_bias").mul_(2)
    wanted = plain(*inputs)
    assert (experts(*inputs) - wanted).norm() <= 2e-4 * wanted.norm(), "biases are read anew"
    half = experts(inputs[0].bfloat16(), *inputs[1:])  # of another dtype than biases
    assert (half - wanted).norm() <= 2e-2 * wanted.norm()


def test_how_exact_experts_are_may_change_between_two_steps() -> None:
    experts, inputs = of_plain(plain_experts(), exact=True), routed(2)
    fine = experts(*inputs)
    experts.exact = False
    coarse = experts(*inputs)
    assert not torch.equal(coarse, fine)
    assert torch.equal(coarse, of_plain(plain_experts(), exact=False)(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_tokens_of_a_joined_step_are_bit_for_bit_what_they_are_alone(
    is_ordered: bool, dtype: torch.dtype
) -> None:
    """Several that share an expert: of one by itself a sum has another order than of many."""
    experts = of_plain(plain_experts(), exact=False, is_ordered=is_ordered)
    x, _, shares = routed(8, dtype)
    index = torch.tensor([[0, 1]] * 7 + [[1, 4]])
    alone = [experts(x[i : i + 1], index[i : i + 1], shares[i : i + 1]) for i in range(8)]
    assert torch.equal(experts(x, index, shares), torch.cat(alone))


def test_a_dtype_of_16_bits_is_kept() -> None:
    plain = plain_experts()
    experts, inputs = of_plain(plain), routed(9, torch.bfloat16)
    out = experts(*inputs)
    assert out.dtype == torch.bfloat16
    wanted = plain(inputs[0].float(), *inputs[1:])
    assert (out - wanted).norm() < 1e-2 * wanted.norm()


def test_many_tokens_of_an_expert_go_the_way_that_a_trial_found_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = plain_experts()
    experts, many = of_plain(plain, exact=False), routed(MIN_TOKENS * EXPERTS)
    wanted = plain(*many)
    errors = []
    for end in (OWN, WIDE):
        tried = trials_end(monkeypatch, end)
        errors.append(float((experts(*many) - wanted).norm() / wanted.norm()))
        experts(*routed(3))
        assert {kind for kind, _, exact in tried if not exact} == {"Q4_1", "Q8_0"}
        assert len(tried) == 2, "few tokens are not asked about"
    assert 1e-3 < errors[0] < 2e-2
    assert errors[1] < 1e-6


@pytest.mark.parametrize("is_ordered", [False, True])
def test_an_expert_that_there_is_not_is_refused(is_ordered: bool) -> None:
    x, index, shares = routed(3)
    index[1, 0] = EXPERTS
    with pytest.raises(ConfigError, match="experts must be numbers of matrices"):
        of_plain(plain_experts(), is_ordered=is_ordered)(x, index, shares)
    with pytest.raises(ShapeError, match=r"top_k_weights must be \[3, 2\].*got \[3, 5\]"):
        of_plain(plain_experts())(x, index, torch.ones(3, EXPERTS))


def test_copies_and_pickles_hold_the_weights() -> None:
    experts, inputs = of_plain(plain_experts()), routed(5)
    wanted = experts(*inputs)
    for same in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(same(*inputs), wanted)


def test_what_packed_experts_cannot_is_refused() -> None:
    experts, (x, *others) = of_plain(plain_experts()), routed(5)
    with pytest.raises(ConfigError, match="packed in Q4_1 and Q8_0 give no gradients"):
        experts(x.requires_grad_(), *others)
    with pytest.raises(ConfigError, match="has no state_dict"):
        experts.state_dict()
    with pytest.raises(ConfigError, match="must stay bytes on the CPU"):
        experts.to(torch.device("cuda")) if torch.cuda.is_available() else experts._apply(
            lambda tensor: tensor.float()
        )


def test_a_graph_of_torch_compile_is_cut_around_them() -> None:
    experts, inputs = of_plain(plain_experts()), routed(5)
    compiled = torch.compile(experts, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), experts(*inputs))


def test_experts_of_another_layout_are_left() -> None:
    experts = plain_experts()
    assert can_be_packed(experts)
    for name, value in (("has_gate", False), ("has_post_expert_norm", True)):
        other = copy.deepcopy(experts)
        setattr(other, name, value)
        assert not can_be_packed(other), name
    del experts.has_gate  # of a class that has no such words
    assert not can_be_packed(experts)
    assert not can_be_packed(nn.Linear(3, 4))


# Files ------------------------------------------------------------------------------------------

FILE = {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q5_1", "ffn_down_exps": "Q8_0"}


def test_a_files_experts_stay_in_their_kinds(tmp_path: Path) -> None:
    path = write(tmp_path / "moe.gguf", "qwen3_moe", "qwen3moe", FILE)
    model = assert_as_transformers(path)
    experts = [part for part in model.modules() if isinstance(part, PackedExperts)]
    assert len(experts) == 2
    assert experts[0].kinds == {"gate_proj": "Q4_0", "up_proj": "Q5_1", "down_proj": "Q8_0"}
    assert not any(weight.ndim > 2 for weight in model.parameters()), "nothing is unpacked"


def test_experts_of_which_one_matrix_is_plain_are_unpacked_and_it_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "moe.gguf", "qwen3_moe", "qwen3moe", {**FILE, "ffn_up_exps": "F16"})
    model = assert_as_transformers(path, unpacked=True)
    assert not any(isinstance(part, PackedExperts) for part in model.modules())


def test_matrices_of_another_shape_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "moe.gguf", "qwen3_moe", "qwen3moe", FILE, wider="ffn_down_exps")
    with pytest.raises(
        ModelNotFoundError,
        match=r"json: 2 tensors are of.*experts\.down_proj is \[4, 96, 800\] instead of \[4, 96, 7",
    ):
        load_model(path, dtype="float32", device="cpu")


def test_with_every_budget_open_answers_are_those_of_the_full_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "moe.gguf", "qwen3_moe", "qwen3moe", FILE)
    tokens, answers = torch.arange(3, 50)[None], []
    for config in ("full", {"method": "hybrid", "page_size": 4, "top_k": "all"}):
        with hkv.load(str(path), config=config, dtype="float32", exact_products=True) as llm:
            answers.append(llm.generate(tokens, max_new_tokens=9).token_ids)
    assert answers[0] == answers[1]


def test_plans_count_the_experts_that_a_token_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "moe.gguf", "qwen3_moe", "qwen3moe", FILE)
    facts = model_facts(path, dtype="float32")
    experts = 2 * 4 * 768 * 96  # layers, experts, rows, columns
    stored = {"Q4_0": 18, "Q5_1": 24, "Q8_0": 34}
    of_experts = sum(experts // 32 * size for size in stored.values())
    assert sum(facts.weights.values()) == facts.weight_bytes >= of_experts
    assert facts.weights["Q4_0"] == experts // 32 * 18
    assert facts.weight_bytes - facts.read_bytes >= of_experts // 2, "two of four"


# Checkpoints ------------------------------------------------------------------------------------


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, head_dim=16)).eval()


def gpt_oss() -> GptOssForCausalLM:
    """Of experts with biases, transposed, the rows of the gate between those that it gates."""
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    model = GptOssForCausalLM(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith("_bias"):
            weight.normal_(std=0.3)
    return model


@pytest.mark.parametrize(("weights", "kind"), [("int4", "Q4_1"), ("int8", "Q8_0")])
def test_a_checkpoints_experts_are_packed_as_it_is_read(
    weights: str, kind: str, tmp_path: Path
) -> None:
    model = mixtral()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_model(saved(tmp_path, model), device="cpu", weights=weights)
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.1.mlp.experts.{name}"
        expected = packed(model.get_parameter(path).detach().flatten(0, 1), kind)
        assert torch.equal(found.get_parameter(path), expected)


@pytest.mark.parametrize("made", [mixtral, gpt_oss])
def test_a_checkpoints_logits_are_those_of_what_its_blocks_hold(
    made: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    plain = made()
    found = load_model(saved(tmp_path, plain), device="cpu", weights="int8", exact_products=True)
    assert any(isinstance(part, PackedExperts) for part in found.modules())
    for name, weight in found.named_parameters():
        own = plain.get_parameter(name)
        values = unpacked(weight, "Q8_0") if weight.dtype == torch.uint8 else weight
        is_transposed = weight.dtype == torch.uint8 and own.ndim == 3 and made is gpt_oss
        own.data.copy_(values.view_as(own.mT).mT if is_transposed else values.view_as(own))
    assert_same_logits(found, plain)


def assert_same_logits(found: nn.Module, wanted: nn.Module, most: float = 1e-3) -> None:
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        own, others = found(tokens).logits, wanted(tokens).logits
    assert (own - others).norm() < most * others.norm()


def test_an_expert_of_another_shape_is_refused_by_its_name(tmp_path: Path) -> None:
    file = saved(tmp_path, mixtral()) / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    for name in [name for name in tensors if ".layers.0." in name and ".w2." in name]:
        tensors[name] = torch.zeros(96, 128)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ModelNotFoundError, match=r"experts\.down_proj is \[4, 96, 128\] instead of \[4, 96, 160\]"
    ):
        load_model(tmp_path, device="cpu", weights="int8")


# MXFP4 -------------------------------------------------------------------------------------------


def mxfp4_folder(path: Path, change: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    """A checkpoint in gpt-oss's own form: random bytes, and exponents around 2^-3."""
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    file = saved(path, gpt_oss(), quantization_config=method) / "model.safetensors"
    tensors, draw = load_file(file), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        numbers = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = numbers
        tensors[f"{name}_scales"] = torch.randint(
            122, 126, shape, generator=draw, dtype=torch.uint8
        )
    if change is not None:
        change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def test_experts_in_mxfp4_are_what_transformers_unpacks(tmp_path: Path) -> None:
    folder = mxfp4_folder(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    ).float()  # which transformers 5.17 unpacks to bfloat16, exactly
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_model(folder, dtype="float32", device="cpu", exact_products=True)
        plain = load_model(folder, dtype="float32", device="cpu", dequantize=True).float()
    experts = [part for part in found.modules() if isinstance(part, PackedExperts)]
    assert [part.kind for part in experts] == ["MXFP4", "MXFP4"]
    assert sum(weight.nbytes for weight in experts[0].parameters() if weight.ndim == 2) < (
        4 * 3 * 160 * 96 * 0.54 + 4 * (320 + 96) * 4
    ), "4.25 bits a weight, and biases"
    assert_same_logits(found, wanted)
    assert_same_logits(plain, wanted, 1e-6)


def test_an_mxfp4_tensor_of_another_shape_or_missing_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"

    def shorter(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"][..., :-1].contiguous()

    with pytest.raises(
        ModelNotFoundError,
        match=r"experts\.down_proj_scales is \[4, 96, 4\] instead of \[4, 96, 5\]",
    ):
        load_model(mxfp4_folder(tmp_path / "short", shorter), device="cpu")

    def fewer(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{name}_blocks"]

    with pytest.raises(
        ModelNotFoundError,
        match=r"1 tensor is missing from the files \(model\..*experts\.down_proj",
    ):
        load_model(mxfp4_folder(tmp_path / "less", fewer), device="cpu")


def test_a_context_of_packed_experts_is_saved_and_opened(tmp_path: Path) -> None:
    folder = mxfp4_folder(tmp_path / "model")
    tokens, question = torch.arange(3, 50)[None], torch.arange(20, 26)[None]
    with hkv.load(str(folder), device="cpu", dtype="float32") as llm:
        context = llm.context(tokens)
        wanted = context.ask(question, max_new_tokens=5).token_ids
        context.save(tmp_path / "kept.hkv")
    with hkv.load(str(folder), device="cpu", dtype="float32") as llm:
        assert llm.open(tmp_path / "kept.hkv").ask(question, max_new_tokens=5).token_ids == wanted
