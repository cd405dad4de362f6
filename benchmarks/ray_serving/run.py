"""Requests to two replicas on this machine, one of them killed: what is lost, what is continued.

`python benchmarks/ray_serving/run.py needle` needs Ray. Conversations of several turns each are
asked at the same time; each turn begins with the one before. In the middle one of the two nodes is
killed. Every answer is compared with that of one engine that was asked the same.
"""

from __future__ import annotations

import argparse
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random
from time import perf_counter
from typing import Any

from ray.cluster_utils import Cluster

from hybrid_kv.api import load
from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.needle import filler
from hybrid_kv.ray.replica import ReplicaSpec
from hybrid_kv.ray.replicas import ReplicaEngine
from hybrid_kv.serve import Engine, Finished, Limits, Request, Sampling, Token

LIMITS = Limits(max_running=8, max_queue=200)
SETTINGS = {"index_build": "wait"}


class Conversations:
    """Turns of several conversations, asked in threads; `answered` counts them."""

    def __init__(self, engine: Any, count: int, turns: int, tokens: int) -> None:
        self.engine, self.count, self.turns, self.tokens = engine, count, turns, tokens
        self.answered, self.lock = 0, threading.Lock()
        self.half = threading.Event()
        self.ends: list[Finished] = []

    def run(self, number: int) -> list[list[int]]:
        """Answers of one conversation; odd ones are drawn by a seed."""
        ids, answers = filler(self.tokens, number).tolist(), []
        for turn in range(self.turns):
            sampling = Sampling(seed=turn) if number % 2 else Sampling(temperature=0)
            tokens = []
            for event in self.engine.submit(Request(tuple(ids), 16, sampling)).events():
                if isinstance(event, Token):
                    tokens.append(event.id)
                elif isinstance(event, Finished):
                    self.note(event)
            answers.append(tokens)
            asked = Random(100 * number + turn)
            ids += tokens + filler(40, asked.randrange(2**20)).tolist()
        return answers

    def note(self, end: Finished) -> None:
        with self.lock:
            self.ends.append(end)
            if len(self.ends) * 2 >= self.count * self.turns:
                self.half.set()

    def all(self) -> list[list[list[int]]]:
        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(self.run, range(self.count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--keep", action="store_true", help="kill no node")
    asked = parser.parse_args()
    sizes = asked.conversations, asked.turns, asked.tokens

    with load(asked.model, dtype="float32", config=SETTINGS) as llm, Engine(llm, LIMITS) as engine:
        expected = Conversations(engine, *sizes).all()
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    spare = cluster.add_node(num_cpus=1)
    config = HybridConfig.from_settings(SETTINGS)
    spec = ReplicaSpec(asked.model, config, {"dtype": "float32"}, LIMITS, None, os.getcwd(), ())
    with ReplicaEngine(cluster.address, spec, print) as replicas:
        talk = Conversations(replicas, *sizes)
        killing = threading.Thread(
            target=lambda: talk.half.wait() and cluster.remove_node(spare, allow_graceful=False)
        )
        if not asked.keep:
            killing.start()
        begin = perf_counter()
        found = talk.all()
        seconds = perf_counter() - begin
    cluster.shutdown()
    same = sum(
        one == other
        for mine, its in zip(found, expected, strict=True)
        for one, other in zip(mine, its, strict=True)
    )
    print(f"{len(talk.ends)} requests in {seconds:.0f} s, {same} answers are those of one engine")
    print(told(talk.ends, asked.tokens))


def told(ends: list[Finished], first_tokens: int) -> str:
    """Errors, and prefixes that later turns continued."""
    lost = [end.error for end in ends if end.error is not None]
    later = [end.usage for end in ends if end.usage.prompt_tokens > first_tokens]
    hits = sum(usage.reused_tokens > 0 for usage in later)
    reused = sum(usage.reused_tokens for usage in later)
    share = reused / sum(usage.prompt_tokens for usage in later)
    return (
        f"{len(lost)} lost {lost[:3]}; {hits} of {len(later)} later turns "
        f"continued a prefix, {share:.1%} of their prompts' tokens"
    )


if __name__ == "__main__":
    main()
