"""Which engine library serves, what it says when it cannot, and its threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_kv.errors import BackendUnavailable, CapacityError, ConfigError
from hybrid_kv.ops import get_ops
from hybrid_kv.ops.native import bindings, library
from hybrid_kv.ops.native.library import Pool, cpu_quota, default_pool, default_threads, num_cores
from tests.ops.native.engines import engine_params, needs_engine, why_not


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that runs no library but the baseline's."""
    monkeypatch.setattr(library, "_known_to_cpu", lambda: ["baseline"])
    for cached in (library.load, library._choose):
        cached.cache_clear()
    yield
    for cached in (library.load, library._choose):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _fresh_choice() -> Iterator[None]:
    library.engine.cache_clear()
    yield
    library.engine.cache_clear()
    default_pool.cache_clear()


@needs_engine
def test_each_library_knows_what_it_is() -> None:
    for isa in library.runnable():
        assert library.load(isa).hkv_isa().decode() == isa
        assert library.load(isa).hkv_abi_version() == bindings.ABI_VERSION


@needs_engine
@pytest.mark.skipif(len(library.built()) < 2, reason="no library beside the baseline's was built")
@pytest.mark.usefixtures("plain_cpu")
def test_a_library_for_another_cpu_is_refused_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = library.built()[-1]
    with pytest.raises(BackendUnavailable, match=f"engine_{isa}.so cannot run here; .* baseline$"):
        library.load(isa)
    assert library.runnable() == ["baseline"]
    assert library.engine_state().isa == "baseline"
    monkeypatch.setenv("HYBRID_KV_ISA", isa)
    with pytest.raises(ConfigError, match=f"HYBRID_KV_ISA={isa} cannot run here; .* baseline$"):
        library.engine()


@needs_engine
@pytest.mark.usefixtures("plain_cpu")
def test_what_the_compiler_could_not_build_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_known_to_cpu", lambda: ["baseline", "avxvnni"])
    monkeypatch.setattr(library, "built", lambda: ["baseline"])
    assert library.engine_state().detail == (
        "baseline, of baseline; avxvnni would run too, but the compiler could not build it"
    )


@needs_engine
def test_only_the_baseline_is_asked_what_the_cpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    path_of = library.path_of
    others = {isa: path_of(isa) for isa in library.ISAS if isa != "baseline"}
    monkeypatch.setattr(library, "path_of", lambda isa: others.get(isa, library.Path("/nowhere")))
    assert library.runnable() == []


@needs_engine
def test_an_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KV_ISA", "baseline")
    engine = library.engine()
    assert engine is not None
    assert engine.hkv_isa() == b"baseline"
    assert library.engine_state().isa == "baseline"


def test_the_engine_can_be_switched_off_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HYBRID_KV_ISA", "none")
    assert library.engine() is None
    assert library.engine_state().isa is None
    with pytest.raises(BackendUnavailable, match="backend 'native' cannot serve here: switched"):
        get_ops("native")
    with pytest.raises(BackendUnavailable, match="a pool needs the native engine"):
        Pool(1)


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KV_ISA", "avx1024")
    with pytest.raises(
        ConfigError, match="one of none, baseline, avx2, avxvnni, avx512, got 'avx1"
    ):
        library.engine()


@needs_engine
def test_an_instruction_set_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ISAS", (*library.ISAS, "avx4096"))
    monkeypatch.setenv("HYBRID_KV_ISA", "avx4096")
    with pytest.raises(ConfigError, match="HYBRID_KV_ISA=avx4096 cannot run here; "):
        library.engine()


def test_a_missing_engine_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "path_of", lambda isa: library.Path("/nowhere") / isa)
    library._choose.cache_clear()
    try:
        with pytest.warns(library.EngineWarning, match="no compiler was found at install time"):
            assert library.engine() is None
        assert library.engine() is None
    finally:
        library._choose.cache_clear()


@needs_engine
def test_statuses_become_typed_errors() -> None:
    engine = library.load("baseline")
    library.check(engine, 0)
    for status, kind in ((1, ConfigError), (2, CapacityError), (3, RuntimeError)):
        with pytest.raises(kind):
            library.check(engine, status)


@needs_engine
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_pool_has_the_threads_that_were_asked_for(threads: int) -> None:
    workers = Pool(threads)
    engine = library.engine()
    assert engine is not None
    assert engine.hkv_pool_threads(workers.handle) == threads
    workers.close()
    workers.close()


@needs_engine
@pytest.mark.parametrize(
    ("threads", "affinity", "message"),
    [
        (0, (), "threads must be 1..1024, got 0"),
        (10_000, (), "threads must be 1..1024, got 10000"),
        (2, (-1,), "affinity names CPU -1, which does not exist"),
        (2, (1023,), "affinity names CPU 1023, which this process may not use"),
    ],
)
def test_a_pool_that_cannot_be_made_says_why(
    threads: int, affinity: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Pool(threads, affinity)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (16, 15)])
def test_one_of_many_cores_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr("hybrid_kv.ops.native.library.num_cores", lambda cpus: cores)
    monkeypatch.setattr("hybrid_kv.ops.native.library.cpu_quota", lambda: None)
    assert default_threads() == threads


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu in range(6):  # the seventh says nothing
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 3},{cpu % 3 + 3}\n")
    assert num_cores(range(7), tmp_path) == 4
    assert num_cores([0, 3], tmp_path) == 1


def test_a_containers_share_of_the_cpus_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "cpu.max"
    control.write_text("250000 100000\n")
    assert cpu_quota(control) == 2.5
    control.write_text("max 100000\n")
    assert cpu_quota(control) is cpu_quota(tmp_path / "absent") is None
    monkeypatch.setattr("hybrid_kv.ops.native.library.num_cores", lambda cpus: 64)
    monkeypatch.setattr("hybrid_kv.ops.native.library.cpu_quota", lambda: 2.5)
    assert default_threads() == 2


@needs_engine
def test_the_default_pool_takes_its_size_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    default_pool.cache_clear()
    monkeypatch.setenv("HYBRID_KV_THREADS", "3")
    assert default_pool().threads == 3
    default_pool.cache_clear()
    monkeypatch.setenv("HYBRID_KV_THREADS", "many")
    with pytest.raises(ConfigError, match="HYBRID_KV_THREADS must be a number of threads, got 'm"):
        default_pool()


@pytest.mark.parametrize("isa", library.ISAS)
def test_an_instruction_set_is_tested_here(isa: str) -> None:
    """One skip in place of one for each test of it."""
    if reason := why_not(isa):
        pytest.skip(f"{reason}: no test of it ran")
    assert isa in engine_params()
