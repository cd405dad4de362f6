"""KIVI and ThinK: the papers' formulas written out, bytes that are really gone, stated loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.codec import decode, encode, pack, unpack
from hybrid_kv.plugins import Method
from tests.drive_method import drive, heads

SINKS, WINDOW, PROMPT = 16, 32, 173


def method(name: str, **settings: Any) -> Method:
    sizes = {"page_size": 16, "sink_tokens": SINKS, "window_tokens": WINDOW}
    built: Method = HybridConfig(method=name, **{**sizes, **settings}).build()
    return built


def kivi_by_hand(
    k: Tensor, v: Tensor, bits: int, size: int, starts: list[int]
) -> tuple[Tensor, Tensor]:
    """k, v [N, D] rounded number by number; keys that left together begin at `starts`."""
    k, v, most = k.double().clone(), v.double().clone(), 2**bits - 1

    def rounded(group: Tensor) -> Tensor:
        zero, scale = group.min(), (group.max() - group.min()) / most
        return zero + ((group - zero) / scale).round() * scale if scale > 0 else group

    for start, end in zip(starts, [*starts[1:], len(k)], strict=True):
        for first in range(start, end, size):
            for channel in range(k.shape[1]):
                rows = slice(first, min(first + size, end))
                k[rows, channel] = rounded(k[rows, channel])
    for row in v:
        for first in range(0, len(row), size):
            row[first : first + size] = rounded(row[first : first + size])
    return k, v


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", [72, 70, 5])
@pytest.mark.parametrize("page_size", [16, 37])
def test_kivi_rounds_keys_by_channel_and_values_by_token(
    bits: int, head_dim: int, page_size: int
) -> None:
    settings = {"page_size": page_size, "sink_tokens": page_size, "window_tokens": page_size}
    kivi = method("kivi", bits=bits, group_size=32, **settings)
    driven = drive(kivi, prompt=PROMPT, new=80, head_dim=head_dim, page_size=page_size)
    kept = driven.kept
    assert kept is not None
    count = kept.lengths[0]
    left = PROMPT - 2 * page_size  # with the prompt's end, then page by page
    starts = [0, *range(left, count, page_size)]
    assert len(starts) > 2
    for head in range(2):
        k, v, positions = kept.head(head)
        assert positions.tolist() == list(range(page_size, page_size + count))
        rows = slice(page_size, page_size + count)
        expected = kivi_by_hand(driven.k[head, rows], driven.v[head, rows], bits, 32, starts)
        torch.testing.assert_close(k.double(), expected[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(v.double(), expected[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("bits", "most"), [(2, 0.65), (4, 0.12)])
def test_kivi_is_off_by_what_it_states(bits: int, most: float) -> None:
    """On normal numbers, the worst for groups: no head of a model has such keys."""
    driven = drive(method("kivi", bits=bits), prompt=1000, new=20)
    size = float(torch.stack(driven.exact).norm())
    off = torch.stack(driven.out) - torch.stack(driven.exact)
    assert most / 1.3 < float(off.norm()) / size < most
    assert not driven.lost.any()


@pytest.mark.parametrize(
    ("name", "settings"), [("kivi", {"bits": "all"}), ("think", {"channel_ratio": 1.0})]
)
@pytest.mark.parametrize("prompt", [5, 37, PROMPT])
def test_codecs_lose_nothing_where_they_say_so(
    name: str, settings: dict[str, Any], prompt: int
) -> None:
    codec = method(name, **settings)
    assert type(codec).full_budget(method(name).params) == codec.params
    driven = drive(codec, prompt=prompt, new=60)
    assert not driven.lost.any()
    assert max(driven.error) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_chosen_by_the_scales_that_are_kept(dtype: torch.dtype) -> None:
    """A zero rounded to 16 bits shifts all codes of a group unless they are chosen by it."""
    x = (torch.randn(3, 37, 70) * 0.1 + 5).to(dtype)
    codes, scales = encode(x, 4, 16, axis=-2)
    group = torch.arange(37) // 16
    got = decode(codes, scales[:, group], 4)
    assert got.dtype == dtype
    steps = scales[:, group, 0].float()
    slack = 2 * torch.finfo(dtype).eps * 6  # scale, zero and sum are rounded
    assert ((got.float() - x.float()).abs() <= steps / 2 + slack).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("count", [1, 3, 8, 70])
def test_packing_is_undone(bits: int, count: int) -> None:
    codes = torch.randint(2**bits, (2, 5, count), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape[-1] == -(-count * bits // 8)
    assert torch.equal(unpack(packed, bits, count), codes)


def test_numbers_that_are_all_the_same_stay_as_they_are() -> None:
    x = torch.full((2, 37, 8), 3.7)
    for axis in (-2, -1):
        codes, scales = encode(x, 2, 16, axis=axis)
        rows = scales[:, torch.arange(37) // 16] if axis == -2 else scales.repeat_interleave(16, -1)
        assert torch.equal(decode(codes, rows[..., :8], 2), x)


def think_by_hand(driven: Any, ratio: float, observed: int) -> list[set[int]]:
    """By KV head the channels of the largest Frobenius norm of Q[:, i] K[:, i]^T."""
    chosen = []
    for head in range(2):
        norms = []
        for channel in range(driven.k.shape[2]):
            q = driven.q[3 * head : 3 * head + 3, PROMPT - observed : PROMPT, channel].flatten()
            k = driven.k[head, :PROMPT, channel]
            norms.append(float(torch.outer(q, k).norm()))
        order = sorted(range(len(norms)), key=lambda channel: -norms[channel])
        chosen.append(set(order[: int(ratio * len(norms))]))
    return chosen


@pytest.mark.parametrize("ratio", [0.25, 0.6])
def test_think_keeps_the_channels_that_queries_and_keys_use(ratio: float) -> None:
    q, k, v = heads(PROMPT + 60, num_q_heads=6, num_kv_heads=2, head_dim=72)
    k = k * torch.rand(2, 1, 72)
    driven = drive(
        method("think", channel_ratio=ratio, observed_tokens=21),
        prompt=PROMPT,
        new=60,
        given=(q, k, v),
    )
    kept = driven.kept
    assert kept is not None
    assert kept.k.shape[1] == int(ratio * 72)
    for head, channels in enumerate(think_by_hand(driven, ratio, 21)):
        assert set(kept.state["channels"][head].tolist()) == channels
        keys, values, positions = kept.head(head)
        whole = driven.k[head, positions]
        mask = torch.zeros(72, dtype=torch.bool)
        mask[list(channels)] = True
        assert torch.equal(keys, torch.where(mask, whole, 0.0))
        assert torch.equal(values, driven.v[head, positions])
    assert max(driven.error) > 1e-3


@pytest.mark.parametrize("prompt", [5, 37])
@pytest.mark.parametrize("name", ["kivi", "think"])
def test_of_a_prompt_within_the_window_the_answer_is_coded(name: str, prompt: int) -> None:
    driven = drive(method(name), prompt=prompt, new=80)
    assert driven.kept is not None
    assert driven.kept.lengths[0] == (prompt + 80 - min(SINKS, prompt) - WINDOW) // 16 * 16
    assert max(driven.error[: SINKS + WINDOW - prompt]) < 1e-9
    assert min(driven.error[-10:]) > 1e-3
    assert not driven.lost.any()


def arithmetic(name: str, settings: dict[str, Any], entries: int, dim: int) -> int:
    """Bytes of entries of one KV head in float32, without room for growing."""
    positions, value = 8 * entries, 4 * dim * entries
    if name == "think":
        return positions + value + 4 * int(settings["channel_ratio"] * dim) * entries
    bits = settings["bits"]
    groups, value_groups = -(-entries // 32), -(-dim // 32)
    codes = 2 * -(-dim * bits // 8) * entries
    return positions + codes + 4 * entries + 2 * 4 * (value_groups * entries + dim * groups)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("kivi", {"bits": 2}), ("kivi", {"bits": 4}), ("think", {"channel_ratio": 0.6})],
)
def test_bytes_are_those_of_the_codes(name: str, settings: dict[str, Any]) -> None:
    driven = drive(method(name, **settings), prompt=3000, new=1)
    kept = driven.kept
    assert kept is not None
    expected = sum(arithmetic(name, settings, count, 72) for count in kept.lengths)
    assert kept.nbytes == pytest.approx(expected, rel=0.03)
    assert kept.nbytes < 0.9 * 2 * 4 * 72 * sum(kept.lengths)


def test_codes_follow_a_selection_and_grow_again() -> None:
    """Cropped codes kept the scales of their groups, and later ones got their own."""
    codec = method("kivi", bits=4)
    k, v = torch.randn(2, 2, 90, 72)
    first = Entries.of(k[:, :50], v[:, :50], torch.arange(50))
    kept = codec.absorb(0, 0, None, first, None)
    assert kept is not None
    before = [kept.head(head) for head in range(2)]
    cut = kept.before(33)
    assert cut.lengths == (33, 33)
    more = Entries.of(k[:, 33:90], v[:, 33:90], torch.arange(33, 90))
    grown = codec.absorb(0, 0, cut, more, None)
    assert grown is not None
    alone = codec.absorb(0, 0, None, more, None)
    assert alone is not None
    for head in range(2):
        for old, new, late in zip(before[head], grown.head(head), alone.head(head), strict=True):
            assert torch.equal(new[:33], old[:33])
            assert torch.equal(new[33:], late)
        again = kept.head(head)
        assert all(torch.equal(a, b) for a, b in zip(again, before[head], strict=True))


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("kivi", {"bits": 3}, "bits: input should be 2, 4 or 'all', got 3"),
        ("kivi", {"bits": "few"}, "bits: input should be 2, 4 or 'all', got 'few'"),
        (
            "kivi",
            {"group_size": 0},
            "group_size: input should be greater than or equal to 1, got 0",
        ),
        ("think", {"channel_ratio": 0}, "channel_ratio: input should be greater than 0, got 0"),
        ("think", {"channel_ratio": 1.5}, "channel_ratio: input should be less than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    name: str, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        HybridConfig(method=name, **settings)
    assert str(refusal.value).startswith(text)


def test_settings_of_the_command_line_are_read() -> None:
    assert HybridConfig.from_settings({"method": "kivi", "bits": "4"}).bits == 4
