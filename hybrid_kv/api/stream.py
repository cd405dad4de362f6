"""Text as it comes, from a generation that runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from queue import SimpleQueue
from typing import Any

from hybrid_kv.api.generation import Generation, until_done
from hybrid_kv.errors import ConfigError

Call = Callable[["SimpleQueue[Any]"], Generation]


class TextStream(Iterator[str]):
    """Pieces of text of one call; closing or dropping it ends the generation.

    Args:
        run: computes the generation and puts pieces of text into the queue that it is given.
        cancel: set to end the run early.
        stops: strings that end the text.
    """

    def __init__(self, run: Call, cancel: threading.Event, stops: list[str]) -> None:
        self._results: list[Generation] = []
        self._pieces = _read(run, cancel, stops, self._results)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the generation after the token in work; `result` is what came until then."""
        self._pieces.close()

    @property
    def result(self) -> Generation:
        """Result of the call: its answer and its costs.

        Raises:
            ConfigError: the stream has not ended yet.
        """
        if not self._results:
            raise ConfigError("the stream has no result yet; read it to its end or close it")
        return self._results[0]


def _read(
    run: Call, cancel: threading.Event, stops: list[str], results: list[Generation]
) -> Generator[str, None, None]:
    """Runs it in a thread and yields its text; what the run returns is added to `results`."""
    # Knows no stream: a stream that is dropped drops this, which ends the thread.
    pieces: SimpleQueue[Any] = SimpleQueue()

    def work() -> None:
        try:
            results.append(run(pieces))
            pieces.put(results[0])
        except BaseException as error:
            pieces.put(error)

    worker = threading.Thread(target=work, name="hybrid-kv-generate")
    worker.start()
    try:
        yield from until_done(pieces, stops)
    finally:
        cancel.set()
        worker.join()
