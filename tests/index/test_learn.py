"""The self-check sees what a graph misses, and sends the head elsewhere."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.index._graph_learner import (
    Goal,
    choose,
    effective_dim,
    hold_out,
    learn,
    num_like_later,
)
from hybrid_kv.index._trial import HeadReport, Trial
from hybrid_kv.ops.key_graph import BuildParams, KeyGraph
from hybrid_kv.rotary import Rotary, Samples

DIM = 24
GOAL = Goal(top_k=10, recall=0.95, mass=1.0, max_scanned=0.5, positions=16, beams=(20, 160))


def nearest(keys: Tensor, queries: Tensor, count: int) -> Tensor:
    return (queries.float() @ keys.float().T).topk(count).indices.int()


def project(lists: Tensor, keys: Tensor, queries: Tensor, params: BuildParams) -> KeyGraph:
    """A 'graph' that knows the retrieved keys and nothing else."""
    return KeyGraph(lists.unique(), torch.empty(0), torch.empty(0), len(keys), 1)


def search(
    graph: KeyGraph, keys: Tensor, queries: Tensor, count: int, beam: int
) -> tuple[Tensor, Tensor, int]:
    """Exact over a share of the known keys that grows with the beam."""
    known = torch.isin(torch.arange(len(keys)), graph.keys_of)
    seen = known & (torch.arange(len(keys)) * 7919 % 200 < beam)
    scores = (queries.float() @ keys.float().T).masked_fill(~seen, -torch.inf)
    found = scores.topk(count)
    return found.indices, found.values, int(seen.sum())


class Exact:
    """An engine made of the functions above; `lost`: of the beam, by walks that share queries."""

    def __init__(self, keys: Tensor, lost: float = 0.0) -> None:
        self.keys, self.lost = keys, lost

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        return nearest(self.keys, queries, count)

    lists = nearest

    def project(self, lists: Tensor, queries: Tensor, params: BuildParams) -> KeyGraph:
        return project(lists, self.keys, queries, params)

    def searcher(self, graph: KeyGraph) -> Any:
        def find(queries: Tensor, top_k: int, *, beam: int, walks: int) -> Any:
            beam = max(1, int(beam / walks**self.lost))
            ids, scores, rows = search(graph, self.keys, queries[0], top_k, beam)
            return SimpleNamespace(ids=ids[None], scores=scores[None], rows_visited=rows)

        return SimpleNamespace(search=find)


def data(num_keys: int = 1000, positions: int = 400) -> tuple[Tensor, Tensor]:
    return torch.randn(num_keys, DIM), 2 * torch.randn(3, positions, DIM)


def run(keys: Tensor, samples: Tensor, goal: Goal = GOAL) -> tuple[KeyGraph | None, HeadReport]:
    return learn(keys, samples, BuildParams(), 50, goal, Exact(keys))


def test_the_search_for_a_beam_closes_in_on_the_smallest_that_reaches_the_goal() -> None:
    keys, samples = data()
    graph, report = run(keys, samples, Goal(10, 0.70, 1.0, 1.0, 16, (20, 200)))
    assert graph is not None
    assert report.serves == "graph"
    tried = {trial.beam: trial.recall for trial in report.trials}
    assert list(tried)[:6] == [20, 32, 51, 81, 129, 200]  # until one reaches it
    assert tried[report.beam] >= 0.70
    misses = max(beam for beam, recall in tried.items() if recall < 0.70)
    assert misses < report.beam <= misses + report.beam // 8
    assert sorted(tried.values()) == [tried[beam] for beam in sorted(tried)]


def test_no_larger_beam_is_tried_than_allowed_or_than_pays() -> None:
    keys, samples = data()
    _, report = run(keys, samples, Goal(10, 2.0, 2.0, 1.0, 16, (20, 60)))
    assert [trial.beam for trial in report.trials] == [20, 32, 51, 60]
    _, report = run(keys, samples, Goal(10, 2.0, 2.0, 0.2, 16, (20, 200)))
    assert [trial.beam for trial in report.trials] == [20, 32, 51]
    assert report.trials[-1].scanned > 0.2
    _, report = run(keys, samples, Goal(10, 0.1, 2.0, 1.0, 16, (70, 70)))
    assert [trial.beam for trial in report.trials] == [70]


def test_the_beam_is_the_smallest_by_mass_where_mass_is_reached_first() -> None:
    keys, samples = data()
    _, by_mass = run(keys, samples, Goal(10, 0.70, 0.2, 1.0, 16, (20, 200)))
    _, by_recall = run(keys, samples, Goal(10, 0.70, 2.0, 1.0, 16, (20, 200)))
    assert by_mass.beam < by_recall.beam


def test_recall_and_mass_are_those_of_a_direct_computation() -> None:
    keys, samples = data()
    _, report = run(keys, samples, Goal(10, 2.0, 2.0, 1.0, 16, (100, 100)))
    _, check = hold_out(samples, 16)
    known = project(
        nearest(keys, hold_out(samples, 16)[0].flatten(0, 1), 50), keys, keys, BuildParams()
    )
    recalls, masses = [], []
    for position in range(16):
        queries = check[:, position]
        logits = queries @ keys.T / DIM**0.5
        found, _, scored = search(known, keys, queries, 10, 100)
        for head in range(3):
            exact = set(logits[head].topk(10).indices.tolist())
            recalls.append(len(exact & set(found[head].tolist())) / 10)
            weights = logits[head].exp()
            masses.append(float(weights[found[head]].sum() / weights.topk(10).values.sum()))
    (trial,) = report.trials
    assert trial.recall == pytest.approx(sum(recalls) / len(recalls))
    assert trial.mass == pytest.approx(sum(masses) / len(masses), rel=1e-4)
    assert trial.scanned == scored / len(keys)


@pytest.mark.parametrize("num_keys", [1000, 20_011])
def test_the_mass_of_the_top_is_over_all_keys(num_keys: int) -> None:
    keys, samples = data(num_keys)
    _, report = run(keys, samples, Goal(10, 2.0, 2.0, 1.0, 16, (100, 100)))
    logits = hold_out(samples, 16)[1] @ keys.T / DIM**0.5
    exact = (logits.topk(10).values.logsumexp(-1) - logits.logsumexp(-1)).exp().mean()
    assert report.top_mass == pytest.approx(float(exact), rel=1e-4 if num_keys < 8192 else 0.1)


def test_a_head_whose_keys_were_not_retrieved_is_served_flat() -> None:
    keys, samples = data()
    held = torch.isin(samples, hold_out(samples, 16)[1])
    samples = torch.where(held, samples, samples[:, :1])  # all others ask for the same
    graph, report = run(keys, samples, Goal(10, 0.95, 1.0, 1.0, 16, (200, 200)))
    assert graph is None
    assert report.serves == "flat"
    assert "misses the target 0.95" in report.reason


def test_a_search_that_scores_too_much_does_not_pass() -> None:
    keys, samples = data()
    goal = Goal(10, 0.95, 1.0, 0.02, 16, (200, 200))
    _, report = run(keys, samples, goal)
    assert report.serves == "flat"
    assert report.trials[-1].recall >= 0.95
    assert "within 2%" in report.reason


def test_mass_lets_a_head_pass_whose_last_keys_weigh_nothing() -> None:
    trials = [Trial(50, 0.6, 0.9999, 0.02), Trial(100, 0.96, 1.0, 0.1)]
    assert choose(trials, Goal(10, 0.95, 0.999, 0.5, 16, (50, 100)))[0] == trials[0]
    goal = Goal(10, 0.95, 2.0, 0.5, 16, (50, 100))
    assert choose(trials, goal)[0] == trials[1]
    assert choose([], goal) == (None, "no held-out queries")


def test_too_few_samples_are_said() -> None:
    keys, samples = data(positions=7)
    graph, report = run(keys, samples)
    assert graph is None
    assert report.reason == "7 sampled positions are too few"


def test_held_out_positions_are_a_block_of_their_own() -> None:
    samples = torch.arange(2 * 803).reshape(2, 803, 1).float()
    build, check = hold_out(samples, 64)
    assert build.shape[1] == 803 - 100
    assert check.min() >= build[0].max() + 1  # none of the run is in the build
    assert check.shape[1] == 35
    build, check = hold_out(samples, 20)
    assert (build.shape[1], check.shape[1]) == (803 - 60, 20)
    assert hold_out(samples[:, :100], 64)[1].shape[1] == 5


def test_held_out_queries_stand_where_decoding_begins() -> None:
    """Spread over the horizon they promised up to .05 more than decoding finds at first."""
    samples = Samples(torch.zeros(1, 1, 803, 4), torch.arange(803), Rotary((0.01, 0.02)))
    ahead = samples.ahead(803, 4096)
    assert ahead.positions is not None
    _, check = hold_out(ahead.positions[None, :, None], 64)
    assert check.max() < 803 + 512
    assert hold_out(ahead.positions[None, :, None], 64)[0].max() > 803 + 4000


def test_only_samples_that_are_like_later_queries_are_held_out() -> None:
    # 80 even samples of 1000 positions, then the last 250: the even ones from 750 on come twice.
    assert num_like_later(330, 250, 1000) == 60
    assert num_like_later(330, 0, 1000) == 330
    assert num_like_later(250, 250, 1000) == 250  # there are no others
    assert num_like_later(330, 250, 260) == 330  # too few are apart
    samples = torch.arange(330).reshape(1, 330, 1).float()
    build, check = hold_out(samples, 16, 60)
    assert 60 - 41 <= check.min() < check.max() < 60
    assert build.flatten().tolist() == [*range(60 - 41), *range(60, 330)]
    assert hold_out(samples, 100, 7)[0].flatten().tolist() == list(range(7, 330))


def test_a_head_is_not_judged_by_the_last_positions_of_the_prompt() -> None:
    keys, samples = data(num_keys=6000)
    samples[:, 100:] = samples[:, 100:101]  # the last positions are all alike, and easily served
    goal = Goal(10, 2.0, 2.0, 1.0, 16, (200, 200))
    easy, honest = (
        run(keys, samples, replace(goal, recent=recent))[1].trials[0].recall for recent in (0, 300)
    )
    assert honest < easy - 0.05


def test_walks_that_share_queries_get_the_beam_that_finds_as_much() -> None:
    """They got a beam a quarter wider whatever the head was; the promise was that of one walk."""
    keys, samples = data()
    goal = Goal(10, 0.70, 1.0, 1.0, 16, (20, 200))
    served: dict[float, HeadReport] = {}
    for lost in (0.0, 0.6, 2.0):
        engine = Exact(keys, lost)
        served[lost] = learn(keys, samples, BuildParams(), 50, goal, engine, walks=2)[1]
    alone = run(keys, samples, goal)[1]
    assert (served[0.0].walks, served[0.0].beam) == (2, alone.beam * 5 // 4)
    assert served[0.6].walks == 2
    assert served[0.6].beam > served[0.0].beam
    assert served[0.6].recall >= 0.70
    assert (served[2.0].walks, served[2.0].beam) == (1, alone.beam)  # they never find as much
    for report in (alone, *served.values()):
        how = ("beam", "walks", "recall", "mass")
        (made,) = {t for t in report.trials if (t.beam, t.walks) == (report.beam, report.walks)}
        assert [getattr(made, name) for name in how] == [getattr(report, name) for name in how]


def test_effective_dim_counts_directions() -> None:
    keys = torch.randn(4000, 16)
    for wanted in (1, 4, 16):
        metric = torch.diag((torch.arange(16) < wanted).float())
        assert effective_dim(keys, metric) == pytest.approx(wanted, rel=0.02)


def test_reports_survive_json() -> None:
    trial = Trial(100, 0.9, 0.99, 0.03, 2)
    report = HeadReport("graph", "why", 100, 2, 0.9, 0.99, (trial,), 0.8, 12.5)
    assert HeadReport.from_dict(report.to_dict()) == report
