"""n workers that exchange compressed arrays in one process, without messages: what the exchange between ranks must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpitrain.parallel.compress.compressor import OWNER, Host, Linear, Make, Packed, Piece, State

Memory: TypeAlias = Callable[[int, Any], Any]     # makes an array of so many numbers of a dtype, for a message


class Workers:
    """Worker w has the compressor w and the state w; state of owners and of all is in `shared`, and in each state."""

    def __init__(self, make: Make, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True,
                 memory: Memory = np.empty):
        self.compressors: list[Any] = [make(pieces, n, seed=seed, feedback=feedback) for _ in range(n)]
        self.n, self.memory = n, memory
        self.states: list[State] = [compressor.new_state() for compressor in self.compressors]
        self.messages: list[bytes] = []           # of the last exchange, in the order in which they were encoded
        self.parted: str | None = None            # a state that is to be equal on all ranks, and is not
        kinds = self.compressors[0].states()
        self.shared = {name: self.states[0][name] for name, kept in kinds.items() if kept.of != "worker"}
        for state in self.states:
            state.update(self.shared)

    def exchange(self, step: int, gradients: Sequence[Host]) -> list[Host]:
        """The sum as each worker decodes it; `gradients` has one array for each, which stay as they were."""
        self.messages.clear()
        first = self.compressors[0]
        if isinstance(first, Packed):
            return self._packed(step, gradients)
        return self._linear(step, gradients) if isinstance(first, Linear) else self._gathered(step, gradients)

    def parts(self, blocks: int) -> list[tuple[int, int]]:
        """The blocks that each owner sums."""
        cuts = [blocks * i // self.n for i in range(self.n + 1)]
        return list(zip(cuts, cuts[1:]))

    def _sent(self, message: Any) -> Any:
        self.messages.append(message.tobytes())
        return message

    def _packed(self, step: int, gradients: Sequence[Host]) -> list[Host]:
        results = [np.empty_like(gradient) for gradient in gradients]
        for owner, (first, stop) in enumerate(self.parts(self.compressors[0].blocks)):
            there = slice(*self.compressors[0].bounds[[first, stop]])
            nbytes, total = self.compressors[owner].nbytes(first, stop), results[owner][there]
            for worker, (gradient, state) in enumerate(zip(gradients, self.states)):
                message = self.memory(nbytes, np.uint8)
                error = state["error"][there] if "error" in state else None
                self.compressors[worker].encode(step, worker, gradient[there], error, first, stop, message)
                self.compressors[owner].decode(self._sent(message), first, stop, total, worker > 0)
            message, kept = self.memory(nbytes, np.uint8), self.shared.get("sum_error")
            self.compressors[owner].encode(step, OWNER, total.copy(), None if kept is None else kept[there], first, stop, message)
            self._sent(message)
            for worker, result in enumerate(results):
                self.compressors[worker].decode(message, first, stop, result[there], False)
        return results

    def _linear(self, step: int, gradients: Sequence[Host]) -> list[Host]:
        results = [gradient.copy() for gradient in gradients]
        for phase in range(self.compressors[0].phases):
            words = self.compressors[0].words(phase)
            total = np.zeros(words, np.float32)
            for worker, (gradient, state) in enumerate(zip(gradients, self.states)):
                message = self.memory(words, np.float32)
                self.compressors[worker].encode(phase, step, gradient, state, message)
                with np.errstate(over="ignore", invalid="ignore"):
                    total += self._sent(message)
            copies = [{name: array.copy() for name, array in self.shared.items()} for _ in results]
            for worker, (result, state, copy) in enumerate(zip(results, self.states, copies)):
                self.compressors[worker].decode(phase, step, total.copy(), {**state, **copy}, result)
            for name, array in self.shared.items():
                array[...] = copies[0][name]
                if any(copy[name].tobytes() != array.tobytes() for copy in copies):
                    self.parted = name
        return results

    def _gathered(self, step: int, gradients: Sequence[Host]) -> list[Host]:
        nbytes, sent = self.compressors[0].nbytes(), []
        for worker, (gradient, state) in enumerate(zip(gradients, self.states)):
            message = self.memory(nbytes, np.uint8)
            self.compressors[worker].encode(step, gradient, state, message)
            sent.append(self._sent(message))
        results = [np.empty_like(gradient) for gradient in gradients]
        for worker, result in enumerate(results):
            self.compressors[worker].decode(step, np.stack(sent), result)
        return results
