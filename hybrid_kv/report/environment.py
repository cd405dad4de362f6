"""The machine and the packages that a run used."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch

PACKAGES = ("hybrid-kv", "torch", "transformers", "faiss-cpu", "numba", "triton", "flashinfer")
"""Packages whose version can change a result; flashinfer and triton may be absent."""

_DISTRIBUTIONS = {
    "faiss-cpu": ("faiss-cpu", "faiss-gpu", "faiss"),
    "flashinfer": ("flashinfer-python", "flashinfer"),
}
_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"),
    *("asimd", "sve", "bf16"),
)
_CPUINFO = Path("/proc/cpuinfo")


class Cpu(BaseModel):
    """A processor: its name, physical cores, hardware threads, and vector instruction sets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    cores: int
    threads: int
    features: tuple[str, ...]


class Environment(BaseModel):
    """Facts that a result may depend on beside the run's own settings.

    versions: of Python and the packages, null where one is not installed. device: what the model
    ran on, null where no model was run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: dict[str, str | None]
    platform: str
    cpu: Cpu
    ram_bytes: int
    device: str | None = None


def probe_environment(device: str | None = None) -> Environment:
    """The environment of this process; imports none of the packages it names."""
    versions = {name: installed_version(name) for name in PACKAGES}
    return Environment(
        versions={"python": platform.python_version(), **versions},
        platform=f"{platform.system()} {platform.machine()}",
        cpu=probe_cpu(),
        ram_bytes=psutil.virtual_memory().total,
        device=device,
    )


def environment_on(device: torch.device) -> Environment:
    """The environment with a device by its name."""
    import torch

    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return probe_environment(f"{device}{name}")


def installed_version(package: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    for name in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def probe_cpu() -> Cpu:
    """The processor as the operating system describes it."""
    facts = _cpuinfo()
    flags = facts.get("flags", facts.get("Features", "")).split()
    threads = psutil.cpu_count() or 1
    return Cpu(
        model=facts.get("model name") or platform.processor() or platform.machine(),
        cores=psutil.cpu_count(logical=False) or threads,
        threads=threads,
        features=tuple(name for name in _FEATURES if name in flags),
    )


def _cpuinfo() -> dict[str, str]:
    """Keys of Linux's description of the first processor; empty elsewhere."""
    if not _CPUINFO.is_file():
        return {}
    first = _CPUINFO.read_text(errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
