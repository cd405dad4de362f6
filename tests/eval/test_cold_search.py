"""The benchmark's own logic: exact answers, calibrated settings, cold rotation, derived ratios."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cold_search import (
    derive,
    engines,
    heads,
    machine,
    measure,
    minilm,
    pivot,
    plots,
    run,
    timing,
)
from benchmarks.cold_search.compare import compare_auto
from benchmarks.cold_search.engines import Copies, Engine, Own, Work
from benchmarks.cold_search.quality import K, Quality, Truth, by_quarter
from benchmarks.cold_search.rows import Knob, Row, chosen_rows, own, parse_rows
from benchmarks.cold_search.targets import Target, find_points, ladder, parse_targets
from hybrid_kv.index._auto_choice import decoding_pace
from hybrid_kv.index._graph_learner import GraphLearner
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.ops.native.library import default_pool
from hybrid_kv.report.files import expand
from tests.tolerances import TOLERANCES

NUM_KEYS, DIM, GROUP, POSITIONS = 523, 24, 3, 11
RECALL = Target("recall", 0.9)


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def tiny_head(group: int = GROUP) -> heads.Head:
    prompt = normal(group, NUM_KEYS, DIM, seed=1)
    steps = torch.tensor([0, 1, 2, 10, 11, 12, 20, 21, 30, 31, 39])
    return heads.Head(
        *("tiny", 0, normal(NUM_KEYS, DIM), lambda rows, horizon=0: prompt[:, rows]),
        *(normal(POSITIONS, group, DIM, seed=2), normal(POSITIONS, group, DIM, seed=3)),
        *(steps, 40, "a test"),
    )


class FirstKeys(Engine):
    """Exact search among the first `share` percent of the keys; counts what it is asked."""

    def __init__(self) -> None:
        self.share, self.done = 100, Work(0, 0)

    def build(self, keys: torch.Tensor, prompt: heads.Prompt) -> None:
        self.keys = keys

    def use(self, setting: engines.Setting) -> None:
        self.share = setting.get("share", 100)

    def find(self, queries: np.ndarray) -> np.ndarray:
        count = max(K, len(self.keys) * self.share // 100)
        assert self.done.rows is not None
        assert self.done.dots is not None
        self.done = Work(self.done.rows + count, self.done.dots + count * len(queries))
        return (torch.from_numpy(queries) @ self.keys[:count].T).topk(K).indices.numpy()

    def work(self) -> Work:
        done, self.done = self.done, Work(0, 0)
        return done

    held_bytes = NUM_KEYS * DIM * 4
    row_bytes = DIM * 4

    def copies(self, count: int) -> Copies:
        return Visits()


class Visits(Copies):
    """Notes which group each copy was visited with."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def use(self, setting: engines.Setting) -> None:
        pass

    def visit(self, groups: Sequence[np.ndarray], grouped: bool) -> None:
        self.seen.append([int(group[0, 0]) for group in groups])


class NoFlush:
    """Memory that counts how often the caches would have been emptied."""

    l3_bytes = 1000

    def __init__(self) -> None:
        self.flushes = 0

    def flush(self) -> None:
        self.flushes += 1


@pytest.fixture
def memory() -> NoFlush:
    return NoFlush()


@pytest.fixture
def plan(memory: NoFlush) -> measure.Plan:
    watch = timing.Stopwatch(ticking(), 3, memory)  # type: ignore[arg-type]
    return measure.Plan([RECALL], False, [1], 0, watch)


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves the number of threads as it was: rows set their own."""
    before = torch.get_num_threads()
    monkeypatch.setenv("HYBRID_KV_THREADS", "1")
    yield
    torch.set_num_threads(before)
    default_pool.cache_clear()
    decoding_pace.cache_clear()


def ticking() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is read."""
    ticks = iter(range(10**6))
    return lambda: float(next(ticks))


# The exact answer.


def exact(head: heads.Head) -> np.ndarray:
    """The best keys of the test queries by a full sort, [P * G, K]."""
    scores = head.test.flatten(0, 1) @ head.keys.T
    return scores.argsort(1, descending=True)[:, :K].numpy()


def test_the_exact_answer_has_full_recall_and_the_whole_of_the_oracles_mass() -> None:
    head = tiny_head()
    truth = Truth(head.keys, head.test)
    quality = truth.judge(exact(head))
    assert quality.recall == quality.recall_p5 == 1
    weights = (head.test.flatten(0, 1) @ head.keys.T * DIM**-0.5).softmax(1)
    mass = weights.gather(1, torch.from_numpy(exact(head))).sum(1).mean()
    for got in (truth.oracle_mass, quality.mass, quality.mass_over_oracle * mass):
        torch.testing.assert_close(torch.tensor(float(got)), mass, **TOLERANCES[torch.float32])


def test_many_keys_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    head = tiny_head()
    found = exact(head)
    found[:, :9] = -1
    whole = Truth(head.keys, head.test)
    monkeypatch.setattr("benchmarks.cold_search.quality.SCORES", 2 * NUM_KEYS)
    parts = Truth(head.keys, head.test)
    assert np.array_equal(parts.recalls(found), whole.recalls(found))
    assert parts.oracle_mass == pytest.approx(whole.oracle_mass)


def test_recall_counts_what_was_found_whatever_the_order() -> None:
    head = tiny_head()
    found = exact(head)[:, ::-1].copy()
    found[:, :25] = -1  # the worst quarter is missing
    quality = Truth(head.keys, head.test).judge(found)
    assert quality.recall == pytest.approx(0.75)
    assert 0.75 < quality.mass_over_oracle < 1


def test_a_key_that_is_not_among_the_best_is_not_recalled() -> None:
    head = tiny_head()
    scores = head.test.flatten(0, 1) @ head.keys.T
    found = scores.argsort(1, descending=True)[:, 10 : K + 10].numpy()
    assert Truth(head.keys, head.test).recalls(found) == pytest.approx(0.9)


def test_equal_keys_stand_for_each_other() -> None:
    """Or exact search had a recall of .989 on a head whose keys repeat."""
    head = tiny_head()
    twice = replace(head, keys=head.keys[: NUM_KEYS // 2].repeat(2, 1))
    found = exact(twice)
    half = NUM_KEYS // 2
    others = np.where(found < half, found + half, found - half)
    truth = Truth(twice.keys, twice.test)
    assert truth.recalls(others).min() == 1


def test_a_key_that_comes_twice_counts_once() -> None:
    head = tiny_head()
    found = exact(head)
    found[:, 50:] = found[:, :50]
    quality = Truth(head.keys, head.test).judge(found)
    assert quality.recall == pytest.approx(0.5)
    assert quality.mass_over_oracle < 1


def test_nothing_found_is_no_mass() -> None:
    head = tiny_head()
    nothing = np.full((POSITIONS * GROUP, K), -1)
    assert Truth(head.keys, head.test).judge(nothing) == Quality(0, 0, 0, 0)


def test_the_worst_twentieth_is_reported() -> None:
    head = tiny_head()
    found = exact(head)
    found[:3] = -1  # 3 of 33 queries
    quality = Truth(head.keys, head.test).judge(found)
    assert quality.recall_p5 == 0
    assert quality.recall == pytest.approx(30 / 33)


def test_recall_by_quarter_goes_by_position() -> None:
    steps = torch.tensor([0, 9, 10, 25])
    recalls = np.array([1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.5, 0.5])  # two heads a position
    assert by_quarter(recalls, steps, 40, 2) == [pytest.approx(0.7), 0.1, 0.5, None]


# Settings for a goal.


@pytest.mark.parametrize("least", [1, 2, 57, 640, 1000])
def test_the_least_value_that_reaches_the_goal_is_found(least: int) -> None:
    asked: list[int] = []

    def evaluate(value: int) -> Quality:
        asked.append(value)
        return Quality(float(value >= least), 0, 0.5, 0)

    values = ladder(1, 1000)
    (point,) = find_points(evaluate, values, [RECALL])
    assert point.reached
    assert point.value == min(value for value in values if value >= least)
    assert len(asked) == len(set(asked)) <= 9


def test_a_goal_out_of_reach_gives_the_best_that_was_seen() -> None:
    def evaluate(value: int) -> Quality:
        return Quality(min(value, 100) / 200, 0, 0, 0)

    (point,) = find_points(evaluate, ladder(1, 1000), [RECALL])
    assert not point.reached
    assert (point.value, point.calibrated) == (1000, 0.5)


def test_goals_share_what_was_measured() -> None:
    asked: list[int] = []

    def evaluate(value: int) -> Quality:
        asked.append(value)
        return Quality(value / 1000, 0, min(1, value / 300), 0)

    goals = [RECALL, Target("mass_over_oracle", 0.9)]
    recall, mass = find_points(evaluate, ladder(1, 1000), goals)
    assert recall.value == pytest.approx(900, rel=0.07)
    assert mass.value == pytest.approx(270, rel=0.07)
    assert len(asked) == len(set(asked))


def test_a_ladder_rises_in_small_steps_from_end_to_end() -> None:
    values = np.array(ladder(16, 1600))
    assert (values[0], values[-1]) == (16, 1600)
    assert (np.diff(values) > 0).all()
    assert (values[1:] <= values[:-1] + np.maximum(1, 0.07 * values[:-1] + 0.5)).all()


def test_goals_are_read_from_text() -> None:
    assert parse_targets("recall=.95,mass=.995") == [
        Target("recall", 0.95),
        Target("mass_over_oracle", 0.995),
    ]


@pytest.mark.parametrize("text", ["recall", "recall=2", "speed=.9", "mass=0"])
def test_other_goals_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="target"):
        parse_targets(text)


def test_settings_are_found_on_other_queries_than_those_reported(plan: measure.Plan) -> None:
    head = tiny_head()
    asked: list[torch.Tensor] = []

    class Spy(FirstKeys):
        def find(self, queries: np.ndarray) -> np.ndarray:
            asked.append(torch.from_numpy(queries.copy()))
            return super().find(queries)

    row = Row("spy", Spy, knob=Knob("share", 20, 100))
    (result,) = measure.Bench(head, replace(plan, targets=[RECALL])).run(row)
    last = torch.cat(asked[-POSITIONS * GROUP :])
    assert torch.equal(last, head.test.flatten(0, 1))
    assert not any(bool((one == head.calibration).all(-1).any()) for one in last)
    assert result["targets"][0]["calibrated"] >= 0.9
    assert result["setting"]["share"] == pytest.approx(90, abs=8)


def test_positions_for_calibration_are_disjoint_from_those_of_the_test() -> None:
    test, calibration = heads.draw_steps(2048, 100, seed=5)
    assert len(set(test.tolist()) | set(calibration.tolist())) == 200
    test, calibration = heads.draw_steps(31, 100, seed=5)
    assert len(test) == len(calibration) == 15


# Work.


def test_work_is_per_search_and_bytes_per_query_head(plan: measure.Plan) -> None:
    row = Row("first", FirstKeys, modes=("single", "group"))
    single, group = measure.Bench(tiny_head(), plan).run(row)
    assert single["scanned_ratio"] == group["scanned_ratio"] == 1
    assert single["dots_per_query"] == group["dots_per_query"] == NUM_KEYS
    assert single["bytes_read"] == NUM_KEYS * DIM * 4
    assert group["bytes_read"] == pytest.approx(NUM_KEYS * DIM * 4 / GROUP)


def test_a_head_without_a_group_is_searched_by_itself(plan: measure.Plan) -> None:
    row = Row("first", FirstKeys, modes=("group",))
    (result,) = measure.Bench(tiny_head(1), plan).run(row)
    assert result["mode"] == "single"


def test_our_kinds_count_the_exact_ranking_apart(plan: measure.Plan) -> None:
    row = own("flat", keys="f16", precision="int8")
    _, group = measure.Bench(tiny_head(), plan).run(row)
    candidates = group["dots_per_query"] - NUM_KEYS
    assert candidates >= K
    assert group["scanned_ratio"] == 1
    assert group["bytes_read"] == pytest.approx(NUM_KEYS * DIM / GROUP + candidates * DIM * 2)
    assert group["recall"] > 0.97


# Times.


def test_a_time_is_the_median_per_query_head(memory: NoFlush) -> None:
    engine = FirstKeys()
    engine.build(tiny_head().keys, tiny_head().prompt)
    ends = iter([0, 1, 1, 8, 8, 10])  # runs of 1, 7 and 2 seconds
    watch = timing.Stopwatch(lambda: float(next(ends)), 3, memory)  # type: ignore[arg-type]
    groups = list(tiny_head().test.numpy())
    assert timing.hot_us(engine, groups, True, watch) == pytest.approx(2e6 / (POSITIONS * GROUP))


def test_a_rotation_empties_the_caches_and_never_asks_a_copy_the_same_twice_in_turn(
    memory: NoFlush,
) -> None:
    groups = [np.full((GROUP, 2), float(number)) for number in range(7)]
    visits = Visits()
    watch = timing.Stopwatch(ticking(), 2, memory)  # type: ignore[arg-type]
    us = timing.cold_us(visits, 4, groups, True, watch)
    timed = visits.seen[1:]  # after one that warms up
    assert memory.flushes == len(timed) == 6
    assert all(len(set(turn)) == 4 for turn in timed)
    for turn, following in pairwise(timed):
        assert all(one != other for one, other in zip(turn, following, strict=True))
    assert us == pytest.approx(1e6 / (4 * GROUP))


def test_rivals_in_a_rotation_take_turns_with_the_same_queries(memory: NoFlush) -> None:
    order: list[str] = []

    class Named(Visits):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def visit(self, groups: Sequence[np.ndarray], grouped: bool) -> None:
            super().visit(groups, grouped)
            order.append(self.name)

    groups = [np.full((GROUP, 2), float(number)) for number in range(7)]
    both = {name: (Named(name), True) for name in "ab"}
    watch = timing.Stopwatch(ticking(), 2, memory)  # type: ignore[arg-type]
    timing.cold_times(both, 4, groups, watch)  # type: ignore[arg-type]
    assert "".join(order) == "ab" * (len(order) // 2)
    assert both["a"][0].seen == both["b"][0].seen


@pytest.mark.parametrize(
    ("held", "l3", "limit", "copies"),
    [
        (100, 1000, 10**6, 40),  # four times the L3
        (10**4, 1000, 10**6, 4),  # at least four
        (10**4, 1000, 35000, 3),  # what fits
        (10**4, 1000, 15000, 0),  # one is no rotation
        (2**20, 2**40, 2**60, 4096),  # never more than 4 GiB
    ],
)
def test_copies_exceed_the_cache_within_the_limit(
    held: int, l3: int, limit: int, copies: int
) -> None:
    assert timing.num_copies(held, l3, limit) == copies


def test_copies_of_ours_are_heads_of_one_index_with_the_graph_learned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learn, learned = GraphLearner.learn_head, []

    def counted(*arguments: Any, **options: Any) -> Any:
        learned.append(arguments)
        return learn(*arguments, **options)

    monkeypatch.setattr(GraphLearner, "learn_head", counted)
    head = tiny_head()
    engine = own("graph", keys="f16", check_positions=7).make()
    assert isinstance(engine, Own)
    engine.build(head.keys, head.prompt)
    if engine.notes()[0]["serves"] != "graph":
        pytest.skip(f"no graph here: {engine.notes()[0]['reason']}")
    expected = engine.find(head.test[0].numpy())
    copies = engine.repeated(3)
    assert len(learned) == 1
    found = copies._index.search(head.test[:1].expand(3, -1, -1).contiguous(), K).ids
    assert np.array_equal(found.numpy(), np.stack([expected] * 3))
    graphs = copies._index._graphs
    places = {graph.lists.data_ptr() for graph in (*graphs, *engine._index._graphs)}
    assert len(places) == 4


def test_copies_of_a_sketch_are_learned_once_and_lie_apart() -> None:
    head = tiny_head()
    engine = own("sketch", keys="f16", codes="16").make()
    assert isinstance(engine, Own)
    engine.build(head.keys, head.prompt)
    if engine.notes()[0]["serves"] != "sketch":
        pytest.skip(f"no sketch here: {engine.notes()[0]['reason']}")
    expected = engine.find(head.test[0].numpy())
    copies = engine.repeated(3)
    found = copies._index.search(head.test[:1].expand(3, -1, -1).contiguous(), K).ids
    assert np.array_equal(found.numpy(), np.stack([expected] * 3))
    sketches = (*copies._index._coded.sketches.values(), *engine._index._coded.sketches.values())
    assert len({sketch.tiers[0].codes.data_ptr() for sketch in sketches}) == 4
    plan = engine._index._coded.sketches[0].tiers[0].map.plan
    assert engine.code_bytes == len(head.keys) * plan.code_bytes


def test_samples_of_a_made_up_head_stand_where_decoding_will_ask() -> None:
    head = heads.synthetic("paper", 700, 0, 5)
    rows = torch.tensor([3, 37, 699])
    there, ahead = head.prompt(rows), head.prompt(rows, 64)
    assert torch.equal(there, head.prompt(rows, 0))
    assert not torch.allclose(there, ahead)
    torch.testing.assert_close(there.norm(dim=-1), ahead.norm(dim=-1))


def test_auto_is_compared_with_what_it_chooses_from(plan: measure.Plan) -> None:
    both = replace(plan, cold_bytes=2**30, threads=[1, 2])
    found = compare_auto(tiny_head(), both, "f16")
    assert found["serves"] == {"1": "flat", "2": "flat"}  # of so few keys
    assert found["copies"] >= 4
    for heat in ("hot", "cold"):
        for times in found[heat].values():
            assert times["auto_over_better"] == times["auto_over_better_by_turn"] == 1  # that clock


def test_copies_of_auto_have_the_graph_that_follows_its_sketch() -> None:
    head = heads.synthetic("paper", 4200, 0, 5)
    wanted = {"graph_min_keys": 1, "graph_tokens": 10**9, "min_keys": 1}
    sizes = {**wanted, "gain": 0, "max_scanned": 1.0}
    engine = own("auto", keys="f16", sizes=sizes, target_recall=0.3).make()
    assert isinstance(engine, Own)
    engine.build(head.keys, head.prompt)
    copies = engine.repeated(2)
    assert engine._index.successor() is None
    assert set(engine._learned) == {"SketchLearner.learn_head", "GraphLearner.learn_head"}
    told = engine.notes() + copies.notes()
    assert all("graph" in note["reason"] and " us (" in note["reason"] for note in told)


# Rows, ratios, sizes, data.


def test_rows_are_chosen_by_pattern_and_written_out() -> None:
    assert [row.name for row in chosen_rows(["faiss-hnsw*"])] == [
        "faiss-hnsw32 raw",
        "faiss-hnsw32 centred",
    ]
    rows = parse_rows("graph:keys=bf16,max_degree=32|64,mode=group")
    assert [row.name for row in rows] == [
        "graph keys=bf16 max_degree=32",
        "graph keys=bf16 max_degree=64",
    ]
    assert all(row.modes == ("group",) and row.knob is not None for row in rows)
    assert parse_rows("graph:beam=100")[0].knob is None
    with pytest.raises(LookupError, match="faiss-flat"):
        chosen_rows(["nothing"])


def test_pivot_links_are_pruned_filled_and_returned() -> None:
    keys = np.array([[1, 0], [2, 0], [0.9, 0.1], [0.5, 1], [-1, 0]], np.float32)
    candidates = np.full((5, 4), -1, np.int32)
    candidates[0] = [4, 3, 2, 1]  # key 1 is best for 0, and scores 2 and 3 higher than 0 does
    assert pivot.link(candidates, keys, 4)[0].tolist() == [1, 4, 2, 3]
    linked = pivot.link(candidates, keys, 2)
    assert linked[0].tolist() == [1, 4]
    assert linked[1].tolist() == linked[4].tolist() == [0, -1]
    assert linked[2].tolist() == [-1, -1]


def test_queries_of_one_pivot_share_its_list() -> None:
    lists = np.array([[3, 1, 2], [0, 2, 4], [3, 2, 5]], np.int32)
    found = pivot.by_pivot(lists, 6)
    assert found[3][found[3] >= 0].tolist()[0] == 2  # named twice
    assert sorted(found[3][found[3] >= 0].tolist()) == [1, 2, 5]
    assert sorted(found[0][found[0] >= 0].tolist()) == [2, 4]
    assert (found[[1, 2, 4, 5]] == -1).all()


def test_an_unknown_kind_or_parameter_makes_a_row_absent() -> None:
    for text in ("nothing:", "flat:nothing=1"):
        with pytest.raises(engines.AbsentError, match="nothing"):
            parse_rows(text)[0].make()


def result(row: str, mode: str, hot: float, cold: float | None, **more: Any) -> dict[str, Any]:
    times = {} if cold is None else {"2": cold / 2, "1": cold}
    about = {"n": 1000, "data": "tiny", "setting": {}, "targets": [], "recall": 1.0}
    return {**about, "row": row, "mode": mode, "hot_us": hot, "cold_us": times, **more}


def test_ratios_compare_hot_with_faiss_and_cold_with_our_shared_scan() -> None:
    rows = [
        result("faiss-flat", "single", 900, 1000),
        result("faiss-flat", "group", 700, 800),
        result(*derive.INT8_FLAT, 50, 60),
        result("graph", "group", 30, 20),
        {"row": "gone", "absent": "not installed"},
    ]
    derive.add_ratios(rows, stream_us=40)
    graph = rows[3]
    assert graph["hot_over_faiss_flat"] == 30
    assert graph["cold_over_int8_flat"] == 3
    assert graph["cold_over_stream"] == 2
    derive.add_ratios(rows[3:], stream_us=40)
    assert graph["hot_over_faiss_flat"] is None


def test_the_rate_of_memory_is_told_per_query_head() -> None:
    assert derive.stream_us(131072, 128, 4, gbps=20) == pytest.approx(131072 * 128 / 4 / 20e3)


def test_a_size_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    machine.refuse_what_does_not_fit(1000, 128, available=3 * 10**6)
    with pytest.raises(MemoryError, match=r"1,000,000 keys of 128 .* 2\.4 GiB .* 1\.9 GiB"):
        machine.refuse_what_does_not_fit(10**6, 128, available=2 * 10**9)


def test_test_windows_are_not_windows_of_the_prompt(tmp_path: Path) -> None:
    class Words:
        def __call__(self, text: str, **_options: object) -> dict[str, list[int]]:
            return {"input_ids": [int(word) for word in text.split()]}

    (tmp_path / "a.txt").write_text(" ".join(map(str, range(4000))))
    (tmp_path / "tiny.md").write_text("7 7 7")
    windows, source = minilm.text_windows(Words(), 7, 0, tmp_path)
    starts = sorted(window[0] for window in windows)
    assert starts == [510 * place for place in range(7)]
    assert [window[0] for window in windows] != starts
    assert source == tmp_path.name
    assert minilm.text_windows(Words(), 7, 0, tmp_path / "a.txt")[1] == "a.txt"
    with pytest.raises(LookupError, match="--text"):
        minilm.text_windows(Words(), 8, 0, tmp_path)


def test_growth_takes_the_settings_that_reach_the_goal() -> None:
    goal = {"metric": "recall", "value": 0.95, "calibrated": 0.96, "reached": True}
    rows = [
        result("graph", "group", 1, 20, targets=[goal], setting={"beam": 90}, recall=0.94),
        result("graph", "group", 1, 30, targets=[goal], n=2000, setting={"beam": 99}),
        result("graph", "group", 1, 5, targets=[goal | {"reached": False}], setting={"beam": 9}),
        result("graph", "group", 1, 7, setting={"beam": 9}),
    ]
    assert plots.growth(rows) == [(1000, 20), (2000, 30)]
    assert plots.growth([result("flat", "group", 1, 9)]) == [(1000, 9)]
    assert plots.growth([result("ivf", "group", 1, 9, recall=0.5)]) == []


def test_curves_average_seeds_and_leave_out_what_only_one_has() -> None:
    rows = [
        result("graph", "group", 1, 20, setting={"beam": 9}, recall=0.8),
        result("graph", "group", 1, 30, setting={"beam": 9}, recall=0.9),
        result("graph", "group", 1, 99, setting={"beam": 77}),
        result("graph", "group", 50, None, setting={"beam": 20}, recall=0.9),
        result("graph", "group", 70, None, setting={"beam": 20}, recall=1.0),
    ]
    assert plots.curve(rows) == [(25, pytest.approx(0.85)), (60, pytest.approx(0.95))]


def test_results_are_plain_json(plan: measure.Plan) -> None:
    bench = measure.Bench(tiny_head(), replace(plan, cold_bytes=2**30, curve=True))
    row = own("ivf", nlist=8)
    found = list(bench.run(Row("ivf", row.make, row.modes, Knob("nprobe", 1, 8))))
    assert json.loads(json.dumps(found)) == found
    assert all(set(one["cold_us"]) == {"1"} for one in found)
    assert [one["setting"]["nprobe"] for one in found if one["mode"] == "group"] == sorted(
        {one["setting"]["nprobe"] for one in found}
    )


def test_stdout_is_the_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = ["flat keys=f16*", "faiss-flat"]
    asked = ["--n", "700", "--queries", "5", "--repeats", "1", "--data", "paper,nothing"]
    asked += ["--memory", "1m", "--rows", *rows, "--text", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["run.py", *asked])
    run.main()
    document = expand(json.loads(capsys.readouterr().out))
    assert document["schema"] == run.SCHEMA
    assert document["settings"]["text"] == tmp_path.name  # and not where it lies
    about, absent = document["heads"]
    assert about["n"] == 700
    assert about["group"] == 4
    assert "nothing" in absent["absent"]
    first = document["rows"][0]
    assert first["recall"] > 0.97
    assert first["hot_over_faiss_flat"] > 0  # though faiss-flat came later
    assert len(document["environment"]["stream_gbps"]) == 2


def test_a_run_that_is_ended_leaves_the_rows_that_it_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Interrupted(Engine):
        def build(self, keys: torch.Tensor, prompt: heads.Prompt) -> None:
            raise KeyboardInterrupt

        find = work = held_bytes = row_bytes = copies = None  # type: ignore[assignment]

    rows = [*chosen_rows(["faiss-flat"]), Row("interrupted", Interrupted)]
    monkeypatch.setattr(run, "chosen_rows", lambda wanted: rows)
    place = tmp_path / "rows.json"
    asked = ["--n", "700", "--queries", "5", "--repeats", "1", "--data", "paper", "--no-cold"]
    monkeypatch.setattr("sys.argv", ["run.py", *asked, "--out", str(place)])
    with pytest.raises(KeyboardInterrupt):
        run.main()
    document = expand(json.loads(place.read_text()))
    assert [row["row"] for row in document["rows"]] == ["faiss-flat", "faiss-flat"]
    assert [about["n"] for about in document["heads"]] == [700]
    assert str(tmp_path) not in place.read_text()


def test_copies_are_timed_by_other_queries_each(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[torch.Tensor] = []
    wanted = own("graph", keys="f16", min_keys=1, sampled_queries=40, recent_queries=9)
    engine = wanted.make()
    assert isinstance(engine, Own)
    head = tiny_head()
    engine.build(head.keys, head.prompt)
    monkeypatch.setattr(
        GraphIndex, "build", lambda index, keys, samples=None, nearest=None: built.append(samples)
    )
    engine.repeated(3)
    (samples,) = built
    assert samples.shape[:2] == (3, GROUP)
    first, second, third = samples[:, :, -9:]
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert torch.equal(samples.sort(2).values, samples[:1].sort(2).values.expand_as(samples))
