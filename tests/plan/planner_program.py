"""Trains a configuration in each of several ways, then beside its prediction, and sees that the latter's error is one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mpitrain.comm.job.start import start
from mpitrain.config import load_config
from mpitrain.errors import ConfigError, MissingError
from mpitrain.run import Run

if __name__ == "__main__":
    path, out, ways = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    from mpitrain.run.session import before_mpi, look_at_files
    files = before_mpi(lambda: look_at_files(load_config(path, [])))
    comm = start().comm
    for number, keys in enumerate(ways):
        with Run(load_config(path, [*keys, f"run.out={out / str(number)}"]), comm, files=files, quiet=True) as run:
            assert run.train().steps == 4
    late = [name for name in sys.modules if name.startswith(("mpitrain.plan.planner", "mpitrain.machines"))]
    assert not late, late
    with Run(load_config(path, [f"run.out={out / 'beside'}", "log.machine=made-up.toml"]), comm, files=files, quiet=True) as run:
        run.train()
    one = Path("one.toml")
    (path.parent / one).write_text((path.parent / "one-host.toml").read_text().replace("ranks = 4", "ranks = 1"))
    for name, kind, words in (("made-down", MissingError, 'unknown machine "made-down"'),
                              (one, ConfigError, "2 ranks are more than the 1 of machine made-up")):
        keys = [f"run.out={out / 'none'}", f"log.machine={name}"]
        with Run(load_config(path, keys), comm, files=files, quiet=True) as run:
            try:
                run.train()
            except kind as error:
                assert words in error.message
            else:
                raise AssertionError(f"the machine {name} was accepted")
        assert not (out / "none").exists()
