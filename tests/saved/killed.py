"""Processes that are killed while they save.

    python -m tests.saved.killed KILLS

saves a small context and one that grew out of it, in turn, in a process that is killed (SIGKILL)
after a random time, and each time looks at what is there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import hybrid_kv as hkv
from hybrid_kv.errors import ReadError
from hybrid_kv.saved import verify_context
from tests import forked
from tests.saved.scene import SMALL, TEXT, loaded, long_model

_CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "open")


def told_by(module: str, *words: str) -> Any:
    """What such a module says at its end, in a process of its own."""
    run = forked.run("-m", module, *words, cwd=forked.ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def tokens_in(root: Path) -> int | None:
    """Of the context in a folder, every byte of which is right; None where there is none."""
    with suppress(ReadError):
        return verify_context(root).manifest.num_tokens
    assert not root.exists()
    return None


def in_child(work: Callable[[], None], wait_s: float | None = None) -> bool:
    """Whether a forked process came to the end of its work, or was killed, after so long or by
    itself.
    """
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    if wait_s is not None:
        time.sleep(wait_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return not os.WIFSIGNALED(status)


def dying_at(fatal: int) -> None:
    """This process dies before its call number `fatal` to the file system."""
    count = iter(range(10**9))

    def counting(real: Any) -> Any:
        def call(*args: Any, **kw: Any) -> Any:
            if next(count) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kw)

        return call

    for name in _CALLS:
        setattr(os, name, counting(getattr(os, name)))


def at_random(contexts: list[hkv.Context], root: Path, kills: int) -> Counter[str]:
    """How often the context of which tokens was found, or none, after a kill at a random moment."""
    found: Counter[str] = Counter()

    def save_on() -> None:
        while True:
            for context in contexts:
                context.save(root)

    begin = time.perf_counter()
    for context in contexts:
        context.save(root)
    round_s = time.perf_counter() - begin
    for number in range(kills):
        if number % 4 == 0:  # the first save of all, now and then
            shutil.rmtree(root, ignore_errors=True)
        in_child(save_on, random.uniform(0, 1.5 * round_s))
        found[str(tokens_in(root))] += 1
    return found


def at_every_call(contexts: list[hkv.Context], root: Path) -> list[int | None]:
    """What was there after a process that died at its first call, its second, and so on."""
    seen: list[int | None] = []
    for first in (None, contexts[0]):
        for fatal in range(10**6):
            shutil.rmtree(root, ignore_errors=True)
            if first is not None:
                first.save(root)

            def save(fatal: int = fatal) -> None:
                dying_at(fatal)
                contexts[1].save(root)

            ended = in_child(save)
            seen.append(tokens_in(root))
            if ended:
                break
    return seen


def main(kills: int, calls: bool) -> None:
    torch.set_num_threads(1)  # a forked process has no threads of its parent's
    folder = Path(tempfile.mkdtemp())
    root = folder / "a.hkv"
    try:
        with loaded(long_model(), "streaming_llm", **SMALL) as llm:
            words = TEXT.split()
            short = llm.context(" ".join(words[:400]))
            grown = short.fork()
            grown.append(" ".join(words[400:900]))
            contexts = [short, grown]
            found = at_random(contexts, root, kills)
            seen = at_every_call(contexts, root) if calls else []
            contexts[0].save(root)  # takes away what the killed left behind
            left = sorted(path.name for path in [*folder.iterdir(), *root.iterdir()])
        print(json.dumps({"found": found, "seen": seen, "left": left}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), calls="--calls" in sys.argv)
