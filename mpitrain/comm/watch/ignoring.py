"""`contextlib.suppress` for the watcher: with all that `contextlib` imports, its start would take 4 ms more."""

from __future__ import annotations


class ignoring:  # noqa: N801
    """Leaves the block at an error of these kinds, and nobody hears of it."""

    def __init__(self, *kinds: type[BaseException]):
        self.kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self.kinds)
