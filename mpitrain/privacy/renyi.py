"""Renyi differential privacy of one step of the Gaussian mechanism on rows, or clients, that are drawn by a Poisson sampler.

A step adds noise N(0, (sigma C)^2) to a sum of parts of norm C at most, each of which is in with probability q. Of order alpha it
costs log(A) / (alpha - 1), where neighbours differ in one part that is there or not, with

    A = E[((1 - q) + q exp((2 z - 1) / (2 sigma^2)))^alpha],   z ~ N(0, sigma^2)

(Mironov, 2017; Mironov, Talwar, Zhang, 2019, whose bound is the larger of two directions, and this is the larger one).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

TAIL_TERMS = 28                # (3 + sqrt 8)^-28 is 4e-22, below the rounding of a sum of float64
ASYMPTOTIC = 6.5               # from here on the shortest term of erfcx's asymptotic series is below 1e-18 of its sum


def renyi_divergence(q: float, sigma: float, order: float) -> float:
    """What one step costs, of `order` > 1; infinite without noise."""
    assert 0 <= q <= 1 and sigma >= 0 and order > 1
    if q == 0:
        return 0.0
    if sigma == 0:
        return math.inf
    if q == 1:
        return order / (2 * sigma * sigma)
    log_a = _whole(q, sigma, int(order)) if order == int(order) else _fractional(q, sigma, order)
    return max(0.0, log_a / (order - 1))                      # exact zeros may come out as -1e-17


def _whole(q: float, sigma: float, order: int) -> float:
    """log(A) by the binomial theorem; k whole steps of the exponential have the mean exp((k^2 - k) / (2 sigma^2))."""
    logs, ways = [], 1
    for k in range(order + 1):
        logs.append(math.log(ways) + k * math.log(q) + (order - k) * math.log1p(-q) + (k * k - k) / (2 * sigma * sigma))
        ways = ways * (order - k) // (k + 1)
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(one - largest) for one in logs))


def _fractional(q: float, sigma: float, order: float) -> float:
    """log(A) of an order that is no whole number: the binomial series on both sides of the place z0 where its terms are equal.

        A = sum over i of C(order, i) (below(i) + above(i)),   z0 = sigma^2 log(1/q - 1) + 1/2
        below(i) = (1-q)^(order-i) q^i exp((i^2 - i) / (2 sigma^2)) P[N(i, sigma^2) < z0]
        above(i) = the same with j = order - i in the place of i, and P[N(j, sigma^2) > z0]

    From i > order on C(order, i) alternates in sign, and sizes fall like i^(-order-2) only: to stop where a term is small takes
    thousands. But they are moments: |C(order, i)| is a Beta integral, and below and above are Laplace transforms of positive
    densities at i. Of an alternating sum of moments 28 terms are enough (`alternating_weights`), without a test of convergence.
    """
    z0 = sigma * sigma * (math.log1p(-q) - math.log(q)) + 0.5
    first = int(order) + 1                                    # of the terms that alternate
    logs, signs = [], []
    weights = [1.0] * first + list(alternating_weights(TAIL_TERMS))
    log_ways, sign = 0.0, 1.0                                 # C(order, i)
    for i, weight in enumerate(weights):
        if weight:
            log_size = log_ways + order * math.log1p(-q) + math.log(weight)
            logs += [log_size + _side(i, z0, sigma), log_size + _side(order - i, z0, sigma, above=True)]
            signs += [sign, sign]
        log_ways += math.log(abs(order - i)) - math.log(i + 1)
        sign *= 1.0 if order > i else -1.0
    largest = max(logs)
    return largest + math.log(math.fsum(s * math.exp(one - largest) for s, one in zip(signs, logs)))


def _side(j: float, z0: float, sigma: float, *, above: bool = False) -> float:
    """log of (q / (1-q))^j exp((j^2 - j) / (2 sigma^2)) P[N(j, sigma^2) < z0], or > z0, without the difference of large numbers:
    the first two are exp(j (j - 2 z0) / (2 sigma^2)), as z0 has it."""
    x = (z0 - j if above else j - z0) / (math.sqrt(2) * sigma)
    if x <= 0:
        return j * (j - 2 * z0) / (2 * sigma * sigma) + math.log(0.5 * math.erfc(x))
    return -z0 * z0 / (2 * sigma * sigma) + math.log(0.5 * erfcx(x))


def erfcx(x: float) -> float:
    """exp(x^2) erfc(x) for x >= 0, where erfc alone would be zero."""
    if x < ASYMPTOTIC:
        return math.exp(x * x) * math.erfc(x)
    term, total, k = 1.0, 1.0, 1
    while True:
        smaller = -term * (2 * k - 1) / (2 * x * x)
        if abs(smaller) >= abs(term) or total + smaller == total:
            return total / (x * math.sqrt(math.pi))
        term, k = smaller, k + 1
        total += term


def alternating_weights(n: int) -> Iterator[float]:
    """Weights w of the first n terms of an alternating sum: the sum of (-1)^k w[k] a[k] is that of all (-1)^k a[k], to
    (3 + sqrt 8)^-n of a[0], if a are the moments of a positive density on [0, 1] (Cohen, Rodriguez Villegas, Zagier, 2000,
    algorithm 1)."""
    d = ((3 + math.sqrt(8)) ** n + (3 - math.sqrt(8)) ** n) / 2
    b, c = -1.0, -d
    for k in range(n):
        c = b - c
        yield abs(c) / d
        b *= (k + n) * (k - n) / ((k + 0.5) * (k + 1))
