"""Zachary's karate club, 34 members and 78 friendships, of PyPI's package networkx: nodes with sampled neighbourhoods."""

import numpy as np

import mpitrain
from mpitrain.data import packages, write_parts
from mpitrain.errors import name_and_text

SAMPLES = (5, 5)                 # model.samples of run.toml
LEADERS = (0, 33)                # the instructor and the president: the only members whose side the model is told
CLUBS = ["Mr. Hi", "Officer"]


def club():
    """The graph; its members are 0 ... 33, and `club` of each is its side. It is the one of 78 friendships that is expected."""
    file = packages.python_file("networkx", "3.6.1", "networkx/generators/social.py")      # which has the friendships in it
    try:
        from networkx.generators.social import karate_club_graph
        graph = karate_club_graph()
    except Exception as error:                                # any file that is imported may be damaged
        raise file.error(f"has no karate_club_graph: {' '.join(name_and_text(error).split())}") from None
    sides = [graph.nodes[node].get("club") for node in graph]
    if (list(graph), graph.number_of_edges()) != (list(range(34)), 78) or set(sides) != set(CLUBS):
        raise file.error(f"expected 34 members, 78 friendships and the sides {', '.join(CLUBS)}, found {len(graph)}, "
                         f"{graph.number_of_edges()} and {', '.join(sorted(map(str, set(sides))))}", dataset="club")
    return graph


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
    graph, rng = club(), np.random.default_rng(0)
    neighbours = {node: sorted(graph[node]) for node in graph}
    side = np.array([CLUBS.index(graph.nodes[node]["club"]) for node in graph])
    features = np.eye(len(graph), dtype=np.float32)          # nothing is known of a member but who it and its friends are
    for node, friends in neighbours.items():
        features[node, friends] = 1
    others = [node for node in graph if node not in LEADERS]
    parts = {part: (features[neighbourhoods(neighbours, nodes, rng)], side[list(nodes)])
             for part, nodes in (("train", LEADERS * 256), ("test", others * 16))}
    write_parts(out.folder, parts, kind="classification", classes=CLUBS, overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
