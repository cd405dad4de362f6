"""Names of settings that are none any more, with what to do instead; refused by name until 1.0."""

from __future__ import annotations

REMOVED = {
    "hot_tokens": "leave it out, or use spare_tokens, which keep further pages on the device",
    "cold.attend": "leave it out: what the host finds it attends; cold.select='device' attends on "
    "the device",
    "cold.stand_in": "leave it out: a scan serves while an index is built; with "
    "cold.select='device' nothing is waited for",
}
"""Settings of which nothing is left."""

_ITSELF = "leave it out: it is decided by itself"
_BUDGETS = "leave it out: hybrid attends top_k and estimates the rest; retrieval_attention has it"
_SIZES = (
    "leave it out: an index of kind auto has a constant, or finds it; graph and sketch have "
    "settings of their own, and tests give index={'kind': 'auto', 'sizes': {...}} in Python"
)
_PAPER = "leave it out: it is a constant, which no measurement has varied"
_OF_AUTO = """
    sampled_queries recent_queries horizon_tokens min_keys target_mass check_queries check_top_k
    gain codes num_rerank max_degree list_length candidates cap alpha beam check_positions
    max_scanned link_keys link_positions graph_tokens graph_min_keys graph_trial_seconds
"""
FORMER = {
    "": {
        "prefill_states": f"{_ITSELF}, by the memory that is free",
        "dense_extend_tokens": "leave it out: a turn of more than 32 tokens attends exactly",
    },
    "hybrid": {
        "look_ahead": _ITSELF,
        "look_ahead_factor": "leave it out: a search ahead finds four times as many",
        "page_budget": "leave it out: a step reads the best 32 pages of the spare tokens",
        **dict.fromkeys(("max_tokens", "min_share", "shared"), _BUDGETS),
    },
    "auto": dict.fromkeys(_OF_AUTO.split(), _SIZES),
    "pq": dict.fromkeys(("iterations", "training_keys"), _PAPER),
    "clusters": dict.fromkeys(("segment_tokens", "update_tokens", "iterations"), _PAPER),
    "blocks": {"local_tokens": _PAPER},
}
"""Settings of all methods (""), of a method or of an index kind that are constants today, follow
from others, or are those of other methods alone.
"""


def is_removed(setting: str) -> bool:
    """Whether a setting, by its whole dotted name, is one of which nothing is left."""
    return any(f".{setting}".endswith(f".{old}") for old in REMOVED)


def is_former(owner: str, name: str) -> bool:
    """Whether all methods, this one or this index kind had a setting that is none any more.

    Args:
        name: the last part of the setting's.
    """
    return name in FORMER[""] or name in FORMER.get(owner, {})


def gone(owner: str, name: str) -> str | None:
    """Words of a refusal behind the name of a setting that is none any more; None if it is one.

    Args:
        owner: a method or an index kind, or "" if nobody knows.
        name: dotted, or the last part of one.
    """
    for old, way in REMOVED.items():
        if f".{old}".endswith(f".{name}") or f".{name}".endswith(f".{old}"):
            return f"was removed; {way}"
    last = name.rpartition(".")[2]
    places = ("", owner, "auto") if owner == "hybrid" else ("", owner)  # its kind by default
    ways = (FORMER.get(place, {}).get(last) for place in places)
    return next((f"is no setting any more; {way}" for way in ways if way is not None), None)
