"""Faults put into the device path by hand, one at a time: does a test of tests/device see each?

    python -m tests.device.mutants [--out FILE] [NAME ...]

Each is a line of the package that is replaced in a copy of it; the tests that are to see the fault
run on the copy. They must pass on the copy as it is, and one of them must fail with the fault. A
line that is not there any more is an error: the fault has to be written anew.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
_FAILED = re.compile(r"^(?:FAILED|ERROR) tests/device/(\S+)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A fault: `old`, once in a file of the package, becomes `new`; `tests` are to see it."""

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]

    def apply(self, package: Path) -> None:
        """Puts the fault into a copy of the package.

        Raises:
            LookupError: the line is not there, or more than once.
        """
        path = package / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise LookupError(
                f"{self.name}: hybrid_kv/{self.file} has this {count} times, expected once; write "
                f"the fault anew:\n{self.old}"
            )
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Verdict:
    """By which test a fault was seen, '' where none saw it, and what the test said."""

    test: str
    said: str


RECORDED = "test_recorded_steps.py"
METHODS = "test_methods.py"

MUTANTS = [
    Mutant(
        "a side stream copies to the host before what it copies is computed",
        "transfer/cuda.py",
        "        self._stream.wait_stream(torch.cuda.current_stream(self._device))\n"
        "        with torch.cuda.stream(self._stream):\n",
        "        with torch.cuda.stream(self._stream):\n",
        [f"{METHODS}::test_a_method_gives_what_it_gives_on_the_host[hybrid]"],
    ),
    Mutant(
        "the event behind a copy is recorded before the copy",
        "transfer/cuda.py",
        "            for target, source in copies:\n"
        "                target.copy_(source, non_blocking=True)\n"
        "            mark = torch.cuda.Event()\n"
        "            mark.record(self._stream)\n",
        "            mark = torch.cuda.Event()\n"
        "            mark.record(self._stream)\n"
        "            for target, source in copies:\n"
        "                target.copy_(source, non_blocking=True)\n",
        [f"{METHODS}::test_a_method_gives_what_it_gives_on_the_host[hybrid]"],
    ),
    Mutant(
        "what has been sent is read without a wait",
        "transfer/cuda.py",
        "            self._mark.synchronize()\n",
        "",
        [f"{METHODS}::test_a_method_gives_what_it_gives_on_the_host[hybrid]"],
    ),
    Mutant(
        "what is copied is let go before the copy has read it",
        "transfer/cuda.py",
        "        parcel = _UnderWay(mark, into, tensor)\n",
        "        parcel = _UnderWay(mark, into, into)\n",
        ["test_transfers.py"],
    ),
    Mutant(
        "copies to the host go to plain memory, where each is waited for",
        "transfer/cuda.py",
        "        return pinned_empty(size, dtype)\n",
        "        return torch.empty(list(size), dtype=dtype)\n",
        ["test_counts.py"],
    ),
    Mutant(
        "a staging buffer is filled again before the device has read it",
        "transfer/cuda.py",
        "        return pinned_empty(size, dtype)\n",
        "        kept = self.__dict__.setdefault('kept', {})\n"
        "        kind = tuple(size), dtype\n"
        "        if kind not in kept:\n"
        "            kept[kind] = pinned_empty(size, dtype)\n"
        "        return kept[kind]\n",
        ["test_transfers.py"],
    ),
    Mutant(
        "parts of the staging area are handed out again while they are in use",
        "transfer/staging.py",
        "        if not self._out:\n",
        "        if True:\n",
        ["test_transfers.py"],
    ),
    Mutant(
        "a part of the staging area is handed out without copying",
        "transfer/cuda.py",
        "            self._tensor = self._parcel.open().clone()\n",
        "            self._tensor = self._parcel.open()\n",
        ["test_transfers.py"],
    ),
    Mutant(
        "a recorded step is not given its queries",
        "transfer/recorded.py",
        "        recording.given.copy_(given)\n",
        "",
        [RECORDED],
    ),
    Mutant(
        "a recording is played whatever it was recorded for",
        "transfer/recorded.py",
        "        if known is None or known.signature != signature:\n",
        "        if known is None:\n",
        [RECORDED],
    ),
    Mutant(
        "a recording goes on with moments that were replaced",
        "runtime/select.py",
        "    signature = tuple(places), tuple(tails), tuple(q.shape), ",
        "    signature = tuple(places), tuple(q.shape), ",
        [RECORDED],
    ),
    Mutant(
        "a recording reads codes that have moved and were freed",
        "index/device_sketch.py",
        "        return self._codes.codes.data_ptr()\n",
        "        return 0\n",
        [RECORDED],
    ),
    Mutant(
        "the number of keys is baked into a recording",
        "runtime/select.py",
        "scores, limit, own, _index_of(span).seen),",
        "scores, limit, own, torch.full([], span.length, device=q.device)),",
        [RECORDED],
    ),
    Mutant(
        "another row's recorded result is merged",
        "runtime/select.py",
        "        if len(step.layer.rows) > 1:  #",
        "        if len(step.layer.rows) > 9:  #",
        [RECORDED],
    ),
    Mutant(
        "a row searches what another row of the same extent sees",
        "runtime/select.py",
        "        seen = _index_of(span).see(span.length)\n",
        "        seen = _index_of(span).codes.codes.data_ptr()\n",
        [RECORDED],
    ),
    Mutant(
        "codes of another head",
        "index/device_sketch.py",
        "            self._codes.codes[:, :coded] = given\n",
        "            self._codes.codes[:, :coded] = given.flip(0)\n",
        ["test_selection.py"],
    ),
    Mutant(
        "an extent's digests are off by a page",
        "index/device_pages.py",
        "            self._digests[:, : given.shape[1]] = given\n",
        "            self._digests[:, : given.shape[1]] = given.roll(1, 1)\n",
        ["test_selection.py"],
    ),
    Mutant(
        "a page table of before the pool grew",
        "store/table.py",
        "        if last is None or last[0] != pool.capacity:\n",
        "        if last is None:\n",
        [RECORDED],
    ),
    Mutant(
        "places of a page that no token has filled are not hidden",
        "store/pool.py",
        "grown(self.positions, 0, HIDDEN)\n",
        "grown(self.positions, 0, 0)\n",
        [RECORDED],
    ),
    Mutant(
        "an array of one device is handed to another",
        "ops/upload.py",
        "        key = device, array.dtype.str, array.tobytes()\n",
        "        key = torch.device('cuda'), array.dtype.str, array.tobytes()\n",
        ["test_two_devices.py"],
    ),
    Mutant(
        "two devices share one stream of copies",
        "transfer/cuda.py",
        "        if device not in self._lanes:\n"
        "            self._lanes[device] = self._make_lane(device)\n"
        "        return self._lanes[device]\n",
        "        if device.type not in self._lanes:\n"
        "            self._lanes[device.type] = self._make_lane(device)\n"
        "        return self._lanes[device.type]\n",
        ["test_two_devices.py"],
    ),
    Mutant(
        "a step is recorded on the current device instead of its own",
        "transfer/recorded.py",
        "        with torch.cuda.device(self._device):\n            current",
        "        with torch.cuda.device(0):\n            current",
        ["test_two_devices.py"],
    ),
    Mutant(
        "page-locked memory is unlocked while a copy reads it",
        "ops/pinned.py",
        "        torch.cuda.synchronize()  # a copy or kernel may be at work on these pages\n",
        "",
        ["test_transfers.py"],
    ),
]


def verdict_of(mutant: Mutant | None, tests: Sequence[str], folder: Path) -> Verdict:
    """What some tests say of a copy of the package in a folder, with a fault or as it is."""
    package = folder / "hybrid_kv"
    if mutant is not None:
        kept = (package / mutant.file).read_text()
        mutant.apply(package)
    try:
        paths = [f"tests/device/{test}" for test in tests]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=no", *paths]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
    finally:
        if mutant is not None:
            (package / mutant.file).write_text(kept)
    if done.returncode == 0:
        return Verdict("", "")
    found = _FAILED.search(done.stdout)
    if found is None:
        ended = (done.stdout + done.stderr).strip().splitlines()[-1:] or [""]
        return Verdict("the process", f"exit status {done.returncode}: {ended[0]}")
    return Verdict(found[1], found[2] or "")


def copied(folder: Path) -> None:
    """Copies the package and the tests of the device to a folder."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hybrid_kv", folder / "hybrid_kv", ignore=ignored)
    shutil.copytree(ROOT / "tests" / "device", folder / "tests" / "device", ignore=ignored)
    for path in [*(ROOT / "tests").glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, folder / path.relative_to(ROOT))


def _row(mutant: Mutant, found: Verdict) -> str:
    by = f"`{found.test}`" if found.test else "**survived**"
    said = found.said.replace("|", "\\|")[:120]
    return f"| {mutant.name} | `{mutant.file}` | {by} | {said} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="words of the faults to put in; all if none")
    parser.add_argument("--out", type=Path, help="file for the table")
    asked = parser.parse_args()
    chosen = [m for m in MUTANTS if not asked.names or any(n in m.name for n in asked.names)]
    lines = ["| fault | file | seen by | which said |", "|---|---|---|---|"]
    survived = 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        as_it_is = verdict_of(None, sorted({t for m in chosen for t in m.tests}), folder)
        if as_it_is.test:
            print(f"without a fault {as_it_is.test} fails: {as_it_is.said}")
            return 2
        print("\n".join(lines), flush=True)
        for mutant in chosen:
            found = verdict_of(mutant, mutant.tests, folder)
            survived += not found.test
            lines.append(_row(mutant, found))
            print(lines[-1], flush=True)
    lines += ["", f"{len(chosen)} faults, {survived} survived."]
    print(lines[-1])
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
