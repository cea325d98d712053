/* Attention to some keys and attention to others become attention to all of them, in one pass over both results. The file includes
   itself for float and double. */

#ifndef T

#include "geometry.h"
#include "vector_math.h"

/* As an array of 64-bit integers; steps are in numbers, between batches, heads and queries. */
typedef struct { i64 batch, head, row; } Steps;
typedef struct { i64 batches, heads, queries, values; Steps out, other; } Shape;

#define SOURCE "joined_attention.c"
#include "both.h"

#else

/* The sum of a query's exps above `top`, from its sum above a largest score of its own; 0 where it met no key. */
INLINE T NAME(share)(T inverse, T largest, T top) { return inverse == 0 ? 0 : NAME(exp)(largest - top) / inverse; }

/* out, tops and inverses become those of all keys. A query without any key has zeros, here and in what comes of it. */
void NAME(join)(T *tops, T *inverses, T *out, const T *other_tops, const T *other_inverses, const T *other, const Shape *n)
{
    i64 i = 0;
    for (i64 b = 0; b < n->batches; b++) for (i64 h = 0; h < n->heads; h++) for (i64 q = 0; q < n->queries; q++, i++) {
        T *restrict mine = out + b * n->out.batch + h * n->out.head + q * n->out.row;
        const T *restrict theirs = other + b * n->other.batch + h * n->other.head + q * n->other.row;
        T top = other_inverses[i] == 0 || (inverses[i] != 0 && tops[i] > other_tops[i]) ? tops[i] : other_tops[i];
        T before = NAME(share)(inverses[i], tops[i], top), added = NAME(share)(other_inverses[i], other_tops[i], top);
        T total = before + added, inverse = total == 0 ? 0 : 1 / total;
        before *= inverse;
        added *= inverse;
        for (i64 j = 0; j < n->values; j++) mine[j] = mine[j] * before + theirs[j] * added;
        tops[i] = top;
        inverses[i] = inverse;
    }
}

#endif
