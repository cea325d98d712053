"""The pool that arrays come from: sizes, contents, threads, limits, and steps that touch no new page."""

from __future__ import annotations

import contextvars
import ctypes
import gc
import importlib
import mmap
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain.backend import keep_freed_memory, memory, native, use_pool
from mpitrain.comm.messages import progress
from mpitrain.data import Loader

ROOT = Path(__file__).resolve().parents[2]
LINE, SMALL, MIB = 64, 1024, 1 << 20
needs_pool = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


def handler(*array: Any) -> str:
    """Whose memory this array is, or the next one of this thread would be."""
    return str(importlib.import_module("numpy._core.multiarray").get_handler_name(*array))


def in_pool(action: Callable[[memory.Pool], Any]) -> Any:
    """Runs `action` with arrays from the pool, in a context that ends with it."""
    pool = memory.pool()
    assert pool is not None

    def run() -> Any:
        pool.use()
        return action(pool)
    return contextvars.Context().run(run)


def child(program: str, *arguments: object, **environment: str) -> str:
    """What a program prints that ends well."""
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=170,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- NumPy's side -----------------------------------------------------------------------------------------------------------

def test_the_places_in_numpys_table_are_those_of_its_header() -> None:
    header = (Path(np.get_include()) / "numpy/__multiarray_api.h").read_text()
    places = {name: int(re.search(rf"#define {name}\b[^[]*PyArray_API\[(\d+)\]", header)[1])
              for name in ("PyDataMem_SetHandler", "PyDataMem_DefaultHandler")}
    assert places == {"PyDataMem_SetHandler": memory.SET_HANDLER, "PyDataMem_DefaultHandler": memory.DEFAULT_HANDLER}


@needs_pool
def test_arrays_come_from_the_pool_where_a_context_uses_it_and_nowhere_else() -> None:
    x = in_pool(lambda pool: np.ones(SMALL))
    assert handler(x) == "mpitrain_pool" and handler() == "default_allocator" == handler(np.ones(SMALL))
    assert x.sum() == SMALL


def test_importing_the_package_leaves_numpy_alone() -> None:
    program = ("import mpitrain, mpitrain.backend, mpitrain.ops; from numpy._core.multiarray import get_handler_name; "
               "print(get_handler_name())")
    assert child(program).strip() == "default_allocator"


@needs_pool
def test_an_array_outlives_the_object_that_it_came_from() -> None:
    def make() -> Any:
        library = native.load("memory")
        assert library is not None
        other = memory.Pool(library)
        other.use()
        return np.arange(5000.0)
    x = contextvars.Context().run(make)
    gc.collect()
    y = x * 2
    assert handler(x) == "mpitrain_pool" and y[-1] == 9998
    del x


# ---- blocks -----------------------------------------------------------------------------------------------------------------

@needs_pool
@pytest.mark.parametrize("size", [1024, 1025, 1089, 4095, 65472, 65473, 10**6, 3 * MIB + 1])
def test_data_begin_on_a_line_and_waste_little(size: int) -> None:
    def action(pool: memory.Pool) -> None:
        before = pool.usage().used
        x = np.empty(size, np.uint8)
        assert x.ctypes.data % LINE == 0
        assert size + LINE <= pool.usage().used - before <= 1.25 * size
    in_pool(action)


@needs_pool
def test_small_and_empty_arrays_stay_with_numpys_own_cache() -> None:
    def action(pool: memory.Pool) -> None:
        before = pool.usage()
        kept = [np.zeros(shape, np.uint8) for shape in (0, 1, (0, 5), SMALL - 1)]
        assert pool.usage() == before and all((x == 0).all() for x in kept)
    in_pool(action)


@needs_pool
@pytest.mark.parametrize("size", [2000, 70_000, 9 * MIB])
def test_zeros_are_zero_in_memory_that_was_written_to(size: int) -> None:
    def action(pool: memory.Pool) -> None:
        below = np.ones(size, np.uint8)                       # keeps the arena, and parts a page with what is trimmed
        for _ in range(2):
            x = np.full(size, 7, np.uint8)
            where = x.ctypes.data
            del x
            x = np.zeros(size, np.uint8)
            assert x.ctypes.data == where and not x.any()
            x[:] = 7
            del x
            assert pool.trim() >= size
            assert not np.zeros(size, np.uint8).any() and not np.zeros(2 * size, np.uint8).any()
        assert below.all()
    in_pool(action)


@needs_pool
def test_resized_arrays_keep_their_contents() -> None:
    def action(pool: memory.Pool) -> None:
        for sizes in ([100, 2000, 90_000, MIB, 2000, 100, 3000], [3000, 50, 400_000, 399_999, 300_000, 1500]):
            x = np.arange(sizes[0], dtype=np.int32)
            for size in sizes[1:]:
                keeps = min(x.size, size)
                x.resize(size, refcheck=False)
                assert (x[:keeps] == np.arange(keeps)).all()
                x[:] = np.arange(size)
        assert (np.fromiter(range(200_000), np.int64) == np.arange(200_000)).all()
    in_pool(action)


@needs_pool
def test_what_cannot_be_had_is_a_memory_error_and_the_pool_goes_on() -> None:
    def action(pool: memory.Pool) -> None:
        before = pool.usage()
        for shape in ((1 << 45,), (1 << 60,)):
            with pytest.raises(MemoryError):
                np.empty(shape, np.uint8)
            with pytest.raises(MemoryError):
                np.zeros(shape, np.uint8)
        assert pool.usage() == before and np.ones(SMALL).all()
    in_pool(action)


@needs_pool
def test_the_same_sizes_again_take_no_more_from_the_system() -> None:
    def action(pool: memory.Pool) -> None:
        sizes = np.random.default_rng(0).integers(SMALL, 300_000, 60)

        def step() -> None:
            kept: list[Any] = []
            for i, size in enumerate(sizes):
                kept.append(np.empty(size, np.uint8))
                if i % 3 == 2:
                    del kept[i // 2]
        step()
        step()
        before = pool.usage()
        for _ in range(50):
            step()
        assert pool.usage() == before
    in_pool(action)


# ---- counting and limits ----------------------------------------------------------------------------------------------------

@needs_pool
def test_bytes_are_counted_and_trimmed() -> None:
    def action(pool: memory.Pool) -> None:
        pool.trim()
        start = pool.usage()
        assert start.cached == 0 and start.system == start.used
        x = [np.ones(MIB, np.uint8) for _ in range(4)]
        full = pool.usage()
        assert 4 * MIB <= full.used - start.used <= 4.1 * MIB and full.peak >= full.used
        x[1] = x[3] = x[0]
        holes = pool.usage()
        assert holes.used - start.used == (full.used - start.used) // 2 and holes.system == full.system
        given = pool.trim()
        assert 2 * MIB - (64 << 10) <= given <= holes.cached and pool.usage().system == holes.system - given
        x[1] = np.full(MIB, 2, np.uint8)                      # the hole, of which the system has the pages
        assert pool.usage().used - start.used == 3 * (full.used - start.used) // 4
        assert x[2].min() == x[2].max() == 1 and x[1].min() == x[1].max() == 2
        del x
        pool.trim()
        assert pool.usage()[0] == start.used and pool.usage().system <= start.system + (64 << 10)
    in_pool(action)


@needs_pool
def test_the_pool_keeps_no_more_than_its_limit() -> None:
    def action(pool: memory.Pool) -> None:
        try:
            pool.limit(3 * MIB)
            for _ in range(3):
                kept = [np.ones(MIB, np.uint8) for _ in range(10)]
                while kept:
                    kept.pop(len(kept) // 2)
                    assert pool.usage().cached <= 3 * MIB
            pool.limit(0)
            assert pool.usage().cached <= 64 << 10            # what shares pages with blocks in use
            pool.limit(1e300)
            del (x := [np.ones(5 * MIB, np.uint8)])[0]
            assert pool.usage().cached >= 5 * MIB and not x
        finally:
            pool.limit(None)
    in_pool(action)


def test_pages_touched_and_the_peak_of_memory_are_the_systems() -> None:
    block = mmap.mmap(-1, 256 << 12, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        block.madvise(mmap.MADV_NOHUGEPAGE)
    before = memory.page_faults()
    for at in range(0, len(block), 4096):
        block[at] = 1
    assert 256 <= memory.page_faults() - before < 400
    grown = child("import numpy as np; from mpitrain.backend.memory import resident; before = resident(peak=True); "
                  "np.ones(100 << 20, np.uint8); print(resident(peak=True) - before)")
    assert 90 * MIB < int(grown) < 120 * MIB


# ---- threads and processes --------------------------------------------------------------------------------------------------

@needs_pool
def test_threads_keep_their_arrays_apart_and_free_each_others() -> None:
    pool = memory.pool()
    assert pool is not None
    passed: queue.SimpleQueue[Any] = queue.SimpleQueue()
    wrong: list[Any] = []

    def work(seed: int) -> None:
        if seed % 4:                                          # the others free what came from the pool, and allocate elsewhere
            pool.use()
        rng, kept = np.random.default_rng(seed), {}
        for i in range(200):
            size, value = int(10 ** rng.uniform(1, 5.7)), int(rng.integers(256))
            x = np.zeros(size, np.uint8) if i % 3 == 0 else np.empty(size, np.uint8)
            if i % 3 == 0 and x.any():
                wrong.append("not zero")
            x[:] = value
            kept[int(rng.integers(20))] = (x, value)
            if i % 5 == 0:
                passed.put(kept.popitem()[1])
            while passed.qsize() > 8:
                kept[i % 20] = passed.get()
            wrong.extend(value for x, value in kept.values() if i % 20 == 0 and (x != value).any())
        wrong.extend(value for x, value in kept.values() if (x != value).any())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            pool.trim()                                       # without Python's lock, so at any time
            thread.join(0.01)
    assert wrong == []


@needs_pool
def test_threads_without_pythons_lock_leave_all_blocks_and_bins_in_order(tmp_path: Path) -> None:
    source, program = Path(__file__).with_name("memory_driver.c"), tmp_path / "driver"
    cc = native.compiler()
    assert cc is not None
    subprocess.run([*cc, "-O1", "-std=gnu11", "-o", program, source, "-pthread"], check=True, timeout=120)
    done = subprocess.run([program, "400"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


FORK = """
import os, sys, threading
import numpy as np
from mpitrain.backend import keep_freed_memory, memory
keep_freed_memory()
pool, ended = memory.pool(), threading.Event()
def trims():
    while not ended.is_set():
        pool.trim()                                   # holds the pool's lock most of the time, and not Python's
thread = threading.Thread(target=trims)
thread.start()
x = [np.full(100_000, 3, np.uint8) for _ in range(200)][::2]
for _ in range(60):
    child = os.fork()
    if child == 0:
        y = np.ones(200_000, np.uint8)
        os._exit(0 if y.all() and all((a == 3).all() for a in x) else 1)
    assert os.waitpid(child, 0)[1] == 0
ended.set()
thread.join()
print("ended")
"""


@needs_pool
def test_a_forked_process_has_a_pool_that_works() -> None:
    assert child(FORK).strip() == "ended"


@pytest.fixture
def pool_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run, but this thread keeps NumPy's handler."""
    monkeypatch.setattr(memory, "_used", [])
    contextvars.Context().run(keep_freed_memory)
    assert handler() == "default_allocator"


@needs_pool
def test_a_thread_uses_the_pool_where_its_process_does(pool_for_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def used() -> str:
        use_pool()
        return handler()
    assert contextvars.Context().run(used) == "mpitrain_pool"
    monkeypatch.setattr(memory, "_used", [])
    assert contextvars.Context().run(used) == "default_allocator"


@needs_pool
def test_threads_that_read_ahead_use_the_pool(pool_for_all: None) -> None:
    class Names(Loader):
        def load(self, step: int) -> Any:
            return [handler()]
    with closing(Names(SimpleNamespace(kind="values"), None, 1, workers=2)) as loader:  # type: ignore[arg-type]
        assert [names for _, names in loader.iterate(0, 4)] == [["mpitrain_pool"]] * 4


@needs_pool
def test_the_thread_that_moves_messages_uses_the_pool(pool_for_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "threads_may_call_mpi", lambda: True)
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Work:
        done = False

        def test(self) -> bool:
            seen.put(handler())
            self.done = True
            return True
    thread = progress.ProgressThread(progress.Progress())
    thread.hand_over(Work())
    assert seen.get(timeout=20) == "mpitrain_pool"
    thread.take_back()
    thread.close()


# ---- steps ------------------------------------------------------------------------------------------------------------------

STEADY = """
import sys
import numpy as np
from mpitrain import models, nn, optim
from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import keep_freed_memory, memory
if sys.argv[2] == "kept":
    keep_freed_memory()
rng = np.random.default_rng(0)
if sys.argv[1] == "mlp":
    model = models.mlp(400, [700, 700], 10)
    batches = [(rng.standard_normal((256, 400), dtype=np.float32), rng.integers(0, 10, 256)) for _ in range(2)]
else:
    model = models.gpt(2, 4, 64, 64, 65)
    batches = [(rng.integers(0, 65, (12, 64)), rng.integers(0, 65, (12, 64))) for _ in range(2)]
storage = model.initialize(seed=0)
gradients = storage.attach_gradients()
optimizer, loss = optim.AdamW(storage, lr=1e-3), nn.LOSSES["cross_entropy"]()

def step(i):
    x, y = batches[i % 2]
    gradients.fill(0)
    run_backward(loss(model(Tensor(x)), y), np.asarray(1 / y.size, np.float32), progress=None)
    optimizer.update(gradients, lr=1e-3, step=i + 1)

for i in range(6):
    step(i)
before = memory.page_faults()
for i in range(6, 26):
    step(i)
print((memory.page_faults() - before) / 20)
"""


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_a_steady_training_step_touches_no_new_page(model: str) -> None:
    """Each in a process of its own; NumPy's own way shows that the measurement sees faults where there are any."""
    assert float(child(STEADY, model, "kept")) <= 5
    if model == "gpt":
        assert float(child(STEADY, model, "plain")) > 100


@pytest.mark.slow
def test_without_a_compiler_steps_touch_no_new_page_either() -> None:
    told = child(STEADY.replace("rng =", "assert memory.pool() is None; rng =", 1), "mlp", "kept", PATH="", CC="")
    assert float(told) <= 5


def test_without_a_compiler_freed_memory_is_left_to_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "load", lambda name: None)
    monkeypatch.setattr(memory, "_used", [])
    memory.pool.cache_clear()
    try:
        assert keep_freed_memory(1) == hasattr(ctypes.CDLL(None), "mallopt")
        use_pool()
        assert memory.pool() is memory.pool_in_use() is None and handler() == "default_allocator"
    finally:
        memory.pool.cache_clear()


@needs_pool
def test_the_recent_peak_and_the_swing_of_a_step() -> None:
    def look(pool: memory.Pool) -> tuple[list[int], int | None]:
        swing = memory.Swing(pool)
        kept, found = [], []
        for size in (3, 1):                                   # MiB that a step has and lets go of, beside one that it keeps
            swing.begin()
            before = pool.usage().used
            held = np.ones(size * MIB, np.uint8)
            kept.append(np.ones(MIB, np.uint8))
            del held
            found.append((pool.recent_peak() - before) // MIB)
            found.append((pool.recent_peak() - before) // MIB)
            swing.end()
        return found, swing.most
    found, least = in_pool(look)
    assert found == [4, 1, 2, 1] and least == 0, "somebody else has asked in between: nothing is left of the peaks"

    def steps(pool: memory.Pool) -> int | None:
        swing = memory.Swing(pool)
        kept = []
        for size, passing in ((3, 0), (1, 0), (2, MIB)):
            swing.begin()
            held = np.ones(size * MIB, np.uint8)
            kept.append(np.ones(MIB, np.uint8))
            del held
            swing.end(passing)
        return swing.most
    assert round((in_pool(steps) or 0) / MIB, 2) == 3.0, "beyond what stays"
    assert memory.Swing().most is None


def test_what_arrays_take_of_the_system_between_steps_is_not_that_of_steps() -> None:
    system = iter([10, 14, 14, 15, 90, 90, 90, 87])           # before and after four steps, an evaluation after the second
    pool: Any = SimpleNamespace(recent_peak=lambda: 0, usage=lambda: memory.Usage(0, 0, 0, next(system), 0))
    swing, found = memory.Swing(pool), []
    for _ in range(4):
        swing.begin()
        swing.end()
        found.append(swing.system)
    assert found == [14, 15, 15, 12]
