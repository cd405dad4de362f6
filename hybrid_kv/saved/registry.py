"""Contexts on disk that prompts begin with, so that what many prompts share is computed once.

A context serves a prompt that begins with the same tokens, up to where they differ; which ones do
is told by hashes of blocks and then token by token, never by likeness. Only contexts count that
were made with the same model, tokenizer, dtype and settings.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter
from warnings import warn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig, parse_count
from hybrid_kv.errors import (
    ConfigError,
    ContextWarning,
    FileFormatError,
    OtherContextError,
    ReadError,
    WriteError,
    said,
)
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.saved.file_blocks import verify_context
from hybrid_kv.saved.folders import ContextFolder, num_bytes
from hybrid_kv.saved.identity import (
    BLOCK_TOKENS,
    chain_of,
    common_tokens,
    identity_hash,
    ids_hash,
    tokenizer_identity,
)
from hybrid_kv.saved.manifest import MANIFEST, read_manifest
from hybrid_kv.saved.opening import open_context, read_ids
from hybrid_kv.saved.saving import Provenance, save_context
from hybrid_kv.types import bytes_per_token

DEFAULT_LIMIT = 20 * 2**30

_LEAST_SHARE = 16
"""A context is used for at least one part in so many of it: all of it is checked."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A context in the folder; stamp: of its manifest. ids: [tokens] on the host."""

    path: Path
    stamp: tuple[int, int]
    ids: Tensor
    chain: tuple[bytes, ...]
    prefill_s: float | None


class ContextRegistry:
    """A folder of contexts with a limit, beyond which those go that were used least recently.

    Several processes may use one folder at the same time. One registry is for one thread at a time.

    counters: of this folder and all processes; see `RegistryCounters`.

    Args:
        folder: made where it is not there.
        limit_bytes: of all contexts together; '20GiB' is taken too. While one is written it comes
            on top.

    Raises:
        ConfigError: the folder cannot be used, or the limit is none.
    """

    def __init__(self, folder: str | Path, limit_bytes: int | str = DEFAULT_LIMIT) -> None:
        self.limit_bytes = _limit(limit_bytes)
        self._shelf = ContextFolder(Path(folder).expanduser())
        self._known: dict[Path, _Entry] = {}
        self._checked: set[tuple[Path, tuple[int, int]]] = set()
        self._tokenizers: WeakKeyDictionary[Provenance, str | None] = WeakKeyDictionary()

    @property
    def folder(self) -> Path:
        return self._shelf.folder

    @property
    def counters(self) -> RegistryCounters:
        return RegistryCounters.read(self.folder / "counters.json")

    # What is there ------------------------------------------------------------------------------

    def find(
        self, ids: Tensor, maker: Provenance, config: HybridConfig, *, whole: bool = False
    ) -> tuple[Path | None, int]:
        """The context that shares most of ids [1, tokens], and how many; counts and opens nothing.

        Args:
            whole: look for a context of exactly these tokens alone.
        """
        entry, shared = self._best(ids[0].cpu(), self._group(maker, config), whole)
        return None if entry is None else entry.path, shared

    def _best(
        self, ids: Tensor, group: str, whole: bool, without: Collection[Path] = ()
    ) -> tuple[_Entry | None, int]:
        chain = chain_of(ids)
        if not chain:
            return None, 0
        entries = [entry for entry in self._entries(group) if entry.path not in without]
        if whole:
            same = (e for e in entries if len(e.ids) == len(ids) and torch.equal(e.ids, ids))
            found = next(same, None)
            return found, 0 if found is None else len(ids)
        for number in reversed(range(len(chain))):
            alike = [e for e in entries if e.chain[number : number + 1] == (chain[number],)]
            shared = {id(e): common_tokens(e.ids, ids) for e in alike}
            alike = [e for e in alike if shared[id(e)] * _LEAST_SHARE >= len(e.ids)]
            if alike:  # of equal ones that of which the least is cut off
                best = max(alike, key=lambda e: (shared[id(e)], -len(e.ids)))
                return best, shared[id(best)]
        return None, 0

    def _entries(self, group: str) -> list[_Entry]:
        """All that can be read; what is damaged is dropped, what has gone meanwhile forgotten."""
        paths = self._shelf.paths(group)
        found = [entry for path in paths if (entry := self._entry(path)) is not None]
        for path in self._known.keys() - set(paths):
            if path.parent == self._shelf.path_of(group, "").parent:
                del self._known[path]
        return found

    def _entry(self, path: Path) -> _Entry | None:
        with self._dropping(path):
            if path.is_symlink():
                raise FileFormatError(f"'{path}' is a symbolic link, which may lead anywhere")
            stamp = _stamp(path)
            known = self._known.get(path)
            if known is None or known.stamp != stamp:
                manifest = read_manifest(path)
                ids = read_ids(path, manifest)
                chain = tuple(chain_of(ids))
                known = self._known[path] = _Entry(path, stamp, ids, chain, manifest.prefill_s)
            return known
        return None

    @contextmanager
    def _dropping(self, path: Path) -> Iterator[None]:
        """A block that reads a context, which is dropped if it is damaged; it may also have gone,
        or another one may have come to its place, which is nobody's fault.
        """
        stamp = _stamp(path)
        try:
            yield
        except FileFormatError as error:
            self._known.pop(path, None)
            if _stamp(path) == stamp and self._shelf.remove(path):
                self._count(RegistryCounters(damaged=1))
                _tell(f"{error}; it was dropped from the cache, and the prompt is computed")
        except (ReadError, OtherContextError) as error:
            self._known.pop(path, None)
            if os.path.lexists(path):
                _tell(f"{error}; the prompt is computed")

    def _group(self, maker: Provenance, config: HybridConfig) -> str:
        if maker not in self._tokenizers:  # a large vocabulary takes a second
            self._tokenizers[maker] = tokenizer_identity(maker.tokenizer)
        return identity_hash(maker.model, self._tokenizers[maker], config)

    # Taking -------------------------------------------------------------------------------------

    def take(self, cache: TieredCache, ids: Tensor, maker: Provenance, device: torch.device) -> int:
        """Fills an empty cache with as many first tokens of ids [1, tokens] as a context has.

        A context is checked, every byte of it, when this process uses it for the first time. What
        is damaged is dropped with a ContextWarning, and the next best is taken.

        A method that drops or recodes entries as the prompt ends has no state for a shorter prompt:
        there only a context of exactly these tokens is taken.

        Returns:
            How many; the cache holds them and nothing else.

        Raises:
            CapacityError, DeviceMemoryError: what stays resident does not fit.
        """
        begin, whole = perf_counter(), not cache.keeps_all
        group, tokens = self._group(maker, cache.kv.config), ids[0].cpu()
        if len(tokens) < BLOCK_TOKENS:
            return 0
        tried: set[Path] = set()
        while True:
            entry, shared = self._best(tokens, group, whole, tried)
            if entry is None:
                self._count(RegistryCounters(misses=1))
                return 0
            tried.add(entry.path)
            with self._dropping(entry.path), self._shelf.reading(entry.path):
                self._check(entry)
                open_context(
                    *(entry.path, cache, maker.model, maker.tokenizer, device), verify=False
                )
                break
        if shared < len(entry.ids):
            cache.crop(shared - len(entry.ids))
        self._shelf.use(entry.path)
        spent = perf_counter() - begin
        took = 0.0 if entry.prefill_s is None else entry.prefill_s * shared / len(entry.ids)
        saved = max(0.0, took - spent)
        self._count(RegistryCounters(hits=1, tokens_saved=shared, seconds_saved=saved))
        _log.info("%d of %d tokens from '%s' in %.2f s", shared, len(tokens), entry.path, spent)
        return shared

    def _check(self, entry: _Entry) -> None:
        key = entry.path, entry.stamp
        if key not in self._checked:
            verify_context(entry.path)
            self._checked.add(key)

    # Leaving ------------------------------------------------------------------------------------

    def add(
        self,
        cache: TieredCache,
        ids: Tensor,
        maker: Provenance,
        *,
        prefill_s: float | None = None,
    ) -> bool:
        """Leaves a context of ids [1, tokens], unless another one serves them but for a block.

        Args:
            cache: of one row, holds these tokens and no others.
            prefill_s: what computing all of them took or would have taken.

        Returns:
            Whether it was written. Where it cannot be, a ContextWarning says why.
        """
        group, tokens = self._group(maker, cache.kv.config), ids[0].cpu()
        if not self._is_new(tokens, group, whole=not cache.keeps_all):
            return False
        path = self._shelf.path_of(group, ids_hash(ids))
        try:
            self._check_size(cache, len(tokens))
            path.parent.mkdir(mode=0o700, exist_ok=True)
            save_context(path, cache, ids, None, maker, prefill_s=prefill_s)
            self._shelf.use(path)
            self._make_room(path)
        except (WriteError, ConfigError, OSError) as error:
            _tell(f"{error}; the context is not kept")
            return False
        return True

    def _is_new(self, ids: Tensor, group: str, *, whole: bool) -> bool:
        if len(ids) < BLOCK_TOKENS:
            return False
        _, shared = self._best(ids, group, whole)
        lacking = len(ids) - shared
        return lacking > 0 if whole else lacking >= BLOCK_TOKENS

    def _check_size(self, cache: TieredCache, num_tokens: int) -> None:
        size = 0
        for store in cache.kv.stores.values():
            near = sum(row.table.num_tokens for row in store.rows)
            size += near * bytes_per_token(store.shape, store.cold.dtype) + store.cold.kv_bytes
        if size > self.limit_bytes:
            raise WriteError(
                f"a context of {num_tokens} tokens takes {size} bytes of {self.limit_bytes} that "
                "the cache may have; raise cache_limit"
            )

    def _make_room(self, new: Path) -> None:
        with self._shelf.locked():
            self._shelf.sweep()
            sizes = {path: num_bytes(path) for path in self._shelf.all_paths()}
            total, evicted = sum(sizes.values()), 0
            for path, size in sizes.items():
                if total > self.limit_bytes and path != new and self._shelf.remove(path):
                    total, evicted = total - size, evicted + 1
            self._add_up(RegistryCounters(added=1, evicted=evicted))

    def _count(self, more: RegistryCounters) -> None:
        with suppress(OSError), self._shelf.locked():  # a full disk is no reason not to answer
            self._add_up(more)

    def _add_up(self, more: RegistryCounters) -> None:
        path = self.folder / "counters.json"
        RegistryCounters.read(path).plus(more).write(path)


def _stamp(root: Path) -> tuple[int, int]:
    """Tells one saving of a context from the next; zeros where there is no manifest."""
    with suppress(OSError):
        found = (root / MANIFEST).lstat()
        return found.st_ino, found.st_mtime_ns
    return 0, 0


def _tell(what: str) -> None:
    warn(what, ContextWarning, stacklevel=2)


def _limit(value: object) -> int:
    number = parse_count(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"cache_limit must be a number of bytes like '20GiB', got {said(value)}")
    return number


@dataclass(slots=True)
class RegistryCounters:
    """hits, misses: prompts of a block or more that began with a context, or with none.

    tokens_saved: that were not computed again. seconds_saved: what they had taken when they were,
    in proportion to their number, less the time for finding, checking and opening; none where that
    took longer or was not measured. added, evicted: contexts. damaged: contexts that were dropped
    because they were not as written.
    """

    hits: int = 0
    misses: int = 0
    tokens_saved: int = 0
    seconds_saved: float = 0.0
    added: int = 0
    evicted: int = 0
    damaged: int = 0

    def plus(self, more: RegistryCounters) -> RegistryCounters:
        """Both together."""
        sums = {f.name: getattr(self, f.name) + getattr(more, f.name) for f in fields(self)}
        return RegistryCounters(**sums)

    @classmethod
    def read(cls, path: Path) -> RegistryCounters:
        """Contents of a file; zeros where there is none, or none of ours."""
        try:
            known = json.loads(path.read_bytes())
            found = cls(**{field.name: known[field.name] for field in fields(cls)})
            return found.plus(cls())  # numbers, or they could not be added
        except (OSError, ValueError, LookupError, TypeError):
            return cls()

    def write(self, path: Path) -> None:
        """Replaces a file in a single step.

        Raises:
            OSError: it cannot be written.
        """
        beside = path.with_suffix(f".{os.getpid()}.part")
        beside.write_text(json.dumps(asdict(self)) + "\n")
        os.replace(beside, path)
