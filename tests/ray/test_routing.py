"""Requests go where their prefix lies, else where least is to do; no Ray is needed."""

from __future__ import annotations

import pytest

from hybrid_kv.errors import BusyError, QueueFullError
from hybrid_kv.ray.replica import Router


def prompt(seed: int, tokens: int = 200) -> list[int]:
    return [seed * 1000 + place for place in range(tokens)]


def router(names: str, most_running: int = 4, most_open: int = 6) -> Router[str]:
    made: Router[str] = Router(most_running, most_open)
    for name in names:
        made.add(name)
    return made


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    both = router("ab")
    first = both.take(prompt(1))
    assert both.take(prompt(2)) != first, "nothing is known of it: the other has less to do"
    for _ in range(3):
        assert both.take(prompt(1)[:180] + prompt(3)) == first


def test_a_prefix_that_is_a_small_part_does_not_draw_everything_to_one_replica() -> None:
    both = router("ab")
    system = prompt(1, 64)
    taken = [both.take(system + prompt(seed)) for seed in range(2, 6)]
    assert sorted(taken) == ["a", "a", "b", "b"]


def test_a_free_place_elsewhere_counts_more_than_a_prefix_in_a_queue() -> None:
    both = router("ab", most_running=2)
    taken = [both.take(prompt(1)) for _ in range(4)]
    assert taken[:2] == [taken[0]] * 2
    assert taken[2] != taken[0]
    both.release(taken[0])
    assert both.take(prompt(1)) == taken[0]


def test_requests_beyond_all_places_are_refused_with_the_limit() -> None:
    both = router("ab", most_running=1, most_open=2)
    for seed in range(4):
        both.take(prompt(seed))
    with pytest.raises(QueueFullError, match="at most 2 requests may be open on each of 2 replica"):
        both.take(prompt(9))


def test_a_replica_that_has_left_is_not_asked_and_comes_back_knowing_nothing() -> None:
    both = router("ab")
    first = both.take(prompt(1))
    both.remove(first)
    both.remove(first)
    both.release(first)
    other = both.take(prompt(1))
    assert other != first
    both.add(first)
    assert both.take(prompt(2)) == first
    assert both.take(prompt(1)) == other
    both.remove("a")
    both.remove("b")
    with pytest.raises(BusyError, match="no replica is there to answer; ask again"):
        both.take(prompt(1))
