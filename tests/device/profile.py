"""torch.profiler.profile, for an emulated machine: what its devices did, and the host's calls."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent, Kernel
from torch.profiler import ProfilerActivity

from tests.device.machine import Machine, Timeline

_NO_WORK = ("mark", "freed", "replay")
"""What runs in a queue and is no kernel; the launches of a replay are there one by one."""

_CALLS = {"to_device": "cudaMemcpyAsync", "to_host": "cudaMemcpyAsync", "replay": "cudaGraphLaunch"}
_COPIES = {"to_device": "Memcpy HtoD", "to_host": "Memcpy DtoH"}


class Profile:
    """As `torch.profiler.profile`, with rows for operators, for calls and for what a device did.

    An operator's row has the device time of the kernels that it launched, as torch's has, so that
    a sum over all rows counts each kernel twice.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        **_: object,
    ) -> None:
        default = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
        self._machine, self._activities = machine, {*(activities or default)}
        self._timeline = Timeline()

    def __enter__(self) -> Profile:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._machine.timelines.append(self._timeline)

    def stop(self) -> None:
        """What was told is done first, as torch waits for the device."""
        if self._timeline in self._machine.timelines:
            self._machine.arrive()
            self._machine.timelines.remove(self._timeline)

    def step(self) -> None:
        pass

    def events(self) -> EventList:
        """In the order of their kinds: operators with their calls, and kernels."""
        kernels = [one for one in self._timeline.done if one[0] not in _NO_WORK]
        found: list[FunctionEvent] = []
        if ProfilerActivity.CPU in self._activities:
            found += self._told(kernels)
        if ProfilerActivity.CUDA in self._activities:
            for name, device, begin, end in kernels:
                found.append(
                    self._event(
                        _COPIES.get(name, name),
                        *(begin, end, len(found)),
                        device_type=DeviceType.CUDA,
                        device_index=device,
                    )
                )
        events = EventList(found, use_device="cuda")
        events._build_tree()
        return events

    def key_averages(self, **_: object) -> EventList:
        return self.events().key_averages()

    def _told(self, kernels: list[Any]) -> list[FunctionEvent]:
        """An operator for each launch, with its call inside and its kernels' times."""
        found: list[FunctionEvent] = []
        waiting = list(kernels)
        for name, begin, end in self._timeline.told:
            call = _CALLS.get(name, "cudaLaunchKernel")
            operator = self._event(name, begin, end, len(found))
            of_it = next((one for one in waiting if one[0] == name), None)
            if of_it is not None and ProfilerActivity.CUDA in self._activities:
                waiting.remove(of_it)
                us = 1e6 * (of_it[3] - of_it[2])
                operator.kernels.append(Kernel(of_it[0], of_it[1], us))
            found += [operator, self._event(call, begin, end, len(found) + 1)]
        return found

    @staticmethod
    def _event(name: str, begin: float, end: float, number: int, **more: Any) -> FunctionEvent:
        times = {"start_us": 1e6 * begin, "end_us": 1e6 * end, "thread": 0, "stack": []}
        return FunctionEvent(number, name, **times, use_device="cuda", **more)


def profiler_of(machine: Machine) -> Any:
    """The class, as those who profile call it."""
    return partial(Profile, machine)
