"""What the command line and the page show: one list, drawn twice."""

from __future__ import annotations

import pytest

from hybrid_kv.cli.profile_tables import print_profile
from hybrid_kv.report import profile
from hybrid_kv.report.html.tables import heading, quantities_table, shown
from hybrid_kv.report.profile import BytesPerToken, ProfileRow, Quantity
from hybrid_kv.report.run import MemoryBytes
from tests.report import profiles

SINGLE = [value for value in vars(profile).values() if isinstance(value, Quantity)]
ALL = {quantity.title: quantity for quantity in (*SINGLE, *profile.GAPS)}
NOTHING = ProfileRow(method="full", context_tokens=37, status="failed")
READ = BytesPerToken(weights=3 << 20, search=5)


@pytest.mark.parametrize("quantity", ALL.values(), ids=ALL)
def test_what_was_not_measured_is_none(quantity: Quantity) -> None:
    assert quantity.of(NOTHING) is None
    assert shown(quantity, NOTHING) == "–"


@pytest.mark.parametrize("quantity", ALL.values(), ids=ALL)
def test_a_quantity_has_its_value(quantity: Quantity) -> None:
    """They are looked up by name, so that a wrong one would only ever give a dash."""
    memory = MemoryBytes(device_peak=1, host_kv=2, host_index=3, host_peak=4)
    more = {"fill_s": 1.5, "resident_kv_bytes": 7, "bytes_per_token": READ, "memory_bytes": memory}
    assert quantity.of(profiles.row("flat", 4096).model_copy(update=more)) is not None


def test_a_run_lacks_what_only_a_profile_measures() -> None:
    (run,) = profiles.demo().runs[:1]
    assert profile.TTFT.of(run) == run.ttft_s
    assert profile.FILL.of(run) is profile.LIMIT.of(run) is None


def test_a_sum_is_of_what_is_known() -> None:
    row = NOTHING.model_copy(update={"bytes_per_token": READ, "predicted_ms": {"search": 2.5}})
    assert row.read_bytes == (3 << 20) + 5
    assert row.planned_ms == 2.5
    assert (NOTHING.read_bytes, NOTHING.planned_ms) == (None, None)


def test_both_ways_of_drawing_have_one_title(capsys: pytest.CaptureFixture[str]) -> None:
    print_profile(profiles.profile((4096,)))
    printed = capsys.readouterr().out
    for quantity in (profile.LIMIT, profile.RECALL, profile.HOST_KV):
        assert quantity.title in printed
        assert heading(quantity) in quantities_table("t", [], [quantity]).head
