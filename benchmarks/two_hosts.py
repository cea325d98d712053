"""Run a measurement over two hosts on one machine, joined by a link of a stated rate; as root.

    python benchmarks/two_hosts.py --rate 1gbit --rate 2gbit benchmarks/overlap.py --model gpt

Everything after the script's path is passed to it; it runs on --ranks ranks, half of them on each host, once for each rate, and
its output appears under a line that says what the link itself does: the time in which both hosts exchange 4 MiB by our ring,
and the least that the rate allows. Up to twice the least is Open MPI: the permission to send a large message waits behind the
data of the other direction, so the directions take turns (--mca btl_tcp_eager_limit=16777216 --mca
btl_tcp_max_send_size=16777216 ends that). Far more than twice means that the processors are the bound, or that something else
keeps the machine busy. Each host has half of the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from hosts import Hosts, burst, two_hosts, why_not  # noqa: E402
from launch import Result  # noqa: E402

PROBE_BYTES = 4 << 20


def main() -> int:
    arguments = read_arguments()
    if reason := why_not():
        sys.exit(reason)
    settings = dict(arguments.mca)
    for rate in arguments.rate or ["1gbit"]:
        with two_hosts(rate) as hosts:
            print(f"{rate}: {link(hosts, settings)}", flush=True)
            measured = hosts.mpirun(arguments.ranks, arguments.script, *arguments.arguments, timeout=arguments.timeout,
                                    cwd=os.getcwd(), env=settings)
            print(ended_well(measured).out, flush=True)
    return 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", action="append", help="of the link, each way, as tc writes it; again for another run (1gbit)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mca", action="append", default=[], type=setting, metavar="NAME=VALUE",
                        help="a setting of Open MPI, for the ranks")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one run of the script")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args()


def setting(text: str) -> tuple[str, str]:
    """The environment variable that says the same as mpirun's ``--mca NAME VALUE``."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {text!r}")
    return f"OMPI_MCA_{name}", value


def link(hosts: Hosts, settings: dict[str, str]) -> str:
    """What the link does alone, with one rank on each side."""
    result = ended_well(hosts.mpirun(2, ROOT / "tests/hosts_program.py", "allreduce", str(PROBE_BYTES), env=settings))
    seconds = statistics.median(json.loads(result.out)["seconds"])
    least = (PROBE_BYTES - burst(hosts.rate)) * 8 / hosts.rate
    return f"the sum of 4 MiB takes {seconds * 1e3:.1f} ms, at least {least * 1e3:.1f} ms by the rate"


def ended_well(result: Result) -> Result:
    if result.rc:
        sys.exit(f"exit code {result.rc}\n{result.out}\n{result.err}")
    return result


if __name__ == "__main__":
    sys.exit(main())
