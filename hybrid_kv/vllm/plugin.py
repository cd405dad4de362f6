"""Entry point of vLLM's general plug-ins: the attention backend of the CPU becomes ours.

    vLLM starts a process ─► register() ─► CPU_ATTN is `hybrid_kv.vllm.backend.HybridBackend`

vLLM loads it in every process and gives it no configuration; settings are read where layers are
made.
"""

from __future__ import annotations

from hybrid_kv.errors import BackendUnavailable
from hybrid_kv.vllm.settings import CONNECTOR

TRIED = ("0.32.0",)
"""Versions of vLLM whose interfaces were tried; they move from one to the next."""


def register() -> None:
    """Put our backend in the place of vLLM's on a CPU, and name our connector. May be called again.

    Raises:
        BackendUnavailable: vLLM is of another version.
    """
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from hybrid_kv.vllm.counters import publish

    check_version(vllm.__version__)
    register_backend(AttentionBackendEnum.CPU_ATTN, "hybrid_kv.vllm.backend.HybridBackend")
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "hybrid_kv.vllm.connector", CONNECTOR)
    publish()


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
