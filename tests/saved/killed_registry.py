"""Processes that are killed while they leave contexts in a folder, and processes that share one.

    python -m tests.saved.killed_registry KILLS

adds small contexts to a folder that holds three of them, again and again, in a process that is
killed (SIGKILL) after a random time, and each time looks at what is there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hybrid_kv as hkv
from hybrid_kv.saved import ContextRegistry, verify_context
from hybrid_kv.saved.folders import num_bytes
from tests.kit import cache_of, every
from tests.saved.killed import dying_at, in_child
from tests.saved.scene import SMALL, TEXT, loaded, long_model

PLACES = 3
"""Contexts for which there is room."""


class Scene:
    """Contexts that share no block, and the folder that they go to."""

    def __init__(self, llm: hkv.LLM, folder: Path) -> None:
        self.llm, self.folder = llm, folder
        words = TEXT.split()
        kinds = ["sea", "sky", "sun", "ice", "oak", "elm"]
        self.contexts = [llm.context(" ".join([kind, *words[:300]])) for kind in kinds]
        limit = 1 << 40
        registry = self.registry(limit)
        for context in self.contexts[:1]:
            self.add(registry, context)
        (path,) = folder.glob("*/*.hkv")
        self.limit = int((PLACES + 0.5) * num_bytes(path))

    def registry(self, limit: int | None = None) -> ContextRegistry:
        return ContextRegistry(self.folder, self.limit if limit is None else limit)

    def add(self, registry: ContextRegistry, context: hkv.Context) -> bool:
        return registry.add(cache_of(context), context.ids, self.llm, prefill_s=1.0)

    def there(self) -> list[str]:
        """The contexts in the folder, every byte of which is right; used last at the end."""
        paths = sorted(self.folder.glob("*/*.hkv"), key=lambda path: path.stat().st_mtime_ns)
        for path in paths:
            verify_context(path)
        return [path.name for path in paths]

    def begin(self) -> None:
        """An empty folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def check(self, before: list[str]) -> str:
        """What a killed process made of these contexts, in order of their use.

        Nothing that was there is lost but for the one that has to make room for a new one, which is
        there then.
        """
        now = self.there()
        new = [name for name in now if name not in before]
        lost = [name for name in before if name not in now]
        assert len(new) <= 1, (before, now)
        assert lost == before[: len(lost)], (before, now)
        needed = max(0, len(before) + len(new) - PLACES)
        assert len(lost) <= needed, (before, now)
        assert not lost or new, (before, now)
        return f"{len(new)} added, {len(lost)} evicted"


def at_random(scene: Scene, kills: int) -> Counter[str]:
    """How often what was found after a kill at a random moment."""
    found: Counter[str] = Counter()
    log = scene.folder.parent / "log"
    scene.begin()
    registry = scene.registry()
    begin = time.perf_counter()
    for context in scene.contexts:
        scene.add(registry, context)
    round_s = time.perf_counter() - begin

    def add_on() -> None:
        own = scene.registry()
        note = os.open(log, os.O_WRONLY)
        for number in range(10**6):
            os.pwrite(note, json.dumps(scene.there()).ljust(1000).encode(), 0)
            scene.add(own, scene.contexts[number % len(scene.contexts)])

    for _ in range(kills):
        log.write_text(json.dumps(scene.there()))
        in_child(add_on, random.uniform(0, 1.5 * round_s))
        found[scene.check(json.loads(log.read_text()))] += 1
    return found


def at_every_call(scene: Scene, stride: int) -> list[str]:
    """What was there after a process that died at its first call to the file system, and so on."""
    scene.begin()
    registry = scene.registry()
    for context in scene.contexts[:PLACES]:
        scene.add(registry, context)
    full = scene.folder.parent / "full"
    shutil.copytree(scene.folder, full)  # with the times of their use
    before, seen = scene.there(), []
    for fatal in range(0, 10**6, stride):
        scene.begin()
        shutil.copytree(full, scene.folder)

        def add(fatal: int = fatal) -> None:
            own = scene.registry()
            dying_at(fatal)
            scene.add(own, scene.contexts[PLACES])

        ended = in_child(add)
        seen.append(scene.check(before))
        if ended:
            break
    return seen


def together(scene: Scene, rounds: int) -> dict[str, Any]:
    """Two processes that leave and take contexts in one folder, which has no room for all."""
    scene.begin()
    scene.registry()
    keys = [_keys(cache_of(context)) for context in scene.contexts]
    children = [_child(_worker(scene, keys, seed, rounds)) for seed in (1, 2)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    counters = scene.registry().counters
    return {
        "codes": codes,
        "there": len(scene.there()),
        "takes": counters.hits + counters.misses,
        "hits": counters.hits,
        "damaged": counters.damaged,
        "tokens": counters.tokens_saved,
    }


def _worker(scene: Scene, keys: list[torch.Tensor], seed: int, rounds: int) -> Callable[[], None]:
    def work() -> None:
        chance, registry = random.Random(seed), scene.registry()
        for _ in range(rounds):
            number = chance.randrange(len(scene.contexts))
            context = scene.contexts[number]
            cache = scene.llm.runtime.cache()
            taken = registry.take(cache, context.ids, scene.llm, torch.device("cpu"))
            assert taken in (0, context.ids.shape[1]), taken
            if taken:
                assert torch.equal(_keys(cache), keys[number])
            else:
                scene.add(registry, context)

    return work


def _keys(cache: Any) -> torch.Tensor:
    return torch.cat([row.entries()[0] for row in every(cache)])


def _child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def main(kills: int, stride: int, rounds: int) -> None:
    torch.set_num_threads(1)  # a forked process has no threads of its parent's
    folder = Path(tempfile.mkdtemp())
    try:
        with loaded(long_model(), "flat", **SMALL, cold={"top_k": 5}) as llm:
            scene = Scene(llm, folder / "contexts")
            found = at_random(scene, kills)
            shared = together(scene, rounds)
            seen = at_every_call(scene, stride) if stride else []
            registry = scene.registry()
            scene.add(registry, scene.contexts[-1])  # takes away what the killed left behind
            left = sorted(path.name for path in scene.folder.glob("*") if len(path.name) != 32)
            parts = [path.name for path in scene.folder.glob("*/.*")]
        told = {"found": found, "together": shared, "seen": seen, "left": left, "parts": parts}
        print(json.dumps(told))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
