"""Texts continued token by token, several at once: each has a slot of the cache, and a slot that is free takes the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from mpitrain.errors import UsageError
from mpitrain.infer.engine import Engine
from mpitrain.infer.sample import Sampling

LENGTH, BLOCK, END = "length", "block", "stop"    # why a text ended: as many tokens as asked for, the model's block, its own end


@dataclass
class Request:
    """A prompt and how to go on; `number` is part of what its random numbers are for."""

    number: int
    prompt: list[int]
    tokens: int
    sampling: Sampling
    heard: Callable[[int], None] | None = None    # told of each token as it comes

    made: list[int] = field(default_factory=list)
    ended: str = ""

    @property
    def text(self) -> list[int]:
        return self.prompt + self.made


def refuse_prompt(prompt: list[int], block: int | None, what: str) -> None:
    """UsageError where a model of that block, if it is one, does not take this prompt; `what` names it."""
    if not prompt:
        raise UsageError(f"{what} is empty; give it a character at least")
    if block is not None and len(prompt) > block:
        raise UsageError(f"{what} has {len(prompt):,} tokens, and the model takes {block:,} (model.block); shorten it, or go "
                         "on from its end with --slide")


class Writer:
    """Continues requests on an engine's slots. `slide`: a text longer than the model's block goes on from its end.

    `end` is the token that ends a text. `known` is how many tokens have a text; the model may have more.
    """

    def __init__(self, engine: Engine, known: int, *, end: int | None = None, slide: bool = False):
        self.engine, self.known, self.end, self.slide = engine, known, end, slide
        self.live: dict[int, Request] = {}        # by slot

    def run(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests as they end, in no order of theirs. All ranks of one copy of the model call it alike."""
        waiting = iter(requests)
        more = True
        while more or self.live:
            while more and len(self.live) < self.engine.slots:
                request = next(waiting, None)
                if request is None:
                    more = False
                    break
                yield from self.admit(request)
            if self.live:
                yield from self.step()

    def admit(self, request: Request) -> Iterator[Request]:
        """Takes a request into a free slot: its prompt is read, and the first token made."""
        slot = next(place for place in range(self.engine.slots) if place not in self.live)
        if request.tokens < 1:
            request.ended = LENGTH
            yield request
            return
        self.live[slot] = request
        yield from self._add({slot: request}, self._whole_text(slot, request))

    def step(self) -> Iterator[Request]:
        """One more token of each live request; those that ended with it."""
        block = self.engine.capacity
        short = {slot: request for slot, request in self.live.items() if len(request.text) <= block}
        long = {slot: request for slot, request in self.live.items() if slot not in short}
        if short and self.engine.cache is not None:
            texts = [request.text for request in short.values()]
            yield from self._add(short, self._chosen(list(short.values()), self.engine.logits(
                [text[-1:] for text in texts], list(short), [len(text) - 1 for text in texts])))
        else:
            long = dict(self.live)
        for slot, request in long.items():
            yield from self._add({slot: request}, self._whole_text(slot, request))

    def _whole_text(self, slot: int, request: Request) -> list[int]:
        """The next token, from all that the model takes of the text."""
        return self._chosen([request], self.engine.logits([request.text[-self.engine.capacity:]], [slot], [0]))

    def _chosen(self, requests: list[Request], logits: object) -> list[int]:
        chosen = [0] * len(requests)
        if logits is not None:
            chosen = [request.sampling.choose(row[:self.known], request.number, len(request.text))
                      for request, row in zip(requests, logits)]      # type: ignore[call-overload]
        return self.engine.share(chosen, logits is not None)

    def _add(self, requests: dict[int, Request], tokens: list[int]) -> Iterator[Request]:
        for (slot, request), token in zip(requests.items(), tokens):
            if token == self.end:
                request.ended = END
            else:
                request.made.append(token)
                if request.heard is not None:
                    request.heard(token)
                if len(request.made) >= request.tokens:
                    request.ended = LENGTH
                elif len(request.text) > self.engine.capacity and not self.slide:
                    request.ended = BLOCK
            if request.ended:
                del self.live[slot]
                yield request
