"""Points for Burgers' equation, and its solution by the transformation of Cole and Hopf, from which the error is measured.

    u(x, t) = - int sin(pi (x - e)) f(x - e) g(e) de / int f(x - e) g(e) de
    f(y) = exp(-cos(pi y) / (2 pi v)),  g(e) = exp(-e^2 / (4 v t))

(Basdevant et al. 1986). With e = s sqrt(4 v t) the weight g is exp(-s^2). Close to the shock, the integrand has its largest
values far from s = 0, where Gauss and Hermite's quadrature has no points, so the trapezoid rule is taken, which converges as fast
for smooth functions that vanish at both ends.
"""

import math

import numpy as np

import mpitrain
from mpitrain.data import packages, write_parts

VISCOSITY = 0.01 / math.pi
INSIDE, AROUND = 12_000, 4_000                        # points to train on: anywhere, and about the shock at x = 0
SIDE = (201, 51)                                      # points of x and of t at which the error is measured


def solution(x, t, nodes=2_001, reach=13.0):
    """u at points x (N,) and times t (N,), float64; `nodes` of the quadrature over |s| <= `reach`."""
    s = np.linspace(-reach, reach, nodes)
    found = np.empty(len(x))
    for i, (place, time) in enumerate(zip(x, t)):
        if time == 0.0:
            found[i] = -np.sin(math.pi * place)
            continue
        y = place - s * math.sqrt(4 * VISCOSITY * time)
        power = -np.cos(math.pi * y) / (2 * math.pi * VISCOSITY) - s * s
        f = np.exp(power - power.max())
        found[i] = -(np.sin(math.pi * y) * f).sum() / f.sum()
    return found


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    rng = np.random.default_rng(0)
    inside = np.stack([rng.uniform(-1, 1, INSIDE), rng.uniform(0, 1, INSIDE)], axis=1)
    around = np.stack([np.clip(rng.normal(0, 0.1, AROUND), -1, 1), rng.uniform(0, 1, AROUND)], axis=1)
    points = np.concatenate([inside, around])
    x, t = (grid.reshape(-1) for grid in np.meshgrid(np.linspace(-1, 1, SIDE[0]), np.linspace(0, 1, SIDE[1]), indexing="ij"))
    u = solution(x, t)
    known = np.full(len(u), 1 / np.mean(u * u))
    write_parts(out.folder, {"train": (points, np.zeros_like(points)),
                             "test": (np.stack([x, t], axis=1), np.stack([u, known], axis=1))},
                kind="regression", overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
