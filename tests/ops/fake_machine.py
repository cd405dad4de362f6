"""A machine whose GPUs and packages can be set; what is known of the real one is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hybrid_kv.ops import devices


@dataclass
class Machine:
    """capabilities: of the GPUs in order, the first of which is the current one. modules: what can
    be imported, or what the import raises. imported: the names asked for so far.
    """

    gpu: bool = True
    capabilities: list[tuple[int, int]] = field(default_factory=lambda: [(9, 0)])
    modules: dict[str, Any] = field(default_factory=dict)
    imported: list[str] = field(default_factory=list)

    def load(self, name: str) -> object:
        self.imported.append(name)
        if name not in self.modules:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        if isinstance(self.modules[name], BaseException):
            raise self.modules[name]
        return self.modules[name]

    def forget(self) -> None:
        """Back ends are looked up anew."""
        for function in (devices.triton_state, devices.flashinfer_state, devices.backends_on):
            function.cache_clear()


@contextmanager
def fake_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    with monkeypatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setattr(torch.cuda, "is_available", lambda: made.gpu)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(
            torch.cuda,
            "get_device_capability",
            lambda device: made.capabilities[torch.device(device).index],
        )
        patch.setattr(devices, "import_module", made.load)
        made.forget()
        yield made
    made.forget()
