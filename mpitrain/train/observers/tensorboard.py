"""`log.tensorboard = true`: the numbers of metrics.jsonl as TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.train.observers.observer import Watched
from mpitrain.train.observers.record import Lines


class TensorBoard(Lines):
    """Rank 0's writer. Raises ConfigError if the package that writes event files is missing."""

    _board: Any = None

    def __init__(self) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError("log.tensorboard = true needs the package tensorboardX; pip install 'mpitrain[tb]'") from None
        self._writer = SummaryWriter

    def begin(self, run: Watched) -> None:
        super().begin(run)
        if run.rank == 0 and run.folder is not None:
            self._board = self._writer(str(run.folder / "tensorboard"))

    def write(self, step: int, group: str, line: Mapping[str, Any]) -> None:
        for name, value in line.items() if self._board is not None else ():
            if isinstance(value, float):
                self._board.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
