"""`mpitrain supervise`: starts a job of `train`, and starts it again where a rank of it was lost.

No rank of a job can do that, for the launcher ends with them. The process here loads neither MPI nor NumPy. Between two attempts
it looks at the run folder: the next one goes on from the newest checkpoint, and only restarts that add none are counted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from mpitrain.checkpoint.folders import candidates, entries, step_of
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import launched_rank
from mpitrain.errors import MpitrainError, OutputError, UsageError, print_warning
from mpitrain.verbs import Parser, train

HELP = "start a job of train, and start it again from its last checkpoint where a rank was lost; needs no MPI itself"
EXAMPLE = "python -m mpitrain supervise --restarts 3 -- mpirun -n 4 python -m mpitrain train run.toml"

# Exit codes of a job that lost a rank. Of a process that a signal ended, Open MPI's mpirun returns 128 + its number, MPICH's the
# number, Intel's 255. All other codes would come again, or were asked for.
ENDS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
LOST = {75: "a rank was lost or stood still", 255: "a rank was lost",
        **{code: f"a rank ended by {number.name}" for number in ENDS for code in (number, 128 + number)}}
REQUEUE = 128 + signal.SIGUSR1        # the exit code that job scripts start again, where no run could say 85

ORDERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FREE_S = 30.0                         # a rank of a job that has ended may hold the run folder for so long; ranks end within 5 s
LOOK_S = 0.1
PR_SET_PDEATHSIG = 1                  # of prctl(2)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--restarts", type=_number, default=3, metavar="N",
                        help="give up after N restarts in a row that have added no checkpoint (3)")
    parser.add_argument("command", nargs=REMAINDER, metavar="-- COMMAND", help="the job, such as: mpirun -n 4 python -m mpitrain "
                        "train run.toml; it is started again with --resume")


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise ArgumentTypeError(f"must be a whole number from 1 on, found {text!r}")
    return int(text)


def run(options: Namespace, process: Process) -> int:
    with guard.symmetric():
        if launched_rank()[1] > 1:
            raise UsageError(f"supervise starts the launcher, and no launcher starts it: {EXAMPLE}")
        command = options.command[1:] if options.command[:1] == ["--"] else options.command
        job = supervised(command)
    with Signals() as signals:
        return keep_going(job, options.restarts, signals)


class Supervised(NamedTuple):
    """A command that trains, with what its own words say."""

    words: Sequence[str]
    first: int                        # the place of the first word after `train`
    folder: RunFolder
    resumes: bool

    def to_go_on(self) -> Supervised:
        """The command that continues the run it has begun."""
        own = [word for word in self.words[self.first:] if len(word) < 3 or not "--overwrite".startswith(word)]
        return self._replace(words=[*self.words[:self.first], *own, "--resume", "auto"], resumes=True)


def supervised(words: Sequence[str]) -> Supervised:
    """UsageError if the command is not one of `train`; the errors of its arguments and its configuration."""
    places = [i + 2 for i, (a, b) in enumerate(pairwise(words)) if Path(a).name == "mpitrain" and b == "train"]
    if len(places) != 1:
        found = " ".join(words) or "nothing"
        raise UsageError(f"supervise needs the command of one training job, found {found}; for instance: {EXAMPLE}")
    parser = Parser(prog="mpitrain train")
    train.add_arguments(parser)
    options, rest = parser.parse_known_args(words[places[0]:])
    arguments = [*options.arguments, *(word for word in rest if not word.startswith("-"))]
    config, resume = train.asked(arguments, options.resume)
    return Supervised(words, places[0], RunFolder(config.run.out), resume is not None)


class Signals:
    """The signals to this process while it lives, for the job: they wait until somebody asks for them here."""

    def __init__(self) -> None:
        self.stops = False                                    # SIGUSR1 has come: the job is to save and stop
        self.ends = False                                     # one of ORDERS has come
        self._waiting = {signal.SIGUSR1, signal.SIGCHLD, signal.SIGTSTP,
                         *(number for number in ORDERS if signal.getsignal(number) != signal.SIG_IGN)}      # nohup ignores one

    def __enter__(self) -> Signals:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, self._waiting)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)         # a caller that ignores it would leave us without the job's end
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def attend(self, words: Sequence[str]) -> int:
        """Runs the job, in a process group of its own, which a terminal's keys do not reach; its exit code as a shell has it."""
        own, tie = os.getpid(), tie_of_death()

        def as_before() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
            tie()
            if os.getppid() != own:                           # dead before the tie
                os.kill(os.getpid(), signal.SIGUSR1)
        try:
            job = subprocess.Popen(words, process_group=0, stdin=subprocess.DEVNULL, preexec_fn=as_before)
        except OSError as error:
            raise UsageError(f"supervise cannot start {words[0]}: {error.strerror}") from None
        while job.poll() is None:
            self._pass_on(signal.sigwait(self._waiting), job)
        return job.returncode if job.returncode >= 0 else 128 - job.returncode

    def _pass_on(self, number: int, job: subprocess.Popen[bytes]) -> None:
        if number == signal.SIGTSTP:                          # Ctrl-Z: this process stands still together with the job
            job.send_signal(signal.SIGTSTP)
            os.kill(os.getpid(), signal.SIGSTOP)
            job.send_signal(signal.SIGCONT)
        elif number in ORDERS and self.ends:
            os.killpg(job.pid, signal.SIGKILL)                # asked a second time; ranks end with their launcher
        elif number == signal.SIGTERM:                        # mpirun would kill the ranks at once: 0.24 s later, Open MPI 5.0.11
            self._note(number)
            say("SIGTERM: the run is asked to save and stop; a second one kills it")
            job.send_signal(signal.SIGUSR1)
        elif number != signal.SIGCHLD:
            self._note(number)
            job.send_signal(number)

    def _note(self, number: int) -> None:
        self.stops |= number == signal.SIGUSR1
        self.ends |= number in ORDERS

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Whether `condition` has come to hold within FREE_S; a signal that ends the job, or stops it, ends the wait."""
        deadline = time.monotonic() + FREE_S
        while not (held := condition()) and not (self.stops or self.ends) and time.monotonic() < deadline:
            found = signal.sigtimedwait(self._waiting, LOOK_S)
            if found is not None:
                self._note(found.si_signo)
        return held


def keep_going(job: Supervised, restarts: int, signals: Signals) -> int:
    """The exit code of the last attempt, or REQUEUE where SIGUSR1 has stopped attempts that would go on."""
    folder, before = job.folder, job.folder.about().get("id")
    free, told, idle = is_free(folder), list[dict[str, Any]](), 0      # restarts in a row that have added no checkpoint
    for attempt in count(1):
        began = newest(folder)
        code = signals.attend(job.words)
        signals.wait_until(partial(written_down, job, told))           # the last of its ranks lets go of the folder
        step = newest(folder)
        if code == 0 and folder.about().get("status") == "running":
            code = 75                                         # said by Open MPI's mpirun with ULFM, and at times by MPICH 4.1's
        if signals.ends:
            kept = f"the checkpoint of step {step} stands" if step >= 0 else "it has no checkpoint"
            say(f"the job was ended, with {code}; {kept}")
            return code
        if code not in LOST:
            return code
        why = f"the job ended with {code} ({LOST[code]})"
        idle = 0 if step > began else idle
        if signals.stops:
            say(f"no restart: {why}, and SIGUSR1 has asked it to stop; exit code {REQUEUE}, start it again with --resume")
            return REQUEUE
        if idle == restarts:
            say(f"no restart: {why}, and {idle} in a row have added no checkpoint (--restarts {restarts})")
            return code
        idle += 1
        if not job.resumes and (free or folder.about().get("id") not in (None, before)):
            job = job.to_go_on()                              # what is in the folder is this job's own
        say(f"restart {attempt}: {why}; it goes on {f'from step {step}' if step >= 0 else 'from the start'}"
            f" ({idle} of {restarts} without a new checkpoint)")
        told.append({"at": datetime.now().astimezone().isoformat(timespec="seconds"), "exit_code": code, "step": max(step, 0)})
        written_down(job, told)
    raise AssertionError("attempts are numbered without end")


def tie_of_death() -> Callable[[], object]:
    """A function that has the kernel (Linux) ask this process to save and stop when its parent dies, however that dies."""
    import ctypes
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *numbers: None)
    return partial(prctl, PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGUSR1))


def is_free(folder: RunFolder) -> bool:
    """Whether there is nothing in the folder of a run that starts."""
    return not folder.path.exists() or (folder.path.is_dir() and set(entries(folder.path)) <= {"lock"})


def newest(folder: RunFolder) -> int:
    """The step of the newest checkpoint, -1 where there is none."""
    return next(map(step_of, candidates(folder.checkpoints)), -1)


def written_down(job: Supervised, told: list[dict[str, Any]]) -> bool:
    """Moves `told` into run.json, if it is that of this job; False while a rank of the job that has ended holds the folder."""
    folder = job.folder
    if not (folder.path / "lock").exists():
        return True
    try:
        folder.open(resume=True)
    except OutputError:
        return False
    except MpitrainError as error:
        if told:
            print_warning(f"the restart is not in run.json: {error}")
        return True
    try:
        about = folder.about() if job.resumes else {}
        if about and told:
            folder.write_json(folder.run_json, about | {"restarts": [*about.get("restarts", []), *told]})
            told.clear()
    except MpitrainError as error:
        print_warning(f"the restart is not in run.json: {error}")
    finally:
        folder.close()
    return True


def say(text: str) -> None:
    print(f"supervise: {text}", file=sys.stderr, flush=True)
