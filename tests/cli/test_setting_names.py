"""A wrong name behind --set is refused at once: PyTorch is not imported for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hybrid_kv.cli.known_names import PATH, check_names, table
from hybrid_kv.config import HybridConfig
from hybrid_kv.plugins import METHODS

RUN = """
import sys
from hybrid_kv.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("generate", "needle", "x", "--set", "window_token=5"), "unknown hybrid setting 'window"),
        (
            ("generate", "needle", "x", "--method", "quest", "--set", "top_k=5"),
            "unknown quest setting 'top_k'",
        ),
        (("profile", "needle", "--set", "top_kk=5"), "unknown hybrid setting 'top_kk'; did you"),
        (
            ("serve", "needle", "--set", "top_k"),
            "--set must be KEY=VALUE like top_k=64, got 'top_k'",
        ),
    ],
)
def test_a_wrong_name_is_refused_without_pytorch(words: tuple[str, ...], text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], check=False, capture_output=True, text=True
    )
    assert text in done.stderr
    assert done.stdout.split() == ["2", "False"]


def test_the_table_is_that_of_the_methods() -> None:
    make = "PATH.write_text(json.dumps(table(), indent=1) + '\\n')"
    assert json.loads(PATH.read_text()) == table(), f"make it: hybrid_kv.cli.known_names: {make}"


@pytest.mark.parametrize("method", [*METHODS])
def test_what_a_method_takes_passes(method: str) -> None:
    known = HybridConfig.settings_of(method)
    last = {name.rpartition(".")[2] for name in known}
    texts = [f"{name}=1" for name in known | last]
    check_names(method, texts)
    check_names(None, texts)
    check_names("of_a_plugin", ["anything=1"])
    check_names(method, ["first.cold.top_k=1"])
