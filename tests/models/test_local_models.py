"""Models that are found on this machine, and facts of their configurations."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from transformers import BertConfig, DeepseekV3Config, LlamaConfig, T5Config

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.local_models import (
    FoundModel,
    check_paths,
    missing_weights,
    models_below,
    models_of_hub,
    models_of_package,
)
from hybrid_kv.models.model_facts import ConfigFacts, facts_of
from hybrid_kv.planning.plan import model_facts
from tests.models.folder import save_model
from tests.models.gguf_files import write
from tests.models.hub_server import COMMIT, use_cache


def in_cache(cache: Path, name: str, files: dict[str, bytes], commit: str = COMMIT) -> Path:
    """A repository as the hub's package keeps it; the commit is main's where it is `COMMIT`."""
    home = cache / f"models--{name.replace('/', '--')}"
    folder = home / "snapshots" / commit
    for part in (folder, home / "blobs", home / "refs"):
        part.mkdir(parents=True, exist_ok=True)
    for number, (file, body) in enumerate(files.items()):
        blob = home / "blobs" / f"{commit[:8]}{number}"
        blob.write_bytes(body)
        (folder / file).symlink_to(blob)
    if commit == COMMIT:
        (home / "refs" / "main").write_text(commit)
    return folder


def test_a_folder_s_models_are_found_three_levels_below(tmp_path: Path) -> None:
    save_model(tmp_path / "a" / "b" / "plain", torch.float32)
    write(tmp_path / "a" / "packed.gguf")
    for part in (1, 2):
        (tmp_path / f"big-0000{part}-of-00002.gguf").write_bytes(b"12345")
    (tmp_path / "mmproj-big.gguf").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.gguf").touch()
    deep = tmp_path / "1" / "2" / "3" / "4"
    deep.mkdir(parents=True)
    (deep / "x.gguf").touch()
    found = {Path(one.name).name: one for one in models_below(tmp_path)}
    assert {name: one.kind for name, one in found.items()} == {
        "plain": "folder",
        "packed.gguf": "gguf",
        "big-00001-of-00002.gguf": "gguf",
    }
    assert found["big-00001-of-00002.gguf"].num_bytes == 10
    weights = tmp_path / "a" / "b" / "plain" / "model.safetensors"
    assert found["plain"].num_bytes > weights.stat().st_size
    assert not any(one.why for one in found.values())
    (file,) = models_below(tmp_path / "a" / "packed.gguf")
    assert file == found["packed.gguf"]


def test_a_relative_path_is_shown_so_that_it_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert [one.name for one in models_below(Path("owner"))] == ["./owner/name"]


@pytest.mark.parametrize(
    ("files", "index", "said"),
    [
        (["model.safetensors"], None, ""),
        (["pytorch_model.bin"], None, ""),
        (["a.safetensors", "b.safetensors"], ["a", "b"], ""),
        ([], None, "its weights are absent"),
        (
            ["a.safetensors"],
            ["a", "b"],
            "1 of its 2 weight files are absent (b.safetensors, for one)",
        ),
        ([], [], "its model.safetensors.index.json lists no weights"),
    ],
)
def test_weights_that_are_absent_are_told(
    files: list[str], index: list[str] | None, said: str, tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).touch()
    if index is not None:
        shards = {f"layer.{name}": f"{name}.safetensors" for name in index}
        told = json.dumps({"weight_map": shards})
        (tmp_path / "model.safetensors.index.json").write_text(told)
    assert missing_weights(tmp_path) == said


@pytest.mark.parametrize("text", ["[", "[]", '{"weight_map": 3}', "\ud800"])
def test_a_damaged_list_of_weights_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    assert "lists no weights" in missing_weights(tmp_path)


def test_the_hub_s_cache_is_listed_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache(monkeypatch, tmp_path / "none")
    assert list(models_of_hub()) == []
    use_cache(monkeypatch, tmp_path)
    config, weights = {"config.json": b"{}"}, {"model.safetensors": b"12345"}
    in_cache(tmp_path, "a/whole", {**config, **weights})
    old = in_cache(tmp_path, "a/whole", config, "f" * 40)
    packed = in_cache(tmp_path, "b/packed", {"q4.gguf": b"123", "README.md": b"r"})
    in_cache(tmp_path, "c/text", {"README.md": b"r"})
    whole, part, file = models_of_hub()
    assert (whole.name, whole.kind, whole.num_bytes, whole.why) == ("a/whole", "hub", 7, "")
    assert part.name == str(old)
    assert part.why == (
        f"its weights are absent; `hybrid-kv pull a/whole@{'f' * 40}` gets what is absent"
    )
    assert file == FoundModel(str(packed / "q4.gguf"), "gguf", packed / "q4.gguf", 3)


def test_split_gguf_in_the_hub_s_cache_is_one_model(tmp_path: Path) -> None:
    """Links there lead to blobs, whose names say neither kind nor part."""
    whole = write(tmp_path / "whole.gguf")
    parts = []
    for number in (0, 1):
        writer = gguf.GGUFWriter(tmp_path / f"{number}", "llama")
        for key, field in gguf.GGUFReader(whole).fields.items():
            if number == 0 and not key.startswith(("GGUF.", "general.architecture")):
                _copy(writer, key, field)
        writer.add_uint16("split.count", 2)
        tensors = gguf.GGUFReader(whole).tensors
        for tensor in tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append((tmp_path / f"{number}").read_bytes())
    names = [f"it-0000{n}-of-00002.gguf" for n in (1, 2)]
    folder = in_cache(tmp_path / "hub", "a/b", dict(zip(names, parts, strict=True)))
    (found,) = models_below(folder)
    assert found.num_bytes == sum(map(len, parts))
    assert facts_of(found) == facts_of(FoundModel("whole", "gguf", whole))
    assert facts_of(found).num_layers == 2


def _copy(writer: gguf.GGUFWriter, key: str, field: gguf.ReaderField) -> None:
    kind, *below = field.types
    writer.add_key_value(key, field.contents(), kind, below[-1] if below else None)


def test_models_of_packages_are_those_that_load_knows() -> None:
    names = [one.name for one in models_of_package()]
    assert names[0] == "needle"
    assert set(names) <= {"needle", "smollm2"}
    for one in models_of_package():
        assert one.num_bytes > 10**6
        assert facts_of(one).why == ""


@pytest.mark.parametrize("shape", ["tiny", "llama-3-8b", "qwen3.5-27b", "gemma-3-27b"])
def test_facts_are_those_of_a_plan(shape: str) -> None:
    name = f"random:{shape}"
    planned, found = model_facts(name), facts_of(FoundModel(name, "random", None))
    assert found.kv_bytes_per_token == planned.kv_bytes_per_token
    assert found.num_layers == planned.num_layers
    assert found.why == ""


def saved(config: object, folder: Path, **more: object) -> FoundModel:
    config.save_pretrained(folder)  # type: ignore[attr-defined]
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    return FoundModel("it", "folder", folder)


def test_facts_have_the_dtype_that_is_stored(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=3, dtype="float32")
    found = saved(config, tmp_path, architectures=["LlamaForCausalLM"])
    assert facts_of(found) == ConfigFacts("LlamaForCausalLM", 3, 2 * 2 * 16 * 4 * 3)


def test_models_that_cannot_be_served_say_why(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    bert = saved(BertConfig(**small), tmp_path / "bert", architectures=["BertModel"])
    assert facts_of(bert).why.startswith("BertModel is no language model that generates text")
    t5 = saved(T5Config(), tmp_path / "t5", architectures=["T5ForConditionalGeneration"])
    assert "is no language model that generates text" in facts_of(t5).why
    deepseek = DeepseekV3Config(**small, vocab_size=64, intermediate_size=32)
    mla = facts_of(saved(deepseek, tmp_path / "mla"))
    assert "multi-head latent attention" in mla.why
    assert (mla.architecture, mla.num_layers) == ("DeepseekV3ForCausalLM", 1)


def test_code_of_a_repository_is_neither_run_nor_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "own",
                "architectures": ["OwnForCausalLM"],
                "auto_map": {"AutoConfig": "own.OwnConfig"},
            }
        )
    )
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')\n")
    facts = facts_of(FoundModel("it", "folder", tmp_path))
    assert facts.architecture == "OwnForCausalLM"
    assert "cannot be loaded" in facts.why


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "nothing"}'])
def test_a_damaged_configuration_is_a_reason(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    facts = facts_of(FoundModel("it", "folder", tmp_path))
    assert facts.why.startswith("model 'it' cannot be loaded: ")
    assert "\n" not in facts.why


def test_paths_are_folders_or_gguf_files(tmp_path: Path) -> None:
    check_paths([tmp_path])
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match=r"PATH must be a folder or a \.gguf file, got '.*a\.txt"):
        check_paths([tmp_path, tmp_path / "a.txt"])
    with pytest.raises(ConfigError, match=r"PATH '.*nowhere' does not exist; check it"):
        check_paths([tmp_path / "nowhere"])
