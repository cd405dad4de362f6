"""The fuzzer of saved indexes, run by `scripts/fuzz`; no test itself."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None
else:
    with atheris.instrument_imports(include=["hybrid_kv.index", "hybrid_kv.ops"]):
        import hybrid_kv.index.auto
        import hybrid_kv.index.graph  # its branches are counted
        import hybrid_kv.index.sketch  # noqa: F401

import torch

from hybrid_kv.errors import FileFormatError
from hybrid_kv.index._file import read_arrays
from tests.index.hostile_files import (
    DIM,
    HEADS,
    Choose,
    keys_of_file,
    load_and_search,
    mutate,
    seeds,
)


class Target:
    """One execution after the other; a file that fails is kept beside the working directory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "index.hkv"
        self.sound = seeds(folder)
        self.keys = keys_of_file()
        self.queries = torch.randn(HEADS, 3, DIM, generator=torch.Generator().manual_seed(1))
        self.executions = self.loaded = 0

    def run(self, choose: Choose) -> None:
        content = mutate(self.sound[choose(len(self.sound))], choose)
        self.path.write_bytes(content)
        self.executions += 1
        try:
            self.loaded += load_and_search(self.path, self.keys, self.queries)
        except BaseException:
            Path("failing-index.hkv").write_bytes(content)
            raise

    def run_raw(self, content: bytes) -> None:
        """Bytes that nobody has repaired."""
        self.path.write_bytes(content)
        self.executions += 1
        try:
            read_arrays(self.path, "graph")
        except FileFormatError:
            return


def with_random_numbers(target: Target, seconds: float, seed: int) -> None:
    draw = random.Random(seed)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        target.run(draw.randrange)
    print(f"fuzz: {target.executions} files, {target.loaded} of them loaded")


def with_atheris(target: Target, seconds: float, seed: int) -> None:
    """Prints how many files there were by itself, and does not come back."""

    def one(data: bytes) -> None:
        provider = atheris.FuzzedDataProvider(data)
        if provider.ConsumeIntInRange(0, 9) == 0:
            target.run_raw(provider.ConsumeBytes(len(data)))
        else:
            target.run(lambda limit: provider.ConsumeIntInRange(0, limit - 1))

    limits = [f"-max_total_time={int(seconds)}", f"-seed={seed + 1}", "-max_len=256"]
    atheris.Setup([sys.argv[0], *limits], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/fuzz")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = with_random_numbers if atheris is None else with_atheris
        run(Target(Path(folder)), arguments.seconds, arguments.seed)


if __name__ == "__main__":
    main()
