"""`frames`: blocks by their mean key, the same for all heads of a layer (ReKV)."""

from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import scan
from hybrid_kv.index.pages import PagesIndex
from hybrid_kv.plugins import INDEXES


@INDEXES.register("frames", paper="ReKV (Di et al. 2025, arXiv:2503.00540)")
class FramesIndex(PagesIndex):
    """Reads the blocks (frames of a video) whose mean key is most like the mean query (ReKV).

    Of a layer: cosine of the mean of all queries of a step and the mean key of a block, the KV
    heads' vectors behind each other; all heads read the same blocks.
    """

    class Params(config.Params):
        """page_size: tokens of a frame; shared: all heads and tokens of a step choose together
        (false: each query by its own dot products).
        """

        page_size: config.Count = 196
        shared: bool = True

    _rows = 1

    def _digest(self, first: int, pages: Tensor) -> Tensor:
        return pages.mean(2)

    def _describe(self) -> None:
        """Nothing for the engine: digests score as keys do."""

    def _best_pages(self, queries: Tensor, wanted: int) -> Tensor:
        digests = self._digests[:, : self._num_pages]
        if not self.params.shared:
            return scan(queries, digests, wanted)[1]
        frames, asked = digests.float(), queries.mean(1, keepdim=True)
        scores = (frames * asked).sum((0, 2)) / frames.square().sum((0, 2)).sqrt().clamp_min(1e-20)
        return scores.topk(wanted).indices.expand(*queries.shape[:2], -1)
