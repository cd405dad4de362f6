"""Triton compiles a kernel anew for other constants and other properties of numbers: no step may
bring a new combination once the steps of a page were seen, or a GPU would wait for a compiler.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from tests.device import emulated
from tests.device.models import llama, tokens
from tests.device.step_counts import INTERPRETED, config_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels need TRITON_INTERPRET=1")
STEPS, SEEN = 24, 9  # pages leave in steps 5 and 21
PROMPT = 139


def _property(value: object, is_specialized: bool) -> Hashable:
    """What Triton's compiler is told of an argument."""
    if isinstance(value, tuple):
        return tuple(_property(one, is_specialized) for one in value)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        width = 32 if -(2**31) <= value < 2**31 else 64
        return (width, value == 1, value % 16 == 0) if is_specialized else width
    return type(value)


@contextmanager
def compiled() -> Iterator[set[Hashable]]:
    """A block, and the combinations that its launches would have had compiled."""
    from triton.runtime.interpreter import InterpretedFunction

    inner, keys = InterpretedFunction.run, set[Hashable]()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        notes = self.fn.__annotations__
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        plain = self.kwargs.get("do_not_specialize") or ()
        told = []
        for name, value in given.items():
            is_constant = "constexpr" in str(notes.get(name)) or name not in self.arg_names
            told.append((name, value if is_constant else _property(value, name not in plain)))
        keys.add((self.fn.__name__, *told))
        return inner(self, *args, grid=grid, warmup=warmup, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        yield keys


@pytest.mark.parametrize("name", ["quest", "hybrid"])
def test_steps_bring_no_new_combination(name: str) -> None:
    counts = []
    with emulated(schedule="late"), compiled() as keys:
        model = llama(layers=1).to("cuda")  # type: ignore[arg-type]
        with torch.inference_mode(), hkv.attach(model, config_of(name)) as runtime:
            cache = runtime.cache()
            model(tokens(PROMPT).cuda(), **passing(cache), logits_to_keep=1)
            for number in range(STEPS):
                model(tokens(1, 2 + number).cuda(), **passing(cache))
                counts.append(len(keys))
    assert counts[-1] == counts[SEEN]
