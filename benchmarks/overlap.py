"""How much of the gradient exchange hides behind backward, on whatever link mpirun starts us on.

    mpirun -n 2 python benchmarks/overlap.py                                the transformer, all ranks on one machine
    mpirun -n 2 python benchmarks/overlap.py --model mlp --bucket-mb auto --progress thread --json overlap.jsonl

Three things are timed in turn, A B C A B C, after a barrier each:

    A  a training step with its exchange        exposed: from the last local backward node to the last bucket, least over ranks
    B  the same step, nothing exchanged         backward alone, step alone
    C  the same buckets, nothing computed       communication alone, least over ranks

    hidden = 1 - exposed / communication alone;  share = exposed / step.  All figures are medians over the rounds.

With `poll`, moving messages takes the processor from backward: that is not waiting, so it is not in `exposed`; it is in the price
of the exchange, step with exchange minus step alone, which is printed as well.

The learning rate is 0, so B computes the gradients that A has summed: each round compares about a thousand elements of A's
sums, other ones each time, with the sum of all ranks' in B, added up in float64; and the same of C's, whose addends it has made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)                                   # a forced kernel would slow backward down, and hide more

import numpy as np  # noqa: E402

from mpitrain import models, nn, optim  # noqa: E402
from mpitrain.autograd import Tensor, run_backward  # noqa: E402
from mpitrain.backend import CPU, keep_freed_memory  # noqa: E402
from mpitrain.bench.inputs import WIRES  # noqa: E402
from mpitrain.comm.job import guard  # noqa: E402
from mpitrain.comm.job.start import start  # noqa: E402
from mpitrain.comm.mesh import Mesh  # noqa: E402
from mpitrain.config import CommConfig, Config  # noqa: E402
from mpitrain.errors import NumericsError, UsageError  # noqa: E402
from mpitrain.parallel.connect import connect  # noqa: E402
from mpitrain.parallel.gradients.tuning import READY_STEPS, WARM_STEPS, Tuning  # noqa: E402
from mpitrain.parallel.policies.choose import choose  # noqa: E402
from mpitrain.parallel.policies.policy import Setup  # noqa: E402
from mpitrain.placement.place import place  # noqa: E402

SAMPLES = 1000
SAME = 1e-5                      # of the addends' magnitudes: computing a gradient again, in float32, changes less


class Nobody:
    """No other rank has a part in any sum: nothing is exchanged."""

    size = 1


def make_model(kind: str, batch: int, seed: int):
    """A model and one rank's batch (x, y)."""
    rng = np.random.default_rng(seed)
    if kind == "gpt":                                            # nanoGPT's settings for a CPU, characters
        tokens = rng.integers(0, 65, (2, batch, 64))
        return models.gpt(layers=4, heads=4, width=128, block=64, vocabulary=65), tokens[0], tokens[1]
    x = rng.standard_normal((batch, 784), dtype=np.float32)
    return models.mlp(784, [1024, 1024], 10), x, rng.integers(0, 10, batch)


class Bench:
    def __init__(self, options: argparse.Namespace, mesh: Mesh):
        self.control = mesh.channel(mesh.axes, "control")
        n = self.control.size
        self.model, self.x, self.y = make_model(options.model, options.batch // n, seed=self.control.rank)
        auto = options.bucket_mb == "auto"
        nbytes = 1 << 20 if auto else max(1, int(float(options.bucket_mb) * 2**20))
        config = Config(comm=CommConfig(wire_dtype=options.wire, bucket_mb=nbytes / 2**20))
        placement = place(self.model, mesh, config.mesh, config.train, config.comm)
        self.update = choose(Setup(config, connect(placement, mesh, self.control), CPU, algorithm=options.algorithm))
        self.update.initialise()
        self.update.open(optim.AdamW(self.update.storage, lr=1e-4, weight_decay=0.01), lambda step: 0.0)
        self.line, self.reducer = self.update.channel, self.update.reducer
        mesh.progress.landed = self.reducer.timeline.look
        shared = self.line.shared
        self.way = "shared memory" if shared else "messages"
        self.wire = "float32" if shared and self.line.cross is None else options.wire       # without messages nothing is packed
        self.update.want_norm = False
        self.loss, self.terms = nn.LOSSES["cross_entropy"](), self.y.size * n
        thread = mesh.progress.thread() if options.progress == "thread" and n > 1 else None
        self.tuning = Tuning(self.reducer, self.control, progress=options.progress, thread=thread, buckets=auto)
        self.mover = self.reducer.mover

    def step(self) -> tuple[float, float, float]:
        """(seconds, of these backward, exposed)"""
        began = time.perf_counter()
        self.update.begin()
        loss = self.loss(self.model(Tensor(self.x)), self.y)
        self.reducer.begin_micro_batch(last=True)
        backward = time.perf_counter()
        run_backward(loss, np.asarray(1 / self.terms, np.float32), progress=self.reducer.progress)
        self.update.finish()
        times = self.reducer.timeline.steps[-1]
        return time.perf_counter() - began, times.backward_end - backward, times.exposed_s

    def with_exchange(self) -> tuple[float, float, float]:
        self.control.barrier()
        return self.step()

    def without_exchange(self) -> tuple[float, float, float]:
        exchange, self.reducer.bucket_sum, self.reducer.mover = self.reducer.bucket_sum, Nobody(), None
        self.control.barrier()
        found = self.step()
        self.reducer.bucket_sum, self.reducer.mover = exchange, self.mover
        return found

    def sample(self, number: int) -> np.ndarray:
        """Some of the gradients, other ones for each number."""
        every = max(1, self.reducer.gradients.size // SAMPLES)
        return self.reducer.gradients[number % every::every].copy()

    def check(self, sums: np.ndarray, mine: np.ndarray, what: str) -> None:
        """NumericsError unless `sums` are those of all ranks' `mine`, up to rounding."""
        exact, magnitude = mine.astype(np.float64), np.abs(mine, dtype=np.float64)
        for array in (exact, magnitude):
            self.control.allreduce(array, name="check")
        n, (eps, smallest) = self.control.size, WIRES[None if self.wire == "float32" else self.wire]
        error = np.abs(sums - exact)
        wrong = ~(error <= (SAME + (n + 1) * eps) * magnitude + n * smallest)                      # true for NaN as well
        if wrong.any():
            raise NumericsError(f"{what} gave wrong sums: {int(wrong.sum())} of {wrong.size} elements looked at, one off by "
                                f"{float(error[wrong][0]):.1e}")

    def round(self, number: int) -> list[float]:
        """A, B and C, checked: seven times."""
        together = self.with_exchange()
        sums = self.sample(number)
        apart = self.without_exchange()
        self.check(sums, self.sample(number), "the exchange during backward")
        return [*together, *apart, self.exchange_alone(number)]

    def exchange_alone(self, number: int) -> float:
        """The same buckets in the same memory, all ready at once; the sums are checked."""
        gradients = self.reducer.gradients
        gradients[...] = np.random.default_rng([self.control.rank, self.update.step]).standard_normal(gradients.size)
        mine = self.sample(number)
        self.control.barrier()
        began = time.perf_counter()
        works = [self.line.start_allreduce(b.parts[0], b.name) for b in self.reducer.buckets]
        for work in works:
            work.wait()
        seconds = time.perf_counter() - began
        self.check(self.sample(number), mine, "the exchange alone")
        return seconds


def measure(bench: Bench, rounds: int) -> dict[str, float]:
    for _ in range(WARM_STEPS + READY_STEPS):                    # the buckets are cut in these, where asked for
        bench.tuning.after_step(bench.with_exchange()[0])
    mine = []
    for i in range(rounds + 2):
        values = bench.round(i)
        if i >= 2:
            mine.append(values)
    ranks = np.array(bench.control.gather_objects(mine))         # [rank, round, value]
    slowest, least = ranks.max(0), ranks.min(0)
    step, backward, exposed, step_alone, backward_alone, _, alone = range(7)

    def median(values: np.ndarray) -> float:
        return statistics.median(values.tolist())

    found = {"step_s": median(slowest[:, step]), "backward_s": median(slowest[:, backward]),
             "exposed_s": median(least[:, exposed]), "step_alone_s": median(slowest[:, step_alone]),
             "backward_alone_s": median(slowest[:, backward_alone]), "communication_alone_s": median(least[:, alone]),
             "share": median(least[:, exposed] / slowest[:, step]),
             "share_high": float(np.quantile(least[:, exposed] / slowest[:, step], 0.75)),
             "price": median(slowest[:, step] / slowest[:, step_alone]) - 1}
    return found | {"hidden": 1 - found["exposed_s"] / found["communication_alone_s"],
                    "communication_to_backward": found["communication_alone_s"] / found["backward_alone_s"]}


def report(found: dict[str, float]) -> str:
    ms = {name: f"{value * 1e3:9.3f} ms" for name, value in found.items() if name.endswith("_s")}
    return (f"  communication alone  {ms['communication_alone_s']}   {found['communication_to_backward']:.2f} of backward alone\n"
            f"  backward alone       {ms['backward_alone_s']}\n"
            f"  backward, exchanging {ms['backward_s']}\n"
            f"  exposed              {ms['exposed_s']}   hidden = 1 - exposed / alone = {found['hidden']:.1%}\n"
            f"  step                 {ms['step_s']}   share exposed {found['share']:.2%} "
            f"(upper quartile {found['share_high']:.2%})\n"
            f"  step alone           {ms['step_alone_s']}   the exchange makes a step {found['price']:.1%} longer")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("gpt", "mlp"), default="gpt")
    parser.add_argument("--batch", type=int, default=0, help="over all ranks; default: 12 (gpt), 128 (mlp)")
    parser.add_argument("--bucket-mb", default="0.5", help='a number, or "auto": as comm.bucket_mb')
    parser.add_argument("--algorithm", default="auto", help="as comm.algorithm")
    parser.add_argument("--wire", choices=("float32", "bfloat16", "float16"), default="float32", help="as comm.wire_dtype")
    parser.add_argument("--progress", choices=("poll", "thread"), default="poll")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", help="append the result to this file")
    return parser


def main() -> int:
    options = parser().parse_args()
    options.batch = options.batch or {"gpt": 12, "mlp": 128}[options.model]
    keep_freed_memory()
    world = start()
    if options.batch % world.size:
        with guard.symmetric():
            raise UsageError(f"--batch {options.batch} does not divide by {world.size} ranks; give a multiple")
    mesh = Mesh(world.comm)
    bench = Bench(options, mesh)
    found = measure(bench, options.rounds)
    if world.rank == 0:
        buckets = len(bench.reducer.buckets)
        print(f"{options.model}, {bench.reducer.storage.size * 4 / 2**20:.1f} MiB of gradients in {buckets} buckets, batch "
              f"{options.batch // world.size} a rank, {world.size} ranks, {options.algorithm} ({bench.way}, {bench.wire}), "
              f"{options.progress}, "
              f"{options.rounds} rounds\n{report(found)}", flush=True)
        if options.json:
            about = {"bench": "overlap", "model": options.model, "ranks": world.size, "batch": options.batch, "buckets": buckets,
                     "algorithm": options.algorithm, "way": bench.way, "wire": bench.wire,
                     "progress": options.progress, "rounds": options.rounds}
            with open(options.json, "a") as file:
                file.write(json.dumps(about | found) + "\n")
    mesh.close()
    return 0


if __name__ == "__main__":
    guard.Process().run(main)
