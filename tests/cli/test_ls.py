"""`ls`: one table of what can be used without a download."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_kv.models.shapes import SHAPES
from tests.cli.support import call, refused, report_of
from tests.models.hub_server import use_cache

TITLES = ["kind", "served", "size", "layers", "KV a token", "architecture", "model"]


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_cache(monkeypatch, tmp_path / "hub")


def test_ls_lists_folders_packages_and_shapes(model: Path) -> None:
    report = report_of(call("ls", model, "--json", "-"))
    assert report.command == "ls"
    first, *others = report.models
    assert (first.name, first.kind, first.path) == (str(model), "folder", str(model))
    assert (first.architecture, first.num_layers, first.served) == ("LlamaForCausalLM", 2, True)
    assert first.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert first.num_bytes > (model / "model.safetensors").stat().st_size
    names = [one.name for one in others if one.kind == "random"]
    assert names == [f"random:{shape}" for shape in SHAPES]
    assert others[0].name == "needle"
    assert all(one.served for one in others)


def test_the_table_says_why_a_model_is_not_served(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    told = {"model_type": "bert", "architectures": ["BertModel"], "num_hidden_layers": 5}
    (there / "config.json").write_text(json.dumps(told))
    (there / "model.safetensors").touch()
    result = call("ls", there)
    assert result.exit_code == 0
    table, _, reasons = result.stdout.rpartition("\n\n")
    head, first, *_ = table.splitlines()
    assert re.split("  +", head) == TITLES
    row = re.split("  +", first)
    assert row == ["folder", "no", row[2], "5", "-", "BertModel", str(there)]
    assert reasons.startswith(f"{there}: BertModel is no language model that generates text; hyb")


def test_ls_says_where_nothing_was_found(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = call("ls", tmp_path / "empty")
    assert result.stderr == f"no model below '{tmp_path / 'empty'}'\n"
    assert result.exit_code == 0


def test_a_wrong_path_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    assert "does not exist" in refused("ls", tmp_path / "nowhere")
    code = (
        "import sys\n"
        "from hybrid_kv.cli.main import app\n"
        f"sys.argv = ['hybrid-kv', 'ls', {str(tmp_path / 'nowhere')!r}]\n"
        "try:\n"
        "    app()\n"
        "finally:\n"
        "    print({'torch', 'transformers'} & set(sys.modules))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "set()\n"), run.stderr
