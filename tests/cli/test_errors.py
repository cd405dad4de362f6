"""Every mistake gets one sentence: name, expected, got, way out."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import typer

from hybrid_kv.api import llm
from hybrid_kv.cli.known_names import describe
from tests.cli.support import MAX_CONTEXT, PROMPT, TINY, call, refused


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt(model: Path, prompt: str) -> None:
    assert "prompt is empty; pass at least one word" in refused("generate", model, prompt)
    error = refused("generate", model, "--prompt-file", "-", stdin=prompt)
    assert "prompt is empty; pass at least one word" in error


def test_no_prompt_and_two_prompts(model: Path) -> None:
    assert "got 0 of them" in refused("generate", model)
    assert "got 2 of them" in refused("generate", model, PROMPT, "--prompt-tokens", 5)


def test_prompt_file_that_cannot_be_read(model: Path, tmp_path: Path) -> None:
    assert "No such file" in refused("generate", model, "--prompt-file", tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refused("generate", model, "--prompt-file", tmp_path / "binary")


def test_prompt_beyond_the_model(model: Path) -> None:
    words = ("generate", model, "--prompt-tokens", 2000, "--max-new-tokens", 5)
    error = refused(*words)
    assert f"at most {MAX_CONTEXT} tokens" in error
    assert "got 2005" in error


def test_missing_folder(tmp_path: Path) -> None:
    error = refused("generate", tmp_path / "absent", PROMPT)
    assert "does not exist" in error


def test_folder_without_config(tmp_path: Path) -> None:
    assert "has no config.json" in refused("generate", tmp_path, PROMPT)


def test_broken_weights(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").write_bytes(b"no tensors")
    assert "cannot be loaded" in refused("generate", folder, PROMPT)


@pytest.mark.parametrize(
    ("words", "name", "nearest"),
    [
        (("--method", "hibrid"), "hibrid", "hybrid"),
        (("--set", "window_token=5"), "window_token", "window_tokens"),
        (("--set", "page_tokens=32"), "page_tokens", "page_size"),
        (("--set", "cold.index=hnws"), "hnws", "hnsw"),
        (("--set", "backend=torch_gpu"), "torch_gpu", "torch_cpu"),
        (("--dtype", "float23"), "float23", "float32"),
    ],
)
def test_unknown_name_gets_the_nearest(words: tuple[str, str], name: str, nearest: str) -> None:
    error = refused("generate", *TINY, *words)
    assert f"'{name}'" in error
    assert f"did you mean '{nearest}'?" in error


def test_unknown_shape() -> None:
    error = refused("generate", "random:tinny", "--prompt-tokens", 5)
    assert "did you mean 'tiny'?" in error


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("top_k=0", "top_k"),
        ("window_tokens=40", "multiple of page_size 16, got 40"),
        ("page_size=0", "page_size"),
        ("window_tokens", "KEY=VALUE"),
    ],
)
def test_setting_out_of_range(setting: str, text: str) -> None:
    assert text in refused("generate", *TINY, "--set", setting)


def test_setting_given_twice() -> None:
    assert "given twice" in refused("generate", *TINY, "--set", "top_k=1", "--set", "top_k=2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has the device")
def test_device_that_is_not_there() -> None:
    error = refused("generate", *TINY, "--device", "cuda")
    assert "'cuda' is not there" in error


def test_too_little_memory_is_said_before_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000, total=9))
    lengths = []
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda _, ids: lengths.append(ids.shape[1]))
    error = refused("generate", *TINY)
    entry, codes = 2 * 16 * 2, 16 + 4  # K and V of head_dim 16 in bfloat16; keys in 8 bits
    needed = 104 * 2 * 2 * (entry + codes)  # tokens, layers, KV heads
    assert f"{needed:,} bytes" in error
    assert "5,000 bytes are free" in error
    assert set(lengths) <= {1}, "a model may be asked how it turns a token, and no more"


def test_json_into_a_missing_folder_is_said_at_once(tmp_path: Path) -> None:
    assert "existing folder" in refused("generate", *TINY, "--json", tmp_path / "no" / "run.json")


def test_text_for_a_random_model_is_refused_before_its_weights_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llm, "load_model", lambda *a, **k: pytest.fail("loaded"))
    error = refused("generate", "random:llama-3-8b", PROMPT)
    assert "needs a tokenizer, and model 'random:llama-3-8b' has none" in error
    assert "--prompt-tokens" in error
    assert "needs a tokenizer" in refused("chat", "random:llama-3-8b", stdin="")


def test_conversation_needs_a_tokenizer() -> None:
    assert "needs a tokenizer" in refused("chat", "random:tiny", stdin="")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("generat", "x"), "did you mean 'generate'?"),
        (("generate", "x", "--max-tokens", "5"), "did you mean '--max-new-tokens'?"),
        (("generate",), "MODEL"),
        (("generate", "x", "y", "--seed", "two"), "--seed"),
        (("generate", "x", "y", "--top-p", "2"), "--top-p"),
        (("generate", "x", "--max-new-tokens", "0"), "at least 1"),
        (("methods", "hybird"), "did you mean 'hybrid'?"),
        (("profile", "needle", "--context", "4k,0"), "error: --context: a count must be a whole"),
        (("profile", "needle", "--new-tokens", "0"), "error: --new-tokens: a count must be a"),
        (("eval", "x", "-o", "y", "--context", "0"), "error: --context: a count must be a whole"),
        (("eval", "x", "-o", "y", "--budget", "5%,101%"), "error: --budget: a budget must be a"),
        (("demo", "--records", "9999999"), "num_records"),
    ],
)
def test_usage(words: tuple[str, ...], text: str) -> None:
    assert text in refused(*words)


def test_unexpected_error_has_a_traceback_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the lamp went out")

    monkeypatch.setattr(llm, "load_model", fail)
    error = refused("generate", *TINY, code=1)
    assert "RuntimeError: the lamp went out; run again with --debug" in error
    assert "Traceback" in call("generate", *TINY, "--debug").stderr


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_memory_that_runs_out_is_a_failure(kind: type[Exception]) -> None:
    code, text = describe(kind("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"))
    assert code == 1
    assert text.startswith("error: memory ran out: CUDA out of memory; shorten the prompt")


def test_ctrl_c_anywhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "load_model", interrupt)
    result = call("generate", *TINY)
    assert result.exit_code == 130
    assert result.output == "interrupted\n"


def test_parameter_errors_of_typer_are_known() -> None:
    code, text = describe(typer.BadParameter("no good"))
    assert code == 2
    assert "no good" in text


def test_a_temperature_below_zero_is_refused_by_its_option() -> None:
    error = refused("generate", "needle", PROMPT, "--temperature", "-1")
    assert error.startswith("error: --temperature: ")
