/* Attention by blocks for float and double: see flash_attention.h. */

#ifndef T

#include "flash_common.h"

#define ADD_SCALED(sum, a, b) ((sum) + (a) * (b))
#define PAIR 1

/* Room that a call needs for numbers of `size` bytes, from a cache line on. */
i64 flash_attention_work_bytes(i64 width, i64 values, i64 keys, i64 size)
{
    i64 lanes = VECTOR_BYTES / size, wide = round_up(width, lanes) + round_up(values, lanes);
    return 2 * keys * wide * size + (2 * wide + at_least(width, values) + 4 * BLOCK) * VECTORS * VECTOR_BYTES;
}

#define SOURCE "flash_attention.c"
#include "both.h"

#else

#include "flash_attention.h"
#include "one_query.h"
#undef V
#undef MASK

#endif
