"""Combinators do to layers, heads and kept entries what their parts do alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.models.rollback import Checkpoint
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests.drive_method import drive
from tests.kit import every, held
from tests.methods.eviction import Heads, kept_sets, method, run
from tests.methods.test_evicting_in_caches import PROMPT, decode, step
from tests.methods.test_evicting_in_caches import tokens as tokens_of_layers
from tests.tolerances import TOLERANCES

CLOSE = TOLERANCES[torch.float32]
SHAPES = tuple(LayerShape(idx, 6, 2, 72) for idx in range(3))
tokens = partial(tokens_of_layers, layers=len(SHAPES))
SIZES = {"window_tokens": 32, "budget_tokens": 61}
SNAP, ADA = {"method": "snapkv", **SIZES}, {"method": "ada_snapkv", **SIZES}
H2O, TOVA = {"method": "h2o", **SIZES}, {"method": "tova", **SIZES}
COMBINED: dict[str, dict[str, Any]] = {
    "by_layer": {"layers": {"0": "full", "1": H2O, "rest": SNAP}},
    "by_layer_with_a_cold_tier": {"layers": {"0,2": {**SNAP, "demote": "offload"}, "rest": "kivi"}},
    "by_head": {"heads": {"0": H2O, "rest": SNAP}},
    "by_head_whole": {"heads": {"0": SNAP, "1": "full"}},
    "chain": {"first": ADA, "then": "kivi"},
    "chain_of_channels": {"first": SNAP, "then": "think"},
    "share": {"of": SNAP, "selection_layers": "0,2"},
}


def config(name: str, **settings: Any) -> HybridConfig:
    combinator = next(
        one for one in ("by_layer", "by_head", "chain", "share") if name.startswith(one)
    )
    return HybridConfig(method=combinator, index_build="wait", **COMBINED.get(name, {}), **settings)


def cache(name: str) -> KVCache:
    return KVCache(ModelInfo(SHAPES), config(name))


def test_layers_are_served_as_their_methods_serve_them() -> None:
    prompt = tokens(PROMPT, seed=1)
    both = cache("by_layer")
    step(both, prompt)
    found = decode(both, 37)
    for layer, alone in enumerate(("full", "h2o", "snapkv")):
        sizes = {} if alone == "full" else SIZES
        kv = KVCache(ModelInfo(SHAPES), HybridConfig(method=alone, **sizes))
        step(kv, prompt)
        torch.testing.assert_close(found[:, layer], decode(kv, 37)[:, layer], **CLOSE)


def test_a_method_of_some_layers_knows_of_these_alone() -> None:
    pyramid = {"method": "pyramidkv", **SIZES}
    kv = KVCache(
        ModelInfo(tuple(LayerShape(idx, 6, 2, 72) for idx in range(3))),
        HybridConfig(method="by_layer", layers={"0": "full", "rest": pyramid}),
    )
    step(kv, tokens(PROMPT, seed=1))
    decode(kv, 1)
    kept = [row.kept for row in every(kv)]
    lengths = [one.lengths[0] for one in kept if one is not None]
    assert lengths[0] > lengths[1]
    assert sum(lengths) == 2 * (61 - 32)


@pytest.mark.parametrize(
    ("first", "other"), [(H2O, SNAP), (SNAP, TOVA), (ADA, "full"), ("full", H2O), (H2O, H2O)]
)
def test_heads_are_served_as_if_there_were_no_others(first: Any, other: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(12, 210, 72, generator=draw)
    k, v = torch.randn(2, 4, 210, 72, generator=draw)
    heads = {"1,3": first, "rest": other}
    driven = run(method("by_head", heads=heads), (q, k, v))
    for spec, own in ((first, [1, 3]), (other, [0, 2])):
        mine = [h * 3 + g for h in own for g in range(3)]
        settings = dict(spec) if isinstance(spec, dict) else {"method": spec}
        alone = method(settings.pop("method"), **settings)
        expected = run(alone, (q[mine], k[own], v[own]))
        for at, (all_of_it, some) in enumerate(zip(driven.steps, expected.steps, strict=True)):
            torch.testing.assert_close(driven.out[at][mine], expected.out[at], **CLOSE)
            if spec != "full":
                found = kept_sets(all_of_it, 4)
                assert [found[h] for h in own] == kept_sets(some, 2)


@pytest.mark.parametrize("first", [SNAP, ADA, {"method": "zipvl", "mass_ratio": 0.5}])
@pytest.mark.parametrize("bits", [2, 4])
def test_what_is_kept_is_coded_behind_what_chose_it(given: Heads, first: Any, bits: int) -> None:
    then = {"method": "kivi", "bits": bits, "group_size": 8}
    settings = dict(first)
    alone = run(method(settings.pop("method"), **settings), given, new=1).kept
    kept = run(method("chain", first=first, then=then), given, new=1).kept
    assert alone is not None
    assert kept is not None
    assert kept_sets(kept, len(given[1])) == kept_sets(alone, len(given[1]))
    codec = method("kivi", bits=bits, group_size=8)
    for h in range(len(given[1])):
        k, v, at = alone.head(h)
        coded: Entries = codec.code(k[None], v[None], at, None, None)  # type: ignore[attr-defined]
        for rows, expected in zip(kept.head(h), coded.head(0), strict=True):
            torch.testing.assert_close(rows, expected)


def test_codes_of_what_is_kept_take_fewer_bytes(given: Heads) -> None:
    whole = run(method("snapkv", budget_tokens=132), given).kept
    coded = run(method("chain", first={"method": "snapkv", "budget_tokens": 132}), given).kept
    assert whole is not None
    assert coded is not None
    assert coded.lengths == whole.lengths
    assert coded.nbytes < whole.nbytes / 2


@pytest.mark.parametrize("name", ["snapkv", "ada_snapkv"])
def test_layers_behind_a_choosing_one_keep_what_it_chose(name: str) -> None:
    prompt = tokens(PROMPT, rows=2, seed=5)
    alone = KVCache(ModelInfo(SHAPES), HybridConfig(method=name, **SIZES))
    shared = KVCache(
        ModelInfo(SHAPES),
        HybridConfig(method="share", of={"method": name, **SIZES}, selection_layers=(0, 2)),
    )
    for kv in (alone, shared):
        step(kv, prompt)
        decode(kv, 1, rows=2)
    own, both = (
        [[kept_sets(held(kv, layer, row).kept, 2) for row in (0, 1)] for layer in (0, 1, 2)]
        for kv in (alone, shared)
    )
    assert both == [own[0], own[0], own[2]]
    assert own[1] != own[0]
    for layer in range(3):
        entries = held(shared, layer).kept
        assert entries is not None
        k, _, at = entries.head(1)
        torch.testing.assert_close(k, prompt[layer][1][0, 1, at])


@pytest.mark.parametrize("name", COMBINED)
def test_rows_that_were_forked_go_on_as_the_row_they_came_from(name: str) -> None:
    one, forked = cache(name), cache(name)
    for kv in (one, forked):
        step(kv, tokens(PROMPT, seed=2))
        decode(kv, 21)
    for layer in forked.layers.values():
        layer.fork([0, 0, 0])
    expected, found = decode(one, 37, seed=300), decode(forked, 37, seed=300, rows=3)
    forked.check_integrity()
    for row in range(3):
        torch.testing.assert_close(found[:, :, row], expected[:, :, 0], **CLOSE)


@pytest.mark.parametrize("name", COMBINED)
def test_a_checkpoint_brings_back_what_was_kept(name: str) -> None:
    kv = cache(name)
    step(kv, tokens(PROMPT, seed=3))
    decode(kv, 5)
    saved = Checkpoint.of(kv.layers)
    first = decode(kv, 37, seed=300)
    saved.restore(kv.layers)
    torch.testing.assert_close(decode(kv, 37, seed=300), first, **CLOSE)


@pytest.mark.parametrize("name", COMBINED)
def test_a_guess_is_cut_off_and_a_later_turn_goes_on(name: str) -> None:
    kv, plain = cache(name), cache(name)
    for one in (kv, plain):
        step(one, tokens(PROMPT, seed=4))
        decode(one, 3)
    step(kv, tokens(4, seed=500))
    for layer in kv.layers.values():
        layer.crop(4)
    found, expected = decode(kv, 6, seed=600), decode(plain, 6, seed=600)
    torch.testing.assert_close(found, expected, **CLOSE)
    for one in (kv, plain):
        step(one, tokens(65, seed=700))
        one.check_integrity()
    torch.testing.assert_close(decode(kv, 20), decode(plain, 20), **CLOSE)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"method": "by_layer", "layers": {"0-1": "ful"}}, "did you mean 'full'"),
        ({"method": "by_layer", "layers": {"0-1": "full", "1": "quest"}}, "layer 1 must have one"),
        ({"method": "by_layer", "layers": {"first": "full"}}, "must be named like '0', '0-3'"),
        ({"method": "by_layer", "layers": {"3-1": "full"}}, "must count upwards"),
        (
            {"method": "by_head", "heads": {"0": "kivi"}},
            "choose entries and drop the rest.*got kivi",
        ),
        (
            {"method": "by_head", "heads": {"0": "streaming_llm", "rest": "snapkv"}},
            "one window for all its heads, got 16, 1024 of streaming_llm and 0, 32 of snapkv",
        ),
        (
            {"method": "by_head", "heads": {"rest": {"method": "snapkv", "demote": "offload"}}},
            "no cold tier.*got demote 'offload' of snapkv",
        ),
        ({"method": "chain", "first": "h2o"}, "chooses when the prompt ends.*got h2o"),
        (
            {"method": "chain", "first": {"method": "snapkv", "demote": "offload"}},
            "drops the rest, got snapkv",
        ),
        ({"method": "chain", "then": "rotate_kv"}, "hang on one head alone, got rotate_kv"),
        ({"method": "share", "of": "tova"}, "differs by layer, got tova"),
        (
            {"method": "by_layer", "layers": {"rest": {"method": "snapkv", "budget": 3}}},
            "unknown snapkv setting 'budget'",
        ),
        (
            {"method": "chain", "first": {"method": "snapkv", "window_tokens": 5}},
            "window_tokens must be a multiple of page_size 16, got 5",
        ),
    ],
)
def test_what_cannot_be_composed_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        HybridConfig(**settings).build()


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("by_layer", {"layers": {"0": "full"}}, "must say what layer 1 is given to"),
        ("by_layer", {"layers": {"7": "full", "rest": "full"}}, "the last of which is 1"),
        ("by_head", {"heads": {"2-3": SNAP, "rest": SNAP}}, "heads '2-3' must be among"),
        ("by_head", {"heads": {"0": SNAP}}, "must say what head 1 is given to"),
    ],
)
def test_what_a_model_has_not_is_refused(name: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        drive(method(name, **settings), num_layers=2)


def test_layers_of_other_heads_share_nothing() -> None:
    info = ModelInfo((LayerShape(0, 6, 2, 72), LayerShape(1, 6, 3, 72)))
    with pytest.raises(ConfigError, match=r"one number of KV heads, got \[2, 3\]"):
        method("share").open(info)


def test_parts_are_written_as_groups_in_python_files_and_flags() -> None:
    dotted = {
        "method": "by_layer",
        "layers.0-1": "full",
        "layers.rest.method": "snapkv",
        "layers.rest.budget_tokens": "512",
    }
    nested = {"0-1": "full", "rest": {"method": "snapkv", "budget_tokens": 512}}
    made = HybridConfig.from_settings(dotted)
    assert made == HybridConfig(method="by_layer", layers=nested)
    assert HybridConfig.from_settings(made.flat()) == made
    assert made.layers["rest"].budget_tokens == 512
    assert made.replace(page_size=8).layers == made.layers


def test_output_projections_are_those_of_the_heads(given: Heads) -> None:
    q, k, _ = given
    output: Tensor = torch.randn(88, len(q) * q.shape[-1])
    weighing = {**SNAP, "value_weighting": "projected"}
    both = run(method("by_head", heads={"rest": weighing}), given, new=1, outputs=output)
    settings = dict(weighing)
    alone = run(method(settings.pop("method"), **settings), given, new=1, outputs=output)
    assert kept_sets(both.kept, len(k)) == kept_sets(alone.kept, len(k))
