"""`blocks`: a few representative keys stand for a block; the best blocks are read whole."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from hybrid_kv import config
from hybrid_kv.index._base import scan
from hybrid_kv.index._file import check_fingerprint, fingerprint, refusing_what_is_damaged
from hybrid_kv.index._saved import SavedIndex
from hybrid_kv.index.pages import PagesIndex, with_room
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import Needs


@INDEXES.register("blocks", paper="InfLLM (Xiao et al. 2024, section 3.2)")
class BlocksIndex(PagesIndex, SavedIndex):
    """Reads the blocks whose representative keys score highest on average (InfLLM).

    Those keys represent a block that the sampled queries of the local_tokens behind it score best
    (the last ones where it came later; without any, all keys do). Each query head chooses alone.
    """

    class Params(config.Params):
        """page_size: tokens of a block; num_representatives: keys that stand for it; local_tokens:
        so far behind it are the queries that choose them; sampled_queries: of the prompt, per head.
        """

        in_python = frozenset({"local_tokens"})

        page_size: config.Count = 128
        num_representatives: config.Count = 4
        local_tokens: config.Count = 4096
        sampled_queries: config.Tokens = 1024

        def without_effect(self) -> dict[str, str]:
            why = "with sampled_queries 0, where the mean of a block stands for it"
            names = ("num_representatives", "local_tokens")
            return {} if self.sampled_queries else dict.fromkeys(names, why)

    file_kind = "blocks"
    _rows = 1

    @classmethod
    def needs(cls, params: Any) -> Needs:
        return Needs(params.sampled_queries)

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        asked = self._keys.new_zeros(1, 0, 1) if samples is None else samples.float().mean(1)
        self._asked, self._built = pad(asked.cumsum(1), (0, 0, 1, 0)), max(1, len(self))
        super()._rebuild(samples, nearest)
        if asked.shape[1]:  # a block that comes later is judged by the last one alone
            self._asked = pad(asked[:, -1:], (0, 0, 1, 0))

    def _digest(self, first: int, pages: Tensor) -> Tensor:
        if not (known := self._asked.shape[1] - 1):  # samples, evenly spread over the keys
            return pages.mean(2)
        ends = torch.arange(first + 1, first + pages.shape[1] + 1) * self.page_tokens
        start = (ends * known // self._built).clamp_max(known - 1)
        stop = ((ends + self.params.local_tokens) * known // self._built).clamp(max=known)
        sums = self._asked[:, torch.maximum(stop, start + 1)] - self._asked[:, start]
        scores = torch.matmul(pages.float(), sums[..., None])  # [Hkv, P, S, 1]
        best = scores.topk(min(self.params.num_representatives, pages.shape[2]), 2).indices
        return pages.gather(2, best.expand(*best.shape[:3], pages.shape[3])).mean(2)

    def _describe(self) -> None:
        """Nothing for the engine: digests score as keys do."""

    def _best_pages(self, queries: Tensor, wanted: int) -> Tensor:
        return scan(queries, self._digests[:, : self._num_pages], wanted)[1]

    def shortened(self, keys: Tensor) -> Self:
        """See `SavedIndex`: the block that ends earlier now is judged as a later one."""
        new, whole = self.over(keys), keys.shape[1] // int(self.params.page_size)
        new._digests = self._digests.clone()
        if whole < new._num_pages:
            rest = keys[:, None, whole * int(self.params.page_size) :]
            new._digests[:, whole : whole + 1] = new._digest(whole, rest)
        return new

    def to_file(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """See `SavedIndex`: the blocks' digests, and what judges those that come later."""
        meta = {
            "params": self.params.model_dump(mode="json"),
            "keys": fingerprint(self._keys, len(self)),
        }
        digests = self._digests[:, : self._num_pages].float()
        return meta, {"digests": digests.numpy(), "asked": self._asked[:, 1:].float().numpy()}

    @classmethod
    def from_file(
        cls, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], keys: Tensor
    ) -> Self:
        """See `SavedIndex`."""
        with refusing_what_is_damaged(path):
            index = cls(cls.Params.model_validate(meta["params"]))
            count = int(meta["keys"]["shape"][1])
            check_fingerprint(path, meta["keys"], keys, count)
            index._known, index._built = keys[:, :count], max(1, count)
            digests, asked = (torch.from_numpy(arrays[name]) for name in ("digests", "asked"))
            heads, dim, pages = keys.shape[0], keys.shape[2], index._num_pages
            if digests.shape != (heads, pages, dim) or not bool(digests.isfinite().all()):
                raise ValueError(f"it has not the digests of {pages} blocks")
            if asked.shape not in ((heads, 1, dim), (1, 0, 1)) or not bool(asked.isfinite().all()):
                raise ValueError("it has not what judges later blocks")
        index._digests = index._empty_digests(with_room(pages))
        index._digests[:, :pages] = digests
        index._asked = pad(asked, (0, 0, 1, 0))
        if keys.shape[1] > count:
            index.add(keys)
        return index
