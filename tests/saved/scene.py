"""Small contexts to save, and how their files are tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import hybrid_kv as hkv
from tests.kit import sized
from tests.models.folder import model, tokenizer

TEXT = " ".join(["sea sky sun ice oak elm bee fox owl sea", "oak fox bee sky"] * 70)
TOKENS = 14 * 70
SMALL: dict[str, Any] = {"page_size": 16, "sink_tokens": 16, "window_tokens": 32}
EASY = {"target_recall": 0.01, "min_keys": 64, "horizon_tokens": 512}
INDEXES = {
    "graph": {"kind": "graph", "max_scanned": 1.0, **EASY},
    "sketch": {"kind": "sketch", "gain": 0.0, "target_mass": 0.01, **EASY},
    "auto": sized("auto", graph_tokens=0, gain=0.0, target_mass=0.01, **EASY),
}


def long_model() -> PreTrainedModel:
    """Takes 4096 tokens: rotary positions know no limit."""
    made = model()
    made.config.max_position_embeddings = 4096
    return made


@contextmanager
def loaded(plain: PreTrainedModel, method: str, **settings: Any) -> Iterator[hkv.LLM]:
    config = hkv.HybridConfig(method=method, index_build="wait", **settings)
    with hkv.load(plain, tokenizer=tokenizer(), config=config) as llm:
        yield llm


def blocks_of(root: Path) -> Path:
    """The folder of blocks that the manifest names."""
    whole = json.loads((root / "manifest.json").read_text())
    return root / whole["content"]["folder"]


def rewrite(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest's content, with a checksum that fits."""
    path = root / "manifest.json"
    whole = json.loads(path.read_text())
    change(whole["content"])
    canonical = json.dumps(whole["content"], sort_keys=True)
    whole["sha256"] = sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(whole))


def flip(path: Path, at: int) -> None:
    """Another bit in a byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
