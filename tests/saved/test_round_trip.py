from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionAndSlidingWindowAttentionLayer

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError, FileFormatError
from hybrid_kv.ops import tail
from hybrid_kv.ops.tail import Tail
from hybrid_kv.saved import manifest as manifest_of
from hybrid_kv.saved import verify_context
from hybrid_kv.saved.manifest import read_manifest
from tests.contracts.architectures import build
from tests.contracts.edges.test_forks import drawn
from tests.kit import cache_of, extents, tiers
from tests.saved.scene import (
    INDEXES,
    SMALL,
    TEXT,
    TOKENS,
    blocks_of,
    flip,
    loaded,
    long_model,
    rewrite,
)

QUESTIONS = ["oak", "fox sea owl"]
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "quest": {"page_budget": 2, "dense_layers": 0, "page_size": 16},
    "hybrid": {**SMALL, "cold": {"top_k": 5}},
    "retrieval_attention": {**SMALL, "cold": {"top_k": 5, "index": INDEXES["graph"]}},
    "flat": {**SMALL, "cold": {"top_k": 5}},
    "ivf": {**SMALL, "cold": {"top_k": 5}},
    "streaming_llm": SMALL,
    "snapkv": {},
    "h2o": {},
    "ada_snapkv": {},
    "kivi": {},
    "think": {},
    "tidal_decode": {},
    "infllm": {**SMALL, "cold": {"top_k": 32, "index": {"kind": "blocks", "page_size": 16}}},
}


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return long_model()


def answers(context: hkv.Context, **options: Any) -> list[list[int]]:
    return [context.ask(question, max_new_tokens=3, **options).token_ids for question in QUESTIONS]


@pytest.mark.parametrize("method", METHODS)
def test_an_opened_context_answers_as_the_one_that_was_saved(
    plain: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    with loaded(plain, method, **METHODS[method]) as llm:
        context = llm.context(TEXT)
        expected = answers(context)
        context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        cache_of(opened).check_integrity()
        assert answers(opened) == expected
        assert answers(opened) == expected  # an ask leaves no trace
        assert answers(context) == expected  # nor does saving


def test_moments_are_saved_and_not_taken_again(
    plain: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would read a page of the file for nearly every entry."""
    with loaded(plain, "hybrid", **METHODS["hybrid"]) as llm:
        context = llm.context(TEXT)
        expected = answers(context)
        context.save(tmp_path / "a.hkv")
        with monkeypatch.context() as patched:
            patched.setattr(Tail, "of", lambda *_, **__: pytest.fail("moments were taken again"))
            opened = llm.open(tmp_path / "a.hkv")
            assert answers(opened) == expected
        assert {extent.moments.count for extent in extents(opened)} == {extents(opened)[0].length}


def test_moments_of_before_clusters_are_read_as_those_of_one(
    plain: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(known: Tail) -> dict[str, Tensor]:
        means = {"keys": known.keys[:, 0], "values": known.values[:, 0]}
        return means | {"key_key": known.key_key, "key_value": known.key_value}

    monkeypatch.setattr(tail, "MOST_CLUSTERS", 1)
    with loaded(plain, "hybrid", **METHODS["hybrid"]) as llm:
        context = llm.context(TEXT)
        expected = answers(context)
        with monkeypatch.context() as patched:
            patched.setattr(Tail, "tensors", before)
            patched.setattr(manifest_of, "VERSION", 4)
            context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        assert {extent.moments.clusters for extent in extents(opened)} == {1}
        assert answers(opened) == expected


def test_damaged_moments_are_refused(plain: PreTrainedModel, tmp_path: Path) -> None:
    with loaded(plain, "hybrid", **METHODS["hybrid"]) as llm:
        llm.context(TEXT).save(tmp_path / "a.hkv")
        manifest = read_manifest(tmp_path / "a.hkv")
        moments = manifest.layers[0].extents[0].moments
        assert moments is not None
        flip(manifest.path_of(tmp_path / "a.hkv", moments.block), -5)
        with pytest.raises(FileFormatError, match="checksum"):
            llm.open(tmp_path / "a.hkv")


@pytest.mark.parametrize("length", [5, 37, 48, 49, 200])
@pytest.mark.parametrize("method", ["hybrid", "full", "streaming_llm", "snapkv"])
def test_odd_lengths(plain: PreTrainedModel, method: str, length: int, tmp_path: Path) -> None:
    """Nothing cold, no whole page, exactly sinks and window, one token beyond."""
    with loaded(plain, method, **METHODS[method]) as llm:
        context = llm.context(" ".join(TEXT.split()[:length]))
        expected = answers(context)
        context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        cache_of(opened).check_integrity()
        assert answers(opened) == expected


@pytest.mark.parametrize("kind", INDEXES)
def test_a_saved_index_is_not_built_again(
    plain: PreTrainedModel, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(plain, "hybrid", **SMALL, cold={"top_k": 5, "index": INDEXES[kind]}) as llm:
        context = llm.context(TEXT)
        before = context.ask("oak", max_new_tokens=4)
        # `auto` takes what is the fastest here, which hangs on the machine.
        assert kind == "auto" or {head["serves"] for head in before.index} == {kind}
        context.save(tmp_path / "a.hkv")
        told = [
            (head.serves, head.recall is not None and head.mass is not None)
            for layer in read_manifest(tmp_path / "a.hkv").layers
            for extent in layer.extents
            for head in extent.heads
        ]
        assert told == [(head["serves"], head["serves"] != "flat") for head in before.index]
        for owner in (type(extent.index.serving) for extent in extents(context)):
            monkeypatch.setattr(owner, "build", lambda *_: pytest.fail("built again"))
        opened = llm.open(tmp_path / "a.hkv")
        after = opened.ask("oak", max_new_tokens=4)
        assert after.token_ids == before.token_ids
        assert [head["serves"] for head in after.index] == [head["serves"] for head in before.index]
        assert [head["samples"] for head in after.index] == [
            head["samples"] for head in before.index
        ]


def test_cold_keys_and_values_stay_in_the_file(plain: PreTrainedModel, tmp_path: Path) -> None:
    with loaded(plain, "flat", **METHODS["flat"]) as llm:
        context = llm.context(TEXT)
        context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        for extent, old in zip(extents(opened), extents(context), strict=True):
            assert torch.equal(extent.k, old.k)
            assert torch.equal(extent.v, old.v)
            assert file_at(extent.k.data_ptr()).startswith(str(tmp_path / "a.hkv"))
            assert file_at(old.k.data_ptr()) == ""
            assert extent.k.data_ptr() % 64 == 16 * 24 * 4 % 64  # sixteen sinks before them


def file_at(address: int) -> str:
    """The file that the system shows at an address; empty for plain memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, path = line.split(maxsplit=5) if line.count("/") else (line.split()[0], "")
        start, stop = (int(part, 16) for part in place.split("-"))
        if start <= address < stop:
            return path
    raise AssertionError(f"nothing at {address}")


def test_an_index_that_is_being_built_is_waited_for(plain: PreTrainedModel, tmp_path: Path) -> None:
    settings = {**SMALL, "cold": {"top_k": 5, "index": INDEXES["sketch"]}}
    config = hkv.HybridConfig(method="hybrid", **settings)  # builds in the background
    with hkv.load(plain, config=config) as llm:
        ids = torch.randint(3, 12, (1, TOKENS))
        llm.context(ids).save(tmp_path / "a.hkv")
        found = llm.open(tmp_path / "a.hkv").ask([3], max_new_tokens=2).index
        assert {head["serves"] for head in found} & {"sketch"}


def test_saving_over_a_context_that_is_open_changes_nothing_for_it(
    plain: PreTrainedModel, tmp_path: Path
) -> None:
    with loaded(plain, "hybrid", **METHODS["hybrid"]) as llm:
        context = llm.context(TEXT)
        expected = answers(context)
        context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        other = llm.context(" ".join(reversed(TEXT.split()[:300])))
        other.save(tmp_path / "a.hkv")
        assert answers(opened) == expected
        assert answers(llm.open(tmp_path / "a.hkv")) == answers(other)
        opened.save(tmp_path / "a.hkv")  # from the file into its place
        assert answers(llm.open(tmp_path / "a.hkv")) == expected
        assert len(list((tmp_path / "a.hkv").iterdir())) == 2
        assert [path.name for path in tmp_path.iterdir()] == ["a.hkv"]


def test_another_budget_reads_the_same_file(plain: PreTrainedModel, tmp_path: Path) -> None:
    """At full budget the answers are those of full attention."""
    with loaded(plain, "hybrid", **METHODS["hybrid"]) as llm:
        llm.context(TEXT).save(tmp_path / "a.hkv")
    with loaded(plain, "full") as llm:
        expected = answers(llm.context(TEXT))
    with loaded(plain, "hybrid", **SMALL, cold={"top_k": "all"}) as llm:
        assert answers(llm.open(tmp_path / "a.hkv")) == expected


def test_a_long_answer_goes_on_behind_the_file(plain: PreTrainedModel, tmp_path: Path) -> None:
    """Pages that leave the window begin an extent of their own."""
    with loaded(plain, "hybrid", **METHODS["hybrid"]) as llm:
        context = llm.context(TEXT)
        context.save(tmp_path / "a.hkv")
        expected = context.ask("oak", max_new_tokens=40).token_ids
        assert llm.open(tmp_path / "a.hkv").ask("oak", max_new_tokens=40).token_ids == expected
        verify_context(tmp_path / "a.hkv")


def test_messages_are_saved(plain: PreTrainedModel, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ 'bee ' if m.role == 'user' else 'elm ' }}{{ m.content }} "
        "{% endfor %}{% if add_generation_prompt %}elm{% endif %}"
    )
    with loaded(plain, "hybrid", **METHODS["hybrid"]) as llm:
        llm.tokenizer.chat_template = template
        context = llm.context([{"role": "user", "content": TEXT}])
        expected = answers(context)
        context.save(tmp_path / "a.hkv")
        assert answers(llm.open(tmp_path / "a.hkv")) == expected


def test_what_the_audit_looks_at_is_saved(plain: PreTrainedModel, tmp_path: Path) -> None:
    # Widening, so that findings do not come late; without limits, so that there is none.
    limits = {"min_recall": 0, "max_missed_mass": None, "max_output_error": None}
    wide = {"action": "widen", **limits}
    with loaded(plain, "streaming_llm", **SMALL, audit_every=1, audit=wide) as llm:
        context = llm.context(TEXT)
        expected = context.ask("oak", max_new_tokens=4).audit
        context.save(tmp_path / "a.hkv")
        found = llm.open(tmp_path / "a.hkv").ask("oak", max_new_tokens=4).audit
        assert found.findings == expected.findings
        told = read_manifest(tmp_path / "a.hkv").audit
        assert told is not None
        assert (told.looks, told.recall) == (len(expected.findings), None)
        assert told.missed_mass == pytest.approx(expected.missed_mass().mean)
        assert told.output_error == pytest.approx(expected.output_error().mean)


@pytest.mark.parametrize("method", ["hybrid", "full", "streaming_llm"])
def test_a_file_is_hardly_larger_than_what_it_holds(
    plain: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    with loaded(plain, method, **METHODS[method]) as llm:
        context = llm.context(TEXT)
        context.save(tmp_path / "a.hkv")
        held = tiers(context)
        fixed = 16 * 1024  # names and checksums, whatever the length
        total = sum(path.stat().st_size for path in (tmp_path / "a.hkv").rglob("*"))
        # Codes of heads that are scanned are made again, so there may be less.
        assert held.device_kv <= verify_context(tmp_path / "a.hkv").num_bytes <= total
        assert total <= 1.02 * sum(held) + fixed


@pytest.mark.parametrize("length", [7, 12, 40])
@pytest.mark.parametrize("architecture", ["gemma3", "mistral", "gpt_oss"])
def test_sliding_windows_are_saved(architecture: str, length: int, tmp_path: Path) -> None:
    """Windows of 12 tokens: not full, full, and long left behind."""
    model = build(architecture)
    with hkv.load(model, config={"method": "full", "page_size": 4}) as llm:
        context = llm.context(drawn(0, length)[0].tolist())
        context.ask([5], keep=True, max_new_tokens=2)
        context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        cache_of(opened).check_integrity()
        for more in ([9, 8], [7] * 14):  # the second one moves the whole window on
            assert opened.append(more) == context.append(more)
            expected = context.ask([3, 4], max_new_tokens=5).token_ids
            assert opened.ask([3, 4], max_new_tokens=5).token_ids == expected


def test_a_window_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = build("gemma3")
    with hkv.load(model, config={"method": "full", "page_size": 4}) as llm:
        root = tmp_path / "a.hkv"
        llm.context(drawn(0, 20)[0].tolist()).save(root)
        (window, *_) = read_manifest(root).windows
        rewrite(root, lambda content: content["windows"][0].update(length=19))
        with pytest.raises(FileFormatError, match="window of layer 0 is another one than the"):
            llm.open(root)
        rewrite(root, lambda content: content["windows"][0].update(length=20))
        llm.open(root).close()
        flip(blocks_of(root) / window.kv, -5)
        with pytest.raises(FileFormatError, match=f"checksum of block '{window.kv}' does not fit"):
            llm.open(root)
        rewrite(root, lambda content: content["windows"].pop(0))
        with pytest.raises(FileFormatError, match="other layers than the model"):
            llm.open(root)


def test_layers_that_no_file_holds_are_refused(plain: PreTrainedModel, tmp_path: Path) -> None:
    with loaded(plain, "full") as llm:
        context = llm.context("oak")
        cache_of(context).layers[1] = LinearAttentionAndSlidingWindowAttentionLayer(8)
        with pytest.raises(
            ConfigError, match=r"layer 1 must be .* got a LinearAttentionAndSliding"
        ):
            context.save(tmp_path / "a.hkv")
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_learned_from_queries_and_has_no_format_is_refused(
    plain: PreTrainedModel, tmp_path: Path
) -> None:
    with loaded(plain, "double_sparsity") as llm:
        context = llm.context(TEXT)
        with pytest.raises(ConfigError, match="choose one of kind auto, sketch, graph or blocks"):
            context.save(tmp_path / "a.hkv")
    assert list(tmp_path.iterdir()) == []
