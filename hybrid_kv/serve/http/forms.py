"""JSON forms of an answer in a chat and in a completion, whole and in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, Protocol

from hybrid_kv.serve.requests import Finished, Reason, Token, Usage

Json = dict[str, Any]
Piece = Callable[[int], str]

_LEAST_LOGPROB = -9999.0
"""Value that the interface writes for a probability of zero."""


class Form(Protocol):
    """JSON form of one choice.

    name: of the object; chunk_name: of a chunk of it.
    """

    name: str
    chunk_name: str

    def whole(self, tokens: Sequence[Token], finish: str) -> Json: ...

    def first(self) -> Json | None: ...

    def chunk(self, tokens: Sequence[Token]) -> Json: ...

    def last(self, finish: str) -> Json: ...


class ChatForm:
    """/v1/chat/completions.

    Args:
        piece: the text of one token; None where log probabilities were not asked for.
    """

    name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, piece: Piece | None) -> None:
        self._piece = piece

    def whole(self, tokens: Sequence[Token], finish: str) -> Json:
        message = {"role": "assistant", "content": text_of(tokens), "refusal": None}
        return {"message": message, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def first(self) -> Json:
        return _chunk({"role": "assistant", "content": ""})

    def chunk(self, tokens: Sequence[Token]) -> Json:
        return _chunk({"content": text_of(tokens)}, self._logprobs(tokens))

    def last(self, finish: str) -> Json:
        return _chunk({}, finish=finish)

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._piece is None:
            return None
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: Token) -> Json:
        top = [self._named(idx, logprob) for idx, logprob in token.top]
        return {**self._named(token.id, token.logprob), "top_logprobs": top}

    def _named(self, idx: int, logprob: float | None) -> Json:
        assert self._piece is not None
        text = self._piece(idx)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _chunk(delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": finish}


class CompletionForm:
    """/v1/completions; one for each choice, because it counts characters."""

    name = chunk_name = "text_completion"

    def __init__(self, piece: Piece | None) -> None:
        self._piece, self._offset = piece, 0

    def whole(self, tokens: Sequence[Token], finish: str) -> Json:
        return {
            "text": text_of(tokens),
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish,
        }

    def first(self) -> None:
        return None

    def chunk(self, tokens: Sequence[Token]) -> Json:
        logprobs = self._logprobs(tokens)
        return {"text": text_of(tokens), "logprobs": logprobs, "finish_reason": None}

    def last(self, finish: str) -> Json:
        return {"text": "", "logprobs": None, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._piece is None:
            return None
        texts = [self._piece(token.id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._piece(idx): _finite(logprob) for idx, logprob in token.top}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def text_of(tokens: Sequence[Token]) -> str:
    """Text of several tokens together."""
    return "".join(token.text for token in tokens)


def finish_of(reason: Reason) -> str:
    """In the interface's words, which have none for the end of time: `hybrid_kv` has."""
    return "stop" if reason == "stop" else "length"


def usage_of(prompts: Sequence[Usage], all_choices: Sequence[Usage]) -> Json:
    """Tokens of a request; a prompt counts once for all of its choices.

    Args:
        prompts: of the first choice of each prompt.
    """
    prompt = sum(usage.prompt_tokens for usage in prompts)
    completion = sum(usage.completion_tokens for usage in all_choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.reused_tokens for usage in prompts)},
    }


def report_of(end: Finished) -> Json:
    """Costs of an answer: the `hybrid_kv` object of a choice."""
    report = asdict(end.report)
    itl = report.pop("itl_ms")
    report["places"] = [
        {"position": position, "weight": weight} for position, weight in report["places"]
    ]
    report = {name: None if _is_nan(value) else value for name, value in report.items()}
    return {"ended_by": end.reason, "tpot_ms": fmean(itl) if itl else None, **report}


def _finite(logprob: float | None) -> float | None:
    if logprob is None or math.isnan(logprob):
        return None
    return max(logprob, _LEAST_LOGPROB)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
