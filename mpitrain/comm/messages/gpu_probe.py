"""Whether this MPI takes addresses of GPU memory, asked of a process that may crash.

An MPI that does not reads the address as one of the host, and the process ends by SIGSEGV, or waits for ever. MPI has no function
that asks beforehand, and Open MPI's own says what it was built with, not whether the library that it needs is there. So a child
starts MPI alone, sends itself small and large messages from GPU memory to GPU memory, and looks at what came.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from mpitrain.backend import select_device
from mpitrain.backend.runtime import address
from mpitrain.comm.job.start import ALONE
from mpitrain.errors import text_of

CHILD = f"from {__name__} import main; main()"
OK, LONGEST = "ok", 200                                       # characters of what a child may say
LIMIT_S = 60.0                                                # CuPy's import, MPI_Init and a GPU's start, of all ranks at once
SIZES = 16, 1 << 18                                           # of float32: a message that is sent at once, one that asks first
KEPT = tuple(f"OMPI_MCA_{name}" for name in ("pml", "mtl", "osc", "accelerator", "opal_cuda"))      # the choice of transports
LAUNCHED = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "FLUX_", "PALS_", "ALPS_", "HYDRA_", "MPI_LOCAL")


def refusal(number: int, limit_s: float | None = None) -> str:
    """Why MPI must not be handed memory of GPU `number` of this process; "" where it may. Takes a second or some."""
    limit_s = LIMIT_S if limit_s is None else limit_s
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {CHILD}", str(number), str(int(limit_s) + 1)]
    try:
        child = subprocess.Popen(command, env=alone(dict(os.environ)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:                                  # other ranks, which wait for our answer, get one
        return f"no process could be started that tries ({text_of(error)})"
    with child:
        try:
            said = child.communicate(timeout=limit_s)[0].decode(errors="replace").strip().splitlines()
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)              # and whatever MPI has started for it
            return f"a process that sent some to itself had not ended after {limit_s:g} s"
    if child.returncode < 0:
        return f"a process that sent some to itself was ended by {signal.Signals(-child.returncode).name}"
    if OK in said and child.returncode == 0:
        return ""
    return f"a process that sent some to itself ended with {child.returncode}{': ' if said else ''}{''.join(said[-1:])[:LONGEST]}"


def alone(variables: dict[str, str]) -> dict[str, str]:
    """The environment without what would make the child a rank of this job; a choice of transports stays."""
    return {name: value for name, value in variables.items() if not name.startswith(LAUNCHED) or name.startswith(KEPT)} | ALONE


def main() -> None:
    """The child: prints OK where what has come is what was sent. Ends by itself where nobody is left to end it."""
    signal.alarm(int(sys.argv[2]))
    device = select_device("gpu", int(sys.argv[1]))
    from mpi4py import MPI
    world, xp = MPI.COMM_SELF, device.xp
    for n in SIZES:
        sent, came = xp.arange(n, dtype="float32"), xp.zeros(n, "float32")
        device.synchronize()
        receive = world.Irecv(MPI.buffer.fromaddress(address(came), 4 * n))
        world.Send(MPI.buffer.fromaddress(address(sent), 4 * n), 0)
        receive.Wait()
        if not bool((came == sent).all()):
            print("what came was not what was sent")
            sys.exit(1)
    print(OK, flush=True)
