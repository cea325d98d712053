"""A search over the paths of a trained supernet, by evaluations alone: regularised evolution over its choices.

All ranks evaluate one path together, and each asks the sampler for the next one by itself: what it draws is a function of the
seed, the trial's number and the table, which all have. With "-ms" the table has what rank 0 has measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpitrain.comm.job import guard
from mpitrain.errors import ConfigError, UsageError
from mpitrain.nn.choices import Elastic
from mpitrain.run.paths import Paths
from mpitrain.search import front
from mpitrain.search.evolution import Evolution
from mpitrain.search.front import Objective
from mpitrain.search.space import Choices, Space
from mpitrain.search.table import Table, Trial, point_text, result

COSTS = "ms", "parameters", "flops"


def objectives_of(words: Sequence[str], paths: Paths) -> tuple[Objective, ...]:
    """``["accuracy", "-flops"]``: metrics of evaluations, and with a minus what a path costs."""
    from mpitrain.metrics import judged
    from mpitrain.train.build.from_config import make_loss, make_metrics
    config, found = paths.config, list[Objective]()
    for word in words:
        name = word.removeprefix("-")
        if name in front.COSTS and name not in COSTS:
            raise UsageError(f'--objective "{word}" is not measured for paths; choose of -{", -".join(COSTS)} and metrics')
        if (name in COSTS) != word.startswith("-"):
            raise UsageError(f'--objective "{word}": costs have a minus ({", ".join(f"-{cost}" for cost in COSTS)}), metrics '
                             "have none")
        try:
            kind = make_loss(config, paths.session.inputs.tokens, paths.session.inputs).kind
            found.append(Objective(name, False) if name in COSTS else
                         Objective(*judged("--objective", name, make_metrics(config), kind)))
        except ConfigError as error:
            raise UsageError(error.message) from None
    if len({objective.name for objective in found}) < len(found):
        raise UsageError(f"--objective has one of {', '.join(words)} twice; name each once")
    return tuple(found)


def space_of(elastic: Elastic) -> Space:
    return Space({name: Choices(options) for name, options in elastic.options.items()})


def measured(paths: Paths, path: Mapping[str, int], objectives: Sequence[Objective]) -> dict[str, Any]:
    """The metrics of a path, and its costs; milliseconds only where they are asked for. It communicates."""
    found: dict[str, Any] = {**paths.evaluate(path), **paths.cost(path)}
    if any(objective.name == "ms" for objective in objectives):
        found["ms"] = 1e3 * paths.seconds(path)
    return found


def search(paths: Paths, trials: int, objectives: Sequence[Objective], seed: int, *, parents: int = 20, tournament: int = 5,
           tell: Callable[[Trial], None] = lambda trial: None) -> Table:
    """So many paths, evaluated; the largest and the smallest are the first two. It communicates."""
    elastic = paths.elastic
    with guard.symmetric():
        if trials < 2:
            raise UsageError(f"a search over paths needs 2 trials at least, the largest and the smallest path, found {trials}")
        sampler = Evolution(space_of(elastic), seed, parents, tournament)
    table, known = Table((1,), objectives, trials), dict[str, dict[str, Any]]()
    for number in range(trials):
        values = (elastic.largest, elastic.smallest)[number] if number < 2 else dict(sampler.ask(table, number).values)
        table.apply({"kind": "start", "trial": number, "rung": 0, "values": values})
        same = point_text(elastic.plain(values))              # Two paths may be one network.
        if same not in known:
            known[same] = measured(paths, values, objectives)
        table.apply(result(number, 0, known[same]))
        tell(table.trials[number])
    return table


def best(table: Table, elastic: Elastic) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(path, its results) of the front: those that no other path of the search dominates, each network once."""
    seen = set()
    for trial in table.front():
        text = elastic.write(trial.values)
        if text not in seen:
            seen.add(text)
            yield text, trial.results[0]
