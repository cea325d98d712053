"""``python -m mpitrain``: the command line, guarded so that a failure on one rank ends the job on all."""

import gc
import sys

if sys.path and sys.path[0] in ("", ".") or not sys.flags.safe_path and sys.argv[0].endswith("__main__.py"):
    # `python -m` puts the current folder first on the path, where data lie: an h5py.py among them would be imported.
    import os
    sys.path[:] = [p for p in sys.path if p not in ("", ".", os.getcwd())]


from mpitrain.comm.job import streams
from mpitrain.comm.job.signals import StopRequest

gc.disable()                                      # until all is imported; see guard.importing
stop = StopRequest()
if sys.argv[1:2] == ["train"]:
    stop.listen()                                 # before the heavy imports
streams.provide()


def main() -> None:
    from mpitrain.cli import main as command_line
    from mpitrain.comm.job.guard import Process
    gc.enable()
    process = Process(traceback="--traceback" in sys.argv, stop=stop)
    process.run(lambda: command_line(process=process))


if __name__ == "__main__":
    main()
