"""The files of a repository that are downloaded."""

from __future__ import annotations

import pytest

from hybrid_kv.errors import ModelNotFoundError
from hybrid_kv.models.local_models import HubFile, choose_files

SMALL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
SPLIT = [f"big-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]


def chosen(names: list[str], gguf: str | None = None) -> list[str]:
    files = [HubFile(name, 1) for name in names]
    return [file.name for file in choose_files("them/it", files, gguf)]


@pytest.mark.parametrize(
    ("weights", "others"),
    [
        (["model.safetensors"], ["pytorch_model.bin", "README.md", "onnx/model.onnx", "x.py"]),
        (["model.safetensors.index.json", *SHARDS], ["consolidated.safetensors", *SPLIT]),
        (["model.safetensors"], [*SHARDS, "model.fp16.safetensors", "original/params.json"]),
        (["pytorch_model.bin"], ["tf_model.h5", "adapter_model.safetensors"]),
        (
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"],
            ["flax_model.msgpack", "training_args.bin", "optimizer.bin"],
        ),
    ],
)
def test_weights_of_one_kind_come_with_what_loading_reads(
    weights: list[str], others: list[str]
) -> None:
    beside = [*SMALL, "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"]
    assert set(chosen([*weights, *others, *beside])) == {*weights, *beside}


def test_a_gguf_file_comes_alone_and_a_split_one_whole() -> None:
    names = [*SMALL, "model.safetensors", "it-Q4_K_M.gguf", "BF16/it.gguf", *SPLIT]
    assert chosen(names, "it-Q4_K_M.gguf") == ["it-Q4_K_M.gguf"]
    assert chosen(names, "it.gguf") == ["BF16/it.gguf"]
    assert chosen(names, SPLIT[1]) == SPLIT
    assert chosen(["README.md", "mmproj-it.gguf", *SPLIT]) == SPLIT


@pytest.mark.parametrize(
    ("names", "gguf", "said"),
    [
        (["a.gguf", "b.gguf"], None, "has 2 GGUF files, .* choose it with --file: a.gguf, b.gguf"),
        (["README.md"], None, "neither safetensors nor GGUF files, got README.md; take"),
        ([], None, "got no files; take"),
        (["model.safetensors"], None, "has no config.json"),
        (SMALL, "it.gguf", "has no GGUF files; leave --file out"),
        (
            ["it-Q4_K_M.gguf", "it-Q8_0.gguf"],
            "it-q4_k_s.gguf",
            "'it-q4_k_s.gguf' is no file of model 'them/it'; did you mean it-Q4_K_M.gguf",
        ),
        (["a/it.gguf", "b/it.gguf"], "it.gguf", "did you mean .*it has a/it.gguf, b/it.gguf"),
    ],
)
def test_what_cannot_be_chosen_is_refused(names: list[str], gguf: str | None, said: str) -> None:
    with pytest.raises(ModelNotFoundError, match=said):
        chosen(names, gguf)
