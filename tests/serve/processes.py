"""`hybrid-kv serve` as a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer

import hybrid_kv
from tests import forked

NEEDLE = Path(hybrid_kv.__file__).parent / "assets" / "needle"
TALK = "{% for m in messages %}{{ m.content }} {% endfor %}"
"""A chat that is a text, for a model that has learned none."""


def needle_that_chats(folder: Path) -> Path:
    """The shipped model, with a chat template."""
    for file in NEEDLE.iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "tokenizer_config.json").write_bytes((NEEDLE / "tokenizer_config.json").read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(NEEDLE)
    tokenizer.chat_template = TALK
    for name in ("tokenizer.json",):
        (folder / name).unlink()
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class ServeProcess:
    """A server; `lines` is what it has said on stderr."""

    process: forked.Forked
    lines: list[str] = field(default_factory=list)
    url: str = ""

    def interrupt(self) -> int:
        """Ctrl-C; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@contextmanager
def serve_process(*words: object) -> Iterator[ServeProcess]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = ("-m", "hybrid_kv", "serve", *words, "--port", 0)
    process = forked.start(*command, stderr=subprocess.PIPE, env=environment)
    running, ready = ServeProcess(process), threading.Event()

    def follow() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            running.lines.append(line.rstrip())
            if found := re.search(r"serving .* at (http://\S+) \(page\)", line):
                running.url = found[1]
                ready.set()
        ready.set()

    threading.Thread(target=follow, daemon=True).start()
    try:
        assert ready.wait(300)
        assert running.url, running.lines
        yield running
    finally:
        process.kill()
        process.wait(30)
