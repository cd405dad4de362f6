"""Processes that are killed while a context from a file grows.

    python -m tests.saved.killed_append KILLS

opens a small context, appends to it, asks it and keeps the answer, and saves it where it was, again
and again, in a process that is killed (SIGKILL) after a random time, and each time looks at what is
there: what was saved last, or the one that was being saved.
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
from pathlib import Path

import torch

import hybrid_kv as hkv
from hybrid_kv.saved import verify_context
from tests.kit import cache_of
from tests.saved.killed import in_child
from tests.saved.scene import SMALL, TEXT, loaded, long_model

MORE = " ".join(TEXT.split()[:60])
FIRST, MOST = 300, 2000


class Growing:
    """A context in a file, and a note beside it of how many tokens it has and is about to have."""

    def __init__(self, llm: hkv.LLM, folder: Path) -> None:
        self.llm, self.root, self.log = llm, folder / "a.hkv", folder / "log"

    def begin(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        with self.llm.context(" ".join(TEXT.split()[:FIRST])) as context:
            context.save(self.root)
        self.log.write_text(json.dumps([FIRST, FIRST]))

    def grow(self, rounds: int = 10**6) -> None:
        """Opened, grown and saved, in turn."""
        note = os.open(self.log, os.O_WRONLY)
        for _ in range(rounds):
            with self.llm.open(self.root) as context:
                before = context.ids.shape[1]
                context.append(MORE)
                context.ask("oak fox", keep=True, max_new_tokens=3)
                after = context.ids.shape[1]
                os.pwrite(note, json.dumps([before, after]).ljust(40).encode(), 0)
                context.save(self.root)
                os.pwrite(note, json.dumps([after, after]).ljust(40).encode(), 0)

    def check(self) -> tuple[str, int]:
        """What a killed process has left, and its tokens."""
        saved, about = json.loads(self.log.read_text())
        found = verify_context(self.root).manifest.num_tokens
        assert found in (saved, about), (saved, about, found)
        with self.llm.open(self.root) as context:
            cache_of(context).check_integrity()
            assert context.ids.shape[1] == found
            assert len(context.ask("sea", max_new_tokens=1).token_ids) == 1
        what = "between saves" if saved == about else "new" if found == about else "old"
        return what, found


def at_random(growing: Growing, kills: int) -> Counter[str]:
    """How often what was found after a kill at a random moment."""
    growing.begin()
    begin = time.perf_counter()
    growing.grow(2)
    round_s = (time.perf_counter() - begin) / 2
    found: Counter[str] = Counter()
    for _ in range(kills):
        in_child(growing.grow, random.uniform(0, 1.5 * round_s))
        what, tokens = growing.check()
        found[what] += 1
        if tokens > MOST:
            growing.begin()
    return found


def main(kills: int) -> None:
    torch.set_num_threads(1)  # a forked process has no threads of its parent's
    folder = Path(tempfile.mkdtemp())
    try:
        with loaded(long_model(), "flat", **SMALL, cold={"top_k": 5}) as llm:
            growing = Growing(llm, folder)
            found = at_random(growing, kills)
            growing.grow(1)  # takes away what the killed left behind
            left = sorted(path.name for path in [*folder.iterdir(), *growing.root.iterdir()])
        print(json.dumps({"found": found, "left": left}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]))
