"""A language model behind HTTP, on any mesh: requests wait in a queue and take turns in the slots of the ranks' engines.

    rank 0, threads       a connection each: read, check, put in the queue (503 if it is full)  ->  send tokens as they come
    rank 0, main thread   each turn: take requests into free slots, tell all ranks of them, make a turn, hand out tokens
    other ranks           each turn: hear what is new, make the turn; the first rank of a copy of the model sends its tokens

Nothing is sent while nobody asks.
"""

from __future__ import annotations

import json
import os
import queue
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import Thread
from typing import Any, TypeAlias

import numpy as np

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import launched_rank
from mpitrain.comm.job.together import on_first
from mpitrain.comm.messages.link import Link, Message
from mpitrain.config import Config
from mpitrain.errors import UsageError
from mpitrain.infer.completion import Asked
from mpitrain.infer.connections import HOST, Server
from mpitrain.infer.engine import Engine, block_of
from mpitrain.infer.generate import Request, Writer
from mpitrain.infer.sample import Sampling
from mpitrain.infer.text import find_encoding

IDLE_S, SENDING_S = 0.05, 5.0                     # between looks at a request to stop; for clients to receive, in the end
AWAKE_S, NAP_S = 0.05, 0.005                      # a rank with nothing to do polls so long, then naps in between

News: TypeAlias = dict[str, Any]                  # "new": [[number, copy, prompt, tokens, sampling]], "gone": numbers, "stop"
Tell: TypeAlias = Callable[[int, int, str], None]      # (request, token, "") for a token, (request, -1, why) for an end


def serve(options: Namespace, config: Config, process: Process) -> int:
    """Runs the verb on all ranks until a signal asks it to stop; requests that were taken by then are answered."""
    with guard.symmetric():
        for name, least in (("slots", 1), ("queue", 1), ("port", 0)):
            if not least <= getattr(options, name) <= 65535:
                raise UsageError(f"--{name} is {getattr(options, name)}, expected a whole number from {least} to 65535")
        block = block_of(config)
        encoding = find_encoding(config, options.vocabulary)
    guarding = process.guarding() if launched_rank()[1] > 1 else nullcontext()
    with guarding, Engine(config, options.folder, options.step, options.slots, encoding.count,
                            device=options.device) as engine:
        writer, line = Writer(engine, end=getattr(encoding, "end", None)), Line(engine)
        opened: list[Server] = []

        def listen() -> str:
            try:
                opened.append(Server(options.port, encoding, block, options.folder.absolute().name, options.queue,
                                     options.slots * line.copies))
            except OSError as error:
                raise UsageError(f"port {options.port} of {HOST} cannot be had: {error.strerror}; take another: --port "
                                 "N") from None
            return f"http://{HOST}:{opened[0].server_address[1]}/v1/completions"

        where = on_first(engine.session.control, listen)
        if not opened:
            follow(writer, line)
            writer.settle()
            return 0
        Thread(target=opened[0].serve_forever, name="mpitrain-http", daemon=True).start()
        print(f"{options.folder}, step {engine.step}, at {where}; Ctrl-C stops it", flush=True)
        Desk(opened[0], line, options.slots, process).work(writer)
        writer.settle()
        opened[0].shutdown()
        opened[0].server_close()
    return 0


class Line:
    """Messages between rank 0 and the others: what is new in each turn, and tokens back from the copies that it is not of."""

    def __init__(self, engine: Engine):
        session = engine.session
        self.place, self.copies = engine.place
        self.is_first = engine.is_first
        self.link: Link | None = session.mesh.link(session.mesh.axes, "requests") if session.control.size > 1 else None
        found = session.control.gather_objects([self.place, self.is_first])
        self.firsts = [rank for rank, (place, first) in enumerate(found) if first and place]

    def tell(self, news: News) -> None:
        """From rank 0 to all."""
        for rank in range(1, self.link.size if self.link is not None else 0):
            self._send(news, rank, "requests")

    def hear(self) -> News:
        """What rank 0 tells."""
        found: News = self._receive(0, "requests")
        return found

    def report(self, events: list[list[Any]]) -> None:
        """From the first rank of a copy to rank 0."""
        self._send(events, 0, "tokens")

    def reports(self) -> list[list[Any]]:
        """What all copies but rank 0's report of a turn."""
        return [event for rank in self.firsts for event in self._receive(rank, "tokens")]

    def _send(self, found: Any, rank: int, what: str) -> None:
        assert self.link is not None
        body = np.frombuffer(json.dumps(found).encode(), np.uint8)
        self.link.send(np.array([len(body)]), rank, 0, f"the length of {what}")
        self.link.send(body, rank, 0, what)

    def _receive(self, rank: int, what: str) -> Any:
        assert self.link is not None
        length = patient(self.link.receive((1,), np.int64, rank, 0, f"the length of {what}"), self.link)
        return json.loads(patient(self.link.receive((int(length[0]),), np.uint8, rank, 0, what), self.link).tobytes())


def patient(message: Message, link: Link) -> Any:
    """What a message brings, however late."""
    began = time.monotonic()
    while not message.test():
        link.progress.progress()
        if time.monotonic() - began < AWAKE_S:
            os.sched_yield()
        else:
            time.sleep(NAP_S)
    message.wait()
    return message.array


class Copy:
    """The requests that this rank's copy of the model answers, by number; `tell` learns what becomes of them."""

    def __init__(self, writer: Writer, place: int, tell: Tell):
        self.writer, self.place, self.tell = writer, place, tell
        self.requests: dict[int, Request] = {}

    def turn(self, news: News) -> None:
        for number, place, prompt, tokens, sampling in news["new"]:
            if place == self.place:
                self.requests[number] = Request(0, prompt, tokens, Sampling(*sampling), partial(self._heard, number))
                self.writer.waiting.append(self.requests[number])
        for number in news["gone"]:
            if number in self.requests:
                self.writer.drop(self.requests.pop(number))
        for ended in self.writer.turn():
            number = next(number for number, request in self.requests.items() if request is ended)
            del self.requests[number]
            self.tell(number, -1, ended.ended)

    def _heard(self, number: int, token: int) -> None:
        self.tell(number, token, "")


def follow(writer: Writer, line: Line) -> None:
    """What other ranks than rank 0 do until that stops."""
    events: list[list[Any]] = []
    reports = line.is_first and line.place > 0
    copy = Copy(writer, line.place, lambda *event: events.append(list(event)) if reports else None)
    while not (news := line.hear())["stop"]:
        copy.turn(news)
        if reports:
            line.report(events)
            events.clear()


class Desk:
    """Rank 0's main thread: between the connections and the ranks."""

    def __init__(self, server: Server, line: Line, slots: int, process: Process):
        self.server, self.line, self.slots, self.process = server, line, slots, process
        self.asked: dict[int, Asked] = {}
        self.copy_of: dict[int, int] = {}
        self.ended: list[Asked] = []
        self._count = 0

    def work(self, writer: Writer) -> None:
        """Until it is asked to stop and nobody waits."""
        copy = Copy(writer, self.line.place, self.tell)
        while not (news := self.news())["stop"]:
            if self.asked or news["gone"]:
                self.line.tell(news)
                copy.turn(news)
                for event in self.line.reports():
                    self.tell(*event)
            self.ended = [one for one in self.ended if not one.sent.is_set()]
        self.line.tell(news)
        for one in self.ended:
            one.sent.wait(SENDING_S)

    def news(self) -> News:
        """What the ranks are to be told; waits a moment where nobody asks."""
        with self.server.lock:
            self.server.open = not self.process.stop.asked
        gone = [number for number, asked in self.asked.items() if asked.gone.is_set()]
        for number in gone:
            self._forget(number)
        new = []
        while len(self.asked) < self.slots * self.line.copies:
            try:
                asked = self.server.waiting.get(timeout=IDLE_S, block=not self.asked and not gone)
            except queue.Empty:
                break
            if asked.gone.is_set():
                self.server.is_done()
                continue
            self._count += 1
            loads = [sum(copy == place for copy in self.copy_of.values()) for place in range(self.line.copies)]
            self.asked[self._count], self.copy_of[self._count] = asked, loads.index(min(loads))
            self.server.live = len(self.asked)
            request, how = asked.request, asked.request.sampling
            new.append([self._count, self.copy_of[self._count], request.prompt, request.tokens,
                        [how.temperature, how.top_k, how.top_p, how.seed]])
        return {"new": new, "gone": gone, "stop": not (self.server.open or self.asked or gone or self.server.waiting.qsize())}

    def tell(self, number: int, token: int, ended: str) -> None:
        """Hands a token, or the end, to the connection."""
        asked = self.asked.get(number)
        if asked is None:
            return
        if ended:
            asked.request.ended = ended
            asked.tokens.put(None)
            self.ended.append(asked)
            self._forget(number)
        else:
            asked.request.made.append(token)
            asked.tokens.put(token)

    def _forget(self, number: int) -> None:
        del self.asked[number], self.copy_of[number]
        self.server.live = len(self.asked)
        self.server.is_done()
