"""Methods of others on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import TINY, call, refused, run_of

METHOD = """
from hybrid_kv.plugin import METHODS, Method, Params, Placement, Read

@METHODS.register("everything_twice")
class Everything(Method):
    '''Keeps everything, by a plug-in.'''

    class Params(Params):
        '''spice: does nothing.'''

        spice: int = 3

    def seal(self, layer_idx, evidence):
        return Placement()

    def read(self, layer_idx, q):
        return Read()
"""


@pytest.fixture
def plugin(tmp_path: Path, own_plugins: None) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(METHOD)
    return path


def test_a_method_of_a_file_runs_and_is_listed(plugin: Path) -> None:
    words = ("--plugin", plugin, "--method", "everything_twice", "--set", "spice=4")
    run = run_of(call("generate", *TINY, *words, "--json", "-"))
    assert run.method == "everything_twice"
    assert "Keeps everything, by a plug-in." in call("methods", "--plugin", plugin).stdout


@pytest.mark.parametrize("verb", ["generate", "chat", "demo", "plan", "profile", "methods"])
def test_every_verb_that_names_a_method_takes_plugins(verb: str) -> None:
    model = () if verb in ("demo", "methods") else ("random:tiny",)
    text = refused(verb, *model, "--plugin", "no_such_module")
    assert text.startswith("error: plugin 'no_such_module' must be a module that can be imported")


def test_a_method_without_its_plugin_is_unknown(plugin: Path) -> None:
    text = refused("generate", *TINY, "--method", "everything_twice")
    assert "unknown method 'everything_twice'" in text
