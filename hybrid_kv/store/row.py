"""One batch row of a layer: its entries in both tiers, and the rule who owns what.

Positions count the row's stored tokens from 0; padding is never stored. The order is sinks, cold
entries, spare pages, window: what leaves the window is always the oldest page behind the sinks, so
the cold tier is one run of positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_kv.errors import MethodError
from hybrid_kv.plugins import Placement
from hybrid_kv.store.cold_tier import ColdChain
from hybrid_kv.store.index_builder import MakeIndex
from hybrid_kv.store.pool import PageTable
from hybrid_kv.types import HIDDEN, Demotion

if TYPE_CHECKING:
    from hybrid_kv.entries import Entries

_LEAST_PAGES = 16
"""Of a window in which layers take turns: what is resident beyond it is half a page on average."""


@dataclass(frozen=True, slots=True)
class RowMark:
    """State of a row to go back to: tokens stored, resident, cold and dropped, and what the method
    kept.
    """

    length: int
    resident: int
    cold: int
    dropped: int
    kept: Entries | None
    copied: Tensor | None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Row:
    """Contents of one row.

    table: its resident pages. chain: its cold entries. length: tokens ever stored, less cropped
    ones. dropped: tokens in neither tier, lost but for what `kept` has of them. kept: what the
    method keeps of those that left the window.
    copied: [Hkv, cold entries] bool on the host, the cold entries that `kept` has; None for none.
    placement: where entries live from the prompt's end on; None before it. shadows: the cold tier
    has what the method drops, for audits, and nobody attends it. full_tokens: resident tokens from
    which on a page leaves, which is outside the window by then; below, nobody need look. The layers
    of a model take turns within a page where that is a small part of the window, so that no step
    moves a page of each. later_index: makes the index of a further extent where the row's device
    finds cold entries by itself; else None.
    """

    number: int
    table: PageTable
    chain: ColdChain
    length: int = 0
    dropped: int = 0
    kept: Entries | None = None
    copied: Tensor | None = None
    placement: Placement | None = None
    shadows: bool = False
    full_tokens: int = HIDDEN
    later_index: MakeIndex | None = None

    @property
    def page_size(self) -> int:
        return self.table.pool.page_size

    @property
    def may_share(self) -> bool:
        """Whether another row sees its first extent, or another store has pages in its pool."""
        spans = self.chain.spans
        return len(self.table.pool.stores) > 1 or any(len(s.extent.readers) > 1 for s in spans[:1])

    @property
    def drains(self) -> bool:
        """Whether what is outside of the window leaves."""
        return self.full_tokens < HIDDEN

    def seal(self, placement: Placement) -> None:
        """Fixes where entries live from now on; `outside` then says what has to move."""
        self.placement, size = placement, self.page_size
        self.chain.stamps.mark("a prompt has ended")
        if placement.rest is Demotion.KEEP:
            self.full_tokens = HIDDEN
            return
        sinks = placement.sink_tokens // size + 1
        kept = sinks * size + placement.window_tokens + placement.spare_tokens
        takes_turns = not placement.in_step and placement.window_tokens >= _LEAST_PAGES * size
        self.full_tokens = kept + (self.table.pool.shape.layer_idx % size if takes_turns else 0)

    # What leaves the window ---------------------------------------------------------------------

    def outside(self) -> tuple[int, int]:
        """The table's pages behind the sinks and before spare pages and window."""
        place, table = self.placement, self.table
        if place is None or place.rest is Demotion.KEEP:
            return 0, 0
        size = table.pool.page_size
        # The last page is always kept; whole pages before it fill the window up.
        inside = place.window_tokens + place.spare_tokens - table.tail_fill
        kept = 1 + -(-max(0, inside) // size)
        return place.sink_tokens // size, len(table.pages) - kept

    def outside_of_prompt(self) -> tuple[int, int]:
        """Tokens of a prompt that a method absorbs: to the token, behind whole pages of sinks."""
        place, stored, size = self.placement, self.table.num_tokens, self.page_size
        if place is None:
            return stored, stored
        start = min(stored, place.sink_tokens // size * size)
        return start, max(start, stored - place.window_tokens - place.spare_tokens)

    # What the method keeps ----------------------------------------------------------------------

    def keep(self, kept: Entries | None, positions: Tensor | None) -> None:
        """From now on the method keeps these entries.

        Args:
            positions: [capacity] theirs, on the host; None where nothing is offloaded.
        """
        if self.copied is not None:
            self.copied = None
            self.chain.stamps.mark("a method keeps other entries")
        self.kept = kept
        spans = self.chain.spans
        if kept is None or positions is None or not spans or not any(kept.lengths):
            return
        first = int(spans[0].extent.positions[0])  # the cold tier is one run of positions
        copied = torch.zeros(kept.num_heads, self.chain.num_tokens, dtype=torch.bool)
        for own, at in zip(copied, kept.split(positions), strict=True):
            own[at - first] = True
        self.copied = copied
        self.chain.stamps.mark("a method keeps cold entries")

    def unseal(self) -> None:
        """Takes `seal` back, as long as nothing has moved."""
        self.placement = self.kept = self.copied = None
        self.shadows = False
        self.chain.stamps.mark("a prompt goes on")

    def take_table(self, table: PageTable) -> None:
        """Reads another table of the same entries from now on."""
        self.table = table
        self.chain.stamps.mark("a row has other pages")

    @property
    def gone_tokens(self) -> int:
        """Tokens that left the window: offloaded or dropped."""
        return self.chain.num_tokens + self.dropped

    @property
    def lost_entries(self) -> int:
        """Entries, counted by KV head, that nobody has any more."""
        gone = self.gone_tokens if self.shadows else self.dropped
        kept = 0 if self.kept is None else sum(self.kept.lengths)
        return max(0, gone * self.table.pool.shape.num_kv_heads - kept)

    # Resident entries ---------------------------------------------------------------------------

    @property
    def sink_tokens(self) -> int:
        """Tokens in the whole pages of sinks; 0 before the prompt's end."""
        place, size = self.placement, self.page_size
        return 0 if place is None else place.sink_tokens // size * size

    def resident_keys(self) -> tuple[Tensor, Tensor]:
        """Keys [Hkv, W, D] of all resident slots; positions [W], HIDDEN where one is empty."""
        slots, pool = self.table.slots(), self.table.pool
        return pool.k[:, slots].flatten(1, 2), pool.positions[slots].flatten()

    # Going back, and going on elsewhere ---------------------------------------------------------

    def check_crop(self, count: int) -> None:
        """Raises MethodError where the window of a row that is `count` tokens shorter is lost.

        What the method has of it may lie among the entries that it keeps.
        """
        place, stop = self.placement, self.length - count
        if place is None or place.rest is not Demotion.ABSORB or not self.lost_entries:
            return
        sinks = place.sink_tokens // self.page_size * self.page_size
        start = max(sinks, stop - place.window_tokens)
        resident = self.length - (self.table.num_tokens - sinks)
        needed = min(stop, resident) - start
        if count == 0 or stop >= resident:
            return
        if self.kept is not None and sinks < stop < (end := self.kept.merged_end):
            raise MethodError(
                f"row {self.number} must stay at least {end} tokens long, got {stop}, for the "
                "method has merged those before; restore a checkpoint"
            )
        heads = [] if self.kept is None else self.kept.split("positions")
        for head, at in enumerate(heads or [torch.zeros(0)]):
            if (there := int(((at >= start) & (at < stop)).sum())) < needed:
                raise MethodError(
                    f"row {self.number} must still have its {needed} tokens before position {stop} "
                    f"to go back there, got {there} in KV head {head}, for the method has dropped "
                    "the others; restore a checkpoint, or give a larger window_tokens"
                )

    def crop(self, count: int) -> None:
        """Forgets the newest `count` tokens, from whichever tier holds them.

        Raises:
            MethodError: see `check_crop`; nothing was forgotten.
        """
        self.check_crop(count)
        self.length -= count
        far_tokens = self.chain.num_tokens
        moved = far_tokens + self.dropped > 0
        sinks = self.placement.sink_tokens if self.placement is not None and moved else 0
        near = min(count, self.table.num_tokens - sinks)
        resident = self.table.num_tokens
        far = min(count - near, far_tokens)
        lost = min(count - near - far, self.dropped)
        if far:
            self.chain.truncate(far_tokens - far)
        self.dropped -= lost
        self.table.truncate(resident - near - (count - near - far - lost))
        if self.kept is not None:
            with torch.inference_mode(False):  # it may be extended outside of it
                self.kept = self.kept.before(self.length)
            self.copied = None if self.copied is None else self.copied[:, : self.chain.num_tokens]

    def mark(self) -> RowMark:
        """State of the row, for `go_back`."""
        gone = self.chain.num_tokens, self.dropped
        return RowMark(self.length, self.table.num_tokens, *gone, self.kept, self.copied)

    def go_back(self, mark: RowMark) -> bool:
        """Takes back what came since a mark, even where somebody was interrupted while storing it.

        What has moved to the cold tier since stays there, as after `crop`. False where something
        was lost since: what has left the window was dropped, or the method chose among it.
        """
        if (self.chain.num_tokens, self.dropped) == (mark.cold, mark.dropped):
            self.length = mark.length
            self.kept, self.copied = mark.kept, mark.copied
            self.chain.stamps.mark("a row went back")
            self.table.truncate(mark.resident)
        elif self.placement is None or self.placement.rest is not Demotion.OFFLOAD or self.shadows:
            return False
        else:
            self.crop(self.length - mark.length)
        return self.table.num_tokens + self.gone_tokens == self.length

    def continued(self, number: int, table: PageTable, chain: ColdChain) -> Row:
        """A row that goes on from this one, with a table and a chain that hold the same."""
        return replace(self, number=number, table=table, chain=chain)


@dataclass(frozen=True, slots=True)
class Overflow:
    """Entries on their way out: k, v [Hkv, n, D] (views), positions [n] (host).

    pages: of the table, from .. to, that hold them and nothing else; none where they leave to the
    token.

    Nothing changes yet: the caller copies what shall live on, then lets the row forget the rest.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    pages: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, row: Row) -> Overflow | None:
        """The pages between sinks and window that the placement does not keep; None for none."""
        start, stop = row.outside()
        if start >= stop:
            return None
        table, size = row.table, row.table.pool.page_size
        count, behind = (stop - start) * size, table.num_tokens - start * size
        first = row.length - behind
        return cls(
            *table.read(start, stop, count), torch.arange(first, first + count), (start, stop)
        )

    @classmethod
    def of_prompt(cls, row: Row) -> Overflow:
        """Tokens of a prompt that a method absorbs, of which there may be none.

        `LayerStore.compact` takes them out.
        """
        start, stop = row.outside_of_prompt()
        k, v = row.table.view()
        return cls(k[:, start:stop], v[:, start:stop], torch.arange(start, stop))
