"""Clocks by slack beside those of `lowtime` 0.3.0, the solver of Perseus's authors, on one table of clocks (docs/slack.md).

    python benchmarks/slack.py                                    # 4 stages, one 30 % longer, a table made by formula
    python benchmarks/slack.py profile.csv --micro 16             # a table in Zeus's CSV

Both get the same table, the same 1F1B graph, and are judged by the same simulator: seconds of a step, joules with waiting.
`lowtime` fits an exponential to each stage's clocks and shortens critical paths unit by unit, in units of --unit seconds.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpitrain.schedules.clocks import Clock, Table, read_table, stages_in
from mpitrain.schedules.pipeline import SCHEDULES
from mpitrain.schedules.pipeline_check import flow
from mpitrain.schedules.slack import Clocks, Pipeline, at_time, front_of


def made_table(n_stages: int = 4, longer: float = 1.3, n_clocks: int = 20) -> Table:
    """Clocks from 1410 MHz down in steps of 30; a fifth of the time is memory's, and the watts above 90 go with f^2.4. The last
    stage works `longer`."""
    table: Table = {}
    for stage in range(n_stages):
        for kind, seconds in (("F", 0.04), ("B", 0.08)):
            for index in range(n_clocks):
                ratio = 1410 / (1410 - 30 * index)
                taken = seconds * (longer if stage == n_stages - 1 else 1) * (0.2 + 0.8 * ratio)
                table.setdefault((stage, kind), []).append(Clock(1410 - 30 * index, taken, (90 + 210 / ratio ** 2.4) * taken))
    return table


def by_lowtime(pipeline: Pipeline, table: Table, unit: float) -> Clocks:
    """What `lowtime` chooses for the shortest step that it reaches."""
    import networkx as nx
    from lowtime.cost_model import ExponentialModel
    from lowtime.graph_utils import add_sink_node, add_source_node
    from lowtime.operation import CandidateExecutionOptions, ExecutionOption, Operation, OperationSpec
    from lowtime.solver import PhillipsDessouky

    specs: dict[Any, Any] = {}
    for place, clocks in table.items():
        options = CandidateExecutionOptions(options=[
            ExecutionOption(real_time=clock.seconds, unit_time=unit, cost=clock.joules - pipeline.idle_watts * clock.seconds,
                            knob=number) for number, clock in enumerate(clocks)])
        specs[place] = OperationSpec(options=options, cost_model=ExponentialModel(options, search_strategy="best"))
    dag = nx.DiGraph()
    number = {place: index for index, place in enumerate(pipeline.places, start=2)}
    operations = {}
    for (stage, action), node in number.items():
        operations[stage, action] = Operation(spec=specs[action.chunk * pipeline.n_stages + stage, action.kind])
        dag.add_node(node, op=operations[stage, action])
    for stage, program in enumerate(pipeline.programs):
        dag.add_edges_from((number[stage, one], number[stage, other]) for one, other in pairwise(program))
    dag.add_edges_from((number[need], number[stage, action]) for stage, action, need in flow(pipeline.programs, pipeline.chunks)
                       if need is not None)
    add_source_node(dag, 0)
    add_sink_node(dag, 1)
    dag.graph["source_node"], dag.graph["sink_node"] = 0, 1
    for _ in PhillipsDessouky(dag).run():
        pass
    return pipeline.simulated({(stage, action): table[action.chunk * pipeline.n_stages + stage, action.kind][chosen.assigned_knob]
                               for (stage, action), chosen in operations.items()})


def compared(pipeline: Pipeline, table: Table, unit: float) -> tuple[Clocks, Clocks]:
    """`lowtime`'s clocks, and ours for a step as long as its is."""
    theirs = by_lowtime(pipeline, table, unit)
    corners = list(pipeline.network.corners())
    wanted = max(theirs.seconds, pipeline.highest().seconds)
    return theirs, pipeline.within(at_time(corners[::-1], wanted), wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--idle-watts", type=float, default=0.0)
    parser.add_argument("--unit", type=float, default=0.001)
    options = parser.parse_args()
    table = read_table(options.csv) if options.csv else made_table()

    def made() -> Pipeline:
        return Pipeline(table, SCHEDULES["1f1b"], stages_in(table), options.micro, idle_watts=options.idle_watts)
    began = time.perf_counter()
    front = front_of(made())
    ours_s = time.perf_counter() - began
    print(f"highest clocks {front.highest.seconds:.4f} s {front.highest.joules:9.2f} J")
    saved = 1 - front.fastest.joules / front.highest.joules
    print(f"by slack       {front.fastest.seconds:.4f} s {front.fastest.joules:9.2f} J   {saved:.2%} less; any clocks need "
          f"{front.least:.2f} J or more; the front took {ours_s:.2f} s")
    try:
        began = time.perf_counter()
        theirs, ours = compared(made(), table, options.unit)
    except ImportError as error:
        print(f"lowtime is not installed ({error}); pip install lowtime==0.3.0")
        return
    print(f"lowtime        {theirs.seconds:.4f} s {theirs.joules:9.2f} J   in {time.perf_counter() - began:.2f} s with ours")
    print(f"ours, as long  {ours.seconds:.4f} s {ours.joules:9.2f} J   {ours.joules / theirs.joules:.4f} of lowtime's")


if __name__ == "__main__":
    main()
