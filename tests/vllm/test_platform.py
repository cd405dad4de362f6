"""What vLLM chooses on CUDA, with a platform that stands for a GPU; nothing is computed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run scripts/check_engines")

import torch
import vllm.platforms
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hybrid_kv.errors import ConfigError, UnsupportedModelError
from hybrid_kv.vllm import cuda, plugin


@pytest.fixture(params=[(9, 0), (7, 5)], ids=["hopper", "turing"])
def capability(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeviceCapability]:
    """VLLM's platform is CUDA, with a GPU of this capability, and has loaded the plug-in."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("stub"))
    from vllm.platforms.cuda import CudaPlatformBase

    there = DeviceCapability(*request.param)

    class StandIn(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return there

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "stand-in"

    monkeypatch.setattr(vllm.platforms, "_current_platform", StandIn())
    selector._cached_get_attn_backend.cache_clear()
    plugin.register()
    plugin.register()  # as in a process that loads it twice
    yield there
    AttentionBackendEnum.CUSTOM.clear_override()
    selector._cached_get_attn_backend.cache_clear()


def configured(
    backend: str | None, settings: dict[str, Any] | None = None, **options: Any
) -> VllmConfig:
    kept = {"additional_config": {"hybrid_kv": settings}} if settings is not None else {}
    return VllmConfig(attention_config=AttentionConfig(backend=backend), **kept | options)


def chosen(config: VllmConfig, **facts: Any) -> type[AttentionBackend]:
    """The backend of a layer, as vLLM's `Attention` asks for it."""
    with set_current_vllm_config(config):
        return selector.get_attn_backend(128, torch.float16, "auto", **facts)


def impl_of(config: VllmConfig, backend: type[AttentionBackend]) -> type:
    with set_current_vllm_config(config):
        return backend.get_impl_cls()


@pytest.fixture(autouse=True)
def v1_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


def test_vllm_takes_ours_where_it_is_asked_to(capability: DeviceCapability) -> None:
    flash = capability.major == 9
    config = configured("CUSTOM", {"budget": "2%"})
    found = chosen(config)
    assert found is (cuda.FlashPageBackend if flash else cuda.TritonPageBackend)
    assert AttentionBackendEnum[found.get_name()] is AttentionBackendEnum.CUSTOM
    ours = cuda.FlashPageImpl if flash else cuda.TritonPageImpl
    assert impl_of(config, found) is ours
    assert chosen(config, has_sliding_window=True) is found
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.float16)
    builder = found.get_builder_cls()
    assert builder.get_cudagraph_support(config, spec) is AttentionCGSupport.NEVER
    assert builder.supports_update_block_table is False


def test_without_settings_vllm_is_as_it_is(capability: DeviceCapability) -> None:
    config = configured("CUSTOM")
    found = chosen(config)
    kind = cuda.FlashPageImpl if capability.major == 9 else cuda.TritonPageImpl
    assert impl_of(config, found) is kind.stock
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.float16)
    stock = found.get_builder_cls().stock
    assert found.get_builder_cls().get_cudagraph_support(config, spec) is (
        stock.get_cudagraph_support(config, spec)
    )
    assert not chosen(configured("TRITON_ATTN")).__module__.startswith("hybrid_kv")


def test_settings_are_refused_where_another_backend_attends(capability: DeviceCapability) -> None:
    assert chosen(configured("TRITON_ATTN")).__name__ == "TritonAttentionBackend", "and is kept"
    config = configured("TRITON_ATTN", {})
    with pytest.raises(ConfigError, match=r"must be CUSTOM .*, got TritonAttentionBackend; give"):
        chosen(config)
    windows = chosen(config, has_sliding_window=True)
    assert not windows.__module__.startswith("hybrid_kv")


def test_settings_are_refused_where_a_model_has_another_backend_on_a_cpu() -> None:
    """Also of an engine after another one of the process."""
    plugin.register()
    selector._cached_get_attn_backend.cache_clear()
    assert not chosen(configured(None), use_mla=True).__module__.startswith("hybrid_kv")
    with pytest.raises(UnsupportedModelError, match=r"attend by \w+MLABackend; use another"):
        chosen(configured(None, {}), use_mla=True)
    assert chosen(configured(None, {})).__module__.startswith("hybrid_kv")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
    ],
)
def test_vllm_refuses_what_is_not_written(
    capability: DeviceCapability, facts: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        chosen(configured("CUSTOM", {}), **facts)


def test_refusals_are_those_of_the_cpu(
    capability: DeviceCapability, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("CUSTOM", {})
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(ConfigError, match="kv_cache_dtype must be auto"):
        impl_of(config, chosen(config))
    config = configured("CUSTOM", {"method": "sketch"})
    with pytest.raises(ConfigError, match="'sketch' does not run inside vLLM on cuda"):
        impl_of(config, chosen(config))
    config = configured("CUSTOM", {})
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        impl_of(config, chosen(config))
