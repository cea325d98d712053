"""Zachary's karate club, 34 members and 78 friendships, of PyPI's package networkx: nodes with sampled neighbourhoods."""

import numpy as np

import mpitrain
from mpitrain.data import packages, write_shards

SAMPLES = (5, 5)                 # model.samples of run.toml
LEADERS = (0, 33)                # the instructor and the president: the only members whose side the model is told
CLUBS = ["Mr. Hi", "Officer"]


def neighbourhoods(neighbours, nodes, rng):
    """(rows, 1 + 5 + 25): each node, 5 of its neighbours, and 5 neighbours of each of those; some twice where there are fewer."""
    level = np.asarray(nodes)[:, None]
    levels = [level]
    for sampled in SAMPLES:
        level = np.array([[rng.choice(neighbours[node], sampled, replace=len(neighbours[node]) < sampled) for node in row]
                          for row in level]).reshape(len(level), -1)
        levels.append(level)
    return np.concatenate(levels, axis=1)


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    packages.python_package("networkx", "3.6.1")
    from networkx import karate_club_graph
    graph, rng = karate_club_graph(), np.random.default_rng(0)
    neighbours = {node: sorted(graph[node]) for node in graph}
    side = np.array([CLUBS.index(graph.nodes[node]["club"]) for node in graph])
    features = np.eye(len(graph), dtype=np.float32)          # nothing is known of a member but who it is
    others = [node for node in graph if node not in LEADERS]
    for folder, nodes in (("train", LEADERS * 256), ("test", others * 16)):
        drawn = neighbourhoods(neighbours, nodes, rng)
        write_shards(out.folder / folder, features[drawn], side[list(nodes)], kind="classification", classes=CLUBS,
                     overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
