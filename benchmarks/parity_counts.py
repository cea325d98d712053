"""How many entries of PyTorch's op_db our operations answer, and what differs.

    python benchmarks/parity_counts.py                     the counts, and what was wrong or raised
    python benchmarks/parity_counts.py sin cumsum -v       these entries, also what was refused or is absent
    python benchmarks/parity_counts.py --missing           entries that no map names
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))
import harness


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="entries; all where none is given")
    parser.add_argument("-v", "--verbose", action="store_true", help="also what was refused or is absent")
    parser.add_argument("--missing", action="store_true", help="the entries that no map names")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.missing:
        print(*sorted(harness.op_db().keys() - harness.maps().keys()), sep="\n")
        return 0
    results = harness.run(args.names or None)
    for result in results:
        shown = [line for line in result.details if args.verbose or line.startswith(("wrong", "raw"))]
        if shown or args.verbose or not result.equal:
            print(f"{result.name}: {', '.join(f'{n} {kind}' for kind, n in result.counts.items())}")
            print(*(f"    {line}" for line in shown), sep="\n")
    print(harness.table(results))
    return 0 if all(result.equal for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
