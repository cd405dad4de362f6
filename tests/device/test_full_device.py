"""A device whose memory runs out at some allocation: a typed error, and nothing is lost."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.errors import DeviceMemoryError, DeviceSelectWarning
from tests.device import Machine, emulated
from tests.device.models import llama, small, tokens
from tests.kit import cache_of

PROMPT = tokens(187)[0].tolist()
QUESTION = tokens(37, 6)[0].tolist()
"""With it pages leave the window; the steps behind it are recorded."""
SHARES = (0.03, 0.21, 0.42, 0.58, 0.77, 0.96)
"""Of all allocations of a call, where memory runs out."""


class Allocations:
    """Counts what a machine's memory is asked for; from number `full_from` on it has none left."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.own = machine, machine.own
        self.count, self.full_from = 0, -1

    def __call__(self, memory: torch.Tensor, device: int) -> object:
        self.count += 1
        if 0 <= self.full_from < self.count:
            kept, self.machine.limits[device] = self.machine.limits[device], 0
            try:
                return self.own(memory, device)
            finally:
                self.machine.limits[device] = kept
        return self.own(memory, device)

    @contextmanager
    def running_out(self, after: int) -> Iterator[None]:
        """A block in which memory suffices for so many more allocations."""
        self.full_from = self.count + after
        try:
            yield
        finally:
            self.full_from = -1


@contextmanager
def served(select: str) -> Iterator[tuple[hkv.LLM, Allocations]]:
    with emulated(schedule="late", kernels="defined") as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeviceSelectWarning)
        counted = Allocations(machine)
        machine.own = counted  # type: ignore[method-assign, assignment]
        config = small("hybrid").replace(select=select)
        with hkv.load(llama().to("cuda"), config=config) as llm:  # type: ignore[arg-type]
            yield llm, counted


def asked(context: hkv.Context) -> list[int]:
    return context.ask(QUESTION, max_new_tokens=6).token_ids


@pytest.mark.parametrize("select", ["device", "host"])
def test_a_prompt_for_which_there_is_no_memory(select: str) -> None:
    """Refused, or its codes do not fit and the host searches; again with memory it works."""
    with served(select) as (llm, memory):
        before = memory.count
        expected = asked(llm.context(PROMPT))
        total, failed = memory.count - before, 0
        for share in SHARES:
            try:
                with memory.running_out(int(share * total)):
                    found = asked(llm.context(PROMPT))
            except DeviceMemoryError as error:
                failed += 1
                assert "GPU memory ran out at" in str(error)  # noqa: PT017
            else:
                assert found == expected
        assert failed
        assert asked(llm.context(PROMPT)) == expected


@pytest.mark.parametrize("select", ["device", "host"])
def test_a_question_for_which_there_is_no_memory(select: str) -> None:
    """The context is as it was, and answers when there is memory again."""
    with served(select) as (llm, memory):
        context = llm.context(PROMPT)
        before = memory.count
        expected = asked(context)
        total, failed = memory.count - before, 0
        for share in SHARES:
            try:
                with memory.running_out(int(share * total)):
                    found = asked(context)
            except DeviceMemoryError as error:
                failed += 1
                assert "GPU memory ran out at" in str(error)  # noqa: PT017
            else:
                assert found == expected
            cache_of(context).check_integrity()
        assert failed == len(SHARES)
        assert asked(context) == expected


@pytest.mark.parametrize("select", ["device", "host"])
def test_a_dropped_context_gives_its_memory_back_at_once(select: str) -> None:
    """A layer hung on itself, by what makes its indexes, until Python's collector ran."""
    with served(select) as (llm, memory):

        def held() -> int:
            torch.cuda.synchronize()
            return memory.machine.allocated[0]

        llm.context(PROMPT)  # page lists that were sent stay there
        gc.collect()
        before = held()
        gc.disable()
        try:
            context = llm.context(PROMPT)
            assert held() > before
            del context
            assert held() == before
        finally:
            gc.enable()
