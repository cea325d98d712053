"""The forward pass alone, through all stages: for evaluation, and for a first sample that shows whether shapes fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpitrain.autograd import Tensor, enable_grad, in_single, no_grad
from mpitrain.comm.messages.link import Abandoned
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.placement.stages import Stage
from mpitrain.registry import is_own

if TYPE_CHECKING:
    from mpitrain.parallel.pipeline.neighbours import Neighbours

AHEAD = 2                                    # At most so many outputs are on their way: a fast stage must not run away.


@contextmanager
def given_to(loss: Any, output: Tensor) -> Iterator[Tensor]:
    """The output as a loss gets it outside of a step: a user's own may take derivatives, so it has a graph, as in a step."""
    with enable_grad() if is_own(loss) else no_grad():
        yield Tensor(output.array, requires_grad=True) if is_own(loss) and not output.requires_grad else output


class Inference:
    """The model as a function of batches; all ranks of a pipeline call it alike, each runs its stage."""

    def __init__(self, stage: Stage, feed: Feed, neighbours: Neighbours | None = None):
        self.stage, self.feed, self.neighbours = stage, feed, neighbours
        self.forwards: list[Any] = list(stage.chunks)      # what computes each chunk's output; it may be exchanged

    def run(self, batches: Iterable[tuple[Any, Any]], *, agreeing: bool = False) -> Iterator[tuple[Tensor, Any]]:
        """(output, y) for each host batch (x, y), without gradients, on ranks of the last stage; others yield nothing.

        The model is in evaluation mode meanwhile. Where ranks agree afterwards whether all of them have come through
        (`agreeing`), a stage that fails tells those after it, which raise Abandoned.
        """
        model = self.stage.model
        was_training = model.training
        model.eval()
        try:
            with no_grad():
                for number, (x, y) in enumerate(batches):
                    for chunk in range(len(self.stage.chunks)):
                        output = self._one(x, chunk, number, agreeing)
                    if self.stage.is_last:
                        yield output, y
        finally:
            model.train(was_training)
        if self.neighbours is not None:
            self.neighbours.link.finish()

    def _one(self, x: Any, chunk: int, number: int, agreeing: bool) -> Tensor:
        """The output of one chunk for batch `number`, which is sent on unless the chunk is the last."""
        try:
            return self._computed(x, chunk, number)
        except Exception as error:
            if agreeing and self.neighbours is not None:
                virtual = self.stage.virtual(chunk)
                self.neighbours.abandon_forward(virtual, len(x), error.at if isinstance(error, Abandoned) else virtual)
            raise

    def _computed(self, x: Any, chunk: int, number: int) -> Tensor:
        virtual, neighbours = self.stage.virtual(chunk), self.neighbours
        if virtual == 0:
            given = self.feed.tensors(x)
        else:
            assert neighbours is not None
            neighbours.expect_forward(virtual, number, len(x), wait=True)
            given = Tensor(self.feed.device.put(neighbours.take("F", virtual, number)))
        output: Tensor = self.forwards[chunk](given)
        if virtual == self.stage.n_virtual - 1:
            found: Tensor = in_single(output)     # Metrics are not computed in 16 bits.
            return found
        assert neighbours is not None
        neighbours.send_forward(output, virtual, number, len(x))
        neighbours.link.finish(AHEAD)
        return output
