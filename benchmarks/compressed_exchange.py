"""The exchange of compressed gradients between two hosts, beside the best dense one, on links of stated rates; as root.

    python benchmarks/compressed_exchange.py --rate 100mbit --rate 1gbit                       times, and bytes
    python benchmarks/compressed_exchange.py --break-even topk:0.01 --kernels numpy            where dense becomes faster

Two hosts in network namespaces, one rank on each (tests/hosts.py). Timed is the sum of one array of --elements float32, from its
values on both ranks to the sum on both, encoding and decoding included; the slower rank counts, the median of --rounds, and the
ways take turns.

Dense has its best settings: both of our rings, with Open MPI's defaults and with the eager limit raised, which lets the two
directions of a large message travel at once; the fastest of the four counts. The link lets some bytes through at once after a
pause (64 KiB, or 1 ms of its rate), which would make small messages free: that allowance is used up, off the clock, right before
the first message of each sum, also of a compressed one, whose encoding would be the pause.

Bytes: what ranks posted is compared with the payload that the compressor says, which must be equal, and with the link's own
counter, which adds headers, acknowledgements and Ethernet's frames.

--break-even looks for the rate at which dense and compressed sums take as long, by halving the interval, and prints it beside
what a run says (break_even_mbit: bytes saved over seconds of coding).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

EAGER = {"OMPI_MCA_btl_tcp_eager_limit": "16777216", "OMPI_MCA_btl_tcp_max_send_size": "16777216"}
WAYS = ("topk:0.01", "int8", "int4", "onebit", "powersgd:4", "randomk:0.01")
DENSE = ("ring", "segmented_ring")
COUNTED = (10, 110)                 # sums in the two runs whose difference is compared with the link's counter
HALVINGS = 6


def main() -> int:
    arguments = read_arguments()
    if arguments.rank_program:
        return rank_program(json.loads(arguments.rank_program))
    from hosts import two_hosts, why_not
    if reason := why_not():
        sys.exit(reason)
    if arguments.break_even:
        break_even(arguments)
        return 0
    for rate in arguments.rate or ["100mbit", "1gbit"]:
        with two_hosts(rate) as hosts:
            times(hosts, rate, arguments)
            if not arguments.no_bytes:
                for way in arguments.ways:
                    counted(hosts, way, arguments)
    return 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", action="append", help="of the link, each way, as tc writes it; again for another one")
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--no-bytes", action="store_true", help="times alone")
    parser.add_argument("--break-even", metavar="WAY")
    parser.add_argument("--between", default="20mbit,8gbit", help="the rates between which --break-even looks")
    parser.add_argument("--kernels", default="", help='what encodes: "numpy" has no C, and is slower')
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-program", help=argparse.SUPPRESS)
    return parser.parse_args()


def times(hosts: Any, rate: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints, and returns, what sums take on this link, by way."""
    asked = {"do": "time", "elements": arguments.elements, "rounds": arguments.rounds, "rate": hosts.rate}
    plain = on(hosts, {**asked, "ways": [*DENSE, *arguments.ways]}, arguments)
    raised = on(hosts, {**asked, "ways": list(DENSE)}, arguments, EAGER)
    found = {**plain, **{f"{way}, eager": value for way, value in raised.items()}}
    dense = min((way for way in found if way.split(",")[0] in DENSE), key=lambda way: found[way]["ms"])
    best = found[dense]["ms"]
    print(f"{rate}: dense takes {best:.1f} ms at best ({dense}); " + ", ".join(
        f"{way} {value['ms']:.1f}" for way, value in found.items() if way.split(",")[0] in DENSE), flush=True)
    for way in arguments.ways:
        one = found[way]
        print(f"  {way:14} {one['ms']:8.2f} ms   {best / one['ms']:6.1f} x   coding {one['coding_ms']:6.2f} ms   "
              f"{one['sent']:>10,} bytes of a rank", flush=True)
    if arguments.json:
        with arguments.json.open("a") as file:
            file.write(json.dumps({"rate": rate, "best": best, "dense": dense, "found": found}) + "\n")
    return {"best": best, **found}


def counted(hosts: Any, way: str, arguments: argparse.Namespace) -> None:
    """Prints posted bytes beside payload and beside the link's own counter: of many sums less those of few."""
    posted, payload, link = [], [], []
    for count in COUNTED:
        before = hosts.bytes_sent("left")
        found = on(hosts, {"do": "count", "elements": arguments.elements, "way": way, "count": count}, arguments)
        posted.append(found["posted"])
        payload.append(found["payload"])
        link.append(hosts.bytes_sent("left") - before)
    sent, said, seen = (after - before for before, after in (posted, payload, link))
    print(f"  {way:14} posted {sent:,} bytes, payload {said:,} ({'equal' if sent == said else 'NOT EQUAL'}); the link counts "
          f"{seen / sent - 1:+.1%}", flush=True)


def break_even(arguments: argparse.Namespace) -> None:
    """Prints the rate at which both take as long, found by halving, and the rate that the run's own figures say."""
    from hosts import bits, two_hosts
    way = arguments.break_even
    low, high = (bits(rate) for rate in arguments.between.split(","))
    said: list[float] = []
    arguments.ways, arguments.json = [way], None
    for _ in range(HALVINGS):
        rate = int((low * high) ** 0.5)
        with two_hosts(f"{rate / 1e6:.3f}mbit") as hosts:
            found = times(hosts, f"{rate / 1e6:.0f} Mbit/s", arguments)
        one = found[way]
        said.append(8e-6 * (one["dense_bytes"] - one["sent"]) / (one["coding_ms"] / 1e3))
        low, high = (rate, high) if found["best"] > one["ms"] else (low, rate)
    at, predicted = (low * high) ** 0.5 / 1e6, statistics.median(said)
    print(f"{way}: dense is faster above {at:,.0f} Mbit/s as found, above {predicted:,.0f} as the run says "
          f"({predicted / at - 1:+.0%})")


def on(hosts: Any, asked: dict[str, Any], arguments: argparse.Namespace, env: dict[str, str] | None = None) -> dict[str, Any]:
    """What rank 0 of two found."""
    given = {**(env or {}), **({"MPITRAIN_KERNELS": arguments.kernels} if arguments.kernels else {})}
    result = hosts.mpirun(2, __file__, "--rank-program", json.dumps(asked), timeout=600, cwd=ROOT, env=given)
    if result.rc:
        sys.exit(f"exit code {result.rc}\n{result.out}\n{result.err}")
    found: dict[str, Any] = json.loads(result.out.splitlines()[-1])
    return found


def rank_program(asked: dict[str, Any]) -> int:
    from mpitrain.comm.job.start import start
    world = start()
    found = count(world.comm, **{k: v for k, v in asked.items() if k != "do"}) if asked["do"] == "count" else \
        measure(world.comm, **{k: v for k, v in asked.items() if k != "do"})
    if world.rank == 0:
        print(json.dumps(found), flush=True)
    return 0


class Sum:
    """One way to add up an array over both ranks."""

    def __init__(self, comm: Any, way: str, elements: int):
        import numpy as np

        from mpitrain.comm.messages.channel import Channel
        from mpitrain.comm.messages.meter import metered
        from mpitrain.parallel.compress.compressor import Piece, make_compressor
        from mpitrain.parallel.compress.exchange import Clock, Exchange
        side = 1 << (elements.bit_length() - 1) // 2
        self.values = np.random.default_rng(comm.rank).standard_normal(elements).astype(np.float32)
        self.array, self.clock, self.exchange = self.values.copy(), Clock(), None
        self.channel = Channel(comm.Dup(), way, algorithm=way if way in DENSE else "auto")
        self.meter = metered(self.channel, [0, 1])
        if way not in DENSE:
            make, state = make_compressor(way), {}
            compressor = make([Piece("weight", 0, elements, 0, (side, elements // side))], 2)
            state = compressor.new_state()
            self.exchange = Exchange(self.channel, compressor, way, state, "weight", lambda: 0, self.clock)

    def run(self, before_messages: Callable[[], None] = lambda: None) -> None:
        """The sum; `before_messages` is called right before the first of them."""
        if self.exchange is None:
            before_messages()
            self.channel.start_allreduce(self.array, "x").wait()
            return
        rounds = self.exchange._program.rounds
        first = rounds[0]
        rounds[0] = first._replace(before=(*first.before, lambda memory: before_messages()))
        self.exchange.start(self.array).wait()
        rounds[0] = first


def count(comm: Any, elements: int, way: str, count: int) -> dict[str, Any]:
    one = Sum(comm, way, elements)
    for _ in range(count):
        one.array[...] = one.values
        one.run()
    assert one.exchange is not None
    return {"posted": one.meter.sent, "payload": count * one.exchange.sent}


def measure(comm: Any, elements: int, rounds: int, rate: int, ways: list[str]) -> dict[str, Any]:
    import numpy as np
    from hosts import burst
    sums = {way: Sum(comm, way, elements) for way in ways}
    drain, other = np.zeros(2 * burst(rate), np.uint8), np.zeros(2 * burst(rate), np.uint8)
    took: dict[str, list[float]] = {way: [] for way in ways}
    coded: dict[str, list[float]] = {way: [] for way in ways}
    clock = {"off": 0.0}
    link = comm.Dup()

    def use_up() -> None:
        began = time.perf_counter()
        link.Sendrecv(drain, 1 - comm.rank, 0, other, 1 - comm.rank, 0)
        clock["off"] += time.perf_counter() - began

    for number in range(rounds + 1):
        for way, one in sums.items():
            one.array[...] = one.values
            link.Barrier()
            clock["off"], coded_before, began = 0.0, one.clock.seconds, time.perf_counter()
            one.run(use_up)
            mine = [time.perf_counter() - began - clock["off"], one.clock.seconds - coded_before - (
                clock["off"] if one.exchange is not None else 0.0)]
            slowest = np.array(mine)
            link.Allreduce(np.array(mine), slowest, _max())
            if number:                                        # the first one warms up
                took[way].append(float(slowest[0]))
                coded[way].append(float(slowest[1]))
    sent = {way: 4 * elements if one.exchange is None else one.exchange.sent for way, one in sums.items()}
    return {way: {"ms": 1e3 * statistics.median(took[way]), "coding_ms": 1e3 * statistics.median(coded[way]),
                  "dense_bytes": 4 * elements, "sent": sent[way]} for way in sums}


def _max() -> Any:
    from mpi4py import MPI
    return MPI.MAX




if __name__ == "__main__":
    sys.exit(main())
