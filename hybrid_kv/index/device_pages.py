"""Pages chosen where the queries are: long contexts are served at once, with no host search."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_kv.index._trial import HeadReport
from hybrid_kv.index.pages import PagesIndex
from hybrid_kv.ops import Ops

_TOKENS = 2048
"""Attended of an extent by each KV head and token: Quest reads as many (section 4.3)."""


class DevicePages(PagesIndex):
    """Page digests on a device choose pages there, which are then attended whole.

    Built by one pass over the keys. What is attended does not hang on top_k: pages are chosen for
    a KV head, and one that holds the best key of one query head holds little for the others.

    Args:
        ops: what bounds and chooses pages on the device.
        page_size: tokens per page.
        device: where the model's queries are.
        digests: [Hkv, P, 2 D] of the keys that it is built over, on that device: maxima, minima;
            None to take them from the keys.
    """

    on_device = True

    def __init__(
        self, ops: Ops, page_size: int, device: torch.device, digests: Tensor | None = None
    ) -> None:
        super().__init__(PagesIndex.Params(page_size=page_size))
        self._ops, self._device, self._given = ops, device, digests

    @property
    def memory_bytes(self) -> int:
        """Host memory: none where the digests lie on a GPU."""
        return super().memory_bytes if self._device.type == "cpu" else 0

    def _write_whole(self, first: int, pages: Tensor) -> None:
        given, self._given = self._given, None
        if given is None or (first, given.shape[1]) != (0, pages.shape[1]):
            super()._write_whole(first, pages)
        else:
            self._digests[:, : given.shape[1]] = given

    def choose_pages(self, queries: Tensor, new: int) -> Tensor:
        highs, lows = self._digests[:, : self._num_pages].chunk(2, -1)
        count = min(-(-_TOKENS // self.page_tokens), self._num_pages)
        return self._ops.choose_pages(
            queries, lows, highs, new=new, oldest=0, newest=1, count=count
        )

    def _best_pages(self, queries: Tensor, wanted: int) -> Tensor:
        return super()._best_pages(queries.to(self._device), wanted).cpu()

    def describe(self) -> list[dict[str, Any]]:
        reason = "pages are chosen by their digests while the index is built"
        return [HeadReport("pages", reason).to_dict() for _ in self._keys]
