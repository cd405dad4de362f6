"""Faults put into the device path by hand, one at a time: does a test see each?

    python -m tests.device.mutants [--out FILE] [NAME ...]

Each is a line of the package that is replaced in a copy of it; the tests that are to see the fault
run on the copy. They must pass on the copy as it is, and one of them must fail with the fault. A
line that is not there any more is an error: the fault has to be written anew. Kernels run in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.device.guard import why_not

ROOT = Path(__file__).parents[2]
_LIMIT_S = 900
_FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(\S+)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A fault: `old`, once in a file of the package, becomes `new`; `tests` are to see it.

    tests: below tests/, all of one folder.
    """

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


RECORDED = "device/test_recorded_steps.py"
LATER = "device/test_later_turns.py"
METHODS = "device/test_methods.py"
TRANSFERS = "device/test_transfers.py"
SELECTION = "device/test_selection.py"
GRAPHS = "device/test_step_graphs.py"
NUMBERS = "device/test_numbers.py"
TWO = "device/test_two_devices.py::test_a_split_model_gives_what_it_gives_on_the_host"
KERNELS = "ops/triton/test_sketch.py"

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
        [f"{TRANSFERS}::test_what_is_sent_may_be_let_go"],
    ),
    Mutant(
        "copies to the host go to plain memory, where each is waited for",
        "transfer/cuda.py",
        "        return pinned_empty(size, dtype)\n",
        "        return torch.empty(list(size), dtype=dtype)\n",
        ["device/test_counts.py::test_a_step_takes_no_more_launches_copies_and_waits[full]"],
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
        [f"{TRANSFERS}::test_parts_of_one_size_are_delivered_one_after_another"],
    ),
    Mutant(
        "parts of the staging area are handed out again while they are in use",
        "transfer/cuda.py",
        "        if not self._out:\n",
        "        if True:\n",
        [f"{TRANSFERS}::test_what_is_kept_is_its_own_while_others_are_under_way"],
    ),
    Mutant(
        "a part of the staging area is handed out without copying",
        "transfer/cuda.py",
        "            self._tensor = self._parcel.open().clone()\n",
        "            self._tensor = self._parcel.open()\n",
        [f"{TRANSFERS}::test_what_was_kept_stays_when_the_area_is_used_again"],
    ),
    Mutant(
        "a recorded step is not given its queries",
        "transfer/graph_cache.py",
        "        recording.given.copy_(given)\n",
        "",
        [f"{RECORDED}::test_replayed_steps_give_what_the_host_gives[late]"],
    ),
    Mutant(
        "a recording is played whatever it was recorded for",
        "transfer/graph_cache.py",
        "        if known is None or known.signature != signature:\n",
        "        if known is None:\n",
        [f"{RECORDED}::test_what_a_recording_reads_may_grow_and_move"],
    ),
    Mutant(
        "a recording goes on with moments that were replaced",
        "runtime/select.py",
        "    places += [one.data_ptr() for tail in tails for one in tail.tensors().values()]\n",
        "",
        [f"{LATER}::test_later_turns_give_what_they_give_on_the_host"],
    ),
    Mutant(
        "moments that a recording reads are not renewed",
        "ops/tail.py",
        "                mine.copy_(its)\n",
        "                pass\n",
        [f"{RECORDED}::test_what_a_recording_reads_may_grow_and_move"],
    ),
    Mutant(
        "a recording reads codes that have moved and were freed",
        "index/device_sketch.py",
        "        return codes.data_ptr(), codes.shape\n",
        "        return 0\n",
        [f"{RECORDED}::test_what_a_recording_reads_may_grow_and_move"],
    ),
    Mutant(
        "the number of keys is baked into a recording",
        "runtime/select.py",
        "scores, limit, own, indexes[number].seen),",
        "scores, limit, own, torch.full([], span.length, device=q.device)),",
        [f"{RECORDED}::test_what_a_recording_reads_may_grow_and_move"],
    ),
    Mutant(
        "another row's recorded result is merged",
        "runtime/select.py",
        "        if len(step.layer.rows) > 1:  #",
        "        if len(step.layer.rows) > 9:  #",
        [f"{RECORDED}::test_rows_of_other_lengths_replay_their_own_results"],
    ),
    Mutant(
        "a row searches what another row of the same extent sees",
        "runtime/select.py",
        "        seen = index.see(span.length)\n",
        "        seen = 0\n",
        [f"{RECORDED}::test_forks_of_other_lengths_search_their_own_entries"],
    ),
    Mutant(
        "codes of another head",
        "index/_device_keys.py",
        "            self.codes.codes[:, :coded] = codes\n",
        "            self.codes.codes[:, :coded] = codes.flip(0)\n",
        [f"{SELECTION}::test_codes_of_each_head_find_the_best_of_its_keys"],
    ),
    Mutant(
        "a list takes its rows from another list's memory",
        "ops/triton/sketch_lists.py",
        "    rows += list_ * capacity\n",
        "",
        [f"{KERNELS}::test_lists_of_heads_and_tokens_are_their_own"],
    ),
    Mutant(
        "a list is ranked by the scores of another token",
        "ops/triton/sketch_lists.py",
        "    members, queries = member < GROUP, (head * GROUP + member) * new + token\n",
        "    members, queries = member < GROUP, (head * GROUP + member) * new\n",
        [f"{KERNELS}::test_lists_of_heads_and_tokens_are_their_own"],
    ),
    Mutant(
        "a list begins with as many as another search has left there",
        "ops/triton/sketch_lists.py",
        "    tl.store(count + list_, 0)\n",
        "",
        [f"{KERNELS}::test_what_memory_held_before_has_no_part_in_a_search"],
    ),
    Mutant(
        "places of a list that nobody fills keep what another search found",
        "ops/triton/sketch_lists.py",
        "    tl.store(ids + list_ * WIDTH + places, tl.full((BLOCK,), -1, tl.int32), "
        "mask=places < WIDTH)\n",
        "",
        [f"{KERNELS}::test_what_memory_held_before_has_no_part_in_a_search"],
    ),
    Mutant(
        "a full list keeps what came first behind its best",
        "ops/triton/sketch_lists.py",
        "            tl.store(ids + list_ * WIDTH + places, tl.full((BLOCK,), -1, tl.int32), "
        "mask=behind)\n",
        "            pass\n",
        [f"{KERNELS}::test_lists_of_heads_and_tokens_are_their_own"],
    ),
    Mutant(
        "a page table without its last page",
        "runtime/decode.py",
        "row.table.slots().expand(every)",
        "row.table.slots()[:-1].expand(every)",
        [f"{RECORDED}::test_rows_of_other_lengths_replay_their_own_results"],
    ),
    Mutant(
        "a step by numbers does not read the newest page",
        "runtime/device_plan.py",
        "here[CHOSEN] = count, newest, chosen\n",
        "here[CHOSEN] = count - 1, newest, chosen\n",
        [f"{RECORDED}::test_replayed_steps_give_what_the_host_gives[late]"],
    ),
    Mutant(
        "an array of one device is handed to another",
        "ops/devices.py",
        "        key = device, array.dtype.str, array.tobytes()\n",
        "        key = torch.device('cuda'), array.dtype.str, array.tobytes()\n",
        [f"{TWO}[hybrid:device-late]"],
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
        [f"{TWO}[hybrid:host-late]"],
    ),
    Mutant(
        "a token's position is that of the step that was captured",
        "runtime/device_plan.py",
        "lists, mine[POSITION : POSITION + 1])",
        "lists, q.new_full([1], self._row.length - 1).long())",
        [f"{GRAPHS}::test_a_step_tells_the_same_whenever_it_is_captured[full]"],
    ),
    Mutant(
        "logits are the graph's own memory",
        "models/step_graphs.py",
        "v.clone() if isinstance(v, Tensor) else v for n",
        "v for n",
        [f"{GRAPHS}::test_replayed_steps_are_those_of_eager_ones[streaming_llm-130]"],
    ),
    Mutant(
        "a new page is listed nowhere",
        "ops/reference_pages.py",
        "    table[listed - 1 : listed] = slot\n",
        "",
        [f"{NUMBERS}::test_steps_by_numbers_give_what_the_host_gives[full-late]"],
    ),
    Mutant(
        "sliding layers are captured",
        "models/step_graphs.py",
        "            if type(layer) is not HybridLayer and not is_written_in_place(layer):\n",
        "            if False:\n",
        [f"{GRAPHS}::test_sliding_layers_are_refused_by_name"],
    ),
    Mutant(
        "page-locked memory is unlocked while a copy reads it",
        "ops/pinned.py",
        "        torch.cuda.synchronize()  # a copy or kernel may be at work on these pages\n",
        "",
        [f"{TRANSFERS}::test_page_locked_memory_is_in_use_until_copies_are_over"],
    ),
]


def verdict_of(mutant: Mutant | None, tests: Sequence[str], folder: Path) -> Verdict:
    """What some tests say of a copy of the package in a folder, with a fault or as it is."""
    package = folder / "hybrid_kv"
    if mutant is not None:
        kept = (package / mutant.file).read_text()
        mutant.apply(package)
    try:
        return _tested(folder, tests)
    finally:
        if mutant is not None:
            (package / mutant.file).write_text(kept)


def _tested(folder: Path, tests: Sequence[str]) -> Verdict:
    options = ["-q", "-x", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    interpreted = any(test.startswith(KERNELS) for test in tests)
    own = {"PYTHONPATH": str(folder), "TRITON_INTERPRET": str(int(interpreted))}
    own["COLUMNS"] = "300"  # or pytest leaves out what a test said
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return Verdict("the process", f"did not end in {_LIMIT_S} s")
    if ended.returncode == 0:
        return Verdict("", "")
    said = ended.stdout + ended.stderr
    if found := _FAILED.search(said):
        return Verdict(found[1], found[2] or "")
    last = (said.strip().splitlines() or [""])[-1]
    return Verdict("the process", f"status {ended.returncode}: {last}")


def copied(folder: Path) -> None:
    """Copies the package and its tests to a folder."""
    for name in ("hybrid_kv", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)


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
    if reason := why_not():
        parser.error(reason)
    with TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        kernels = [test for test in tests if test.startswith(KERNELS)]
        for some in (kernels, [test for test in tests if test not in kernels]):
            as_it_is = verdict_of(None, some, folder) if some else Verdict("", "")
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
