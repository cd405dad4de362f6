"""Schema 1: the keys of the design, nothing invented, damage refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, ValidationError

from hybrid_kv.errors import ConfigError
from hybrid_kv.report import RunReport, probe_environment, read_report, schema
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.schema import parse_report, to_json

RUN_KEYS = [
    "schema",
    "command",
    "environment",
    "config",
    "method",
    "model",
    "context_tokens",
    "new_tokens",
    "text",
    "token_ids",
    "ttft_s",
    "prefill_s",
    "index_build_s",
    "tpot_ms",
    "itl_ms",
    "phases_ms",
    "work",
    "memory_bytes",
    "bandwidth_gbps",
    "backends",
    "index",
    "audit",
    "prefill",
    "exact",
    "token_errors",
    "look_ahead",
    "steps",
    "chat_template",
    "interrupted",
]
PHASES = [
    "search",
    "cold_attention",
    "resident_attention",
    "select",
    "merge",
    "transfer",
    "wait",
    "other",
    "model",
    "python",
]


def report(**changes: Any) -> RunReport:
    values = {
        "config": {},
        "method": "full",
        "model": "needle",
        "context_tokens": 5,
        "new_tokens": 1,
        "text": "ä",
        "token_ids": (3,),
    }
    return RunReport(environment=probe_environment("cpu"), **{**values, **changes})


def test_keys_come_in_the_order_of_the_design() -> None:
    data = json.loads(to_json(report()))
    assert list(data) == RUN_KEYS
    assert list(data["phases_ms"]) == PHASES
    assert list(data["work"]) == [
        "scored_ratio",
        "retrieved_tokens",
        "most_retrieved_tokens",
        "attended_tokens",
        "recall_at_k",
        "missed_mass",
        "mass_error",
        "audited_steps",
    ]
    assert list(data["memory_bytes"]) == ["device_peak", "host_kv", "host_index", "host_peak"]
    assert list(data["bandwidth_gbps"]) == ["dram", "h2d", "d2h"]


def test_a_report_with_counters_that_were_removed_is_read() -> None:
    own = report()
    data = json.loads(to_json(own))
    data["work"] |= {"hot_ratio": 0.25, "promoted_pages": 3, "fetched_bytes": 512}
    assert parse_report(json.dumps(data)) == own


def test_what_was_not_measured_is_null() -> None:
    data = json.loads(to_json(report()))
    assert set(data["bandwidth_gbps"].values()) == {None}
    assert data["prefill_s"] is None
    assert data["work"]["recall_at_k"] is None


def test_written_and_read_is_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(to_json(report()), encoding="utf-8")
    assert read_report(file) == report()


def test_environment_names_versions_cpu_and_device() -> None:
    environment = probe_environment("cpu")
    assert environment.versions["python"]
    assert environment.versions["torch"]
    assert environment.cpu.cores >= 1
    assert environment.ram_bytes > 2**20
    assert environment.device == "cpu"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": 2}, "must be of schema 1, got 2"),
        ({"schema": None}, "got None"),
        ({"command": "dance"}, "damaged"),
        ({"new_tokens": "many"}, "damaged: new_tokens"),
        ({"colour": "red"}, "damaged: colour"),
    ],
)
def test_other_documents_are_refused(change: dict[str, Any], text: str) -> None:
    data = {**json.loads(to_json(report())), **change}
    with pytest.raises(ConfigError, match=text):
        parse_report(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[1]", '"schema"'])
def test_text_that_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="report must be"):
        parse_report(text)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_report(tmp_path / "absent.json")


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        report(ttft_s=float("nan"))


def test_what_a_validator_says_is_not_led_by_pydantics_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Picky(BaseModel):
        report: Annotated[dict[str, Any], AfterValidator(_refuse)]

    monkeypatch.setattr(schema, "_Any", Picky)
    with pytest.raises(ConfigError, match="damaged: too odd; run"):
        parse_report(to_json(report()))


def _refuse(_: object) -> None:
    raise ValueError("too odd")


def test_a_damaged_report_is_called_by_the_users_names() -> None:
    data = json.loads(to_json(report()))
    data["new_tokens"] = "many"
    with pytest.raises(ConfigError) as caught:
        parse_report(json.dumps(data))
    assert "damaged: new_tokens: input should be a valid integer" in str(caught.value)
    assert "Value error" not in str(caught.value)


def test_a_row_is_checked_when_a_value_is_set() -> None:
    """Rows are filled while they are measured; what JSON cannot say is refused at once."""
    row = ProfileRow(method="full", context_tokens=37, status="ok")
    row.limit_ms = 2.5
    with pytest.raises(ValidationError, match="finite"):
        row.limit_ms = float("nan")
    with pytest.raises(ValidationError, match="status"):
        row.status = "fine"  # type: ignore[assignment]
    with pytest.raises(ValidationError, match="no attribute"):
        row.limits_ms = 2.5  # type: ignore[attr-defined]
    assert row.limit_ms == 2.5
