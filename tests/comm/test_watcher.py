"""The watcher's own means: its descriptors."""

from __future__ import annotations

import subprocess
import sys

from launch import clean_environment

MANY = """if True:
    import os, resource
    from mpitrain.comm.watch.watcher import Watcher
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096) if hard > 0 else 4096, hard))
    orders, ours = os.pipe()
    os.dup2(orders, 0)
    pipe, record = os.pipe()[1], os.memfd_create("record")
    os.ftruncate(record, 4096)
    watcher = Watcher(60.0, 60.0, True, 0, 1, False)

    def begin_run(*ranks):
        lines = [f"rank {rank} {os.getpid()} {pipe} {record} {record}" for rank in ranks]
        os.write(ours, "\\n".join([f"run {len(ranks)} ", *lines, ""]).encode())
        assert watcher.take_orders() and len(watcher.ranks) == len(ranks)

    begin_run(0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        begin_run(0)
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors of former runs are open"
    for _ in range(1100):
        os.dup(0)
    begin_run(0, 1)
    assert watcher.ranks[1].end > 1024
    begin_run(0, 1)
    os.close(ours)
    assert not watcher.take_orders()
"""


def test_the_watcher_closes_what_former_runs_had_and_looks_at_more_descriptors_than_select_takes() -> None:
    done = subprocess.run([sys.executable, "-c", MANY], env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
