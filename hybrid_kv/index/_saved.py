"""Indexes that are written to files, and reports that lie in them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from hybrid_kv.index._base import KeyIndex


class SavedIndex(KeyIndex):
    """An index with a file format (docs/index-file.md); keys stay with their owner.

    file_kind: what the file calls it.
    """

    file_kind: ClassVar[str]

    def over(self, keys: Tensor) -> Self:
        """This index over keys [Hkv, N, D] that differ by rounding, to be saved with them."""
        new = copy(self)
        new._known = keys
        return new

    def shortened(self, keys: Tensor) -> Self | None:
        """Index of keys [Hkv, N, D], the first of its own, to be saved with them.

        It may share memory with this index. None where those that follow cannot be taken out.
        """
        return None

    def save(self, path: str | Path) -> None:
        """Writes all but the keys.

        Raises:
            OSError: the file cannot be written.
        """
        from hybrid_kv.index._file import write_arrays

        write_arrays(Path(path), self.file_kind, *self.to_file())

    @classmethod
    def load(cls, path: str | Path, keys: Tensor) -> Self:
        """The index that `save` wrote, over the same keys [Hkv, N, D]; more may follow them.

        Raises:
            FileFormatError: the file is damaged, foreign or was made for other keys.
            OSError: it cannot be read.
        """
        from hybrid_kv.index._file import read_arrays

        path = Path(path)
        return cls.from_file(path, *read_arrays(path, cls.file_kind), keys)

    @abstractmethod
    def to_file(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Contents of a file for `save`: numbers and words, and arrays."""

    @classmethod
    @abstractmethod
    def from_file(
        cls, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], keys: Tensor
    ) -> Self:
        """Of what `to_file` gave; raises as `load`, where `path` is named."""


class SavedReport:
    """Conversion of a report, a dataclass, to JSON and back."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """From what `to_dict` gave.

        Raises:
            ValueError: a value is missing or of another type.
        """
        return _adapter(cls).validate_python(data)  # type: ignore[arg-type, no-any-return]


@cache
def _adapter(kind: type[SavedReport]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
