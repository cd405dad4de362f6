"""Block-sparse prefill: its error, what it says of itself, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.contest.arguments import contenders
from hybrid_kv.errors import ConfigError, NonFiniteError, OtherContextError
from hybrid_kv.eval.profiling.arguments import ProfileArguments
from hybrid_kv.models.cache_state import passing
from hybrid_kv.ops import Ops, get_ops
from hybrid_kv.runtime.sparse_prefill import SparsePrefill, prefill_loss
from hybrid_kv.types import KEY_BLOCK, BlockMask, PartialAttention
from tests.contracts.architectures import PAD, VOCAB, build

CPU = torch.device("cpu")
CHUNKS = {"prefill_chunk_tokens": 128}


def prompt_like(tokens: int, heads: tuple[int, int] = (6, 2), dim: int = 32) -> list[Tensor]:
    """q, k, v [H, tokens, dim]: what a query likes changes slowly, as a text's topic does."""
    topic = [torch.randn(dim)]
    for step in 0.2 * torch.randn(tokens - 1, dim):
        topic.append(0.98 * topic[-1] + step)
    q, k = (torch.stack(topic) + torch.randn(count, tokens, dim) for count in heads)
    return [q, k, torch.randn(heads[1], tokens, dim)]


def in_chunks(
    sparse: SparsePrefill, q: Tensor, k: Tensor, v: Tensor, chunk: int = 256, **logits: Any
) -> Tensor:
    """Out [Hq, T, D] of a prompt, chunk by chunk."""
    given = {"scale": q.shape[2] ** -0.5, "softcap": None, **logits}
    outs = []
    for start in range(0, q.shape[1], chunk):
        stop = min(q.shape[1], start + chunk)
        seen = (q[:, start:stop], k[:, :stop], v[:, :stop])
        outs.append(sparse.attend(get_ops("auto"), *seen, **given).out[0])
    return torch.cat(outs, 1)


def exactly(q: Tensor, k: Tensor, v: Tensor, **logits: Any) -> Tensor:
    given = {"scale": q.shape[2] ** -0.5, "softcap": None, **logits}
    part = get_ops("auto").attend_causal(q[None], k[None], v[None], **given)
    return part.out[0]


def relative(out: Tensor, exact: Tensor) -> Tensor:
    """[Hq, T] relative distance."""
    return (out.float() - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize(("heads", "dim"), [((6, 2), 32), ((3, 3), 72), ((8, 1), 20)])
def test_a_larger_aim_reads_less_and_errs_as_it_says(
    heads: tuple[int, int], dim: int, softcap: float | None
) -> None:
    q, k, v = prompt_like(3001, heads, dim)
    exact = exactly(q, k, v, softcap=softcap)
    densities = []
    for aim in (0.05, 0.3):
        sparse = SparsePrefill(aim, heads[1], CPU)
        error = relative(in_chunks(sparse, q, k, v, softcap=softcap), exact)
        lost = prefill_loss([(3, sparse)])
        assert lost is not None
        assert lost.worst_layer == 3
        assert lost.error <= lost.worst_error
        # Those that judge are few, and the first chunks were read before the share was found.
        assert lost.error == pytest.approx(float(error.mean()), rel=0.4)
        assert error[:, -1000:].mean() < 2 * aim
        densities.append(lost.density)
    assert densities[1] < 0.8 * densities[0] < 0.8


def test_the_density_is_of_the_work() -> None:
    q, k, v = prompt_like(2000)
    for start in range(128, 2000, 128):
        k[:, start - KEY_BLOCK : start] *= -1  # what is before a query block is little liked
    sparse = SparsePrefill(0.3, 2, CPU)
    seen: list[Tensor] = []

    class Watched(Ops):
        def attend_blocks(
            self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, **given: Any
        ) -> PartialAttention:
            seen.append(mask.listed)
            return super().attend_blocks(q, k, v, mask, **given)

    sparse.attend(Watched(), q, k, v, scale=0.15, softcap=None)
    (listed,) = seen
    past = torch.arange(0, 2000, 128) // KEY_BLOCK
    counts = torch.arange(listed.shape[-1]) < past[:, None]
    assert not listed[:, :, ~counts].any()
    assert listed[:, :, past > 0, 0].all()  # sinks
    last = listed[0].gather(-1, (past - 1).clamp_min(0).expand(2, -1)[..., None])[..., 0]
    assert last[:, past > 0].all()
    lost = prefill_loss([(0, sparse)])
    assert lost is not None
    assert lost.density == pytest.approx(float(listed.sum() / (2 * counts.sum())))
    assert lost.density < 0.9
    assert lost.queries == len(past)


def test_short_prompts_and_single_tokens_are_exact() -> None:
    for tokens, chunk in ((1, 1), (128, 400), (300, 5)):
        q, k, v = prompt_like(tokens)
        sparse = SparsePrefill(0.5, 2, CPU)
        exact = exactly(q, k, v)
        torch.testing.assert_close(in_chunks(sparse, q, k, v, chunk), exact, rtol=1e-5, atol=1e-4)
        assert prefill_loss([(0, sparse)]) is None


def test_a_key_that_is_not_a_number_is_not_left_out() -> None:
    q, k, v = prompt_like(3000)
    k[1, 700] = torch.nan
    out = in_chunks(SparsePrefill(0.5, 2, CPU), q, k, v)
    assert out[3:, 1200:].isnan().all()
    assert out[:3].isfinite().all()


def test_halves_are_chosen_as_floats_are() -> None:
    q, k, v = (t.bfloat16() for t in prompt_like(3000))
    whole, rounded = SparsePrefill(0.1, 2, CPU), SparsePrefill(0.1, 2, CPU)
    in_chunks(whole, q.float(), k.float(), v.float())
    assert in_chunks(rounded, q, k, v).dtype == torch.bfloat16
    one, other = prefill_loss([(0, whole)]), prefill_loss([(0, rounded)])
    assert one is not None
    assert other is not None
    assert one.density == pytest.approx(other.density, rel=0.05)


# In a model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("llama")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def ids_of(tokens: int, rows: int = 1) -> Tensor:
    return torch.randint(PAD + 1, VOCAB, (rows, tokens))


def logits_after(
    model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    logits: Tensor = model(ids, attention_mask=mask, **passing(cache), use_cache=True).logits
    return logits[:, -1]


@pytest.mark.parametrize("method", ["full", "hybrid", "quest", "snapkv"])
def test_it_serves_methods_and_says_what_it_lost(model: PreTrainedModel, method: str) -> None:
    ids = ids_of(500)
    with hkv.attach(model, {"method": method, **CHUNKS}) as exact:
        wanted = logits_after(model, exact.cache(), ids)
        assert exact.cache().kv.prefill_loss() is None
    with hkv.attach(model, {"method": method, "prefill": 0.01, **CHUNKS}) as attached:
        cache = attached.cache()
        got = logits_after(model, cache, ids)
        lost = cache.kv.prefill_loss()
    assert lost is not None
    assert 0 < lost.density < 1
    assert 0 < lost.error < 0.1
    assert not torch.equal(got, wanted)
    assert (got - wanted).norm() < 0.1 * wanted.norm()


def test_rows_of_a_padded_batch_are_as_alone(model: PreTrainedModel) -> None:
    ids, lengths = ids_of(500, 2), (500, 431)
    mask = torch.stack([torch.arange(500) >= 500 - length for length in lengths]).long()
    with hkv.attach(model, {"method": "full", "prefill": 0.1, **CHUNKS}) as attached:
        cache = attached.cache()
        together = logits_after(model, cache, ids.masked_fill(mask == 0, PAD), mask)
        for row, length in enumerate(lengths):
            whole = ids[row : row + 1, 500 - length :]
            # Chunks begin elsewhere where there was padding.
            alone = attached.cache()
            got = logits_after(model, alone, whole)
            close = 1e-4 if length == 500 else 0.2
            assert (together[row] - got[0]).norm() < close * got.norm()


def test_a_mask_with_holes_hides_what_it_hides_in_exact_prefill(model: PreTrainedModel) -> None:
    ids, mask = ids_of(500), torch.ones(1, 500, dtype=torch.long)
    mask[0, 100:140] = mask[0, 300] = 0
    found = []
    for prefill in ("exact", 0.01):
        with hkv.attach(model, {"method": "full", "prefill": prefill, **CHUNKS}) as attached:
            cache = attached.cache()
            found += [
                logits_after(model, cache, ids.masked_fill(mask == 0, hidden), mask)
                for hidden, cache in ((5, cache), (9, attached.cache()))
            ]
            assert (cache.kv.prefill_loss() is None) == (prefill == "exact")
    exact, exact_again, sparse, sparse_again = found
    assert torch.equal(exact, exact_again)
    assert torch.equal(sparse, sparse_again)
    assert 0 < (sparse - exact).norm() < 0.3 * exact.norm()  # short chunks: the share is the first


def test_a_prompt_that_failed_is_computed_as_if_it_were_the_first_try(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, then = ids_of(300), ids_of(200)
    with hkv.attach(model, {"method": "full", "prefill": 0.1, **CHUNKS}) as attached:
        wanted_cache, cache = attached.cache(), attached.cache()
        for one in (wanted_cache, cache):
            one.kv.more_prompt = True  # as a server says of the first part of a prompt
            logits_after(model, one, first)
        wanted = logits_after(model, wanted_cache, then)
        attend, calls = SparsePrefill.attend, []

        def fail(self: SparsePrefill, *args: Any, **kwargs: Any) -> Any:
            calls.append(self)
            if len(calls) == 4:
                raise MemoryError
            return attend(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(SparsePrefill, "attend", fail)
            with pytest.raises(MemoryError):
                logits_after(model, cache, then)
        assert torch.equal(logits_after(model, cache, then), wanted)
        assert cache.kv.prefill_loss() == wanted_cache.kv.prefill_loss()


def test_a_fork_goes_on_as_its_source(model: PreTrainedModel) -> None:
    ids, token = ids_of(500), ids_of(1)
    with hkv.attach(model, {"method": "hybrid", "prefill": 0.1, **CHUNKS}) as attached:
        cache = attached.cache()
        logits_after(model, cache, ids)
        fork = cache.fork()
        assert fork.kv.prefill_loss() == cache.kv.prefill_loss()
        assert torch.equal(logits_after(model, fork, token), logits_after(model, cache, token))


def test_keys_that_are_not_numbers_are_told(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].self_attn.k_proj.weight
    before = weight.clone()
    with hkv.attach(model, {"method": "full", "prefill": 0.5, **CHUNKS}) as attached:
        cache = attached.cache()
        try:
            weight.data[0] = torch.inf
            with pytest.raises(NonFiniteError):
                logits_after(model, cache, ids_of(500))
        finally:
            weight.data.copy_(before)


# Settings ----------------------------------------------------------------------------------------


def test_wrong_settings_are_refused(model: PreTrainedModel) -> None:
    for wrong in ("dense", 0, 0.6, "nan", True):
        with pytest.raises(ConfigError, match=r"^prefill(: must be 'exact'| must not be).*got"):
            hkv.HybridConfig(prefill=wrong)
    assert hkv.HybridConfig.from_settings({"prefill": "0.1"}).prefill_error == 0.1
    assert hkv.HybridConfig(prefill="sparse").prefill_error == 0.05
    with pytest.raises(ConfigError, match="prefill must be 'exact' for a method that needs"):
        hkv.attach(model, {"method": "h2o", "prefill": "sparse"})


def test_a_model_of_windows_alone_has_nothing_to_read_sparsely() -> None:
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
    )
    windows = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="'exact' for a model without layers of full attention"):
        hkv.attach(windows, {"method": "full", "prefill": 0.1})
    hkv.attach(windows, "full").close()


def test_where_no_prompt_is_computed_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="no effect in an evaluation"):
        list(contenders(["hybrid"], ["10%"], 4096, {"prefill": "sparse"}))
    with pytest.raises(ConfigError, match="no effect with fill 'synthetic'"):
        ProfileArguments.of({"model": "x", "fill": "synthetic", "settings": {"prefill": "sparse"}})
    ProfileArguments.of({"model": "x", "settings": {"prefill": "sparse"}})


def test_everything_open_is_exact() -> None:
    assert hkv.HybridConfig(prefill=0.2).opened().prefill == "exact"


def test_contexts_of_sparse_and_exact_prompts_are_not_the_same(
    model: PreTrainedModel, tmp_path: Any
) -> None:
    ids = [int(token) for token in ids_of(400)[0]]
    configs = {
        "sparse": hkv.HybridConfig(method="full", prefill="sparse"),
        "exact": hkv.HybridConfig(method="full"),
    }
    for name, config in configs.items():
        with hkv.LLM(model, None, config=config) as llm:
            llm.context(ids).save(tmp_path / f"{name}.hkv")
    for name, other in (("sparse", "exact"), ("exact", "sparse")):
        with hkv.LLM(model, None, config=configs[name]) as llm:
            llm.open(tmp_path / f"{name}.hkv")
            with pytest.raises(OtherContextError, match="prefill"):
                llm.open(tmp_path / f"{other}.hkv")
