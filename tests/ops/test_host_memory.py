"""The limit that is met first is the one that counts, and it is named."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hybrid_kv.ops import host_memory
from hybrid_kv.ops.host_memory import free_memory, give_back_freed
from tests import forked


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """64 of 128 GB free, no limits; the folder stands for /proc/self and the cgroups."""
    memory = SimpleNamespace(available=64 * 10**9, total=128 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(host_memory, "_OWN", tmp_path)
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "sys")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.", 1)).write_text(f"{text}\n")


def test_without_limits_the_machine_counts() -> None:
    assert str(free_memory()) == "64,000,000,000 bytes are free"


def test_the_limit_of_the_process_counts_what_it_has_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapped = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (mapped + 10**9, mapped + 10**9))
    free = free_memory()
    assert 0 < free.num_bytes <= 1.1e9
    assert str(free).endswith("bytes are free within the limit of this process (ulimit -v)")


def test_a_container_counts_with_the_groups_above_it(machine: Path) -> None:
    """Pages of files are given back, so that they are free."""
    write(machine, cgroup="0::/outer/inner")
    outer = machine / "sys" / "outer"
    write(outer / "inner", memory_max="max", memory_current=10)
    write(outer, memory_max=3000, memory_current=2000, memory_stat="anon 5\ninactive_file 700")
    free = free_memory()
    assert free.num_bytes == 3000 - 2000 + 700
    assert "within the limit of the container (cgroup)" in str(free)


def test_the_first_version_of_cgroups_is_known(machine: Path) -> None:
    write(machine, cgroup="3:cpu:/x\n4:memory:/docker/abc")  # whose folder is not mounted here
    folder = machine / "sys" / "memory"
    write(folder, memory_limit_in_bytes=5000, memory_usage_in_bytes=6000, memory_stat="x 1")
    assert free_memory().num_bytes == 0


def test_a_group_without_a_limit_that_counts_is_not_read_further(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first version of cgroups writes a number of 19 digits where there is no limit."""
    write(machine, cgroup="4:memory:/")
    write(machine / "sys" / "memory", memory_limit_in_bytes=2**63 - 4096, memory_usage_in_bytes=5)
    read, plain = list[str](), Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda it: read.append(it.name) or plain(it))
    assert free_memory().limit == ""
    assert read == ["cgroup", "memory.limit_in_bytes"]


def test_damaged_files_are_no_limit(machine: Path) -> None:
    write(machine, cgroup="0::/")
    write(machine / "sys", memory_max="what", memory_current="?")
    assert free_memory().limit == ""


def test_a_cache_that_the_process_may_not_hold_is_refused_in_one_sentence() -> None:
    code = (
        "import resource, torch\n"
        "from hybrid_kv.store.memory import check_host_memory\n"
        "import psutil\n"
        "limit = psutil.Process().memory_info().vms + 10**9\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "check_host_memory(3 * 10**9, 37)\n"
    )
    run = forked.run("-c", code)
    assert run.returncode == 1
    assert "CapacityError: context of 37 tokens needs 3,000,000,000 bytes" in run.stderr
    assert "within the limit of this process (ulimit -v); shorten the prompt" in run.stderr


def test_freed_memory_is_given_back_where_the_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back_freed()
    asked = list[int]()
    monkeypatch.setattr(host_memory, "_malloc_trim", lambda: asked.append)
    give_back_freed()
    assert asked == [0]
    monkeypatch.setattr(host_memory, "_malloc_trim", lambda: None)
    give_back_freed()  # another C library
