"""A language model behind HTTP on the loopback interface: requests wait in a queue and take turns in the slots of one engine.

    a thread for each connection:  read, check, put in the queue (503 if it is full)  ->  send tokens as they come
    the main thread:               while there is something: take requests into free slots, one token of each live one

For trying a model: no encryption, no accounts, and no other machine can reach it.
"""

from __future__ import annotations

import json
import queue
import sys
from argparse import Namespace
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import launched_rank
from mpitrain.config import Config
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.infer import completion
from mpitrain.infer.completion import Asked
from mpitrain.infer.engine import Engine, block_of
from mpitrain.infer.generate import Request, Writer
from mpitrain.infer.text import Decoder, Encoding, find_encoding

HOST, MOST_BYTES = "127.0.0.1", 1 << 20
IDLE_S, SOCKET_S, SENDING_S = 0.05, 30.0, 5.0      # between looks at a request to stop; for a client to send, and to receive
NAMES = (HOST, "localhost")                       # a page of another site must not reach it by a name that leads here


class Server(ThreadingHTTPServer):
    """What the threads of connections share: the queue, and whether it still takes requests."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, port: int, encoding: Encoding, block: int, model: str, waiting: int):
        self.encoding, self.block, self.model, self.open = encoding, block, model, True
        self.waiting: queue.Queue[Asked] = queue.Queue(waiting)
        self.live, self.lock = 0, Lock()
        super().__init__((HOST, port), Connection)

    def takes(self, asked: Asked) -> bool:
        """Puts a request in the queue; False where that is full, or the server about to stop."""
        with self.lock:
            try:
                if self.open:
                    self.waiting.put_nowait(asked)
                return self.open
            except queue.Full:
                return False

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
            return
        body = self.rfile.read(int(length))
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
        while (token := asked.tokens.get()) is not None:
            text += decoder.add(token)
        self._send(200, completion.answer(asked, text + decoder.end(), self.server.model))

    def _stream(self, asked: Asked) -> None:
        self.send_response(200)
        for name, value in (("Content-Type", "text/event-stream"), ("Cache-Control", "no-store"), ("Connection", "close")):
            self.send_header(name, value)
        self.end_headers()
        decoder = Decoder(self.server.encoding)
        while (token := asked.tokens.get()) is not None:
            if piece := decoder.add(token):
                self._event(completion.answer(asked, piece, self.server.model, last=False))
        self._event(completion.answer(asked, decoder.end(), self.server.model))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, found: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(found).encode() + b"\n\n")

    def _is_ours(self) -> bool:
        if self.headers.get("Host", HOST).rpartition(":")[0] in ("", *NAMES) or self.headers.get("Host") in NAMES:
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


def serve(options: Namespace, config: Config, process: Process) -> int:
    """Runs the verb until a signal asks it to stop; requests that were taken by then are answered."""
    with guard.symmetric():
        if launched_rank()[1] > 1:
            raise UsageError("serve runs on one rank; start it without mpirun")
        for name, least in (("slots", 1), ("queue", 1), ("port", 0)):
            if not least <= getattr(options, name) <= 65535:
                raise UsageError(f"--{name} is {getattr(options, name)}, expected a whole number from {least} to 65535")
        block = block_of(config)
        encoding = find_encoding(config, options.vocabulary)
    with Engine(config, options.folder, options.step, options.slots) as engine:
        try:
            server = Server(options.port, encoding, block, options.folder.absolute().name, options.queue)
        except OSError as error:
            raise UsageError(f"port {options.port} of {HOST} cannot be had: {error.strerror}; take another: --port N") from None
        Thread(target=server.serve_forever, name="mpitrain-http", daemon=True).start()
        where = f"http://{HOST}:{server.server_address[1]}/v1/completions"
        print(f"{options.folder}, step {engine.step}, at {where}; Ctrl-C stops it", flush=True)
        work(server, Writer(engine, encoding.count, end=getattr(encoding, "end", None)), process)
        server.shutdown()
        server.server_close()
    return 0


def work(server: Server, writer: Writer, process: Process) -> None:
    """The main thread's part, until it is asked to stop and nobody waits."""
    asked: dict[int, Asked] = {}                  # by the request's address: numbers of requests are all 0
    ended: list[Asked] = []
    while True:
        with server.lock:
            server.open = not process.stop.asked
        if not server.open and not asked and server.waiting.empty():
            break
        while len(writer.live) < writer.engine.slots:
            try:
                new = server.waiting.get(timeout=None if writer.live else IDLE_S, block=not writer.live)
            except queue.Empty:
                break
            asked[id(new.request)] = new
            ended += _advance(writer.admit(new.request), asked)
        for slot, request in list(writer.live.items()):
            if asked[id(request)].gone.is_set():
                del writer.live[slot], asked[id(request)]
        if writer.live:
            ended += _advance(writer.step(), asked)
        server.live, ended = len(writer.live), [one for one in ended if not one.sent.is_set()]
    for one in ended:
        one.sent.wait(SENDING_S)


def _advance(ending: Iterable[Request], asked: dict[int, Asked]) -> list[Asked]:
    """Those whose texts have ended, who are told so."""
    found = [asked.pop(id(request)) for request in ending]
    for one in found:
        one.tokens.put(None)
    return found
