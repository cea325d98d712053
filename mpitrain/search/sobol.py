"""The Sobol sequence: points that fill a cube evenly, each made from its number alone.

Direction numbers: S. Joe and F. Y. Kuo (2008), "Constructing Sobol sequences with better two-dimensional projections", file
new-joe-kuo-6.21201, which SciPy and PyTorch have too. Points come in the order of Gray codes (Antonov and Saleev 1979), as theirs
"""

from __future__ import annotations

import functools

BITS = 30                 # of a coordinate, and the logarithm of the number of points

# Of each dimension from the second on: its primitive polynomial, whose bits are the coefficients, and the first m.
JOE_KUO = """
3: 1; 7: 1 3; 11: 1 3 1; 13: 1 1 1; 19: 1 1 3 3; 25: 1 3 5 13; 37: 1 1 5 5 17; 41: 1 1 5 5 5; 47: 1 1 7 11 19; 55: 1 1
5 1 1; 59: 1 1 1 3 11; 61: 1 3 5 5 31; 67: 1 3 3 9 7 49; 91: 1 1 1 15 21 21; 97: 1 3 1 13 27 49; 103: 1 1 1 15 7 5;
109: 1 3 1 15 13 25; 115: 1 1 5 5 19 61; 131: 1 3 7 11 23 15 103; 137: 1 3 7 13 13 15 69; 143: 1 1 3 13 7 35 63; 145:
1 3 5 9 1 25 53; 157: 1 3 1 13 9 35 107; 167: 1 3 1 5 27 61 31; 171: 1 1 5 11 19 41 61; 185: 1 3 5 3 3 13 69; 191: 1 1
7 13 1 19 1; 193: 1 3 7 5 13 19 59; 203: 1 1 3 9 25 29 41; 211: 1 3 5 13 23 1 55; 213: 1 3 7 3 13 59 17; 229: 1 3 1 3
5 53 69; 239: 1 1 5 5 23 33 13; 241: 1 1 7 7 1 61 123; 247: 1 1 7 9 13 61 49; 253: 1 3 3 5 3 55 33; 285: 1 3 1 15 31
13 49 245; 299: 1 3 5 15 31 59 63 97; 301: 1 3 1 11 11 11 77 249; 333: 1 3 1 11 27 43 71 9; 351: 1 1 7 15 21 11 81 45;
355: 1 3 7 3 25 31 65 79; 357: 1 3 1 1 19 11 3 205; 361: 1 1 5 9 19 21 29 157; 369: 1 3 7 11 1 33 89 185; 391: 1 3 3 3
15 9 79 71; 397: 1 3 7 11 15 39 119 27; 425: 1 1 3 1 11 31 97 225; 451: 1 1 1 3 23 43 57 177; 463: 1 3 7 7 17 17 37
71; 487: 1 3 1 5 27 63 123 213; 501: 1 1 3 5 11 43 53 133; 529: 1 3 5 5 29 17 47 173 479; 539: 1 3 3 11 3 1 109 9 69;
545: 1 1 1 5 17 39 23 5 343; 557: 1 3 1 5 25 15 31 103 499; 563: 1 1 1 11 11 17 63 105 183; 601: 1 1 5 11 9 29 97 231
363; 607: 1 1 5 15 19 45 41 7 383; 617: 1 3 7 7 31 19 83 137 221; 623: 1 1 1 3 23 15 111 223 83; 631: 1 1 5 13 31 15
55 25 161; 637: 1 1 3 13 25 47 39 87 257
"""
LARGEST = JOE_KUO.count(":") + 1


@functools.cache
def directions(dimension: int) -> tuple[int, ...]:
    """The BITS direction numbers of a dimension, counted from 0, as integers of BITS bits.

    m_k = 2 a_1 m_(k-1) ^ 4 a_2 m_(k-2) ^ ... ^ 2^s m_(k-s) ^ m_(k-s), for a polynomial of degree s; v_k = m_k / 2^k.
    """
    if dimension == 0:
        return tuple(1 << (BITS - 1 - k) for k in range(BITS))
    polynomial, _, first = JOE_KUO.split(";")[dimension - 1].partition(":")
    a, m = int(polynomial), [int(number) for number in first.split()]
    degree = len(m)
    for k in range(degree, BITS):
        new = m[k - degree] ^ (m[k - degree] << degree)
        for i in range(1, degree):
            if a >> (degree - i) & 1:
                new ^= m[k - i] << i
        m.append(new)
    return tuple(number << (BITS - 1 - k) for k, number in enumerate(m))


def sobol(dimensions: int, number: int) -> list[float]:
    """Point `number`, counted from 0, of the sequence in so many dimensions; after 2^BITS points it begins again."""
    gray = (number ^ (number >> 1)) & ((1 << BITS) - 1)
    point = []
    for dimension in range(dimensions):
        bits = 0
        for k, direction in enumerate(directions(dimension)):
            if gray >> k & 1:
                bits ^= direction
        point.append(bits / (1 << BITS))
    return point
