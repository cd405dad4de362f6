"""`--weights KIND`: every verb that loads a model packs it, a plan counts it, a file refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.api import planning
from hybrid_kv.planning.rates import Rates
from tests.cli.support import call, refused, report_of
from tests.ops.native.engines import needs_engine

pytestmark = needs_engine
PROMPT = ("--prompt-tokens", "37", "--max-new-tokens", "3", "--device", "cpu", "--json", "-")


def test_tokens_are_those_of_the_packed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measure_rates", lambda _: Rates(50, 50, 20))
    for kind, linear in (("int8", "Q8_0"), ("int4", "Q4_1")):
        made = call("generate", "random:tiny", *PROMPT, "--weights", kind)
        assert len(report_of(made).token_ids) == 3
        asked = ("--context", "200", "--device", "cpu", "--json", "-", "--weights", kind)
        planned: Any = report_of(call("plan", "random:tiny", *asked))
        assert linear in planned.weights


def test_a_profile_packs_what_it_measures() -> None:
    asked = ("--context", "64", "--methods", "full", "--new-tokens", "2", "--weights", "int4")
    made = call("profile", "random:tiny", *asked, "--device", "cpu", "--json", "-")
    assert made.exit_code == 0, made.output
    assert '"weights": "int4"' in made.stdout


def test_what_no_kind_is_for_is_one_sentence(tmp_path: Path) -> None:
    text = refused("generate", "random:tiny", *PROMPT, "--weights", "int5")
    assert text == "error: unknown weights 'int5'; did you mean 'int8'? known: int4, int8, nf4"
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    text = refused("generate", file, *PROMPT, "--weights", "int4")
    assert text.endswith("have the kinds of their file, got weights='int4'; leave it out")
