"""A KV connector of vLLM that takes what a prompt begins with from saved contexts (`NAME.hkv`).

    scheduler   prompt's ids ─► a context that begins with them ─► blocks of the request
    worker      its keys and values ─► each layer's own `do_kv_cache_update`

Keys go the way that new ones go, so that any attention backend's layout is right, and an index
takes note. A load that fails is reported by its blocks: vLLM computes them, or ends the request, as
`kv_load_failure_policy` says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils.hub import cached_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hybrid_kv.errors import ConfigError, FileFormatError, ReadError
from hybrid_kv.saved.identity import name_of
from hybrid_kv.vllm.contexts import SavedPrefix, SavedPrefixes, checkpoint_identity, saved_layers

_log = logging.getLogger("vllm.hybrid_kv")


@dataclass(frozen=True, slots=True)
class ContextLoad:
    """Tokens begin..end - 1 of a context, for the blocks of a request."""

    path: Path
    folder: str
    begin: int
    end: int
    block_ids: list[int]


@dataclass
class ContextLoads(KVConnectorMetadata):
    """Loads of a step."""

    loads: list[ContextLoad] = field(default_factory=list)


class HybridContexts(KVConnectorBase_V1):
    """Saved contexts in front of the prefix cache; see the arguments of vLLM's class.

    Raises:
        ConfigError: settings are wrong, or the engine is one that it does not serve.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = int(vllm_config.cache_config.block_size)
        self._found: dict[str, tuple[SavedPrefix, int]] = {}  # and the end, of requests that wait
        self._loads: list[ContextLoad] = []
        self._failed: set[int] = set()
        folder, checks = _checked(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            model = vllm_config.model_config
            home = _folder_of(model.model, model.revision)
            own = checkpoint_identity(home, model.dtype, weights=checks)
            self._prefixes = SavedPrefixes(folder, *own, name_of(model.dtype))

    # In the scheduler ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond those of the prefix cache that a context has, whole blocks of them."""
        self._found.pop(request.request_id, None)
        other = request.mm_features, request.lora_request, request.prompt_embeds, request.cache_salt
        if any(one is not None and one != [] for one in other) or request.skip_reading_prefix_cache:
            return 0, False
        ids = torch.tensor(request.prompt_token_ids[:-1])  # one is left to be computed
        best = self._prefixes.best(ids)
        if best is None:
            return 0, False
        found, shared = best
        end = shared // self._block * self._block
        if end <= num_computed_tokens:
            return 0, False
        self._found[request.request_id] = found, end
        return end - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note where to load to."""
        found = self._found.pop(request.request_id, None)
        if found is None or num_external_tokens == 0:
            return
        one, end = found
        begin = end - num_external_tokens
        ids = blocks.get_block_ids()[0][begin // self._block : end // self._block]
        self._loads.append(ContextLoad(one.path, one.manifest.folder, begin, end, list(ids)))

    def build_connector_meta(self, scheduler_output: Any) -> ContextLoads:
        """Loads of this step."""
        loads, self._loads = self._loads, []
        return ContextLoads(loads)

    # In a worker --------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what the step needs, all of it, before the step attends to it."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ContextLoads)
        layers = {
            extract_layer_index(name): layer
            for name, layer in forward_context.no_compile_layers.items()
            if getattr(layer, "kv_cache", None) is not None
        }
        for load in metadata.loads:
            try:
                self._load(load, layers)
            except (FileFormatError, ReadError) as error:
                _log.warning("%s; its tokens are not loaded", error)
                self._failed |= set(load.block_ids)

    def _load(self, load: ContextLoad, layers: Mapping[int, Any]) -> None:
        """Write a span of a context to its blocks.

        Raises:
            FileFormatError, ReadError: it is not there any more, or not as it was.
        """
        blocks, inside = torch.tensor(load.block_ids), torch.arange(self._block)
        slots = (blocks[:, None] * self._block + inside).flatten()
        for number, k, v in saved_layers(load.path, load.folder, slice(load.begin, load.end)):
            layer = layers[number]
            where = layer.kv_cache.device
            own = k.contiguous().to(where), v.contiguous().to(where)
            layer.impl.do_kv_cache_update(layer, *own, layer.kv_cache, slots.to(where))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing is saved: contexts are made by hybrid_kv."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""


def _checked(config: Any, kv_cache_config: Any) -> tuple[Path, bool]:
    """The folder of contexts, and whether their weights are compared.

    Raises:
        ConfigError: settings are wrong, or the engine is one that is not served.
    """
    given = dict(config.kv_transfer_config.kv_connector_extra_config)
    folder, checks = given.pop("contexts", None), given.pop("check_weights", True)
    where = "kv_connector_extra_config"
    if not isinstance(folder, str) or not isinstance(checks, bool) or given:
        raise ConfigError(
            f"{where} must have contexts, a folder, and may have check_weights, true or false, got "
            f"{dict(config.kv_transfer_config.kv_connector_extra_config)}"
        )
    parallel, dtype = config.parallel_config, config.cache_config.cache_dtype
    if (size := parallel.world_size * parallel.decode_context_parallel_size) > 1:
        raise ConfigError(f"saved contexts are loaded by one worker, got {size}; leave out {where}")
    if dtype not in ("auto", name_of(config.model_config.dtype)):
        raise ConfigError(f"kv_cache_dtype must be auto to load saved contexts, got {dtype}")
    if (groups := len(kv_cache_config.kv_cache_groups)) != 1:
        raise ConfigError(
            f"saved contexts are loaded where all layers attend everything, got {groups} kinds of "
            f"layers; leave out {where}"
        )
    return Path(folder), checks


def _folder_of(model: str, revision: str | None) -> Path:
    """Where vLLM has loaded a model from: a folder, or a hub's name in its cache."""
    found = cached_file(model, "config.json", revision=revision, local_files_only=True)
    assert found is not None
    return Path(found).parent
