"""The pulse of a rank that nobody watches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.comm.messages.progress import Progress


class Unwatched:
    """What a program may tell its pulse, and ask of it, at any time; here nobody hears. `pulse.Pulse` has the meanings."""

    obstacle = ""

    def contact(self) -> list[Any] | None:
        return None

    def started(self) -> None:
        pass

    def opens(self) -> None:
        pass

    def recovers(self) -> None:
        pass

    def join(self, contacts: Sequence[list[Any] | None], own: int, progress: Progress) -> None:
        pass

    def keep_in(self, folder: Path) -> None:
        pass

    def where(self) -> dict[str, object]:
        return {}

    def span(self, row: str, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def leave_ends(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def over(self) -> None:
        pass

    def rest(self) -> None:
        pass


NOBODY = Unwatched()
