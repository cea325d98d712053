"""How much longer the slowest of n ranks takes than the mean one, where their seconds are spread log-normally.

In synchronous training each step lasts as long as its slowest rank. With independent normal deviates Z of the log of its seconds,
the step takes E[max of n exp(s Z)] / E[exp(s Z)] times the mean: for small s about 1 + s E[max of n Z], so 1.14 s more of 1 at 8
ranks for s = 0.1, and 1.24 at 64 (Tippett, 1925, has the expected largest of n normal deviates).
"""

from __future__ import annotations

from functools import lru_cache
from math import erf, exp, inf, pi, sqrt

from mpitrain.errors import ConfigError

ENDS, STEPS = 12.0, 2400                                      # deviates within 12, in steps of 0.01


@lru_cache(maxsize=1024)
def straggler_factor(n: int, spread: float) -> float:
    """The mean seconds of the slowest of n ranks over the mean seconds of one; `spread` is the standard deviation of the log.

    ConfigError for a spread that is negative or no number.
    """
    if not 0 <= spread < inf:
        raise ConfigError(f"the spread of the ranks' steps is {spread}; it should be a number, 0 or more")
    if n == 1 or spread == 0:
        return 1.0
    width = 2 * ENDS / STEPS
    total = 0.0
    for i in range(STEPS + 1):
        z = -ENDS + i * width + spread                        # exp(s z) phi(z) / exp(s^2 / 2) is phi(z - s)
        below = 0.5 * (1 + erf(z / sqrt(2)))
        total += exp(-(z - spread) ** 2 / 2) * below ** (n - 1)
    return n * total * width / sqrt(2 * pi)
