"""The engine's C interface for ctypes: its numbers, structures and functions.

Made by `scripts/make_bindings` from `native/include`, where each is described; not edited.
"""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)

ABI_VERSION = 29
OK = 0
INVALID = 1
NO_MEMORY = 2
FAILED = 3
NOT_FINITE = 4
F32 = 0
F16 = 1
BF16 = 2
SILU = 0
GELU_TANH = 1
CLAMPED_SILU = 2
LINEAR_TOKENS = 8
Q4_0 = 2
Q4_1 = 3
Q5_0 = 6
Q5_1 = 7
Q8_0 = 8
Q4_K = 12
Q5_K = 13
Q6_K = 14
IQ4_NL = 20
MXFP4 = 39
MAX_DIM = 4096
LEVELS = 256
BLOCK_KEYS = 16
SKETCH_DIMS = 256
KEY_BLOCK = 64
FLOATS = 0
PAIRS = 1
AMX = 2
NORM = 0
NORM_ONCE = 1
NORM_CENTRED = 2
IDS_INT32 = 0
IDS_INT64 = 1
POINT_DIMS = 32
POINT_LIMIT = 4095
MAX_DEGREE = 256
SEARCH_FLAT = 0
SEARCH_GRAPH = 1
SEARCH_SKETCH = 2


class KeysStruct(Structure):
    """`hkv_keys`."""

    _fields_ = (
        ("data", c_void_p),
        ("count", c_int64),
        ("stride", c_int64),
        ("dim", c_int32),
        ("dtype", c_int32),
    )


class QuantisedStruct(Structure):
    """`hkv_quantised`."""

    _fields_ = (
        ("mean", c_void_p),
        ("channel", c_void_p),
        ("levels", c_void_p),
        ("rows", c_void_p),
        ("scale_codes", c_void_p),
        ("blocks", c_void_p),
        ("count", c_int64),
        ("capacity", c_int64),
        ("dim", c_int32),
    )


class SketchMapStruct(Structure):
    """`hkv_sketch_map`."""

    _fields_ = (
        ("key_columns", c_void_p),
        ("query_columns", c_void_p),
        ("start", c_void_p),
        ("dim", c_int32),
        ("lines_of_8", c_int32),
        ("lines_of_4", c_int32),
        ("lines_of_2", c_int32),
    )


class SketchTierStruct(Structure):
    """`hkv_sketch_tier`."""

    _fields_ = (
        ("map", POINTER(SketchMapStruct)),
        ("blocks", c_void_p),
        ("ids", c_void_p),
        ("count", c_int64),
        ("pages", c_void_p),
        ("page_keys", c_int32),
        ("first", c_int32),
        ("page_rows", c_int64),
        ("page_bytes", c_int64),
        ("first_row", c_int64),
    )


class SketchHeadStruct(Structure):
    """`hkv_sketch_head`."""

    _fields_ = (
        ("keys", KeysStruct),
        ("tiers", POINTER(SketchTierStruct)),
        ("num_tiers", c_int32),
        ("num_rerank", c_int64),
        ("first_exact", c_int64),
    )


class KVStruct(Structure):
    """`hkv_kv`."""

    _fields_ = (
        ("keys_data", c_void_p),
        ("keys_count", c_int64),
        ("keys_stride", c_int64),
        ("keys_dim", c_int32),
        ("keys_dtype", c_int32),
        ("values_data", c_void_p),
        ("values_count", c_int64),
        ("values_stride", c_int64),
        ("values_dim", c_int32),
        ("values_dtype", c_int32),
        ("key_step_0", c_int64),
        ("key_step_1", c_int64),
        ("value_step_0", c_int64),
        ("value_step_1", c_int64),
    )


class VisibleStruct(Structure):
    """`hkv_visible`."""

    _fields_ = (
        ("positions", c_void_p),
        ("row_step", c_int64),
        ("newest", c_void_p),
        ("new_tokens", c_int64),
    )


class PromptStruct(Structure):
    """`hkv_prompt`."""

    _fields_ = (
        ("queries", c_void_p),
        ("step", c_int64 * 3),
        ("tokens", c_int64),
        ("group", c_int64),
        ("window", c_int64),
        ("dtype", c_int32),
        ("causal", c_int32),
        ("listed", c_void_p),
        ("block", c_int64),
        ("positions", c_void_p),
        ("arithmetic", c_int32),
    )


class RaggedStruct(Structure):
    """`hkv_ragged`."""

    _fields_ = (
        ("keys", KeysStruct),
        ("values", KeysStruct),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("bias", c_void_p),
    )


class PartStruct(Structure):
    """`hkv_part`."""

    _fields_ = (
        ("out", c_void_p),
        ("lse", c_void_p),
        ("dtype", c_int32),
    )


class MatrixStruct(Structure):
    """`hkv_matrix`."""

    _fields_ = (
        ("kind", c_int32),
        ("exact", c_int32),
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
        ("stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
    )


class NormStruct(Structure):
    """`hkv_norm`."""

    _fields_ = (
        ("weight", c_void_p),
        ("epsilon", c_float),
        ("form", c_int32),
    )


class DecoderStruct(Structure):
    """`hkv_decoder`."""

    _fields_ = (
        ("dtype", c_int32),
        ("head_dim", c_int32),
        ("activation", c_int32),
        ("residual_scale", c_float),
        ("before_attention", NormStruct),
        ("of_queries", NormStruct),
        ("of_keys", NormStruct),
        ("after_attention", NormStruct),
        ("before_feed_forward", NormStruct),
        ("after_feed_forward", NormStruct),
        ("query", MatrixStruct),
        ("key", MatrixStruct),
        ("value", MatrixStruct),
        ("output", MatrixStruct),
        ("gate", MatrixStruct),
        ("up", MatrixStruct),
        ("down", MatrixStruct),
    )


class ExpertMatrixStruct(Structure):
    """`hkv_expert_matrix`."""

    _fields_ = (
        ("kind", c_int32),
        ("stride", c_int64),
        ("expert_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("bias_stride", c_int64),
        ("bias_expert_stride", c_int64),
    )


class ExpertsStruct(Structure):
    """`hkv_experts`."""

    _fields_ = (
        ("dtype", c_int32),
        ("activation", c_int32),
        ("exact", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("num_experts", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("gate", ExpertMatrixStruct),
        ("up", ExpertMatrixStruct),
        ("down", ExpertMatrixStruct),
    )


class FlatHeadStruct(Structure):
    """`hkv_flat_head`."""

    _fields_ = (
        ("keys", KeysStruct),
        ("quantised", POINTER(QuantisedStruct)),
    )


class ProjectionStruct(Structure):
    """`hkv_projection`."""

    _fields_ = (
        ("lists", c_void_p),
        ("extra", c_void_p),
        ("num_keys", c_int64),
        ("num_queries", c_int64),
        ("list_length", c_int32),
        ("extra_length", c_int32),
        ("degree", c_int32),
        ("cap", c_int32),
        ("candidates", c_int32),
        ("num_entries", c_int32),
        ("alpha", c_float),
        ("seed", c_uint64),
    )


class GraphHeadStruct(Structure):
    """`hkv_graph_head`."""

    _fields_ = (
        ("keys", KeysStruct),
        ("rows", QuantisedStruct),
        ("tail", QuantisedStruct),
        ("lists", c_void_p),
        ("keys_of", c_void_p),
        ("entries", c_void_p),
        ("linked", c_int64),
        ("num_nodes", c_int64),
        ("degree", c_int32),
        ("num_entries", c_int32),
    )


class GraphQueryStruct(Structure):
    """`hkv_graph_query`."""

    _fields_ = (
        ("beams", c_void_p),
        ("queries", c_int32),
        ("top_k", c_int32),
        ("pool_size", c_int32),
        ("width", c_int32),
        ("num_warm", c_int32),
        ("beta", c_float),
        ("walks", c_void_p),
    )


class PagesStruct(Structure):
    """`hkv_pages`."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("positions", c_void_p),
        ("lows", c_void_p),
        ("highs", c_void_p),
        ("slots", c_int64),
        ("page_size", c_int64),
        ("heads", c_int32),
        ("dim", c_int32),
        ("value_dim", c_int32),
        ("dtype", c_int32),
    )


class PageDigestsStruct(Structure):
    """`hkv_page_digests`."""

    _fields_ = (
        ("lows", KeysStruct),
        ("highs", KeysStruct),
    )


class SearchStruct(Structure):
    """`hkv_search`."""

    _fields_ = (
        ("kind", c_int32),
        ("num_heads", c_int32),
        ("heads", c_void_p),
        ("head", c_void_p),
        ("first_row", c_int64),
        ("width", c_int64),
        ("num_ranked", c_int64),
        ("beams", c_void_p),
        ("walks", c_void_p),
        ("num_expanded", c_int32),
    )


class TailStruct(Structure):
    """`hkv_tail`."""

    _fields_ = (
        ("shares", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_key", c_void_p),
        ("key_value", c_void_p),
        ("clusters", c_int64),
        ("first_order", c_int32),
        ("entries", c_int64),
    )


class ExtentStruct(Structure):
    """`hkv_extent`."""

    _fields_ = (
        ("kv", KVStruct),
        ("searches", POINTER(SearchStruct)),
        ("num_searches", c_int32),
        ("tail", TailStruct),
    )


class ColdStruct(Structure):
    """`hkv_cold`."""

    _fields_ = (
        ("extents", POINTER(ExtentStruct)),
        ("num_extents", c_int32),
        ("width", c_int64),
    )


class ResidentStruct(Structure):
    """`hkv_resident`."""

    _fields_ = (
        ("kv", KVStruct),
        ("slots", c_void_p),
        ("num_pages", c_int64),
        ("page_size", c_int64),
        ("num_chosen", c_int64),
        ("oldest", c_int64),
        ("newest", c_int64),
        ("digests", PageDigestsStruct),
        ("digest_step", c_int64),
    )


class LayerStruct(Structure):
    """`hkv_layer`."""

    _fields_ = (
        ("heads", c_int32),
        ("num_queries", c_int64),
        ("resident", ResidentStruct),
        ("cold", ColdStruct),
        ("pages", POINTER(PagesStruct)),
        ("whole", POINTER(KVStruct)),
        ("num_whole", c_int32),
    )


class StepStruct(Structure):
    """`hkv_step`."""

    _fields_ = (
        ("queries", c_void_p),
        ("query_dtype", c_int32),
        ("out_dtype", c_int32),
        ("tail_fill", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("warm", c_void_p),
        ("num_warm", c_int64),
        ("ids", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("new_keys", c_void_p),
        ("new_values", c_void_p),
        ("new_key_step", c_int64),
        ("new_value_step", c_int64),
        ("new_position", c_int64),
        ("named", c_void_p),
        ("num_named", c_int64),
        ("found", c_void_p),
        ("found_scores", c_void_p),
        ("num_found", c_int64),
        ("estimated", c_void_p),
        ("half", c_void_p),
    )


class StepReportStruct(Structure):
    """`hkv_step_report`."""

    _fields_ = (
        ("search_s", c_double),
        ("cold_s", c_double),
        ("select_s", c_double),
        ("resident_s", c_double),
        ("merge_s", c_double),
        ("scored", c_int64),
        ("retrieved", c_int64),
        ("most_retrieved", c_int64),
        ("rows_read", c_int64),
    )


class OneStepStruct(Structure):
    """`hkv_one_step`."""

    _fields_ = (
        ("layer", POINTER(LayerStruct)),
        ("step", POINTER(StepStruct)),
        ("report", POINTER(StepReportStruct)),
        ("status", c_int32),
    )


# fmt: off
FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "hkv_abi_version": (c_int, []),
    "hkv_append": (c_int, [POINTER(PagesStruct), c_void_p, c_int64, c_void_p, c_int64, c_int64,
        c_int64, c_int64]),
    "hkv_attend": (c_int, [c_void_p, c_int32, POINTER(KVStruct), c_void_p, c_int32, c_int64,
        c_void_p, c_int64, c_void_p, c_float, c_float, c_void_p, c_void_p]),
    "hkv_attend_prompt": (c_int, [c_void_p, c_int32, c_int32, POINTER(KVStruct),
        POINTER(PromptStruct), c_float, c_float, c_void_p, c_void_p, c_void_p, c_void_p]),
    "hkv_attend_ragged": (c_int, [c_void_p, c_int32, POINTER(RaggedStruct), c_void_p, c_int32,
        c_int64, c_float, c_float, c_void_p, c_void_p]),
    "hkv_attend_rows": (c_int, [c_void_p, c_int32, c_int32, POINTER(KVStruct), c_void_p, c_int32,
        c_int64, POINTER(VisibleStruct), c_float, c_float, c_void_p, c_void_p]),
    "hkv_attend_step": (c_int, [c_void_p, POINTER(LayerStruct), POINTER(StepStruct),
        POINTER(StepReportStruct)]),
    "hkv_attend_steps": (c_int, [c_void_p, c_int64, POINTER(OneStepStruct)]),
    "hkv_block_bytes": (c_int64, [c_int32]),
    "hkv_decoder_inputs": (c_int, [c_void_p, POINTER(DecoderStruct), c_int64, c_void_p, c_int64,
        c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "hkv_decoder_outputs": (c_int, [c_void_p, POINTER(DecoderStruct), c_int64, c_void_p, c_void_p,
        c_void_p]),
    "hkv_flat_search": (c_int, [c_void_p, c_int32, POINTER(FlatHeadStruct), c_void_p, c_int64,
        c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p]),
    "hkv_graph_cover": (c_int, [POINTER(ProjectionStruct), c_void_p, c_void_p]),
    "hkv_graph_list_bytes": (c_int64, [c_int32, c_int64]),
    "hkv_graph_pack": (c_int, [c_void_p, c_int32, c_int64, c_void_p, c_void_p]),
    "hkv_graph_project": (c_int, [c_void_p, POINTER(ProjectionStruct), c_void_p, c_int64, c_int64,
        c_void_p, c_void_p, c_void_p]),
    "hkv_graph_search": (c_int, [c_void_p, c_int32, POINTER(GraphHeadStruct),
        POINTER(GraphQueryStruct), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "hkv_graph_unpack": (c_int, [c_void_p, c_int32, c_int64, c_void_p, c_void_p]),
    "hkv_has_arithmetic": (c_int, [c_int32]),
    "hkv_isa": (c_char_p, []),
    "hkv_knn": (c_int, [c_void_p, POINTER(FlatHeadStruct), POINTER(KeysStruct), c_int64, c_int64,
        c_int32, c_void_p, c_void_p]),
    "hkv_last_error": (c_char_p, []),
    "hkv_linear": (c_int, [c_void_p, c_int32, c_int64, c_int64, c_void_p, c_int64, c_void_p,
        c_int64, c_void_p, c_void_p]),
    "hkv_merge": (c_int, [c_void_p, c_int32, POINTER(PartStruct), c_int64, c_int32, c_int32,
        c_void_p, c_void_p]),
    "hkv_mixture": (c_int, [c_void_p, POINTER(ExpertsStruct), c_int64, c_int64, c_void_p, c_void_p,
        c_void_p, c_void_p]),
    "hkv_packed_experts": (c_int, [c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p, c_int64,
        c_int32, c_int64, c_void_p, c_void_p, c_void_p, c_int32, c_void_p]),
    "hkv_packed_linear": (c_int, [c_void_p, c_int32, c_int64, c_int64, c_void_p, c_int64, c_void_p,
        c_int32, c_int64, c_void_p, c_int32, c_void_p]),
    "hkv_packed_tile_tokens": (c_int64, []),
    "hkv_page_scores": (c_int, [c_void_p, c_int32, POINTER(PageDigestsStruct), c_void_p, c_int64,
        c_void_p]),
    "hkv_page_search": (c_int, [c_void_p, c_int32, POINTER(PageDigestsStruct), c_void_p, c_int64,
        c_int64, c_void_p, c_void_p]),
    "hkv_pool_close": (c_int, [c_void_p]),
    "hkv_pool_create": (c_int, [c_int32, c_void_p, c_int32, POINTER(c_void_p)]),
    "hkv_pool_destroy": (None, [c_void_p]),
    "hkv_pool_threads": (c_int32, [c_void_p]),
    "hkv_quantise": (c_int, [c_void_p, c_int32, POINTER(KeysStruct), POINTER(QuantisedStruct)]),
    "hkv_quantise_append": (c_int, [c_void_p, c_int32, POINTER(KeysStruct),
        POINTER(QuantisedStruct)]),
    "hkv_quantise_query": (c_int, [POINTER(QuantisedStruct), c_void_p, c_void_p, c_void_p, c_void_p,
        c_void_p]),
    "hkv_row_bytes": (c_int64, [c_int32]),
    "hkv_runnable_isas": (c_char_p, []),
    "hkv_sketch_block_bytes": (c_int64, [POINTER(SketchMapStruct)]),
    "hkv_sketch_encode": (c_int, [c_void_p, POINTER(SketchMapStruct), POINTER(KeysStruct), c_void_p,
        c_int64, c_int64, c_void_p]),
    "hkv_sketch_encode_pages": (c_int, [c_void_p, c_int32, POINTER(SketchTierStruct),
        POINTER(KeysStruct), c_int64]),
    "hkv_sketch_search": (c_int, [c_void_p, c_int32, POINTER(SketchHeadStruct), c_void_p, c_int64,
        c_int64, c_void_p, c_void_p, c_void_p, c_void_p]),
    "hkv_stream": (c_uint64, [c_void_p, c_int64]),
}
"""Result and arguments of each."""
