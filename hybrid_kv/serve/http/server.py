"""A socket and uvicorn around the application: connections that hang are ended, Ctrl-C too."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from hybrid_kv.errors import ConfigError
from hybrid_kv.serve.http.schemas import ApiError
from hybrid_kv.serve.http.service import Ending, Service

HEAD_SECONDS = 15.0
"""For the head of a request to arrive."""

STALL_SECONDS = 60.0
"""For which a client may read nothing of what is written for it."""

PROBE_SECONDS = 1.0
"""From one look to the next whether a client that has ended its own side still reads."""

MAX_CONNECTIONS = 1000

END_SECONDS = 3.0
"""For which requests may go on after Ctrl-C; what follows, on a busy machine, makes it five."""

LAST_SECONDS = 1.0
"""For which clients may then read what was written for them."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket of this address, before anything is loaded; port 0 takes a free one.

    Raises:
        ConfigError: the port is in use or not allowed, or the host is none of this machine's.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host must be an address of this machine, got '{host}' ({error}); 127.0.0.1 serves "
            "this machine alone, 0.0.0.0 all others too"
        ) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1)  # another process that listens is only seen here
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"--port must be free at {host}, got {port} ({error.strerror}); choose another one, or "
            "0 for any that is free"
        ) from None
    return bound


class Connection(H11Protocol):
    """HTTP/1.1 whose clients may not hang: neither in a request's head nor in reading an answer."""

    head_seconds, stall_seconds, max_connections = HEAD_SECONDS, STALL_SECONDS, MAX_CONNECTIONS
    probe_seconds = PROBE_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock for the first request; one connection too many is told so."""
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            self._refuse(503, "the server has too many connections; ask again later", "no_room_now")
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Stops the clock when the head is there."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop("_head_timer")
        elif self._head_timer is None:
            self._await_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps what it can write to where a whole request waits for its answer.

        A client that has only ended its own side reads on; one that has left looks the same until
        something is sent to it.
        """
        states = (self.conn.their_state, self.conn.our_state)
        asked = states[0] in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        if not asked or states[1] not in (h11.SEND_RESPONSE, h11.SEND_BODY):
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        """Finds out whether anybody reads, by an interim response, which every client passes over.

        HTTP/1.0 has none: there it is seen when the answer is written.
        """
        waits = self.conn.our_state is h11.SEND_RESPONSE and not self.transport.is_closing()
        if waits and self.conn.their_http_version != b"1.0":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")
            self._probe_timer = self.loop.call_later(self.probe_seconds, self._probe)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks."""
        self._stop("_head_timer")
        self._stop("_stall_timer")
        self._stop("_probe_timer")
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts the clock for the client to read on."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops it."""
        self._stop("_stall_timer")
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP in the same form as all else."""
        self._refuse(400, "what came is no HTTP request; speak HTTP/1.1", "no_http")

    def _refuse(self, status: int, sentence: str, code: str) -> None:
        content = json.dumps(ApiError(status, sentence, code=code).body).encode()
        headers = (
            f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(headers.encode() + content)
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if (timer := getattr(self, name)) is not None:
            timer.cancel()
            setattr(self, name, None)


class Server(uvicorn.Server):
    """uvicorn that ends by finishing or cancelling the requests, within five seconds.

    Args:
        started: called when requests are taken.
        ended: called with what became of the requests that were in work.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        started: Callable[[], None],
        ended: Callable[[Ending], None],
    ) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(END_SECONDS) + 1,
            )
        )
        self._service, self._on_start, self._on_end = service, started, ended
        self.signal: int | None = None
        """By which it was asked to end."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tells that it has begun."""
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the requests, then the connections."""
        for server in self.servers:
            server.close()  # whoever comes now is refused at the door
        seconds = 0.0 if self.force_exit else END_SECONDS
        self._on_end(await self._service.end(seconds))
        # A connection that is cut ends its request as any client that leaves does; uvicorn would
        # cancel it, and print a traceback.
        cutting = asyncio.get_running_loop().call_later(LAST_SECONDS, self._cut)
        await super().shutdown(sockets)
        cutting.cancel()

    def _cut(self) -> None:
        """Ends the connections that are left."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Takes Ctrl-C and SIGTERM, and unlike uvicorn does not raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Notes by which signal."""
        self.signal = sig
        super().handle_exit(sig, frame)
