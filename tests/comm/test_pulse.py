"""A rank's part in being watched, in one process that a launcher seems to have started."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from launch import clean_environment

from mpitrain.backend.native import compiler
from mpitrain.comm.watch.pulse import ENDING_S, SILENCES, Pulse
from mpitrain.comm.watch.record import HERE

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler")
BEGIN = """if True:
    import os, signal, socket, sys
    from mpitrain.backend import native
    from mpitrain.comm.watch import pulse as module
    if sys.argv[1] == "no compiler":
        native.load = lambda name: None
    module.ENDING_S = 100.0
    pulse = module.Pulse(60.0, 60.0, "end")
"""
TIMER = BEGIN + """
    stop, stops = pulse._stop_alarm, []
    pulse._stop_alarm = lambda: stops.append(stop())
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (sys.argv[1] != "no compiler")
    pulse.started()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    signal.setitimer(signal.ITIMER_REAL, 50.0)
    pulse.join([pulse.contact()], 0, None)
    pulse.over()
    assert len(stops) == 1
    library = native.load("leave")
    if library is not None:
        library.leave_not()
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 40
"""
DIES = BEGIN + """
    pulse._watcher._arguments[1:] = ["-I", "-S", "-c", "pass"]
    for _ in range(4):
        pulse._replace("has ended")
    assert pulse._watcher.orders == -1
    pulse.over()
"""
FAILS = BEGIN + """
    pulse._watcher.start = lambda: 1 // 0
    pulse._replace("has ended")
    pulse._replace("has ended")
    pulse.over()
"""
LIMITED = BEGIN.replace("import os,", "import ctypes, resource, os,") + """
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, resource.RLIM_INFINITY))
    pulse._name_exits(native.load("leave"))
    ctypes.CDLL(None).exit(3)
"""
ONE = BEGIN + """
    own = pulse.contact()
    assert own[1]
    pulse.join([own], 0, None)
    assert pulse._watcher.orders >= 0
    pulse.join([own, own], 1, None)
    assert pulse._watcher.orders == -1
    pulse.over()
"""


def said(text: str, how: str = "", code: int = 0) -> str:
    """What it writes on stderr; the launcher says nothing of nodes."""
    done = subprocess.run([sys.executable, "-c", text, how], env=clean_environment() | {"PMI_RANK": "1", "PMI_SIZE": "2"},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.mark.promise("A4")
@pytest.mark.parametrize("how", [pytest.param("", marks=needs_compiler), "no compiler"])
def test_the_alarm_for_mpis_start_ends_with_it_and_the_timer_is_the_programs_then(how: str) -> None:
    assert said(TIMER, how) == ""


@pytest.mark.promise("A4")
def test_watchers_that_always_die_are_not_replaced_for_ever() -> None:
    then = re.findall(r"^warning: the watcher of \S+ has ended: (.*)$", said(DIES), re.MULTILINE)
    assert then == ["another one takes its place"] * 3 + \
        ["nobody watches any more, since each of the last 4 ended within 10 s"]


def test_an_error_in_the_thread_that_replaces_the_watcher_is_told_once_and_the_job_goes_on() -> None:
    line = r"\nwarning: the watcher of \S+ has ended: nobody watches any more: ZeroDivisionError: .*\n"
    assert re.fullmatch(line, said(FAILS))


@needs_compiler
def test_an_exit_of_a_library_below_a_limit_names_the_limit_and_does_not_claim_that_it_was_the_cause() -> None:
    line = r"\nmpitrain: E_MEMORY rank=1/2 \S+ .* call of exit\(\); if it found no memory \(a process may have 16384 MiB: " \
           r"ulimit -v\), raise that limit\n"
    assert re.fullmatch(line, said(LIMITED, code=71))


def test_where_each_rank_has_started_a_watcher_the_first_one_stays() -> None:
    assert said(ONE) == ""


@pytest.mark.promise("A4")
def test_a_rank_that_was_stopped_for_long_hears_whether_another_watches_before_it_replaces_its_own() -> None:
    rank = Pulse.__new__(Pulse)                               # without its thread, which reads the pipe, too
    rank._asked, another = os.pipe()
    rank._silence, long = 0.01, SILENCES * 0.01 + ENDING_S
    assert not rank._another_watches(long)
    os.write(another, HERE)
    assert rank._another_watches(long) and not rank._another_watches(long - 0.001)
    os.read(rank._asked, 100)
    assert not rank._another_watches(long)
    os.close(rank._asked)
    os.close(another)
