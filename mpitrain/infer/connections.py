"""HTTP on the loopback interface: a thread for each connection, which reads a request, puts it in a queue, and sends its tokens.

For trying a model: no encryption, no accounts, and no other machine can reach it. A client that goes away, or neither sends nor
reads for long, gives its slot back.
"""

from __future__ import annotations

import json
import queue
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from mpitrain.errors import MpitrainError
from mpitrain.infer import completion
from mpitrain.infer.completion import Asked
from mpitrain.infer.text import Decoder, Encoding

HOST, MOST_BYTES = "127.0.0.1", 1 << 20
READING_S, SOCKET_S = 30.0, 30.0                  # for a client to send its request, and to take a part of the answer
LOOK_S = 0.2                                      # between looks whether a client is there still
MORE = 64                                         # connections beyond those that wait or are answered
NAMES = (HOST, "localhost")                       # a page of another site must not reach it by a name that leads here
DRAIN_BYTES = 64 << 20                            # of a body too long are read and dropped, so that the client reads why
FULL = (b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        b'{"error": {"message": "too many connections; try again", "type": "server_error", "code": 503}}')


class Server(ThreadingHTTPServer):
    """What the threads of connections share: the queue, and whether it still takes requests."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, port: int, encoding: Encoding, block: int, model: str, waiting: int, slots: int):
        self.encoding, self.block, self.model, self.open = encoding, block, model, True
        self.waiting: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self.room, self.most = waiting + slots, waiting + slots + MORE       # requests; connections
        self.live, self.lock = 0, Lock()
        self._reading: dict[socket.socket, float] = {}       # since when
        self._connections: set[socket.socket] = set()
        super().__init__((HOST, port), Connection)

    def takes(self, asked: Asked) -> bool:
        """Puts a request in the queue; False where that is full, or the server about to stop."""
        with self.lock:
            if not self.open or self.room < 1:
                return False
            self.room -= 1
            self.waiting.put(asked)
            return True

    def is_done(self) -> None:
        """A request has ended, or is forgotten."""
        with self.lock:
            self.room += 1

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, where there are not too many."""
        if len(self._connections) >= self.most:
            with suppress(OSError):
                request.setblocking(False)
                request.send(FULL)
            self.shutdown_request(request)
            return
        with self.lock:
            self._connections.add(request)
            self._reading[request] = time.monotonic()
        super().process_request(request, client_address)

    def has_read(self, request: socket.socket) -> None:
        with self.lock:
            self._reading.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self._connections.discard(request)
            self._reading.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Now and then: who sends a request so slowly that it never ends is cut off."""
        late = time.monotonic() - READING_S
        with self.lock:
            for request in [request for request, since in self._reading.items() if since < late]:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):
            print(f"mpitrain: a connection failed: {type(error).__name__}: {error}", file=sys.stderr)


class Connection(BaseHTTPRequestHandler):
    """One client's connection."""

    server: Server
    timeout = SOCKET_S
    server_version, sys_version = "mpitrain", ""

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        if self.path == "/health":
            self._send(200, {"status": "ok" if self.server.open else "stopping", "model": self.server.model,
                             "live": self.server.live, "waiting": self.server.waiting.qsize()})
        elif self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": self.server.model, "object": "model"}]})
        else:
            self._refuse(404, "there is nothing here; POST /v1/completions, GET /v1/models, GET /health")

    def do_POST(self) -> None:
        if not self._is_ours():
            return
        if self.path != "/v1/completions":
            self._refuse(404, "there is nothing here; POST /v1/completions")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(411, "Content-Length is missing")
            return
        if len(length) > 12 or int(length) > MOST_BYTES:
            self._refuse(413, f"the body has more than {MOST_BYTES:,} bytes")
            self._drain()
            return
        body = self.rfile.read(int(length))
        self.server.has_read(self.connection)
        try:
            asked = completion.read(body, self.server.encoding, self.server.block)
        except MpitrainError as error:
            self._refuse(400, error.message)
            return
        if not self.server.takes(asked):
            self._refuse(503, "as many requests as may wait are waiting; try again", {"Retry-After": "1"})
            return
        try:
            self._stream(asked) if asked.stream else self._whole(asked)
        except OSError:
            asked.gone.set()                      # its slot is for somebody else
            raise
        finally:
            asked.sent.set()

    def _whole(self, asked: Asked) -> None:
        decoder, text = Decoder(self.server.encoding), ""
        for token in self._tokens(asked):
            text += decoder.add(token)
        self._send(200, completion.answer(asked, text + decoder.end(), self.server.model))

    def _stream(self, asked: Asked) -> None:
        self.send_response(200)
        for name, value in (("Content-Type", "text/event-stream"), ("Cache-Control", "no-store"), ("Connection", "close")):
            self.send_header(name, value)
        self.end_headers()
        decoder = Decoder(self.server.encoding)
        for token in self._tokens(asked):
            if piece := decoder.add(token):
                self._event(completion.answer(asked, piece, self.server.model, last=False))
        self._event(completion.answer(asked, decoder.end(), self.server.model))
        self.wfile.write(b"data: [DONE]\n\n")

    def _tokens(self, asked: Asked) -> Iterator[int]:
        """The request's tokens as they come. ConnectionError where the client has gone."""
        looked = time.monotonic()
        while True:
            token: int | None = -1
            with suppress(queue.Empty):
                token = asked.tokens.get(timeout=LOOK_S)
                if token is None:
                    return
                yield token
            if token == -1 or time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                self._look()

    def _look(self) -> None:
        """ConnectionError where the client has closed the connection."""
        if select.select([self.connection], [], [], 0)[0] and not self.connection.recv_into(bytearray(1), 1, socket.MSG_PEEK):
            raise ConnectionAbortedError("the client has gone")

    def _drain(self) -> None:
        """Reads what a client that was refused still sends: a connection closed over unread bytes loses the answer, too."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        left, room = DRAIN_BYTES, bytearray(1 << 16)
        while left > 0 and (count := self.connection.recv_into(room)):
            left -= count

    def _event(self, found: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(found).encode() + b"\n\n")

    def _is_ours(self) -> bool:
        host = self.headers.get("Host") or HOST
        if (host.rpartition(":")[0] if ":" in host else host).lower() in NAMES:
            return True
        self._refuse(403, f"this server answers to {' and '.join(NAMES)} alone")
        return False

    def _refuse(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._send(status, {"error": {"message": message, "type": kind, "code": status}}, headers)

    def _send(self, status: int, found: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Nothing: a line for each request would hide what matters."""
