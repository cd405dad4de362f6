"""Half an hour of everything at once: the server's memory stays flat. `HYBRID_KV_SOAK=30` runs it.

Its figures are printed: `HYBRID_KV_SOAK=30 pytest -s tests/serve/test_soak.py`. Clients ask without
a pause unless `HYBRID_KV_SOAK_PAUSE` names the mean one, in seconds.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from statistics import median

import httpx
import psutil
import pytest

from tests.serve.processes import serve_process

MINUTES = float(os.environ.get("HYBRID_KV_SOAK", "0"))
PAUSE_S = float(os.environ.get("HYBRID_KV_SOAK_PAUSE", "0"))
CLIENTS = 8
TEXT = "the river. key 3f a0: 11 5c 9e 07. the hill. "


def client(url: str, seed: int, end: float, seen: Counter[str]) -> None:
    """Asks what a client may ask, and leaves as clients leave."""
    dice = random.Random(seed)
    with httpx.Client(base_url=url, timeout=300) as wire:
        while time.monotonic() < end:
            time.sleep(dice.uniform(0, 2 * PAUSE_S))
            try:
                status, body = ask(wire, dice)
                seen[str(status)] += 1
                if status >= 500:
                    print(status, body, flush=True)
            except httpx.TransportError:  # the server ends connections that were idle too long
                seen["idle"] += 1


def ask(wire: httpx.Client, dice: random.Random) -> tuple[int, str]:
    """One request of a random kind; its status, and what came of it."""
    path, body = (
        "/v1/completions",
        {
            "model": "needle",
            "prompt": f"{TEXT * dice.choice((1, 5, 40, 200))}? key {dice.randrange(99):02d} a0",
            "max_tokens": dice.choice((4, 16, 64)),
            "temperature": dice.choice((0, 1)),
        },
    )
    kind = dice.choice(("whole", "stream", "leave", "wrong", "broken"))
    if kind == "whole":
        answer = wire.post(path, json=body)
    if kind == "wrong":
        answer = wire.post(path, json={**body, "n": "many"})
    if kind == "broken":
        head = {"content-type": "application/json"}
        answer = wire.post(path, content=b'{"model', headers=head)
    if kind in ("whole", "wrong", "broken"):
        return answer.status_code, answer.text
    with wire.stream("POST", path, json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if '"error"' in line:  # what fails later than its first byte
                return 500, line
            if kind == "leave" and dice.random() < 0.2:
                break
        return stream.status_code, ""


@pytest.mark.slow
@pytest.mark.skipif(not MINUTES, reason="takes half an hour: HYBRID_KV_SOAK=30 runs it")
def test_memory_stays_flat() -> None:
    words = ("needle", "--max-running", "8", "--set", "index_build=wait")
    with serve_process(*words, "--prefix-memory", "64MiB") as running:  # soon full
        end = time.monotonic() + 60 * MINUTES
        seen: Counter[str] = Counter()
        threads = [
            threading.Thread(target=client, args=(running.url, seed, end, seen))
            for seed in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        process, sizes = psutil.Process(running.process.pid), []
        while time.monotonic() < end:
            time.sleep(min(5.0, MINUTES))
            sizes.append(process.memory_info().rss / 2**20)
        for thread in threads:
            thread.join(300)
        half = len(sizes) // 2
        before, after = median(sizes[half // 2 : half]), median(sizes[half + half // 2 :])
        print(f"answers {dict(seen)}; RSS in MiB: {before:.0f} then {after:.0f}, at most", end=" ")
        print(f"{max(sizes):.0f}, each minute {[round(size) for size in sizes[::12]]};", end=" ")
        print(f"lines {running.lines[1:]}")
        assert not any(status.startswith("5") for status in seen)
        assert httpx.get(running.url + "/health").status_code == 200
        assert after < 1.1 * before + 32
