"""Seconds of an exchange over parameter servers that run on the workers' own hosts (Li et al., 2014), for comparison with others.

Each of `hosts` workers sends its gradients to `servers` of these hosts, which have an equal part of the parameters each, add the
gradients up and send the new parameters back. Both directions of a host's link work at once; a host's own part stays at home.

    push    worker   out  B, on a server's host B (1 - 1/S)         server   in   B (W - 1) / S
    pull    the same bytes the other way
"""

from __future__ import annotations

from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.schedules.level_times import Level


class ServerSeconds(NamedTuple):
    """Seconds until all gradients are at their servers and added up, and until all workers have the parameters."""

    push: float
    pull: float


def server_seconds(nbytes: float, hosts: int, servers: int, level: Level) -> ServerSeconds:
    """Of `nbytes` of gradients, over the links of `level`. ConfigError unless there are 1 to `hosts` servers.

    The busiest link decides: with as many servers as hosts it carries (W-1)/W of the data each way, as in a ring, and with fewer
    (W-1)/S, more than the data.
    """
    if not 1 <= servers <= hosts:
        raise ConfigError(f"there are {servers} parameter servers on {hosts} hosts; give 1 to {hosts}")
    out = 1 - 1 / servers if servers == hosts else 1.0
    busiest = max(out, (hosts - 1) / servers) if hosts > 1 else 0.0
    messages = max(hosts, servers) - 1
    one_way = messages * level.alpha + busiest * nbytes * level.beta
    return ServerSeconds(one_way + (hosts - 1) / servers * nbytes * level.gamma, one_way)
