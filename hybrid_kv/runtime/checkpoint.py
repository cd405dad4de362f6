"""A state of a cache to which it can be put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid_kv.runtime.layers import Layers
from hybrid_kv.store import LayerStore


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of all layers to go back to: the stores they had, and by row how many tokens.

    Where the method moves entries on as the window advances, the next tokens are taken by a branch
    of the store: cropping would bring back neither dropped nor offloaded entries.
    """

    stores: Mapping[int, LayerStore]
    lengths: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, layers: Layers) -> Checkpoint:
        """The state now; prompts that have not ended end here.

        Raises:
            CapacityError, DeviceMemoryError: a branch does not fit; nothing has changed.
        """
        layers.seal_all()
        saved, branches = layers.stores(), dict[int, LayerStore]()
        try:
            for layer_idx, store in saved.items():
                if store.moves_entries:
                    branches[layer_idx] = store.branch()
        except BaseException:  # memory ran out: all layers stay what they are
            for branch in branches.values():
                branch.cold.release()
            raise
        for layer_idx, branch in branches.items():
            layers[layer_idx].go_on_from(branch)
        lengths = {idx: [row.length for row in store.rows] for idx, store in saved.items()}
        return cls(saved, lengths)

    def restore(self, layers: Layers) -> None:
        """Puts every layer back to where it was."""
        for layer in layers.values():
            layer.leaving.forget()
        for layer_idx, store in self.stores.items():
            layer = layers[layer_idx]
            if layer.held is not store:
                layer.held.cold.release()
                layer.go_on_from(store)
            for row, length in zip(store.rows, self.lengths[layer_idx], strict=True):
                row.crop(row.length - length)
