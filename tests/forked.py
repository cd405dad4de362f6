"""Processes that begin with PyTorch, transformers and the package imported, which takes seconds.

`start` and `run` take what a Python is given, `-m MODULE` or `-c CODE` with further words, and give
what `subprocess.Popen` and `subprocess.run` would. One process with everything imported serves all
tests of this one, and forks for each call. Tests of what is imported when, of an environment that
is read by imports, or of how an interpreter ends, need a new interpreter: `subprocess`.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "transformers.models.llama.modeling_llama",
    "hybrid_kv.api",
    "hybrid_kv.cli.evaluate",
    "hybrid_kv.cli.model_run",
    "hybrid_kv.cli.profile",
    "hybrid_kv.serve.http.app",
)
_MOST_BYTES = 1 << 17
"""Of a request: words and environment."""


class Forked(AbstractContextManager["Forked"]):
    """A process, as `subprocess.Popen[str]` would be: killed at the end of its context."""

    def __init__(self, told: socket.socket, pipes: Mapping[str, IO[str]]) -> None:
        self._told = told
        self.stdout, self.stderr = pipes.get("stdout"), pipes.get("stderr")
        self.pid: int = json.loads(told.recv(100))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(TimeoutError):
            self.wait(0.001)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._told.settimeout(timeout)
            self.returncode = json.loads(self._told.recv(100))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of both pipes, once it has ended; it is killed when the time is over."""
        timer = threading.Timer(timeout or 600, self.kill)
        timer.start()
        texts = {"stdout": "", "stderr": ""}

        def read(name: str) -> None:
            pipe = getattr(self, name)
            if pipe is not None and not pipe.closed:
                texts[name] = pipe.read()

        readers = [threading.Thread(target=read, args=(name,)) for name in texts]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self.wait()
        timer.cancel()
        return texts["stdout"], texts["stderr"]

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.wait(30)
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self._told.close()


def start(
    *words: object,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Forked:
    """A process with these words behind `python`, which must begin with -m or -c."""
    request = {
        "words": [str(word) for word in words],
        "cwd": str(cwd or Path.cwd()),
        "env": dict(os.environ if env is None else env),
    }
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes, ends, given = dict[str, IO[str]](), list[int](), list[int]()
    for name, stream, number in (("stdout", stdout, 1), ("stderr", stderr, 2)):
        if stream == subprocess.PIPE:
            reading, writing = os.pipe()
            pipes[name] = open(reading, encoding="utf-8")  # noqa: SIM115
            ends.append(writing)
            given.append(writing)
        elif stream is None or isinstance(stream, int):
            given.append(number if stream is None else stream)
        else:
            given.append(stream.fileno())
    body = json.dumps(request).encode()
    assert len(body) < _MOST_BYTES
    socket.send_fds(_server(), [body], [*given, theirs.fileno()])
    theirs.close()
    for end in ends:
        os.close(end)
    return Forked(own, pipes)


def run(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The process once it has ended, with what it wrote on stdout and stderr."""
    with start(*words, stdout=-1, stderr=-1, cwd=cwd, env=env) as process:
        out, err = process.communicate()
        return subprocess.CompletedProcess([*map(str, words)], process.wait(), out, err)


@cache
def _server() -> socket.socket:
    """The socket of a process that has imported everything and waits for requests."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", str(number)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        pass_fds=[number],
    )
    theirs.close()

    def end() -> None:
        own.close()
        process.wait(30)

    atexit.register(end)
    return own


def _serve(requests: socket.socket) -> None:
    """Forks for each request, until nobody is left to ask."""
    for name in IMPORTED:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the tests
    while True:
        body, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
        if not body:
            return
        if os.fork() == 0:
            requests.close()
            _attend(json.loads(body), descriptors)
        for one in descriptors:
            os.close(one)


def _attend(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Forks the process that was asked for, says its pid, and at its end its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told = socket.socket(fileno=descriptors[2])
    child = os.fork()
    if child == 0:
        told.close()
        _become(request, descriptors)
    for one in descriptors[:2]:
        os.close(one)
    told.send(json.dumps(child).encode())
    _, status = os.waitpid(child, 0)
    with suppress(BrokenPipeError):
        told.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """What the interpreter does with its words, streams and signals."""
    for number, descriptor in enumerate(descriptors[:2], start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", line_buffering=True)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        _run(request["words"])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # as the interpreter would
        traceback.print_exc()
        status = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    os._exit(status)


def _run(words: list[str]) -> None:
    kind, what, *rest = words
    assert kind in ("-m", "-c"), words
    sys.path[0] = "" if kind == "-c" else os.getcwd()
    if kind == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        names = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(what, "<string>", "exec"), names)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
