"""The watcher's process, as a rank starts it: the first one of a node before MPI, any other where that one is gone.

Nothing else starts a process once MPI runs. `posix_spawn` may: it copies no page of this process, so none that a network card
knows, and runs no handler of `fork`; and the watcher closes at once what it inherits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

from mpitrain.comm.watch.processes import BORN, stat

WATCHER = (f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); "
           "from mpitrain.comm.watch.watcher import main; main()")
BLOCKED = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}     # for ranks; the watcher sees its rank end instead


class WatcherProcess:
    """The watcher that this rank has started, if any, and all that any watcher of the node has to be told.

    `orders` is the end of a pipe, -1 without a watcher: the watcher ends when it is closed, and poll(2) finds an error on it
    when the watcher has ended. `told` are the watcher's arguments.
    """

    def __init__(self, *told: object):
        self._arguments = [sys.executable, "-I", "-S", "-c", WATCHER, *map(str, told)]
        self._said: dict[str, str] = {}                       # the last order of each kind
        self._lock = threading.Lock()                         # of the main thread, which orders, and of the one that replaces
        self.orders, self._process, self._born = -1, 0, ""

    def start(self) -> str:
        """Starts one in place of the former, if any, and tells it all; why that fails, or ""."""
        with self._lock:
            self._end()
            try:
                orders, ours = os.pipe()
            except OSError as error:
                return f"making a pipe failed ({error.strerror})"
            try:
                self._process = os.posix_spawn(sys.executable, self._arguments, os.environ, setsigmask=BLOCKED, file_actions=[
                    (os.POSIX_SPAWN_DUP2, orders, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)])
            except OSError as error:
                os.close(ours)
                return f"starting a process failed ({error.strerror})"
            finally:
                os.close(orders)
            self.orders, self._born = ours, stat(self._process)[BORN]
            self._write("".join(self._said.values()))
            return ""

    def order(self, word: str, *lines: str) -> None:
        """`lines` are all orders of the kind `word`; a later watcher gets them, too."""
        with self._lock:
            self._said[word] = "".join(line + "\n" for line in lines)
            self._write(self._said[word])

    def _write(self, text: str) -> None:
        if self.orders >= 0:
            with contextlib.suppress(OSError):                # it is gone, and the next one is told all
                os.write(self.orders, text.encode())

    def end(self) -> None:
        """Ends the one that was started, if any, also if it is stopped."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self.orders < 0:
            return
        os.close(self.orders)
        self.orders = -1
        if not self._born or stat(self._process)[BORN] != self._born:
            return                                            # the program has waited for it, and its number may be another's
        with contextlib.suppress(OSError):
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, os.WNOHANG)             # one in a system call that does not return would be waited for
