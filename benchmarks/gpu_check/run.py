"""What a GPU must show and what it costs, by one command in 20 minutes.

    scripts/gpu_check                values, constants, decode steps, one prompt, rivals, tests
    scripts/gpu_check --part tests   one part; results in the folder are kept and joined
    scripts/gpu_check --missing      what must be installed; how to bring it without a network
    scripts/gpu_check --sizes tiny   the same code in minutes, also without a GPU; no results

What no time is left for is listed as not run. A job has a process of its own, so that one which
crashes, hangs or runs out of memory ends alone; its row says why. Each row is written when it is
measured, as JSON and into a table, in benchmarks/results/<device>-<date>. Exit code 0: done; 1: a
row failed, or a difference was beyond its limit; 2: this machine cannot run it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import document as documents
from benchmarks.gpu_check import plan, requirements
from benchmarks.gpu_check.jobs import Budget, Job, Row, run_job, run_jobs
from benchmarks.gpu_check.requirements import ROOT, Finding

_BUDGET_S = 1200.0
_FAILED = ("failed", "timed out")


class CannotRun(Exception):  # noqa: N818 (a state of the machine, not an error)
    """Why nothing can be measured here, in one sentence."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = (*plan.PARTS, *plan.MORE_PARTS, plan.FAULTS)
    main = ", ".join(plan.PARTS)
    parser.add_argument("--part", action="append", choices=parts, help=f"repeatable; {main}")
    parser.add_argument("--system", action="append", choices=plan.SYSTEMS, help="end to end; all")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--cap-gib", type=float, default=24.0, help="of capped rows; 24")
    parser.add_argument("--budget", type=float, default=_BUDGET_S, help="seconds in all; 1200")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of what is missing")
    parser.add_argument("--missing", action="store_true", help="only list what is needed")
    parser.add_argument("--sizes", choices=[*plan.MODELS], default="full", help="full")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    with tempfile.TemporaryDirectory(prefix="gpu_check-wheels-") as unpacked:
        try:
            if options.wheels is not None:
                requirements.unpack_wheels(options.wheels, Path(unpacked))
            findings = check_packages()
            return 0 if options.missing else check(options, findings)
        except (CannotRun, RuntimeError, ValueError) as error:
            say(f"gpu_check: {error}")
            return 2


def check_packages() -> list[Finding]:
    findings = requirements.find_packages()
    for found in findings:
        say(f"{found.state:>8}  {found.name}: {found.detail}")
    if lacking := requirements.missing(findings):
        say(f"\n{requirements.instructions(findings)}\n")
        raise CannotRun(f"{', '.join(lacking)} must be installed; the lines above say how")
    return findings


def check(options: argparse.Namespace, findings: list[Finding]) -> int:
    budget = Budget(options.budget, plan.SHARES_S if several(options) else {})
    rehearse = options.sizes != "full"
    machine = probe(options.sizes)
    if machine["device"] is None and not rehearse:
        raise CannotRun(
            "this machine has no NVIDIA GPU that torch can use; --sizes tiny needs none"
        )
    device = "cpu" if machine["device"] is None else "cuda:0"
    label = documents.label_of(machine["device"], rehearse)
    date = datetime.now(UTC).date().isoformat()
    folder = options.out or default_folder(machine["device"], date, rehearse)
    before = documents.read(folder, rehearse=rehearse, label=label)
    engine = requirements.build_engine()
    say(f"{engine.state:>8}  {engine.name}: {engine.detail}")
    cap = int(options.cap_gib * 2**30)
    about = {
        **{"benchmark": "gpu_check", "schema": documents.SCHEMA, "rehearsal": rehearse},
        **{"label": label, "date": date, "commit": commit(), "machine": machine},
        **{"model": plan.MODELS[options.sizes]},
        **{"cap_bytes": cap, "limit_bytes": cap - plan.CONTEXT_BYTES},
        **{"packages": requirements.as_json(findings), "engine": engine.detail},
    }
    wanted = plan.jobs(
        options.part or plan.PARTS,
        device=device,
        sizes=options.sizes,
        cap_bytes=cap,
        systems=options.system or plan.SYSTEMS,
    )
    say(f"\n{label}: {len(wanted)} jobs, {options.budget:.0f} s; {folder}")
    rows: list[Row] = []
    for row in run_jobs(wanted, budget):
        rows.append(row)
        report(row)
        whole = {**about, "elapsed_s": budget.spent_s, "rows": documents.joined(before, rows)}
        written = documents.write(folder, whole)
    say(f"\n{Path(written[1]).read_text(encoding='utf-8')}\n{written[0]}\n{written[1]}")
    bad = [row for row in rows if row["status"] in _FAILED and row["part"] != plan.FAULTS]
    return 1 if bad else 0


def several(options: argparse.Namespace) -> bool:
    """Whether other parts wait behind the first ones."""
    return options.part is None or len(set(options.part)) > 1


def probe(sizes: str) -> dict[str, Any]:
    rows = list(run_job(Job("probe", "probe", "probe", {"sizes": sizes}), 120))
    if rows[-1]["status"] != "ok":
        raise CannotRun(f"the package cannot be imported here: {rows[-1]['why']}")
    return dict(rows[0]["values"])


def default_folder(device: dict[str, Any] | None, date: str, rehearse: bool) -> Path:
    if rehearse or device is None:  # never beside results
        return Path(tempfile.mkdtemp(prefix="gpu_check-rehearsal-"))
    return ROOT / "benchmarks" / "results" / documents.folder_name(device["name"], date)


def commit() -> str | None:
    """Of the checkout, where git is there to tell."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def report(row: Row) -> None:
    why = f": {row['why']}" if row["why"] else ""
    say(f"{row['status']:>9}  {row['part']:<9}  {row['name']}{why}")


if __name__ == "__main__":
    sys.exit(main())
