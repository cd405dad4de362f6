"""Pieces of a prompt that fit into a time."""

from __future__ import annotations

import pytest

from hybrid_kv.serve.prefill_queue import PrefillPace


def taking(pace: PrefillPace, each: float, before: float, chunks: list[tuple[int, int]]) -> None:
    for first, count in chunks:
        pace.note(first, count, count * (each + before * (first + count / 2)))


def test_the_first_piece_is_small() -> None:
    assert PrefillPace().tokens(0, 1.0, 4096) == 128
    assert PrefillPace().tokens(0, 1.0, 50) == 50


@pytest.mark.parametrize("first", [0, 1000, 5000])
def test_a_piece_fits_into_its_time_wherever_it_stands(first: int) -> None:
    pace, each, before = PrefillPace(), 1e-3, 1e-6
    taking(pace, each, before, [(0, 128), (128, 400), (528, 300), (828, 512)])
    count = pace.tokens(first, 0.5, 4096)
    took = count * (each + before * (first + count / 2))
    assert 0.7 * 0.5 < took <= 0.5


def test_pieces_are_even_but_for_the_last_and_the_least() -> None:
    """Products of ever new sizes are slow."""
    pace = PrefillPace()
    taking(pace, 1e-3, 1e-6, [(0, 128), (128, 256), (384, 352)])
    for first in range(0, 4000, 77):
        assert pace.tokens(first, 0.3, 4096) % 32 == 0
    assert pace.tokens(0, 0.02, 4096) == 16
    assert pace.tokens(0, 0.3, 101) == 101


def test_costs_that_do_not_grow_are_learned_as_such() -> None:
    pace = PrefillPace()
    taking(pace, 1e-3, 0.0, [(0, 128), (128, 256)])
    assert 380 <= pace.tokens(10_000, 0.5, 4096) <= 450


def test_there_is_a_least_and_a_most() -> None:
    pace = PrefillPace()
    taking(pace, 1.0, 0.0, [(0, 128)])
    assert pace.tokens(0, 0.0, 4096) == 16
    assert pace.tokens(0, 0.0, 5) == 5
    assert pace.tokens(0, 1e6, 300) == 300
    assert pace.tokens(0, 1e6, 4096) == 4 * 128, "what is not known yet is tried step by step"


def test_what_took_longer_than_expected_is_allowed_for() -> None:
    pace = PrefillPace()
    taking(pace, 1e-3, 0.0, [(0, 100), (100, 100)])
    calm = pace.tokens(0, 0.5, 4096)
    pace.note(200, 100, 0.25)
    assert pace.tokens(0, 0.5, 4096) < 0.6 * calm
    taking(pace, 1e-3, 0.0, [(100 * n, 100) for n in range(24)])
    assert pace.tokens(0, 0.5, 4096) == pytest.approx(calm, rel=0.05)


def test_seconds_are_those_of_a_chunk_or_of_its_length_while_nothing_is_known() -> None:
    pace = PrefillPace()
    assert pace.seconds(0, 300) > pace.seconds(0, 200)
    taking(pace, 1e-3, 1e-6, [(0, 128), (128, 400), (528, 300)])
    assert pace.seconds(1000, 100) == pytest.approx(100 * (1e-3 + 1e-6 * 1050), rel=0.01)


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    pace = PrefillPace()
    taking(pace, 1e-3, 1e-7, [(100 * n, 100) for n in range(30)])
    fast = pace.tokens(0, 0.5, 4096)
    taking(pace, 4e-3, 1e-7, [(100 * n, 100) for n in range(24)])
    assert pace.tokens(0, 0.5, 4096) < fast / 3


@pytest.mark.parametrize("seconds", [-0.2, -1000.0])
def test_a_piece_whose_time_is_over_is_the_least(seconds: float) -> None:
    """A prompt whose cache took longer to make than a piece may: "math domain error"."""
    pace = PrefillPace()
    taking(pace, 1e-3, 1e-6, [(0, 128), (128, 400), (528, 300)])
    assert pace.tokens(0, seconds, 4096) == 16


def test_what_a_piece_costs_whatever_its_length_is_no_cost_of_its_tokens() -> None:
    """It was counted as theirs, which made pieces ever shorter."""
    pace, fixed, each = PrefillPace(), 0.2, 1e-3
    for first, count in [(0, 128), (128, 32), (160, 16), (176, 64)] * 6:
        pace.note(first, count, fixed + count * each)
    assert pace.seconds(0, 256) == pytest.approx(fixed + 256 * each, rel=0.05)
    count = pace.tokens(256, 0.6, 4096)
    assert count >= 64
    assert fixed + count * each <= 0.6


def test_where_no_stream_waits_no_piece_is_smaller_than_the_first() -> None:
    """Sixteen tokens at a time for ever: 65 s for a prompt of 1,044 tokens."""
    pace = PrefillPace()
    taking(pace, 1.0, 0.0, [(0, 128), (128, 16), (144, 16)])
    assert pace.tokens(160, 0.5, 4096, alone=True) == 128
    assert pace.tokens(160, 0.5, 100, alone=True) == 100
    assert pace.tokens(160, 0.5, 4096) == 16
