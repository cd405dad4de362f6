"""Which cold pages of a row have a copy on the device: those that searches find most often.

The host keeps K and V of every cold page, so a copy that is given up is forgotten, never written
back. A page that is found in every step is worth more than one that was found often long ago:
scores are counts that halve every 69 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_DECAY = 0.99
"""Of all scores, per step."""
_MARGIN = 1.5
"""How much higher than the lowest hot page a page must score to take its place: copies cost time on
the bus, and two pages that are found equally often shall not take turns.
"""
_PER_STEP = 4
"""Pages promoted at most in one step: what is copied beside it must stay a small part of it."""
_HEAVIEST = 1e100

Pages = npt.NDArray[np.int64]
PageSums = tuple[Tensor, Tensor, Tensor]


class Promotion(NamedTuple):
    """A cold page, and the place among the hot pages that it shall take."""

    page: int
    place: int


class HotPages:
    """The hot pages of one row and layer, and how often which cold page was found.

    Cold pages are numbered along the row, an extent's first entry begins a page. A step costs
    O(found entries), however many pages there are.

    Args:
        page_size: tokens per page.
        capacity: hot pages at most.
    """

    def __init__(self, page_size: int, capacity: int) -> None:
        self.page_size, self.capacity = page_size, capacity
        self.pages: list[int] = []  # by place
        self._place_of = np.full(0, -1, dtype=np.int64)  # by page, -1 for none
        self._scores = np.zeros(0)
        self._last = np.zeros(0, dtype=np.int64)  # scratch
        self._weight = 1.0  # of an entry found now: it grows, so that no step decays all scores
        self._found: list[Pages] = []  # since the last step
        self._sums: dict[int, PageSums] = {}  # of hot pages, by number

    def __len__(self) -> int:
        return len(self.pages)

    def book(
        self,
        ids: Tensor,
        first_page: int,
        whole_pages: int,
        attended: Tensor | None,
        copied: Tensor | None = None,
    ) -> Tensor:
        """Counts the entries that a search has found; says which of them the device attends.

        Args:
            ids: [Hkv, M, K] rows of an extent, -1 for none, on the host; M = G * T.
            first_page: the number of the extent's first page.
            whole_pages: filled pages of the extent; only these can be hot.
            attended: [Hkv, T, len(self)] bool, the hot pages that the device attends in this step;
                None for all of them.
            copied: [Hkv, n] bool, the extent's entries that the device attends as copies of their
                own; their pages are not worth promoting, for they would be attended twice.

        Returns:
            [Hkv, M, K] bool.
        """
        self._know(first_page + whole_pages + 1)
        found = ids.numpy()
        local = found // self.page_size
        usable = (found >= 0) & (local < whole_pages)
        pages = np.where(usable, local + first_page, 0)
        places = np.where(usable, self._place_of[pages], -1)
        covered = places >= 0
        if attended is not None and covered.any():
            head, query, _ = covered.nonzero()
            token = query % attended.shape[1]
            covered[covered] = attended.numpy()[head, token, places[covered]]
        if copied is not None and whole_pages:
            by_page = copied[:, : whole_pages * self.page_size].any(0).view(-1, self.page_size)
            usable &= ~by_page.any(1).numpy()[np.where(usable, local, 0)]
        met = pages[usable]
        np.add.at(self._scores, met, self._weight)
        self._found.append(met)
        return torch.from_numpy(covered)

    def _know(self, num_pages: int) -> None:
        known = len(self._scores)
        if num_pages > known:
            more = max(num_pages, 2 * known) - known
            self._scores = np.pad(self._scores, (0, more))
            self._last = np.pad(self._last, (0, more))
            self._place_of = np.pad(self._place_of, (0, more), constant_values=-1)

    def next_step(self) -> list[Promotion]:
        """Ends a step: the pages to promote, best first; `take` each when its copy is there."""
        found, self._found = self._found, []
        self._weight /= _DECAY
        if self._weight > _HEAVIEST:
            self._scores /= self._weight
            self._weight = 1.0
        if not found or not self.capacity:
            return []
        best = self._best_cold(np.concatenate(found))
        fresh = range(len(self.pages), self.capacity)[: len(best)]
        lowest = self._scores[self.pages].argsort(kind="stable")[: len(best) - len(fresh)]
        promotions = [Promotion(int(page), place) for page, place in zip(best, fresh, strict=False)]
        for page, place in zip(best[len(fresh) :], lowest, strict=False):
            if self._scores[page] <= _MARGIN * self._scores[self.pages[place]]:
                break
            promotions.append(Promotion(int(page), int(place)))
        return promotions

    def _best_cold(self, found: Pages) -> Pages:
        """The pages with the highest scores among those found that are not hot, best first.

        Thousands of entries: a sort would cost more than all the rest of a step.
        """
        number = np.arange(len(found))
        self._last[found] = number  # of the entries in a page one remains, which stands for it
        cold = found[(self._last[found] == number) & (self._place_of[found] < 0)]
        scores, best = self._scores[cold], np.empty(min(_PER_STEP, len(cold)), dtype=np.int64)
        for place in range(len(best)):
            at = scores.argmax()
            best[place], scores[at] = cold[at], -1.0
        return best

    def summed(self, page: int, make: Callable[[], PageSums]) -> PageSums:
        """What `make` sums up of a hot page, once for as long as the page is hot."""
        if page not in self._sums:
            self._sums[page] = make()
        return self._sums[page]

    def take(self, promotion: Promotion) -> None:
        """A page is hot from now on, instead of the one that had its place."""
        page, place = promotion
        if place == len(self.pages):
            self.pages.append(page)
        else:
            self._place_of[self.pages[place]] = -1
            self._sums.pop(self.pages[place], None)
            self.pages[place] = page
        self._place_of[page] = place

    def clear(self) -> None:
        """No page is hot any more; scores stay."""
        self._place_of[self.pages] = -1
        self.pages, self._sums = [], {}

    def truncate(self, num_pages: int) -> None:
        """Pages from `num_pages` on are gone, and nothing is hot."""
        self.clear()
        self._scores[num_pages:] = 0
        self._found = [pages[pages < num_pages] for pages in self._found]

    def copy(self) -> HotPages:
        """The same for a row that continues from this one."""
        new = copy(self)
        new.pages, new._found = list(self.pages), list(self._found)
        new._sums = dict(self._sums)
        new._place_of, new._scores = self._place_of.copy(), self._scores.copy()
        new._last = self._last.copy()
        return new
