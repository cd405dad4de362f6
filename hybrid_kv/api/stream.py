"""Text as it comes, from a generation that runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from queue import SimpleQueue
from typing import Any

from hybrid_kv.api.generation import Generation, until_done
from hybrid_kv.errors import ConfigError

Run = Callable[["SimpleQueue[Any]"], Generation]


class TextStream(Iterator[str]):
    """Pieces of text of one call; closing it ends the generation.

    Args:
        run: computes the generation and puts pieces of text into the queue that it is given.
        cancel: set to end the run early.
        stops: strings that end the text.
    """

    def __init__(self, run: Run, cancel: threading.Event, stops: list[str]) -> None:
        self._run, self._cancel = run, cancel
        self._result: Generation | None = None
        self._pieces = self._read(stops)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the generation after the token in work; `result` is what came until then."""
        self._pieces.close()

    @property
    def result(self) -> Generation:
        """What the call produced and cost.

        Raises:
            ConfigError: the stream has not ended yet.
        """
        if self._result is None:
            raise ConfigError("the stream has no result yet; read it to its end or close it")
        return self._result

    def _read(self, stops: list[str]) -> Generator[str, None, None]:
        pieces: SimpleQueue[Any] = SimpleQueue()

        def work() -> None:
            try:
                self._result = self._run(pieces)
                pieces.put(self._result)
            except BaseException as error:
                pieces.put(error)

        worker = threading.Thread(target=work, name="hybrid-kv-generate")
        worker.start()
        try:
            yield from until_done(pieces, stops)
        finally:
            self._cancel.set()
            worker.join()
