"""What becomes of work that nobody waits for: an end or an error, in a future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from traceback import format_exception


def run_into(
    future: Future[None],
    work: Callable[[], None],
    caught: type[BaseException] = Exception,
) -> None:
    """Runs work, whose end or error becomes the future's.

    Args:
        caught: what is an error of the work; everything else is raised here.
    """
    failure: BaseException | None = None
    try:
        work()
    except caught as error:
        failure = without_frames(error)
    del work  # before anybody who waits is told
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)


def without_frames(error: BaseException) -> BaseException:
    """The error with its traceback as text: frames would keep the keys of the work that failed, and
    those of its callers the future that keeps the error.
    """
    error.add_note("".join(format_exception(error)))
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
