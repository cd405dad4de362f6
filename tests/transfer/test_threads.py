"""The executor with threads: order, errors, ends. Events of the tests decide when work goes on."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError

import pytest
import torch

from hybrid_kv.errors import ConfigError
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.transfer import ThreadExecutor, build_threads

PATIENCE = 60
"""Seconds after which a test that waits for a thread has failed."""


class Held:
    """Work that tells when it has begun and goes on when it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self) -> None:
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.let_go.wait(PATIENCE)


def test_tensors_move_at_once() -> None:
    executor, value = ThreadExecutor(), torch.randn(3, 5)
    assert torch.equal(executor.send(value).open(), value)
    assert torch.equal(executor.to_device(value, value.device), value)
    executor.close()


def test_work_in_the_background_runs_beside_the_caller_and_in_order() -> None:
    executor, first, done = ThreadExecutor(1), Held(), list[int]()
    begun = executor.background(first)
    rest = [executor.background(lambda i=i: done.append(i)) for i in range(5)]
    assert first.begun.wait(PATIENCE)
    assert not begun.done()
    assert done == []
    first.let_go.set()
    for future in rest:
        future.result(PATIENCE)
    assert done == list(range(5))
    assert first.thread is not threading.current_thread()
    executor.close()


def test_what_a_step_waits_for_is_not_behind_a_build() -> None:
    executor, build, done = ThreadExecutor(1), Held(), list[int]()
    executor.background(build)
    assert build.begun.wait(PATIENCE)
    for place in range(3):
        executor.soon(lambda i=place: done.append(i)).result(PATIENCE)
    assert done == [0, 1, 2]
    build.let_go.set()
    executor.close()


def test_as_many_threads_work_as_were_asked_for() -> None:
    executor, works = ThreadExecutor(3), [Held() for _ in range(4)]
    futures = [executor.background(work) for work in works]
    for work in works[:3]:
        assert work.begun.wait(PATIENCE)
    assert not futures[3].running()
    for work in works:
        work.let_go.set()
    for future in futures:
        future.result(PATIENCE)
    assert len({work.thread for work in works[:3]}) == 3
    executor.close()


def test_an_error_comes_out_of_result_and_the_thread_works_on() -> None:
    def fail() -> None:
        raise MemoryError("of the work")

    executor = ThreadExecutor(1)
    with pytest.raises(MemoryError, match="of the work"):
        executor.background(fail).result(PATIENCE)
    assert executor.background(lambda: None).result(PATIENCE) is None
    executor.close()


def test_closing_waits_for_what_has_begun_and_cancels_the_rest() -> None:
    executor, first = ThreadExecutor(1), Held()
    begun, queued = executor.background(first), executor.background(lambda: None)
    assert first.begun.wait(PATIENCE)
    queued.add_done_callback(lambda _: first.let_go.set())  # let go by the closing itself
    executor.close()
    assert begun.result(0) is None
    with pytest.raises(CancelledError):
        queued.result(0)
    assert first.thread is not None
    assert not first.thread.is_alive()


def test_work_after_closing_is_done() -> None:
    executor = ThreadExecutor(1)
    executor.close()
    executor.background(lambda: None).result(PATIENCE)
    executor.close()
    executor.background(lambda: None).result(PATIENCE)
    executor.close()


def test_threads_end_with_their_executor() -> None:
    executor, work = ThreadExecutor(1), Held()
    work.let_go.set()
    executor.background(work).result(PATIENCE)
    assert work.thread is not None
    del executor
    gc.collect()
    work.thread.join(PATIENCE)
    assert not work.thread.is_alive()


def test_a_waiting_thread_keeps_nothing_of_its_last_work() -> None:
    class Keys:
        def touch(self) -> None:
            pass

    executor, keys = ThreadExecutor(1), Keys()
    gone = threading.Event()
    weakref.finalize(keys, gone.set)
    executor.background(keys.touch).result(PATIENCE)
    del keys
    assert gone.wait(PATIENCE)
    executor.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a policy on Linux only")
def test_builds_give_way_and_what_a_step_waits_for_does_not() -> None:
    executor, found, own = ThreadExecutor(1), list[int](), os.sched_getscheduler(0)
    for begin in (executor.background, executor.soon):
        begin(lambda: found.append(os.sched_getscheduler(0))).result(PATIENCE)
    assert found == [os.SCHED_IDLE, own]
    assert os.sched_getscheduler(0) == own
    executor.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority on Linux only")
def test_builds_have_the_lowest_priority_where_the_policy_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("by a sandbox")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    executor, found = ThreadExecutor(1), list[int]()
    executor.background(
        lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    ).result(PATIENCE)
    assert found == [19]
    executor.close()


@pytest.mark.skipif(engine_state().isa is None, reason="there is no native engine and no pool")
def test_the_background_leaves_the_pool_to_decoding() -> None:
    executor, found = ThreadExecutor(1), list[object]()
    executor.background(lambda: found.append(pool_here())).result(PATIENCE)
    assert found == [None]
    assert pool_here() is not None
    executor.close()


def test_a_process_ends_while_builds_are_queued_and_running() -> None:
    """A build that is cancelled by its owner's finalizer, not one that would run on for ever."""
    script = """
import threading, weakref
from hybrid_kv.transfer import ThreadExecutor

class Owner: pass

executor, begun, cancelled = ThreadExecutor(1), threading.Event(), threading.Event()

def build():
    begun.set()
    assert cancelled.wait(60)
    print("cancelled")

running = executor.background(build)
queued = executor.background(lambda: print("ran"))
owner = Owner()
weakref.finalize(owner, cancelled.set)
assert begun.wait(60)
print("end")
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout == "end\ncancelled\n"
    assert run.stderr == ""


def test_the_number_of_threads_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRID_KV_BUILD_THREADS", raising=False)
    assert build_threads() >= 1
    monkeypatch.setenv("HYBRID_KV_BUILD_THREADS", "3")
    assert build_threads() == 3
    for wrong in ("0", "many", "1025", "-1", "1.5"):
        monkeypatch.setenv("HYBRID_KV_BUILD_THREADS", wrong)
        with pytest.raises(ConfigError, match=f"a number of threads, 1..1024, got '{wrong}'"):
            ThreadExecutor()


def test_a_copy_of_the_process_has_threads_of_its_own() -> None:
    executor = ThreadExecutor(1)
    for begin in (executor.background, executor.soon):
        begin(lambda: None).result(PATIENCE)
        if (child := os.fork()) == 0:
            failed = True
            try:
                begin(lambda: None).result(PATIENCE / 4)
                failed = False
            finally:
                os._exit(failed)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        begin(lambda: None).result(PATIENCE)
    executor.close()


def test_torch_stays_in_the_thread_of_a_build_and_nowhere_else() -> None:
    """Each product of a build took a team of all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen: list[int] = []
        executor = ThreadExecutor(1)
        executor.background(lambda: seen.append(torch.get_num_threads())).result(30)
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        executor.close()
        assert seen == [1, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
