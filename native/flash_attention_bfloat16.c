/* Attention by blocks of floats, whose products round their factors to bfloat16 (to the nearest, ties to even) and add up in
   float: queries (scaled), keys, values, weights and gradients. Softmax, its sums and what is kept of them are float;
   flash_attention.h has the order. Weights are rounded before they are normalised; their sum is that of the weights that are not
   rounded. Numbers and results of products below 2^-126 are zeros to the instruction. */

#include "flash_common.h"

#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")              /* as the loops that it serves */
#endif
#include "pairs.h"
#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC pop_options
#endif

#define ADD_SCALED(sum, a, b) ((V)add_products((Floats)(sum), bits_of(a), (Words)(b)))
#define PAIR 2

/* Whether attention runs on the CPU's own bfloat16 instruction. */
int flash_attention_bfloat16_is_fast(void) { return HAS_INSTRUCTION; }

/* Room that a call needs, from a cache line on. */
i64 flash_attention_bfloat16_work_bytes(i64 width, i64 values, i64 keys, i64 size)
{
    i64 wide = round_up(width, FLOATS) + round_up(values, FLOATS);
    return 3 * (keys + 1) * wide * size + (2 * wide + at_least(width, values) + 4 * BLOCK) * VECTORS * VECTOR_BYTES;
}

#define T float
#define INTEGER int32_t
#define LANES FLOATS
#define NAME(name) name##_bfloat16
#define exp_of_negative_bfloat16 exp_of_negative_float32

/* FLOATS words from twice as many numbers in a row. */
INLINE Words words_bfloat16(const float *x)
{
    Words one = *(const Words *)x, two = *(const Words *)(x + FLOATS);
    return pairs_of(PICK(Mask, one, two, ORDER(EVEN, FLOATS)), PICK(Mask, one, two, ORDER(ODD, FLOATS)));
}

#include "flash_attention.h"
