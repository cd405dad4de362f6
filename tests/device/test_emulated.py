"""The emulated device itself: right values, and every fault that it is there to show."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import math
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._dynamo.types import ConvertFrameReturn

from tests.device import CaptureError, HostWaitsError, Machine, emulated, why_not
from tests.device.cuda import values
from tests.device.machine import Schedule, differences

SCHEDULES: list[Schedule] = ["now", "late", 1, 2]


def pinned(*numbers: float) -> Tensor:
    return torch.tensor(numbers).pin_memory()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_are_those_of_the_host(schedule: Schedule) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    expected = (a @ b).softmax(-1)[:, 1:].T.contiguous() * 2
    with emulated(schedule=schedule):
        there = (a.to("cuda") @ b.cuda()).softmax(-1)[:, 1:].T.contiguous()
        there *= 2
        assert there.device == torch.device("cuda", 0)
        assert there.is_cuda
        torch.testing.assert_close(there.cpu(), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_views_share_memory(schedule: Schedule) -> None:
    with emulated(schedule=schedule):
        base = torch.zeros(3, 4, device="cuda")
        base[1, 2:].fill_(5)
        assert base.sum().item() == 10
        assert base[1].storage_offset() == 4


def test_it_is_gone_afterwards() -> None:
    with emulated():
        assert torch.cuda.is_available()
        kept = torch.ones(3, device="cuda")
    assert not torch.cuda.is_available()
    with pytest.raises(RuntimeError, match="after the device has gone"):
        kept + 1
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(3, device="cuda")


def test_one_at_a_time() -> None:
    with emulated(), pytest.raises(RuntimeError, match="in place already"), emulated():
        pass


def test_devices_do_not_mix() -> None:
    with emulated(num_devices=2):
        first, second = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            first + torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            first + second
        assert (first + second.to("cuda:0")).sum().item() == 6


def test_memory_runs_out_and_comes_back() -> None:
    with emulated(memory_bytes=1000):
        kept = torch.empty(200, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(100, device="cuda")
        del kept
        gc.collect()
        assert torch.empty(240, device="cuda").numel() == 240
        assert torch.cuda.max_memory_allocated() <= 1000


def test_tensors_have_addresses() -> None:
    with emulated():
        one, two = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        assert one.data_ptr() != two.data_ptr() != 0
        assert one[1:].data_ptr() == one.data_ptr() + 4


def test_new_memory_is_undefined() -> None:
    with emulated():
        assert torch.empty(3, device="cuda").isnan().all().item()


def _side_stream(waits: bool) -> Tensor:
    """A sum that another stream computes, with or without waiting for its input."""
    x = torch.full((4,), 2.0, device="cuda")
    x.mul_(3)
    side = torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
        done = torch.cuda.Event()
        done.record(side)
    done.synchronize()
    return values(y)


def test_a_stream_of_any_accelerator_is_entered_and_left() -> None:
    with emulated():
        outer, side = torch.cuda.current_stream(), torch.Stream()
        with side:
            assert torch.cuda.current_stream() == side
        assert torch.cuda.current_stream() == outer


def test_a_missing_event_gives_a_wrong_value() -> None:
    with emulated(schedule="late"):
        assert _side_stream(waits=True).tolist() == [7] * 4
        assert _side_stream(waits=False).tolist() != [7] * 4


def test_a_staging_buffer_that_is_used_too_early_gives_a_wrong_value() -> None:
    with emulated(schedule="late"):
        buffer, there = pinned(1.0, 2.0), torch.empty(2, device="cuda")
        there.copy_(buffer, non_blocking=True)
        buffer.fill_(9)
        assert there.tolist() == [9, 9]


def test_what_has_not_arrived_is_not_there() -> None:
    with emulated(schedule="late") as gpu:
        target, there = pinned(0.0), torch.ones(1, device="cuda")
        target.copy_(there, non_blocking=True)
        assert target.item() == 0
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
        done.synchronize()
        assert target.item() == 1
        assert gpu.counts.num_waits == 1


def test_pageable_memory_is_waited_for() -> None:
    with emulated(schedule="late") as gpu:
        target, there = torch.zeros(1), torch.ones(1, device="cuda")
        target.copy_(there, non_blocking=True)
        assert target.item() == 1
        assert gpu.counts.num_waits == 1


def test_memory_that_another_stream_still_reads_is_overwritten() -> None:
    """As CUDA's caching allocator may give it to whoever asks next on its own stream."""
    for told in (False, True):
        with emulated(schedule="late"):
            x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x + 1
            if told:
                x.record_stream(side)
            del x
            gc.collect()
            torch.zeros(1, device="cuda")
            torch.cuda.current_stream().synchronize()
            side.synchronize()
            assert (values(y).tolist() == [2, 2, 2]) is told


def test_a_wait_is_counted_with_its_line_or_refused() -> None:
    with emulated() as gpu:
        torch.ones(2, device="cuda").sum().item()
        assert gpu.counts.num_waits == 1
        assert next(iter(gpu.counts.waits)).startswith("item in ")
    with emulated(strict=True), pytest.raises(HostWaitsError, match="nonzero"):
        torch.ones(2, device="cuda").nonzero()


def test_launches_are_counted_and_views_are_not() -> None:
    with emulated() as gpu:
        x = torch.ones(6, device="cuda")
        before = gpu.counts.copy()
        y = x.view(2, 3)[1:].T + 1
        after = gpu.counts.since(before)
        assert (after.launches, after.num_waits) == (1, 0)
        y.cpu()
        assert gpu.counts.to_host == 12


class TestGraphs:
    """Captures and replays."""

    @staticmethod
    def captured(work) -> torch.cuda.CUDAGraph:  # type: ignore[no-untyped-def]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def test_nothing_runs_before_the_replay(self) -> None:
        with emulated() as gpu:
            x, out = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
            graph = self.captured(lambda: out.copy_(x * 2))
            assert values(out).tolist() == [0, 0, 0]
            x.fill_(4)
            graph.replay()
            assert values(out).tolist() == [8, 8, 8]
            assert (gpu.counts.captures, gpu.counts.replays) == (1, 1)

    def test_a_number_of_the_host_is_baked_in(self) -> None:
        with emulated():
            out, number = torch.zeros(1, device="cuda"), 1
            graph = self.captured(lambda: out.add_(number))
            number = 5
            graph.replay()
            graph.replay()
            assert out.item() == 2

    @pytest.mark.parametrize(
        "forbidden",
        [
            lambda x: x.sum().item(),
            lambda x: x.copy_(torch.ones(3)),
            lambda x: torch.cuda.synchronize(),
            lambda x: torch.ones(3).pin_memory(),
            lambda x: torch.cuda.CUDAGraph().capture_begin(),
        ],
    )
    def test_what_a_capture_may_not_do_fails(self, forbidden) -> None:  # type: ignore[no-untyped-def]
        with emulated():
            x = torch.ones(3, device="cuda")
            with pytest.raises((CaptureError, RuntimeError), match="when stream is capturing"):
                self.captured(lambda: forbidden(x))

    def test_a_stream_that_does_not_come_back_fails(self) -> None:
        with emulated():
            x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()

            def work() -> None:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x.add_(1)

            with pytest.raises(RuntimeError, match="unjoined"):
                self.captured(work)

    def test_memory_of_a_graph_is_undefined_before_a_replay(self) -> None:
        """A buffer that was cleared before the capture, not in it, is added to for ever."""
        with emulated():
            x, out = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")

            def work() -> None:
                scratch = torch.empty(3, device="cuda")
                out.copy_(scratch.add_(x))

            graph = self.captured(work)
            graph.replay()
            assert values(out).isnan().all()

    def test_another_graph_of_the_pool_overwrites_results(self) -> None:
        with emulated():
            pool, x, results = torch.cuda.graph_pool_handle(), torch.ones(2, device="cuda"), []
            graphs = []
            for factor in (2, 3):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(torch.cuda.Stream()):
                    graph.capture_begin(pool)
                    results.append((x * 0 + 1) * factor)
                    graph.capture_end()
                graphs.append(graph)
            graphs[1].replay()
            assert values(results[1]).tolist() == [3, 3]
            graphs[0].replay()
            assert values(results[0]).tolist() == [2, 2]
            assert values(results[1]).isnan().all()

    def test_two_captures_are_compared_launch_by_launch(self) -> None:
        with emulated():
            x = torch.ones(8, device="cuda")
            first = self.captured(lambda: x[:4].mul_(2))
            again = self.captured(lambda: x[:4].mul_(2))
            other = self.captured(lambda: x[4:].mul_(2))
            assert differences(first.launches, again.launches) == []
            assert len(differences(first.launches, other.launches)) == 1


def test_threads_that_begin_inside_see_the_device() -> None:
    found: list[object] = []
    with emulated():
        thread = threading.Thread(
            target=lambda: found.append(torch.ones(2, device="cuda").sum().item())
        )
        thread.start()
        thread.join()
    assert found == [2.0]


def test_any_order_that_events_allow_gives_the_same() -> None:
    for seed in range(20):
        with emulated(schedule=seed):
            assert _side_stream(waits=True).tolist() == [7] * 4


def test_a_machine_has_a_size() -> None:
    machine = Machine(num_devices=2, memory_bytes=5)
    assert machine.allocated == [0, 0]


class TestTimes:
    """Events, the profiler, and what torch says of waits."""

    @staticmethod
    def timed_pair(work) -> float:  # type: ignore[no-untyped-def]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        with pytest.raises(RuntimeError, match="not ready"):
            begin.elapsed_time(end)
        end.synchronize()
        return begin.elapsed_time(end)

    def test_an_event_has_the_time_when_its_stream_gets_there(self) -> None:
        with emulated(schedule="late"):
            x = torch.ones(200, 200, device="cuda")
            time.sleep(0.001)  # of the host, before the stream gets to either
            short = self.timed_pair(lambda: None)
            assert 0 <= short < self.timed_pair(lambda: [x @ x for _ in range(50)])

    def test_times_are_told_of_events_that_have_them(self) -> None:
        with emulated():
            plain, timed = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
            plain.record()
            with pytest.raises(ValueError, match="enable_timing=True"):
                timed.elapsed_time(plain)
            with pytest.raises(ValueError, match="must be recorded"):
                timed.elapsed_time(torch.cuda.Event(enable_timing=True))

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_a_profile_has_each_kernel_as_such_and_in_its_operator(
        self, schedule: Schedule
    ) -> None:
        both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with emulated(schedule=schedule):
            x = torch.ones(50, 50, device="cuda")
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=both) as profile:
                (x @ x).add_(1)
            x.mul_(2)  # is no part of it
            found = profile.key_averages()
        kernels = [one for one in found if one.device_type == torch.autograd.DeviceType.CUDA]
        assert sum(one.count for one in kernels) == 2
        total = sum(one.self_device_time_total for one in kernels)
        assert total > 0
        assert sum(one.self_device_time_total for one in found) == pytest.approx(2 * total)
        assert next(one for one in found if one.key == "cudaLaunchKernel").count == 2

    def test_launches_of_a_replay_are_profiled_one_by_one(self) -> None:
        with emulated():
            x = torch.ones(3, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x.mul_(2)
                x.add_(1)
            with torch.profiler.profile() as profile:
                graph.replay()
            names = [one.key for one in profile.events()]
            assert names == ["replay", "cudaGraphLaunch", "aten.mul_.Tensor", "aten.add_.Tensor"]
            assert values(x).tolist() == [3, 3, 3]

    def test_waits_are_told_with_their_line_or_refused(self) -> None:
        with emulated():
            x = torch.ones(3, device="cuda")
            torch.cuda.set_sync_debug_mode("warn")
            with pytest.warns(UserWarning, match="synchronizing") as told:
                x.sum().item()
            assert [one.filename for one in told] == [__file__]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                torch.cuda.synchronize()  # which nobody does by mistake
            torch.cuda.set_sync_debug_mode("error")
            with pytest.raises(RuntimeError, match="synchronizing"):
                x.nonzero()
            torch.cuda.set_sync_debug_mode(0)

    def test_a_process_may_be_held_to_less_memory(self) -> None:
        with emulated(memory_bytes=1000):
            torch.cuda.set_per_process_memory_fraction(0.5)
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(200, device="cuda")
            kept = torch.empty(100, device="cuda")
            assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == kept.nbytes

    def test_ranges_may_be_named(self) -> None:
        with emulated(), torch.cuda.nvtx.range("a range"):
            pass


def test_dynamo_looks_at_no_operator_of_a_device() -> None:
    """It would trace, compile and guard what is the device's own."""
    seen: list[str] = []

    def look(frame: Any, *_: object) -> ConvertFrameReturn:
        seen.append(frame.f_code.co_name)
        return ConvertFrameReturn()

    def work(x: Tensor) -> Tensor:
        return x.sin()

    with emulated():
        x = torch.ones(3, device="cuda")
        eval_frame.set_eval_frame(look)  # as while a compiled function runs
        try:
            y = work(x)
        finally:
            eval_frame.set_eval_frame(None)
        assert values(y).tolist() == pytest.approx([math.sin(1)] * 3)
    assert seen[:2] == ["work", "__torch_function__"]
    assert not {"__torch_dispatch__", "known_of", "launch"} & {*seen}


def test_what_is_imported_meanwhile_stays() -> None:
    """Else a class of it would be another one afterwards, and no instance of before an instance."""
    sys.modules.pop("this", None)
    with emulated(kernels="defined"), contextlib.redirect_stdout(io.StringIO()):
        meanwhile = importlib.import_module("this")
    assert sys.modules.get("this") is meanwhile


def test_storages_lie_at_addresses_of_their_own() -> None:
    """All lay at 0, so that memory of a device that methods keep was counted once."""
    with emulated():
        one, other = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
        places = [t.untyped_storage().data_ptr() for t in (one, one[1:], other)]
        assert places[0] == places[1] != places[2]
        assert other.untyped_storage().nbytes() == 12


def test_without_a_compiler_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not.__wrapped__().startswith("no C++ compiler: ")


def test_where_there_is_a_gpu_none_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_not.__wrapped__().startswith("this machine has a GPU; ")


def test_page_locked_memory_that_a_copy_has_yet_to_read_is_not_given_up() -> None:
    memory = torch.arange(6.0)

    def copied(waits: bool) -> Tensor:
        with emulated(schedule="late"):
            runtime = torch.cuda.cudart()
            runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            there = torch.empty(6, device="cuda")
            there.copy_(memory, non_blocking=True)
            if waits:
                torch.cuda.synchronize()
            runtime.cudaHostUnregister(memory.data_ptr())
            return values(there)

    assert torch.equal(copied(waits=True), memory)
    with pytest.raises(RuntimeError, match="24 bytes of page-locked memory were given up"):
        copied(waits=False)


def test_memory_that_a_capture_clears_is_clear_at_each_replay() -> None:
    with emulated():
        out = torch.zeros(3, device="cuda")
        graph = TestGraphs.captured(lambda: out.copy_(torch.zeros(3, device="cuda").add_(2)))
        for _ in range(2):
            graph.replay()
            assert values(out).tolist() == [2.0] * 3


def test_a_device_that_runs_ahead_overwrites_what_another_stream_still_reads() -> None:
    with emulated(schedule="ahead"):
        x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        x.fill_(7)
        assert values(y).tolist() == [8] * 3
