"""A cluster of Slurm's real daemons on this machine alone: one node, in a folder of its own, on ports of its own.

Debian has all of it in `slurm-wlm`, `munge` and, for `srun --mpi=pmix`, `libpmix-dev`. Nothing is installed or started as a
service of the system, and nothing stays when the cluster is closed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from launch import POLL, TAG, clean_environment, find_mpirun, tagged, wait_until

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
SEARCHED = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"))
REQUEUE_S = 5                             # Slurm starts a requeued job after this and a second; 120 by default, 5 is its least
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")

CONFIGURATION = """
ClusterName=mpitrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire={requeue}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=5
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def missing() -> str:
    """What the cluster needs and this machine has not, "" if nothing."""
    lacking = [name for name in COMMANDS if not shutil.which(name, path=SEARCHED)]
    if lacking:
        return f"no {', '.join(lacking)}: on Debian, apt-get install slurm-wlm munge libpmix-dev"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


class Cluster(contextlib.AbstractContextManager["Cluster"]):
    """The daemons, from `with` on; `submit` and `srun` run in folders that have a `.venv`, as the users' have."""

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.tag = secrets.token_hex(8)
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        (self.folder / "key").write_bytes(secrets.token_bytes(64))
        (self.folder / "key").chmod(0o400)
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0], ports=free_ports(2), folder=self.folder, requeue=REQUEUE_S))
        kept = {name: value for name, value in clean_environment().items() if not name.startswith(("SLURM_", "SBATCH_"))}
        self.environment = {**kept, "SLURM_CONF": str(self.folder / "slurm.conf"), TAG: self.tag, "PATH": SEARCHED}
        try:
            self._start("munged", "--foreground", "--force", f"--key-file={self.folder}/key", f"--socket={self.folder}/munge",
                        f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
                        f"--seed-file={self.folder}/seed")
            wait_until((self.folder / "munge").exists)
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D")
            self.wait(lambda: self.run("sinfo", "--noheader", "--format=%T", check=False).startswith("idle"), 30, "an idle node")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if len(self._daemons) > 1:
            self.run("scancel", "--full", "--user=root", check=False)
            wait_until(lambda: not self.processes())
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(20)
        shutil.rmtree(self.folder)

    def _start(self, name: str, *arguments: str) -> None:
        command = shutil.which(name, path=SEARCHED)
        assert command
        environment = {key: value for key, value in self.environment.items() if key != TAG}
        with open(self.folder / f"{name}.out", "wb") as out:
            self._daemons.append(subprocess.Popen([command, *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=out,
                                                  stderr=out, cwd=self.folder, start_new_session=True))

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """The output of one of Slurm's commands."""
        found = subprocess.run(command, env=self.environment, cwd=cwd, text=True, capture_output=True, timeout=60)
        assert found.returncode == 0 or not check, found.stdout + found.stderr
        return found.stdout

    def submit(self, folder: Path, *arguments: str) -> str:
        """The number of a job that `sbatch` has put into the queue, on this node and with two ranks; it writes `out.txt`."""
        give_environment(folder)
        said = self.run("sbatch", "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--output=out.txt", *arguments,
                        cwd=folder)
        return said.split()[-1]

    def about(self, job: str) -> dict[str, str]:
        """What `scontrol` says of a job: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", job)))

    def end(self, job: str, timeout: float = 150) -> dict[str, str]:
        """Waits for the end of a job that is not started again; `about` it."""
        self.wait(lambda: self.about(job)["JobState"] in ENDED, timeout, f"the end of job {job}")
        return self.about(job)

    def processes(self) -> list[int]:
        """Processes of jobs, which the tag tells from the daemons."""
        return tagged(self.tag)

    def wait(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Returns when `condition()` holds; AssertionError with the daemons' logs after the time."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {timeout} s\n" + "\n".join(
                f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("*.log")))
            time.sleep(10 * POLL)


def give_environment(folder: Path) -> None:
    """A `.venv` in the folder, whose `activate` finds this test's own Python and mpirun."""
    scripts = folder / ".venv/bin"
    scripts.mkdir(parents=True, exist_ok=True)
    (scripts / "activate").write_text(f'PATH="{Path(sys.executable).parent}:{Path(find_mpirun()).parent}:$PATH"\n')


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
