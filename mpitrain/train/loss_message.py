"""The message of a step in which ranks add up their parts of the loss, and tell each other how long they worked and waited."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.prepare import ALONE
from mpitrain.comm.work import Collective
from mpitrain.parallel.pipeline.late import LateLosses, parts_of
from mpitrain.parallel.pipeline.runner import Parts
from mpitrain.train.intervals import NO_TALLY


class LossMessage:
    """All ranks of `channel` have one, and call it alike, once a step."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self._message = np.zeros(0)                              # and its sum over ranks
        self._add: Collective = ALONE

    def __call__(self, parts: Parts, seconds: tuple[float, float, float], tally: np.ndarray[Any, Any] = NO_TALLY
                 ) -> tuple[Any, float, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The sum of the micro-batches' parts of the mean loss, and the ranks' seconds, in one message.

        Each rank passes its own parts, and zeros; the sum is exact, and rounded once. `tally` becomes the sum of the ranks'. Of
        the three `seconds` come the smallest of the ranks' first (waiting), and each rank's second and third (worked and loaded;
        empty on one rank), valid until the next call. On one rank losses of a device stay on their way.
        """
        n = self.channel.size
        if isinstance(parts, LateLosses):
            parts.begin()
            if n == 1:
                return parts, seconds[0], NO_TALLY, NO_TALLY
            parts = parts_of(parts)
        if n == 1:
            return math.fsum(parts), seconds[0], NO_TALLY, NO_TALLY      # a message to nobody costs a small model 1 % of its step
        begin = len(parts)
        end = begin + 3 * n
        if self._message.size != end + len(tally):
            self._message = np.zeros(end + len(tally))
            self._add = self.channel.prepare(self._message, "loss")
        message = self._message
        message[:begin], message[begin:end], message[end:] = parts, 0, tally
        message[begin + self.channel.rank:end:n] = seconds
        self._add.run()
        tally[...] = message[end:]
        waited, worked, loaded = message[begin:begin + n], message[begin + n:end - n], message[end - n:end]
        return math.fsum(message[:begin]), float(waited.min()), worked, loaded
