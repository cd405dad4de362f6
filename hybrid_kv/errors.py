"""Typed errors; every message is one sentence: name, expected, got, way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class HybridKVError(Exception):
    """Base class of every error this package raises on purpose.

    `exit_code` is what the command line returns: 2 for a user's mistake, 1 for a failure.
    """

    exit_code = 1


class ConfigError(HybridKVError, ValueError):
    """A setting, argument or name is wrong."""

    exit_code = 2


class NoBudgetError(ConfigError):
    """A method does not say how a budget of tokens sets its parameters."""


class ShapeError(HybridKVError, ValueError):
    """Tensors do not fit together."""


class NonFiniteError(HybridKVError, ValueError):
    """Keys or values hold NaN or infinity."""

    @classmethod
    def of(cls, what: str) -> NonFiniteError:
        """The error that says so of some values, named in words."""
        return cls(
            f"{what} must be finite, got NaN or infinity; check the model's weights, or load it in "
            "bfloat16 or float32, whose range is wider than float16's"
        )


class CapacityError(HybridKVError, MemoryError):
    """The context does not fit into the memory that is free."""

    exit_code = 2


class DeviceMemoryError(CapacityError):
    """The memory of a GPU ran out; what was kept before is still there."""

    exit_code = 1


class UnsupportedModelError(HybridKVError, NotImplementedError):
    """The model's attention cannot be served by a tiered KV cache."""

    exit_code = 2


class ModelNotFoundError(HybridKVError, OSError):
    """The model folder or id cannot be read."""

    exit_code = 2


class WriteError(HybridKVError, OSError):
    """A file could not be written; what was there before still is."""


class FileFormatError(HybridKVError, ValueError):
    """A file is damaged, foreign, or of another version."""

    exit_code = 2


class ReadError(HybridKVError, OSError):
    """A file is not there or cannot be read."""

    exit_code = 2


class OtherContextError(ConfigError):
    """A saved context is whole, but was made with another model, tokenizer or settings."""


class BackendUnavailable(HybridKVError, RuntimeError):
    """A back end was asked for by name and cannot serve here."""

    exit_code = 2


class BusyError(HybridKVError, RuntimeError):
    """The model is computing already, and serves one call at a time."""


class BrokenCacheError(HybridKVError, RuntimeError):
    """A forward ended in the middle, and what its cache lost since does not come back."""


class QueueFullError(HybridKVError, RuntimeError):
    """More requests wait than the limits allow; `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AuditError(HybridKVError, RuntimeError):
    """The audit found a worse approximation than the settings allow."""


class MethodError(HybridKVError, RuntimeError):
    """A method broke its contract; what was stored before is still there."""


class RecallWarning(RuntimeWarning):
    """The audit found a worse approximation than the settings allow; decoding goes on."""


class BackendWarning(RuntimeWarning):
    """A device is served by plain torch; everything works, more slowly."""


class IndexBuildWarning(RuntimeWarning):
    """An index could not be built; everything works, more slowly."""


class DeviceSelectWarning(RuntimeWarning):
    """A device cannot select what is attended as it was meant to; everything works, more slowly."""


class PluginWarning(RuntimeWarning):
    """A package offers a method or index that cannot be used; everything else works."""


class PinnedMemoryWarning(RuntimeWarning):
    """Host memory could not be page-locked; everything works, with slower transfers."""


class ContextWarning(RuntimeWarning):
    """A context on disk could not be used or left there; everything works, more slowly."""


class WeightsWarning(UserWarning):
    """Weights take more memory than their files or the kind that was asked for."""


class GgufWarning(WeightsWarning):
    """Weights were unpacked from a GGUF file and take more memory than it does."""


class IntegrityError(HybridKVError, AssertionError):
    """The cache broke one of its own invariants."""


def said(value: object) -> str:
    """A value as a sentence quotes it: text and numbers as they are, all else by its type."""
    plain = value is None or isinstance(value, (str, int, float))
    return repr(value) if plain else f"a {type(value).__name__}"


def unknown_setting(owner: str, name: str, known: Iterable[str], of: str = "") -> ConfigError:
    """An error for a setting that `owner` does not have: as for any name, or that it had it once.

    Args:
        owner: 'setting', or what has it: 'hybrid setting'.
        name: dotted, or the last part of one.
        of: the method or index kind, where `owner` does not begin with it.
    """
    from hybrid_kv.former import gone

    if (said_of_it := gone(of or owner.removesuffix("setting").strip(), name)) is not None:
        return ConfigError(f"{owner} '{name}' {said_of_it}")
    return unknown_name(owner, name, {one.removeprefix("cold.") for one in known})


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """An error for `name` that lists the known names, the nearest one first."""
    names = sorted(known)
    near = nearest_name(name, names)
    hint = f"did you mean '{near}'? " if near else ""
    return ConfigError(f"unknown {what} '{name}'; {hint}known: {', '.join(names) or '(none)'}")


_SYNONYMS = {
    "page_size": ("page_tokens", "tokens_per_page", "block_size", "block_tokens", "page_len"),
    "window_tokens": ("window", "window_size", "sliding_window", "local_tokens", "recent_tokens"),
    "sink_tokens": ("sinks", "num_sinks", "initial_tokens", "attention_sinks"),
    "spare_tokens": ("resident_tokens", "extra_tokens"),
    "page_budget": ("num_pages", "max_pages", "pages_per_step", "token_budget"),
    "budget_tokens": ("max_capacity_prompt", "base_capacity", "cache_size", "kv_budget"),
    "observed_tokens": ("observation_window", "observed_queries"),
    "pool_tokens": ("kernel_size", "pool_size"),
    "safeguard": ("floor_alpha", "alpha"),
    "prefill_chunk_tokens": ("chunk_size", "prefill_chunk_size", "chunk_tokens"),
    "top_k": ("k", "topk", "num_neighbors", "retrieved_tokens"),
    "nprobe": ("num_probes", "probes", "n_probe"),
    "nlist": ("num_clusters", "num_lists", "clusters", "n_list"),
    "ef_search": ("ef", "efsearch"),
    "ef_construction": ("efc", "efconstruction"),
    "retrieval_attention": ("roargraph", "roar_graph"),
    "full": ("dense", "exact"),
    "max_new_tokens": ("max_tokens", "num_predict", "n_predict", "max_completion_tokens"),
    "stop": ("stop_sequences", "stop_words", "stop_tokens"),
    "num_beams": ("beams", "beam_size", "beam_width"),
    "seed": ("random_seed", "rng_seed"),
}
"""Names by which other systems call a thing, where spelling says nothing."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is probably meant: by another system's word for it, else by spelling.

    Of dotted names the last part counts; of equal ones the shortest path is meant.
    """
    places: dict[str, str] = {}
    for place in sorted(known, key=lambda place: (place.count("."), place)):
        places.setdefault(_last_part(place), place)
    word = _last_part(name)
    meant = [own for own, others in _SYNONYMS.items() if word.lower() in others and own in places]
    near = meant or get_close_matches(word, places, n=1, cutoff=0.5)
    return places[near[0]] if near else None


def _last_part(name: str) -> str:
    parts = name.split(".")
    return parts[-1] if all(part.isidentifier() for part in parts) else name
