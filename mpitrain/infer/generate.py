"""Texts continued token by token, several at once: each has a slot of the cache, and a slot that is free takes the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from mpitrain.errors import UsageError
from mpitrain.infer.engine import Choice, Coming, Engine
from mpitrain.infer.sample import Sampling

LENGTH, BLOCK, END = "length", "block", "stop"    # why a text ended: as many tokens as asked for, the model's block, its own end


@dataclass(eq=False)
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

    `end` is the token that ends a text. All ranks of one copy of the model call it alike.
    """

    def __init__(self, engine: Engine, *, end: int | None = None, slide: bool = False):
        self.engine, self.end, self.slide = engine, end, slide
        self.waiting: deque[Request] = deque()
        self.live: dict[int, Request] = {}        # by slot
        self._turns = 0
        self._coming: list[list[tuple[dict[int, Request], Coming]]] = [[] for _ in engine.groups]

    def run(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests as they end, in no order of theirs."""
        more = iter(requests)
        while True:
            self.waiting += islice(more, self.engine.slots - len(self.waiting))
            if not (self.waiting or self.live):
                return
            yield from self.turn()

    def turn(self) -> Iterator[Request]:
        """The next group's: its tokens, the requests that ended with them, new ones in their slots, and its next step begun."""
        group = self._turns % len(self._coming)
        self._turns += 1
        coming, self._coming[group] = self._coming[group], []
        for requests, tokens in coming:
            yield from self._add(requests, tokens.wait())
        for request in [request for request in self.waiting if request.tokens < 1]:
            self.waiting.remove(request)
            request.ended = LENGTH
            yield request
        new: dict[int, Request] = {}
        for slot in self.engine.groups[group]:
            if slot not in self.live and self.waiting and self._is_least(group):
                new[slot] = self.live[slot] = self.waiting.popleft()
        self._begin(group, new)

    def drop(self, request: Request) -> None:
        """Forgets a request, wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        self.live = {slot: other for slot, other in self.live.items() if other is not request}

    def settle(self) -> None:
        """Waits for tokens of dropped requests that are on their way still: nothing may be, where a mesh is closed."""
        for coming in self._coming:
            for _, tokens in coming:
                tokens.wait()
            coming.clear()

    def _is_least(self, group: int) -> bool:
        """Whether no other group has fewer live requests."""
        counts = [sum(slot in self.live for slot in slots) for slots in self.engine.groups]
        return counts[group] == min(counts)

    def _begin(self, group: int, new: Mapping[int, Request]) -> None:
        """One more token for each live request of the group. A new one is read whole, and so is one beyond the model's block."""
        capacity, short = self.engine.capacity, dict[int, Request]()
        for slot in self.engine.groups[group]:
            request = self.live.get(slot)
            if request is None:
                continue
            text = request.text
            if slot in new or self.engine.cache is None or len(text) > capacity:
                self._ask(group, {slot: request}, [text[-capacity:]], [0])
            else:
                short[slot] = request
        if short:
            texts = [request.text for request in short.values()]
            self._ask(group, short, [text[-1:] for text in texts], [len(text) - 1 for text in texts])

    def _ask(self, group: int, requests: dict[int, Request], tokens: list[list[int]], starts: list[int]) -> None:
        choices = [Choice(request.sampling, request.number, len(request.text)) for request in requests.values()]
        self._coming[group].append((requests, self.engine.next_tokens(tokens, list(requests), starts, choices)))

    def _add(self, requests: dict[int, Request], tokens: list[int]) -> Iterator[Request]:
        for (slot, request), token in zip(requests.items(), tokens):
            if self.live.get(slot) is not request:
                continue                          # it was dropped meanwhile
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
