"""What the library logs under its own name, and who sees it."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

import hybrid_kv as hkv
from hybrid_kv.cli.main import logged
from hybrid_kv.planning.rates import Rates
from tests.cli.support import TINY, call

WORDS = ("generate", *TINY, "--set", "window_tokens=16")


def test_nothing_is_printed_where_nobody_listens() -> None:
    """The package has a handler, so that Python's handler of last resort is not asked."""
    code = (
        "import logging, hybrid_kv\n"
        "logging.getLogger('hybrid_kv.anything').error('x')\n"
        "assert logging.getLogger('hybrid_kv').level == logging.NOTSET\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout + run.stderr == ""


def test_a_generation_logs_model_prompt_and_indexes(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"window_tokens": 16, "sink_tokens": 4, "index_build": "wait", "page_size": 4}
    with (
        caplog.at_level(logging.DEBUG, logger="hybrid_kv"),
        hkv.load("random:tiny", config=hkv.HybridConfig(**settings)) as llm,
    ):
        llm.generate(list(range(1, 101)), max_new_tokens=2)
    said = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    loaded = [
        text for name, level, text in said if (name, level) == ("hybrid_kv.models.load", "INFO")
    ]
    assert loaded[0].startswith("loaded random:tiny (")
    layers = llm.model.config.num_hidden_layers
    ended = [text for _, level, text in said if level == "INFO" and "prompt ended" in text]
    assert ended == [f"prompt ended: method hybrid, {layers} layers, 100 tokens"]
    served = [text for _, _, text in said if "serves; KV heads" in text]
    assert len(served) == layers
    assert "by flat" in served[0]
    begun = [level for _, level, text in said if "index build begins" in text]
    assert begun == ["DEBUG"] * layers


def test_nothing_is_logged_while_decoding(caplog: pytest.LogCaptureFixture) -> None:
    counts = []
    for new_tokens in (2, 9):
        caplog.clear()
        config = hkv.HybridConfig(window_tokens=16)
        with (
            caplog.at_level(logging.DEBUG, logger="hybrid_kv"),
            hkv.load("random:tiny", config=config) as llm,
        ):
            llm.generate(list(range(1, 101)), max_new_tokens=new_tokens)
        counts.append(len(caplog.records))
    assert counts[0] == counts[1]


def test_a_plan_logs_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hybrid_kv"):
        planned = hkv.plan("random:tiny", 500, rates=Rates(50, 50, 20))
    assert [record.getMessage() for record in caplog.records] == [
        f"plan for 500 tokens on cpu: {planned.advice}"
    ]


def test_debug_shows_the_log_and_leaves_no_listener() -> None:
    shown = call(*WORDS, "--debug")
    assert shown.exit_code == 0, shown.output
    assert "hybrid_kv.models.load: loaded random:tiny" in shown.stderr
    assert "hybrid_kv.runtime.layer: prompt ended: method hybrid" in shown.stderr
    assert "prompt ended" not in shown.stdout
    quiet = call(*WORDS)
    assert "hybrid_kv." not in quiet.stderr
    assert [type(handler) for handler in logging.getLogger("hybrid_kv").handlers] == [
        logging.NullHandler
    ]


def test_errors_are_shown_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("hybrid_kv.serve")
    with logged(debug=False):
        log.info("a prompt ended")
        try:
            raise ZeroDivisionError("of a hook")
        except ZeroDivisionError:
            log.exception("a request failed")
    shown = capsys.readouterr().err
    assert "a request failed" in shown
    assert "ZeroDivisionError: of a hook" in shown
    assert "a prompt ended" not in shown
