"""Grammars that an answer keeps to: JSON schemas, regular expressions and Lark grammars.

llguidance (MIT) reads them, and says before each token which ones may follow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_kv.errors import ConfigError, HybridKVError
from hybrid_kv.models.checkpoint import reason

ANY_OBJECT: dict[str, Any] = {"type": "object"}

SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON in answers: as much as is usual, for small models find no end of it."""


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar as it was asked for.

    text: a schema as JSON, or what stands in the regular expression or the grammar.
    """

    kind: Literal["json", "regex", "lark"]
    text: str

    @classmethod
    def of_schema(cls, schema: dict[str, Any]) -> GrammarText:
        """Keys and their order are kept: an answer has them in the order of the schema."""
        return cls("json", json.dumps(schema))

    @classmethod
    def of_choices(cls, texts: Sequence[str]) -> GrammarText:
        """One of these texts."""
        return cls("lark", f"start: {' | '.join(map(json.dumps, texts))}")


class GrammarReader:
    """Reads grammars for one tokenizer.

    Args:
        vocab: logits of a step.
        end_ids: tokens that end an answer, allowed where the grammar may end.

    Raises:
        ConfigError: llguidance is missing, or cannot read the tokenizer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab: int, end_ids: Sequence[int]
    ) -> None:
        if find_spec("llguidance") is None:
            raise ConfigError(
                "answers by a schema or grammar, and calls of tools that must come, need "
                "llguidance, got an environment without; pip install 'hybrid-kv[serve]'"
            )
        from llguidance.hf import from_tokenizer

        ends = list(end_ids) or [each for each in (tokenizer.eos_token_id,) if each is not None]
        if not ends:
            raise ConfigError(
                "answers by a schema or grammar need a token that ends them, got a model without; "
                "ask without"
            )
        fast: Any = tokenizer
        try:
            self._tokens = from_tokenizer(fast, vocab, ends)
        except ValueError as error:
            raise ConfigError(
                "answers by a schema or grammar need a tokenizer of bytes (BPE or SentencePiece), "
                f"got one that llguidance does not read: {reason(error)[:120]}; ask without"
            ) from None
        self._vocab = vocab

    def read(self, asked: GrammarText) -> Grammar:
        """A grammar, ready for its first token.

        Raises:
            ConfigError: it is none, or has parts that cannot be kept to.
        """
        from llguidance import LLMatcher

        try:
            text = {
                "json": lambda schema: LLMatcher.grammar_from_json_schema(schema, SPACING),
                "regex": LLMatcher.grammar_from_regex,
                "lark": LLMatcher.grammar_from_lark,
            }[asked.kind](asked.text)
        except ValueError as error:  # no JSON
            raise _refusal(asked, str(error)) from None
        matcher = LLMatcher(self._tokens, text, log_level=0)
        if matcher.is_error():
            raise _refusal(asked, matcher.get_error())
        return Grammar(asked, matcher, self._vocab)


def _refusal(asked: GrammarText, why: str) -> ConfigError:
    word = {"json": "JSON schema", "regex": "regular expression", "lark": "grammar"}[asked.kind]
    return ConfigError(
        f"the {word} cannot be kept to: {' '.join(why.split())[:300]}; leave that part out"
    )


class Grammar:
    """Keeps an answer to a grammar, whatever tokens are tried and taken back.

    text: that it was read from.
    """

    def __init__(self, text: GrammarText, matcher: Any, vocab: int) -> None:
        self.text, self._matcher, self._vocab = text, matcher, vocab
        self._taken: list[int] = []

    def copy(self) -> Grammar:
        """The same for another answer, from its first token on."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return Grammar(self.text, matcher, self._vocab)

    def allowed(self, answer: Sequence[int]) -> Tensor:
        """Bool [V] on the host: the tokens that may follow those of an answer.

        Raises:
            HybridKVError: the grammar has become too large for llguidance's limits.
        """
        self._follow(answer)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab]).bool()

    def is_complete(self, answer: Sequence[int]) -> bool:
        """Whether nothing can follow."""
        self._follow(answer)
        return bool(self._matcher.is_stopped())

    def _follow(self, answer: Sequence[int]) -> None:
        """Takes back what the answer does not have, and takes up what it has."""
        same = 0
        for ours, theirs in zip(self._taken, answer, strict=False):
            if ours != theirs:
                break
            same += 1
        if same < len(self._taken):
            self._matcher.rollback(len(self._taken) - same)
        for token in answer[same:]:
            self._matcher.consume_token(token)
            self._check()
        self._taken = list(answer)

    def _check(self) -> None:
        if self._matcher.is_error():
            said = " ".join(self._matcher.get_error().split())[:200]
            raise HybridKVError(f"the answer's grammar failed: {said}; ask with a simpler one")
