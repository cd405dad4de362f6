"""Entry point of vLLM's general plug-ins: its attention backend of the CPU becomes ours.

    vLLM starts a process ─► register() ─► CPU_ATTN is `hybrid_kv.vllm.backend.HybridBackend`
                                       └► on CUDA, CUSTOM is one of `hybrid_kv.vllm.cuda`

vLLM loads it in every process and gives it no configuration; settings are read where layers are
made.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from hybrid_kv.errors import BackendUnavailable
from hybrid_kv.vllm.settings import CONNECTOR, check_backend

TRIED = ("0.32.0",)
"""Versions of vLLM whose interfaces were tried; they move from one to the next."""
OURS = CPU, CUDA = "hybrid_kv.vllm.backend", "hybrid_kv.vllm.cuda"


def register() -> None:
    """Put our backend in the place of vLLM's on a CPU, offer one on CUDA, and name our connector.
    May be called again.

    Raises:
        BackendUnavailable: vLLM is of another version.
    """
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from hybrid_kv.vllm.counters import publish

    check_version(vllm.__version__)
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{CPU}.HybridBackend")
    if current_platform.is_cuda():
        kind = "Flash" if current_platform.has_device_capability(80) else "Triton"
        register_backend(AttentionBackendEnum.CUSTOM, f"{CUDA}.{kind}PageBackend")
    _watch_choice()
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "hybrid_kv.vllm.connector", CONNECTOR)
    publish()


def _watch_choice() -> None:
    """Refuse settings of ours where vLLM takes another backend, which would not read them.

    vLLM asks here for the backend of each layer, and has no hook of its own. The function keeps
    what it found for the next engine of the process, whose settings may be others.
    """
    from vllm.v1.attention import selector

    stock = selector._cached_get_attn_backend
    if getattr(stock, "watches", False):
        return

    @wraps(stock)
    def watched(backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import get_current_vllm_config
        from vllm.platforms import current_platform

        found = stock(backend, attn_selector_config, *args, **kwargs)
        attends_all = not attn_selector_config.has_sliding_window
        attends_all = attends_all and attn_selector_config.attn_type == "decoder"
        if attends_all and found.__module__ not in OURS:
            platform = "cuda" if current_platform.is_cuda() else "cpu"
            check_backend(get_current_vllm_config().additional_config, found.__name__, platform)
        return found

    watched.watches, watched.cache_clear = True, stock.cache_clear  # type: ignore[attr-defined]
    selector._cached_get_attn_backend = watched


def check_version(version: str) -> None:
    """Refuse a version of vLLM that was not tried.

    Raises:
        BackendUnavailable: it was not.
    """
    if version.partition("+")[0] not in TRIED:
        raise BackendUnavailable(
            f"vllm must be of a version that hybrid_kv was tried with ({', '.join(TRIED)}), got "
            f"{version}; install one of these, or leave the plug-in out by VLLM_PLUGINS"
        )
