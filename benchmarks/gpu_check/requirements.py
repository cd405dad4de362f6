"""What must be there before the check runs, found without importing any of it.

A machine with a GPU may have no network: so packages that lack can be brought as wheels, and the
native engine is compiled in place.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "hybrid_kv" / "ops" / "native"

WHEELS = """\
Packages that lack can be brought along as wheels. On a machine with a network, for the Python and
the processor of the one with the GPU:

    python3 -m pip download --only-binary=:all: --python-version {python} --dest wheels \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 {names}

Then, beside the checkout: scripts/gpu_check --wheels wheels. They are unpacked into a temporary
folder; nothing is installed. Keep one version of each: pip refuses two."""

TORCH = """\
torch is not carried along: install a build with CUDA there, as its own pages say."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package: its name for pip, the module it gives, the least version, and who needs it.

    for_all: nothing runs without it; else only what `purpose` says is left out.
    """

    package: str
    module: str
    purpose: str
    least: tuple[int, ...] = ()
    for_all: bool = True


REQUIREMENTS = (
    Requirement("torch", "torch", "everything; a build with CUDA", (2, 9)),
    Requirement("transformers", "transformers", "the models", (5, 17)),
    Requirement("accelerate", "accelerate", "reading weights straight to a GPU", (1, 1)),
    Requirement("filelock", "filelock", "the package's cache of contexts"),
    Requirement("numpy", "numpy", "the package"),
    Requirement("pydantic", "pydantic", "the package's settings", (2,)),
    Requirement("psutil", "psutil", "the package: how much memory the host has"),
    Requirement("safetensors", "safetensors", "the needle model's weights", (0, 8)),
    Requirement("pyyaml", "yaml", "transformers"),
    Requirement("triton", "triton", "our kernels", (3, 5), for_all=False),
    Requirement("pytest", "pytest", "part `tests`", (8,), for_all=False),
    Requirement("hypothesis", "hypothesis", "some test files", for_all=False),
    Requirement("typer", "typer", "the command line's test files", for_all=False),
    Requirement("rich", "rich", "the command line's test files", for_all=False),
    Requirement("jinja2", "jinja2", "pages of reports", for_all=False),
    Requirement("matplotlib", "matplotlib", "figures of reports", for_all=False),
    Requirement("numba", "numba", "index kernels where there is no engine", for_all=False),
    Requirement("setuptools", "setuptools", "compiling the engine", (77,), for_all=False),
    Requirement("faiss-cpu", "faiss", "methods ivf and hnsw, which no row uses", for_all=False),
    Requirement("flashinfer-python", "flashinfer", "rows of FlashInfer", for_all=False),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one requirement; state is "ok", "absent" (optional) or "missing"."""

    name: str
    state: str
    detail: str


def find_packages(requirements: Sequence[Requirement] = REQUIREMENTS) -> list[Finding]:
    """One finding a package."""
    return [_find(requirement) for requirement in requirements]


def _find(wanted: Requirement) -> Finding:
    lacking = "missing" if wanted.for_all else "absent"
    if find_spec(wanted.module) is None:
        return Finding(wanted.package, lacking, f"not installed; for {wanted.purpose}")
    found = _version(wanted.package)
    numbers = tuple(int(number) for number in re.findall(r"\d+", found or "")[: len(wanted.least)])
    if found is not None and numbers < wanted.least:
        least = ".".join(map(str, wanted.least))
        return Finding(wanted.package, lacking, f"{found}, {least} at least is needed")
    return Finding(wanted.package, "ok", found or "of unknown version")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None  # unpacked from a wheel under another name, or a folder on the path


def missing(findings: Sequence[Finding]) -> list[str]:
    """Names of what nothing runs without."""
    return [found.name for found in findings if found.state == "missing"]


def instructions(findings: Sequence[Finding]) -> str:
    """How to bring what is missing; empty where nothing is."""
    names = missing(findings)
    carried = [name for name in names if name != "torch"]
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    parts = [TORCH] if "torch" in names else []
    if carried:
        parts.append(WHEELS.format(python=python, names=" ".join(carried)))
    return "\n\n".join(parts)


def unpack_wheels(folder: Path, target: Path) -> None:
    """Puts the wheels of a folder where this process and its children import from.

    Raises:
        RuntimeError: there are none, or pip refuses them.
    """
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise RuntimeError(f"--wheels must name a folder with wheels, got '{folder}' without any")
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--target", str(target)]
    run = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *wheels],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"pip cannot unpack the wheels in '{folder}': {last_line(run.stderr)}")
    sys.path.insert(0, str(target))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(target), *([before] if before else [])])


def build_engine(folder: Path = ENGINES) -> Finding:
    """Compiles the native engine where there is none yet."""
    if built := sorted(path.stem for path in folder.glob("engine_*.so")):
        return Finding("native engine", "ok", ", ".join(built))
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return Finding("native engine", "absent", "no C++ compiler; the host's part is slow")
    run = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if built := sorted(path.stem for path in folder.glob("engine_*.so")):
        return Finding("native engine", "ok", f"compiled now: {', '.join(built)}")
    why = last_line(run.stderr) or "the compiler says nothing"
    return Finding("native engine", "absent", f"cannot be compiled; the host's part is slow: {why}")


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(found) for found in findings]
