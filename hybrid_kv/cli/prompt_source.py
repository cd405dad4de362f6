"""Prompts of a command: an argument, a file, stdin, or random tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_kv.api import LLM
    from hybrid_kv.api.llm import Prompt


def has_no_tokenizer(model: str) -> bool:
    """Whether a MODEL is one of random weights."""
    return model.startswith("random:")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Exactly one of text and a number of random tokens."""

    text: str | None
    random_tokens: int | None
    seed: int

    def check(self, model: str) -> None:
        """Raises ConfigError for text where it is known, before anything is loaded, that no
        tokenizer will read it.
        """
        if self.text is not None and has_no_tokenizer(model):
            raise ConfigError(
                f"a text prompt needs a tokenizer, and model '{model}' has none; give "
                "--prompt-tokens N instead"
            )

    def for_model(self, llm: LLM, system: str | None, *, raw: bool) -> Prompt:
        """Prompt as `LLM.generate` takes it: messages if the model has a chat template, unless
        `raw`.

        Raises:
            ConfigError: there is none to put the system message into.
        """
        import torch

        if self.text is not None:
            if system is None and (raw or llm.chat_template is None):
                return self.text
            llm.require_chat_template()
            opening = [] if system is None else [{"role": "system", "content": system}]
            return [*opening, {"role": "user", "content": self.text}]
        embedding: Any = llm.model.get_input_embeddings()
        size = embedding.weight.shape[0]
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(size, (self.random_tokens or 1,), generator=generator)


def find_prompt(
    text: str | None, file: str | None, random_tokens: int | None, seed: int
) -> PromptSource:
    """The one prompt that was given.

    Raises:
        ConfigError: none or several were given, the file cannot be read, or the text is empty.
    """
    given = [value for value in (text, file, random_tokens) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            "prompt must be given once, as an argument, with --prompt-file or with "
            f"--prompt-tokens, got {len(given)} of them"
        )
    if file is not None:
        text = sys.stdin.read() if file == "-" else _read(Path(file))
    if text is not None and not text.strip():
        raise ConfigError("prompt is empty; pass at least one word")
    return PromptSource(text, random_tokens, seed)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"prompt file '{path}' must be UTF-8 text; convert it") from None
    except OSError as error:
        raise ConfigError(
            f"prompt file '{path}' cannot be read: {error.strerror}; check the path"
        ) from None
