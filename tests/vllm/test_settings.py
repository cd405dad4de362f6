"""Settings and refusals of the plug-in; vLLM is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_kv.errors import BackendUnavailable, ConfigError, UnsupportedModelError
from hybrid_kv.vllm.plugin import TRIED, check_version
from hybrid_kv.vllm.settings import (
    VARIABLE,
    VllmSettings,
    check_backend,
    check_config,
    check_layer,
    search_range,
    settings_of,
)


def test_without_settings_the_plug_in_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert settings_of({}) is None
    assert settings_of(None) is None
    assert settings_of({"hybrid_kv": {}}) == VllmSettings()


def test_each_platform_has_methods_of_its_own() -> None:
    assert settings_of({"hybrid_kv": {}}, "cuda") == VllmSettings(method="quest")
    with pytest.raises(ConfigError, match=r"'quest' does not run inside vLLM on cpu; .*: sketch"):
        settings_of({"hybrid_kv": {"method": "quest"}})
    with pytest.raises(ConfigError, match=r"'sketch' does not run inside vLLM on cuda; .*: quest"):
        settings_of({"hybrid_kv": {"method": "sketch"}}, "cuda")


def test_settings_that_no_backend_reads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    check_backend({}, "FlashAttentionBackend", "cuda")
    with pytest.raises(ConfigError, match=r"must be CUSTOM .*, got FlashAttentionBackend; give"):
        check_backend({"hybrid_kv": {}}, "FlashAttentionBackend", "cuda")
    with pytest.raises(UnsupportedModelError, match="models that attend by AmxMlaBackend; use"):
        check_backend({"hybrid_kv": {}}, "AmxMlaBackend", "cpu")


def test_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"budget": "2%", "window_tokens": "1k"}')
    assert settings_of({}) == VllmSettings(budget="2%", window_tokens=1024)
    assert settings_of({"hybrid_kv": {"budget": 64}}) == VllmSettings(budget="64")
    monkeypatch.setenv(VARIABLE, "budget=2%")
    with pytest.raises(ConfigError, match="HYBRID_KV_VLLM must be JSON such as"):
        settings_of({})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budgets": "2%"}, "unknown setting 'budgets'; did you mean 'budget'"),
        ({"budget": "200%"}, "a budget must be a share of the context such as 5%"),
        ({"budget": "none"}, "a budget must be"),
        ({"sink_tokens": -1}, "sink_tokens: .*greater than or equal to 0, got -1"),
        (
            {"method": "snapkv"},
            "method 'snapkv' does not run inside vLLM on cpu; those that do: sketch",
        ),
        ("all", "must be a group of settings, got 'all'"),
    ],
)
def test_wrong_settings_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of({"hybrid_kv": given})


@pytest.mark.parametrize(
    ("budget", "context", "expected"),
    [
        ("all", 100_000, None),
        ("128", 1_000, None),
        ("128", 4_096, None),
        ("128", 5_000, (16, 4720, 128)),
        ("2%", 100_000, (16, 99_728, 2000)),
        ("50%", 100_000, None),
    ],
)
def test_what_is_searched(budget: str, context: int, expected: tuple[int, int, int] | None) -> None:
    assert search_range(VllmSettings(budget=budget), context) == expected


def test_versions_that_were_not_tried_are_refused() -> None:
    check_version(f"{TRIED[0]}+cpu")
    with pytest.raises(BackendUnavailable, match=rf"tried with \({TRIED[0]}\), got 0.1.0; install"):
        check_version("0.1.0")


def config(**given: Any) -> Any:
    return SimpleNamespace(
        speculative_config=given.get("speculative"),
        kv_transfer_config=given.get("transfer"),
        cache_config=SimpleNamespace(cache_dtype=given.get("dtype", "auto")),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=given.get("dcp", 1),
            prefill_context_parallel_size=given.get("pcp", 1),
            use_ubatching=given.get("dbo", False),
        ),
        model_config=SimpleNamespace(is_hybrid=given.get("hybrid", False)),
        use_v2_model_runner=given.get("v2", False),
    )


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"speculative": object()}, ConfigError, "speculative_config must be None"),
        (
            {"transfer": SimpleNamespace(kv_connector="NixlConnector")},
            ConfigError,
            "kv_transfer_config must be None or of HybridContexts .*, got NixlConnector",
        ),
        ({"dtype": "fp8_e5m2"}, ConfigError, "kv_cache_dtype must be auto .*, got fp8_e5m2"),
        ({"dcp": 2}, ConfigError, "decode_context_parallel_size must be 1"),
        ({"pcp": 2}, ConfigError, "prefill_context_parallel_size must be 1"),
        ({"dbo": True}, ConfigError, "a batch in one piece"),
        ({"v2": True}, ConfigError, "must be V1 .* VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"hybrid": True}, UnsupportedModelError, "models with recurrent layers"),
    ],
)
def test_configurations_that_are_not_served(given: Any, error: Any, said: str) -> None:
    check_config(config())
    check_config(config(transfer=SimpleNamespace(kv_connector="HybridContexts")))
    with pytest.raises(error, match=f"{said}.*leave out hybrid_kv's settings"):
        check_config(config(**given))


@pytest.mark.parametrize("given", ["alibi", "shared_with"])
def test_layers_that_are_not_served(given: str) -> None:
    check_layer(None, None)
    parts = dict.fromkeys(("alibi", "shared_with")) | {given: "there"}
    with pytest.raises(UnsupportedModelError, match="does not serve full attention with"):
        check_layer(parts["alibi"], parts["shared_with"])
