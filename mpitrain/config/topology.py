"""The sections of what ranks exchange less of: compressed gradients, levels of exchange, workers apart from ranks, privacy.

    [comm] compress...    what travels for a gradient         a class of COMPRESSORS
    [[sync]]              over whom, how often, what, how     a `levels.Level`, with a rule of OUTER or a graph of GRAPHS
    [workers]             clients, which ranks host           their rows by PARTITIONS, their gradients by CORRECTIONS
    [privacy]             what one client or row may tell     an accountant of ACCOUNTANTS
"""
# Annotations are read as they are, so that no text has to be evaluated: no `from __future__ import annotations` here.

from dataclasses import dataclass
from typing import Any, Literal

from mpitrain.registry import Registry

COMPRESSORS: Registry[Any] = Registry("compressor")
OUTER: Registry[Any] = Registry("outer rule")
GRAPHS: Registry[Any] = Registry("graph")
PARTITIONS: Registry[Any] = Registry("partition")
CORRECTIONS: Registry[Any] = Registry("correction")
ACCOUNTANTS: Registry[Any] = Registry("accountant")
OWN = {
    COMPRESSORS: ("parallel.compress", {"int8": "blocks:Int8", "int4": "blocks:Int4", "levels": "blocks:Levels",
                                        "onebit": "blocks:TwoMeans", "topk": "sparse:TopK", "randomk": "sparse:RandomK",
                                        "powersgd": "lowrank:PowerSGD"}),
    OUTER: ("optim", {"average": "outer:Average", "nesterov": "outer:Nesterov", "slowmo": "outer:SlowMo",
                      "fedavgm": "outer:FedAvgM", "fedadam": "outer:FedAdam", "fedyogi": "outer:FedYogi",
                      "fedadagrad": "outer:FedAdagrad"}),
    GRAPHS: ("schedules", {name: f"graphs:{name}" for name in ("ring", "torus", "matching", "line", "one_peer_exponential",
                                                               "exponential", "complete", "random")}),
    PARTITIONS: ("data", {"iid": "partitions:Iid", "shards": "partitions:Shards", "dirichlet": "partitions:Dirichlet",
                          "sizes": "partitions:Sizes", "column": "partitions:ByColumn"}),
    CORRECTIONS: ("parallel.workers", {"prox": "corrections:Prox", "scaffold": "scaffold:Scaffold"}),
    ACCOUNTANTS: ("privacy", {"rdp": "accountant:RenyiAccountant"})}
for _registry, (_package, _places) in OWN.items():
    for _name, _place in _places.items():
        _registry.register_later(_name, f"mpitrain.{_package}.{_place}")


@dataclass(frozen=True)
class SyncConfig:
    levels: tuple[dict[str, Any], ...] = ()  # a table for each [[sync]], from the inside out


@dataclass(frozen=True)
class WorkersConfig:
    count: int = 0                           # clients of the federation; 0: there is none
    rows: str = "iid"                        # one of PARTITIONS, "dirichlet:0.1"; or the user's own, "file.py:name"
    each_round: int | str = 0                # clients drawn for a round, or "poisson:0.1"; 0: all
    drop: float = 0.0                        # share of those that do not answer
    weights: Literal["rows", "equal"] = "rows"       # what a client's change counts in the mean: as many rows as it has, or 1
    correct: str = ""                        # one of CORRECTIONS, "prox:0.1"; or the user's own, "file.py:name"
    arrival: str = ""                        # "": together; "simulated", "recorded", or a record to repeat, "arrivals.jsonl"
    in_flight: int = 4                       # with arrival: workers that train at once
    buffer: int = 1                          # results that change the parameters together
    staleness: int = 8                       # most changes while a worker trains
    discount: float = 0.5                    # a result s changes old counts (1 + s)^-discount
    spread: float = 0.5                      # simulated: standard deviation of the logarithms of workers' speeds

    @property
    def usual(self) -> int:
        """The number of workers of a round on average, as far as `each_round` is right, which draws look at."""
        if isinstance(self.each_round, str):
            return max(1, round(float(self.each_round.partition(":")[2]) * self.count))
        return self.each_round or self.count


@dataclass(frozen=True)
class PrivacyConfig:
    unit: Literal["none", "client", "sample"] = "none"       # whose presence is hidden
    clip: float = 1.0                        # largest norm of what one unit adds
    noise: float | str = 0.0                 # standard deviation of the noise over clip; "seeded:1.1": for tests, not private
    epsilon: float = 0.0                     # or: noise is found for this, at the end of the run
    delta: float = 1e-5
    accountant: str = "rdp"                  # one of ACCOUNTANTS
    secure: bool = False                     # ranks see masked integers of each other's clients, and their sum
    sampling: Literal["poisson", "shuffle"] = "poisson"      # of rows; of clients, workers.each_round says it
    by_row: bool = False                     # each row is a micro-batch, also where norms of rows follow from whole batches
    threshold: float = 0.6                   # share of clients that must answer for the sum to be unmasked
