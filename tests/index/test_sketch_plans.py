"""Plans of sketches: bytes in proportion to the head's channels, within what there is."""

from __future__ import annotations

import pytest

from hybrid_kv.index._sketch_head import layouts, plan_of
from hybrid_kv.ops.sketch_codes import MAX_DIMS

NAMED = (16, 24, 32, 48, 64)


@pytest.mark.parametrize(
    ("head_dim", "sizes"),
    [(128, [16, 24, 32, 48, 64]), (64, [8, 12, 16, 24, 32]), (256, [32, 48, 64, 96, 128])],
)
def test_codes_take_bytes_in_proportion_to_the_channels(head_dim: int, sizes: list[int]) -> None:
    plans = [plan_of(size, head_dim) for size in NAMED]
    assert [plan.code_bytes for plan in plans if plan is not None] == sizes


def test_the_plans_of_128_channels_are_the_measured_ones() -> None:
    plans = [plan_of(size, 128) for size in (16, 32, 48, 64)]
    assert [plan.groups for plan in plans if plan is not None] == [
        ((4, 8), (24, 4)),
        ((8, 8), (32, 4), (32, 2)),
        ((8, 8), (80, 4)),
        ((16, 8), (96, 4)),
    ]


@pytest.mark.parametrize("head_dim", [4, 5, 17, 70, 72, 80, 96, 255, 300])
def test_no_code_has_more_dims_than_the_head_has_channels(head_dim: int) -> None:
    found = layouts(head_dim)
    assert found
    for layout in found:
        assert all(plan.num_dims <= min(head_dim, MAX_DIMS) for plan in layout.plans)
        assert sum(layout.shares) == pytest.approx(1)


def test_fewer_channels_than_a_quad_have_no_plan() -> None:
    assert layouts(3) == []


def test_lower_tiers_are_kept_in_coarser_codes() -> None:
    tiers = layouts(128, "tiers")
    assert [layout for layout in layouts(128) if not layout.is_uniform] == tiers
    sizes = [[plan.code_bytes for plan in layout.plans] for layout in tiers]
    assert sizes == [[16, 32, 64]]
    assert [layout.scanned_bytes for layout in tiers] == pytest.approx([25.6])


@pytest.mark.parametrize(("head_dim", "count"), [(128, 1), (72, 1), (64, 1), (16, 0), (8, 0)])
def test_tiers_are_tried_where_their_codes_differ(head_dim: int, count: int) -> None:
    tiers = layouts(head_dim, "tiers")
    assert len(tiers) == count
    for layout in tiers:
        assert len({plan.code_bytes for plan in layout.plans}) == len(layout.plans)


@pytest.mark.parametrize("head_dim", [32, 64, 72, 128, 256])
def test_no_tier_is_too_coarse_for_what_the_prompt_never_asked(head_dim: int) -> None:
    # Tiers of 8 B were there: every self-check passed, and a question about a record that no query
    # of the prompt had looked at was answered wrongly.
    least = plan_of(16, head_dim)
    assert least is not None
    for layout in layouts(head_dim):
        assert all(plan.code_bytes >= least.code_bytes for plan in layout.plans)
