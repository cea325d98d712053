"""Messages between the stages of a pipeline: activations forward, their gradients back.

Virtual stage v lives on rank v modulo the number of stages. A message's tag says direction, virtual stage and micro-batch. The
shape of activations is sent once for each number of rows; a stage whose output changes its shape later is refused as it sends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.comm.messages.link import Link, Message
from mpitrain.errors import ShapeError
from mpitrain.placement.stages import Stage

FORWARD, BACKWARD, SHAPES = range(3)


class Neighbours:
    """The messages of one rank's chunks. `expect_*` begins to receive, `take` hands out what has arrived."""

    def __init__(self, link: Link, stage: Stage):
        self.link, self.stage = link, stage
        self._arriving: dict[tuple[str, int, int], Message] = {}
        self._shapes: dict[tuple[int, int], tuple[tuple[int, ...], str]] = {}      # Shapes that arrive, by (virtual stage, rows).
        self._told: dict[tuple[int, int], tuple[tuple[int, ...], str]] = {}        # Shapes that leave.

    def expect_forward(self, virtual: int, micro: int, rows: int, *, wait: bool) -> None:
        """Begins to receive a virtual stage's input. Unless it may `wait`, only where the shape is known."""
        if ("F", virtual, micro) in self._arriving:
            return
        peer, what = self._rank(virtual - 1), f"the output of {self.stage.describe(virtual - 1)}"
        if (virtual, rows) not in self._shapes:
            if not wait:
                return
            self._shapes[virtual, rows] = self.link.receive_shape(peer, self._tag(SHAPES, virtual, 0), what)
        shape, dtype = self._shapes[virtual, rows]
        self._arriving["F", virtual, micro] = self.link.receive(shape, dtype, peer, self._tag(FORWARD, virtual, micro), what)

    def expect_backward(self, output: Tensor, virtual: int, micro: int) -> None:
        """Begins to receive the gradient of what a virtual stage has sent."""
        if ("B", virtual, micro) not in self._arriving:
            self._arriving["B", virtual, micro] = self.link.receive(
                output.shape, np.dtype(output.dtype), self._rank(virtual + 1), self._tag(BACKWARD, virtual, micro),
                f"the gradient of the output of {self.stage.describe(virtual)}")

    def take(self, kind: str, virtual: int, micro: int) -> Any:
        """The host array that has arrived; waits for it."""
        message = self._arriving.pop((kind, virtual, micro))
        message.wait()
        return message.array

    def send_forward(self, output: Tensor, virtual: int, micro: int, rows: int) -> None:
        """Sends a virtual stage's output on. ShapeError where it is no single array, or not of the shape that was told before."""
        here, there = self.stage.describe(virtual), self.stage.describe(virtual + 1)
        if not isinstance(output, Tensor):
            raise ShapeError(f"{here} gives a {type(output).__name__} to {there}; between stages one tensor travels: cut the "
                             "model at another block")
        peer, what, found = self._rank(virtual + 1), f"the output of {here}", (output.shape, np.dtype(output.dtype).name)
        told = self._told.get((virtual, rows))
        if told is None:
            self._told[virtual, rows] = found
            self.link.send_shape(output.array, peer, self._tag(SHAPES, virtual + 1, 0), what)
        elif told != found:
            raise ShapeError(f"{what} is {found[0]} {found[1]}, and {there} expects {told[0]} {told[1]}, as it was for the same "
                             "number of rows before; shapes between stages may depend on the number of rows only")
        self.link.send(output.array, peer, self._tag(FORWARD, virtual + 1, micro), what)

    def abandon_forward(self, virtual: int, rows: int, at: int) -> None:
        """Tells the next virtual stage, where it waits for a first shape, that virtual stage `at` has failed. One on the rank
        of `at` itself waits for nothing any more."""
        if virtual + 1 < min(self.stage.n_virtual, at + self.stage.n_stages) and (virtual, rows) not in self._told:
            self.link.send_failure(at, self._rank(virtual + 1), self._tag(SHAPES, virtual + 1, 0),
                                   f"output of {self.stage.describe(virtual)}")

    def send_backward(self, x: Tensor, virtual: int, micro: int) -> None:
        """Sends the gradient of a virtual stage's input back; zeros where it took no part."""
        grad: Array = x.grad if x.grad is not None else x.xp.zeros(x.shape, x.dtype)
        self.link.send(grad, self._rank(virtual - 1), self._tag(BACKWARD, virtual - 1, micro),
                       f"the gradient of the input of {self.stage.describe(virtual)}")

    def _rank(self, virtual: int) -> int:
        return virtual % self.stage.n_stages

    def _tag(self, kind: int, virtual: int, micro: int) -> int:
        return (micro * self.stage.n_virtual + virtual) * 3 + kind
