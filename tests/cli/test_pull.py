"""`pull`, from a hub on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, try_to_load_from_cache

from hybrid_kv.models.load import hub_path
from hybrid_kv.models.pull import prepare_download
from tests.cli.support import call, refused, report_of
from tests.models.hub_server import COMMIT, Hub, serving, use_hub

SMALL = {"config.json": b"{}", "tokenizer.json": b"[]"}
NAME, GGUF = "them/it", "them/packed"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    weights = {"model.safetensors": b"w" * 5000, "pytorch_model.bin": b"b" * 7000}
    packed = {"it-Q4_K_M.gguf": b"GGUF4", "it-Q8_0.gguf": b"GGUF8"}
    repositories = {NAME: {**SMALL, **weights, "README.md": b"r"}, GGUF: packed}
    with serving(Hub(repositories)) as found:
        use_hub(monkeypatch, found.address, tmp_path / "hub")
        yield found


def test_a_model_comes_with_what_loading_needs_and_can_be_found_without_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call("pull", NAME)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{NAME}\n"
    assert "4.9 KiB in 3 files, 4.9 KiB of them to come; " in result.stderr
    assert sorted(hub.sent) == ["config.json", "model.safetensors", "tokenizer.json"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = Path(hub_path(NAME))
    assert (folder / "model.safetensors").read_bytes() == b"w" * 5000


def test_what_is_there_does_not_come_again(hub: Hub) -> None:
    hub.statuses["tokenizer.json"] = 500
    error = refused("pull", NAME, "-q", code=2)
    assert error.startswith("error: model 'them/it' cannot be pulled: the hub answered 500")
    before = list(hub.sent)
    hub.statuses.clear()
    report = report_of(call("pull", NAME, "--json", "-"))
    assert report.command == "pull"
    assert report.files.keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert report.downloaded_bytes == sum(
        size for name, size in report.files.items() if name not in before
    )
    assert sorted(hub.sent) == sorted(report.files)
    assert (report.name, report.model, report.commit) == (NAME, NAME, COMMIT)
    assert "0 B of them to come" in call("pull", NAME).stderr


def test_another_revision_and_a_gguf_file_are_loaded_by_their_paths(
    hub: Hub, tmp_path: Path
) -> None:
    folder = Path(call("pull", f"{NAME}@v1").stdout.strip())
    assert folder.is_relative_to(tmp_path)
    assert (folder / "config.json").read_bytes() == b"{}"
    file = Path(call("pull", GGUF, "--file", "it-Q8_0.gguf").stdout.strip())
    assert file.read_bytes() == b"GGUF8"
    assert not isinstance(try_to_load_from_cache(GGUF, "it-Q4_K_M.gguf"), str)


def test_the_hub_s_refusals_are_sentences(hub: Hub) -> None:
    hub.statuses["config.json"] = 403
    error = refused("pull", NAME, "-q")
    assert "the hub answered 403; agree to the model's terms on its page, or log in with" in error
    hub.gated.add(NAME)
    error = refused("pull", NAME, "-q")
    assert "agree on its page on the hub, then log in with `hf auth login` or set HF_TOKEN" in error
    assert "has no such model, or a private one" in refused("pull", "them/nothing", "-q")
    assert "it has no revision 'v2'; give a branch" in refused("pull", f"{NAME}@v2", "-q")
    error = refused("pull", GGUF, "-q", "--file", "it-Q4_K.gguf")
    assert "did you mean it-Q4_K_M.gguf" in error
    assert "has 2 GGUF files" in refused("pull", GGUF, "-q")


def test_what_the_disk_has_no_room_for_is_not_begun(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 2**20))
    hub.sizes["model.safetensors"] = 3 * 2**20
    error = refused("pull", NAME, "-q", code=1)
    assert "needs 3.0 MiB on the disk of" in error
    assert "which has 1.0 MiB free; make room, or set HF_HOME" in error
    assert hub.sent == []


def test_a_cache_that_cannot_be_written_is_a_sentence(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file")
    error = refused("pull", NAME, "-q", code=1)
    assert f"'{tmp_path / 'hub'}' cannot be written: " in error


def test_without_a_network_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "HF_HUB_OFFLINE forbids to ask the hub; unset it" in refused("pull", NAME)
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)  # nobody listens
    error = refused("pull", NAME)
    assert "the hub cannot be reached (ConnectError); check the network" in error


def test_a_defect_is_not_said_to_be_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.models.pull.HfApi", lambda: None)
    with pytest.raises(AttributeError):
        prepare_download(NAME)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a/b/c"], "NAME must be a hub id like OWNER/NAME or OWNER/NAME@REVISION, got 'a/b/c'"),
        (["a/b@"], "got 'a/b@'"),
        (["needle"], "got 'needle', which is none: use it as it is"),
        (["random:tiny"], "got 'random:tiny'"),
        (["a/b", "--file", "x.safetensors"], "--file must name a GGUF file, got 'x.safetensors'"),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], said: str) -> None:
    assert said in refused("pull", *words)


WORDS = [sys.executable, "-m", "hybrid_kv", "pull"]


def test_nothing_of_a_download_imports_torch(hub: Hub, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from hybrid_kv.cli.main import app\n"
        f"sys.argv = ['hybrid-kv', 'pull', '{NAME}', '-q']\n"
        "try:\n"
        "    app()\n"
        "finally:\n"
        "    print({'torch', 'transformers'} & set(sys.modules))\n"
    )
    run = ended([sys.executable, "-c", code], hub, tmp_path)
    assert run.stdout == f"{NAME}\nset()\n", run.stderr


def test_ctrl_c_is_one_line_and_the_same_command_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.stalls = "model.safetensors"
    process = subprocess.Popen(
        [*WORDS, NAME],
        env=_environment(hub, tmp_path),
        stdout=-1,
        stderr=-1,
        text=True,
        # A job in the background ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, ""), stderr
    first, *rest = stderr.splitlines()
    assert first.endswith("free on the disk")
    assert rest == ["interrupted: the same command goes on; whole files are kept"]
    hub.stalls = ""
    run = ended([*WORDS, NAME], hub, tmp_path)
    assert run.stdout == f"{NAME}\n"
    assert sorted(hub.sent) == ["config.json", "model.safetensors", "tokenizer.json"]


def ended(words: list[str], hub: Hub, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = _environment(hub, cache)
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def _environment(hub: Hub, cache: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
