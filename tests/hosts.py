"""Two hosts on one machine: `mpirun` over a real TCP link of a known rate, without a second machine.

    with two_hosts(rate="1gbit") as hosts:
        result = hosts.mpirun(4, "-m", "mpitrain", "train", "run.toml", cwd=tmp_path)

A host is a network namespace with a name, a /dev/shm and half of the cores of its own; they share the file system. One veth
link joins them, shaped both ways by a token bucket (two_hosts.sh). mpirun runs on `left` and reaches `right` through an agent
in the place of ssh; the first half of the ranks is on `left`. The hosts vanish with the process that made them.

Needs Linux, root, iproute2, util-linux and Open MPI; `why_not` says what is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import psutil
from launch import ROOT, Job, Result, clean_environment, find_mpirun, is_python, is_watcher, tagged

SCRIPT = ROOT / "tests/two_hosts.sh"
NAMES = ("left", "right")
TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "taskset", "hostname")
# The namespaces that both hosts live in; --kill-child is for the case that unshare itself is killed.
UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
# What a host is made of, tried once in namespaces that go at once; prints the first thing that is not permitted.
PROBE = """mount -t tmpfs none /run; ip netns add a; ip netns add b; ip -n a link add link0 type veth peer name link0 netns b
tc -n a qdisc add dev link0 root tbf rate 1gbit burst 64k latency 50ms; ip netns exec a unshare --uts --ipc hostname a"""


@cache
def why_not() -> str:
    """Why two hosts cannot be had here, in one line; empty if they can."""
    if os.geteuid():
        return f"two hosts on one machine need root, to make network namespaces; this is user {os.geteuid()}"
    path = environment()["PATH"]
    if missing := [tool for tool in TOOLS if not shutil.which(tool, path=path)]:
        return f"two hosts on one machine need {', '.join(missing)} (Linux; packages iproute2, util-linux, hostname)"
    version = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        return f"two hosts on one machine need Open MPI's mpirun, which takes an agent for ssh; found {version[:60]!r}"
    probe = subprocess.run([*UNSHARE, "sh", "-ec", PROBE], capture_output=True, text=True, env=environment())
    if probe.returncode:
        reason = " ".join(probe.stderr.split()) or f"exit code {probe.returncode}"
        return f"two hosts on one machine need CAP_SYS_ADMIN, CAP_NET_ADMIN, veth and tbf: {reason}"
    return ""


class Hosts:
    """The two hosts; `mpirun` and `launch` are those of launch.py, across both."""

    def __init__(self, holder: int, rate: str):
        self.rate = bits(rate)                            # bits per second, each way
        self._enter = ["nsenter", "--target", str(holder), "--mount", "--net", f"--pid=/proc/{holder}/ns/pid_for_children"]

    def mpirun(self, n: int, *args: str | os.PathLike[str], timeout: float = 60, env: Mapping[str, str] | None = None,
               cwd: str | os.PathLike[str] | None = None, mpi_args: tuple[str, ...] = ()) -> Result:
        """Run ``python *args`` on `n` ranks to its end, the first half of them (and the odd one) on `left`."""
        return self.launch(n, *args, env=env, cwd=cwd, mpi_args=mpi_args).finish(timeout)

    def launch(self, n: int, *args: str | os.PathLike[str], env: Mapping[str, str] | None = None,
               cwd: str | os.PathLike[str] | None = None, mpi_args: tuple[str, ...] = ()) -> Job:
        """Start ``python *args`` on `n` ranks; `env` reaches the ranks of both hosts."""
        ours = {**environment(), **(env or {})}
        if n - n // 2 > max(1, len(os.sched_getaffinity(0)) // 2):
            # Each daemon believes all cores are its own; ranks that wait must give theirs to those that work. The sum of
            # 4 MiB on 2 + 2 ranks over 1 Gbit/s took 0.27 s without and 0.11 s with it (2 cores, 2026-11).
            ours.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        blas = [name for name in ours if name.startswith("OPENBLAS_")]         # both hosts must add up alike
        exported = {*(env or {}), *blas, "OMP_NUM_THREADS", "PYTHONFAULTHANDLER", "PYTHONPATH", "PYTHONUNBUFFERED"}
        forward = [word for name in sorted(exported) for word in ("-x", name)]
        here = [f"--wd={os.path.abspath(cwd or os.getcwd())}", "/run/host", "left"]
        # Bound by default, the first rank of each host would get core 0, and both hosts' core 0 is the same one.
        command = [*self._enter, *here, find_mpirun(), "--host", f"left:{n - n // 2},right:{max(n // 2, 1)}",
                   "--map-by", "slot", "--bind-to", "none", *forward, *mpi_args, "-n", str(n), sys.executable,
                   *map(os.fspath, args)]
        return HostJob(command, ours, cwd)

    def cut(self) -> None:
        """The link is down from now on; nobody is told."""
        subprocess.run([*self._enter, "ip", "-n", "left", "link", "set", "link0", "down"], check=True, env=environment())

    def bytes_sent(self, name: str) -> int:
        """Bytes that have left a host over the link, headers and acknowledgements included."""
        command = [*self._enter, "ip", "netns", "exec", name, "cat", "/sys/class/net/link0/statistics/tx_bytes"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment()).stdout)


class HostJob(Job):
    """A Job whose process is `nsenter`: mpirun is its child, and in another PID namespace."""

    def ranks(self) -> list[int]:
        """Ids of the Python processes of both hosts, without mpirun, its daemons and what starts them."""
        return [pid for pid in tagged(self.tag) if is_python(pid) and not is_watcher(pid)]

    def signal(self, number: int) -> None:
        """Send a signal to `mpirun`."""
        for child in psutil.Process(self.process.pid).children():
            child.send_signal(number)


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[Hosts]:
    """Both hosts, until the block ends; `rate` as tc writes it (``100mbit``, ``2.5gbit``). Whatever runs there then is killed."""
    left, right = halves(sorted(os.sched_getaffinity(0)))
    command = [*UNSHARE, "sh", str(SCRIPT), f"{bits(rate)}bit", str(burst(bits(rate))), left, right]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=environment(), start_new_session=True)
    assert holder.stdin and holder.stdout
    try:
        said = []
        for line in holder.stdout:
            if line == "ready\n":
                break
            said.append(line)
        else:
            raise AssertionError(f"the two hosts did not start:\n{''.join(said)}")
        yield Hosts(holder.pid, rate)
    finally:
        holder.stdin.close()                              # process 1 reads its end and goes, and with it everything
        holder.wait(10)
        holder.stdout.close()


def environment() -> dict[str, str]:
    """That of any job, plus the agent under the names that Open MPI 5 and 4 read, and where ip and tc are for users."""
    env = clean_environment()
    env.update(PATH=f"{env.get('PATH', os.defpath)}:/usr/sbin:/sbin", PRTE_MCA_plm_ssh_agent="/run/agent",
               OMPI_MCA_plm_rsh_agent="/run/agent")
    return env


def bits(rate: str) -> int:
    """Bits per second: ``100mbit`` is 10**8."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not found:
        raise ValueError(f"a rate is a number and one of {', '.join(UNITS)}, like 100mbit or 2.5gbit; found {rate!r}")
    return int(float(found[1]) * UNITS[found[2]])


def burst(rate: int) -> int:
    """Bytes that may pass at once after a pause: 1 ms of the rate (bits per second), and no less than TCP hands down at once."""
    return max(2**16, rate // 8000)


def halves(cores: list[int]) -> tuple[str, str]:
    """The cores of each host, as taskset takes them; the one core of a small machine serves both."""
    middle = len(cores) // 2
    return ",".join(map(str, cores[:middle] or cores)), ",".join(map(str, cores[middle:]))
