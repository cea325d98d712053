"""Seconds of a secure round on these ranks, and whether its sum has the bits of the plain integer sum.

    mpirun -n 2 python benchmarks/secure_sum.py [--clients 8] [--parameters 61706] [--absent 2] [--gone 0] [--silent 2]

Of the clients some are absent, and share no keys; some are gone before they send a vector, and some silent after it.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import mpitrain
from mpitrain.privacy.fixed_point import FixedPoint
from mpitrain.privacy.secure_round import SecureRound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--parameters", type=int, default=61_706)
    parser.add_argument("--absent", type=int, default=2)
    parser.add_argument("--gone", type=int, default=0)
    parser.add_argument("--silent", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    mesh = mpitrain.Mesh(mpitrain.start().comm)
    channel = mesh.channel(mesh.axes, "secure")
    clients, n = range(asked.absent, asked.clients), asked.parameters
    numbers = FixedPoint(1.0, asked.clients)
    vectors = {k: np.random.default_rng(k).normal(0, 1e-3, n) for k in clients}
    seconds, worked, equal = [], [], True
    for _ in range(asked.rounds):
        channel.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        secure = SecureRound(channel, clients, clients[channel.rank::channel.size], numbers, n, 0.5001)
        for k in secure.own:
            if k >= asked.absent + asked.gone:
                secure.add(k, vectors[k])
        found = secure.finish(lambda k: k < asked.clients - asked.silent)
        seconds.append(time.perf_counter() - began)
        worked.append(time.process_time() - began_cpu)
        equal &= bool((found == numbers.decode(sum(numbers.encode(vectors[k]) for k in clients[asked.gone:]))).all())
    if channel.rank == 0:
        print(f"{asked.clients} clients, {asked.absent} absent, {asked.gone} gone before and {asked.silent} after sending, "
              f"{n:,} parameters, {channel.size} ranks: {min(seconds):.2f} s at best, "
              f"{sorted(seconds)[len(seconds) // 2]:.2f} s in the middle, {min(worked):.2f} s of rank 0's processor; "
              f"{'the bits of the plain sum' if equal else 'WRONG'}")
    mesh.close()
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
