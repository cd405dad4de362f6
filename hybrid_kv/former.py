"""Old names of settings, public names and modules, with what to do instead; refused until 1.0."""

from __future__ import annotations

from functools import cache

_SCANNED = "leave it out: later keys are scanned until the index is learned again"
REMOVED = {
    "compile_decode": "leave it out: no measurement has shown that it helps; on a GPU "
    "capture_decode captures whole steps",
    "hot_tokens": "leave it out, or use spare_tokens, which keep further pages on the device",
    "cold.attend": "leave it out: what the host finds it attends; select='device' attends on "
    "the device",
    "cold.stand_in": "leave it out: a scan serves while an index is built; with "
    "select='device' nothing is waited for",
    "link_keys": _SCANNED,
    "link_positions": _SCANNED,
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
    max_scanned graph_tokens graph_min_keys graph_trial_seconds
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


_FOR_PLUG_INS = """
    Attended Demotion Entries Evidence INDEXES Index LayerShape METHODS Method MethodError ModelInfo
    Needs Params Placement Ragged Read SearchResult Tiers TokenBudget
"""
"""Names that left `hybrid_kv` for `hybrid_kv.plugin`."""

MODULES = {
    "api.building": ".saved.unfinished .saved.building",
    "api.generation": "prefill stream",
    "api.llm": "conversation",
    "api.planning": "heads",
    "api.tokens": "asked_messages template",
    "api.turn": "prefixes",
    "cli.comparison": ".eval.one_layer",
    "contest.arguments": "cases contenders",
    "contest.evaluation": "run statistics",
    "contest.measure": "probe",
    "contest.prompts": ".eval.prefilled prose shared",
    "entries": "attended",
    "eval.needle": ".eval.needle.samples",
    "eval.needle.facts": "vocabulary words",
    "eval.profiling.bench": "room",
    "eval.tasks.base": "haystack measures words",
    "eval.tasks.data_sets": "infinite_bench longbench recorded ruler_files",
    "eval.tasks.documents": "perplexity",
    "eval.tasks.ruler": "counting needles tracking",
    "index.clusters": "query_lists",
    "index.faiss_kinds": "hnsw ivf",
    "index.hashing": "hash_tables lsh",
    "index.pages": "blocks frames landmarks",
    "index.projections": "label_channels pca pq query_channels skewed_channels",
    "methods.before_rope": "kvquant rotate_kv",
    "methods.by_part": "by_head by_layer",
    "methods.codec": "outliers planes turned",
    "methods.combining": "chain composing share",
    "methods.evicting": "demoting scores",
    "methods.h2o": "a2sf following keyformer scissorhands tova",
    "methods.index_baselines": "ctkvr double_sparsity infinigen_proxy infllm loki magic_pig "
    "pqcache rekv retroinfer shadowkv sparq",
    "methods.locret": "retaining_heads",
    "methods.low_bits": "accurate_block gear kivi mixed_bits saq zipcache",
    "methods.low_rank": "cskv matryoshka_kv shadowkv_keys think",
    "methods.merging": "d2o elastic_cache kvmerger look_m merging_once",
    "methods.retrieval": "budget hybrid",
    "methods.snapkv": "ada_pyramid ada_snapkv headkv keydiff prompt_scored pyramidkv zipvl",
    "methods.whole_heads": "duo_attention fastgen head_scores razor_attention",
    "methods.windows": "full lm_infinite quest streaming_llm tidal_decode",
    "models.block_quantiser": "block_quantizer",
    "models.cache_state": "cache_argument fixed_state forwards",
    "models.exact_steps": "prompt_lookup",
    "models.few_tokens": "linear_product",
    "models.gguf_model": "gguf",
    "models.load": "hub",
    "models.local_models": "hub_files",
    "models.packed_linear": "block_packing blocks",
    "models.prompt_layers": "widening",
    "models.quantisers": "packed_checkpoint",
    "models.support": "outputs rope rotary weight_tensors",
    "planning.plan": "facts model_facts other_layers",
    "planning.planner": "learning",
    "planning.rates": "forecast",
    "planning.traffic": "device_select first_token prefill_bytes",
    "runtime.step": ".attention",
    "saved.file_blocks": "blocks rounding verify",
    "saved.folders": "context_folder folder shelf whole_folder",
    "saved.identity": "chain",
    "saved.opening": "in_use",
    "saved.registry": "counters",
    "serve.http.answers": "forms",
    "serve.http.app": "guard",
    "serve.http.chat": "tools",
    "serve.http.metrics": "journal",
    "serve.http.schemas": "errors",
    "serve.http.service": "extensions",
    "serve.http.tokenizer": "lengths texts",
    "serve.output": "exact sampling text",
    "serve.prefill_queue": "pace prefix_cache prefixes prompts",
    "serve.running": "active admission room .watch.places",
    "serve.scheduler": "counters rounds tally",
    "testing": ".testing.checks .testing.driving .testing.exact",
}
"""Modules below `hybrid_kv`, each with the last parts of the names of those that it holds today;
whole behind a dot if they lay in another package.

Of the packages for users and authors of plug-ins: what runtime, store, ops, transfer, report and
cli are made of was never theirs to import.
"""


@cache
def moved() -> dict[str, str]:
    """Sentences that refuse old names, by whole dotted names."""
    names = {f"hybrid_kv.{name}": name for name in _FOR_PLUG_INS.split()}
    plug_ins = {
        whole: f"'{name}' is for authors of plug-ins; import it from hybrid_kv.plugin"
        for whole, name in names.items()
    }
    modules = {}
    for new, olds in MODULES.items():
        for old in olds.split():
            place = ".".join(("hybrid_kv", *new.split(".")[:-1]))
            whole = f"hybrid_kv{old}" if old[0] == "." else f"{place}.{old}"
            modules[whole] = f"'{whole}' is part of hybrid_kv.{new} today; import from there"
    return plug_ins | modules
