"""A log line per request: nothing of what was asked or answered, but how much of it."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from time import perf_counter
from types import TracebackType

from hybrid_kv.serve.requests import Usage

log = logging.getLogger("hybrid_kv.serve.requests")
"""Its records have `facts`: method, path, status, prompt_tokens, completion_tokens, seconds."""

_current: ContextVar[RequestLine | None] = ContextVar("line of the request", default=None)


class RequestLine:
    """Logs a request of HTTP at its end; a context manager around all that is done for it.

    status: of the response; 0 while there is none.
    """

    def __init__(self, method: str, path: str) -> None:
        self._method, self._path, self._begin = method, path, perf_counter()
        self._prompt = self._completion = self.status = 0

    def add(self, usage: Usage) -> None:
        """Tokens of one of its answers."""
        self._prompt += usage.prompt_tokens
        self._completion += usage.completion_tokens

    def __enter__(self) -> RequestLine:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        _current.reset(self._token)
        facts = {
            "method": self._method,
            "path": self._path,
            "status": self.status,
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "seconds": round(perf_counter() - self._begin, 3),
        }
        path = json.dumps(self._path)[1:-1]  # a client chooses it: no line of its own
        log.info(
            "%s %s %d, %d + %d tokens, %.3f s",
            *(self._method, path, self.status, self._prompt, self._completion, facts["seconds"]),
            extra={"facts": facts},
        )


def answered(usage: Usage) -> None:
    """An answer of the request that is in work here has come to its end."""
    if (line := _current.get()) is not None:
        line.add(usage)
