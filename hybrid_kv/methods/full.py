"""Full attention: the exact baseline inside our own store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybrid_kv.config import Params as BaseParams
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.types import Evidence, Read

_EVERYTHING = Read()


@METHODS.register("full", paper="Vaswani et al. 2017, arXiv:1706.03762, section 3.2")
class Full(Method):
    """Everything stays resident and every entry is attended: exact.

    out = softmax(q K^T * scale) V over all entries that a query may see.

    Kept: everything, on the device.
    Lost: nothing.
    Deviations: none.
    """

    class Params(BaseParams):
        """No parameters."""

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return Placement()

    reads_alike = True

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return _EVERYTHING

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        return params
