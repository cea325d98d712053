/* What convolutions of all number types have in common: see convolution.c. */

#include <string.h>

#include "borrowed.h"
#include "geometry.h"
#include "vectors.h"
#include "views.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT ON
#define UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
/* No calls of memset for the one or two zeros beside a row, which were a third of a small convolution's time; and no loads
   carried from one round to the next, which took registers from sums. */
#pragma GCC optimize("fp-contract=fast", "no-tree-loop-distribute-patterns", "no-predictive-commoning", "no-tree-slp-vectorize")
#define UNROLL _Pragma("GCC unroll 32")
#else
#define UNROLL
#endif

/* Register tiles: ROWS x VECTORS sums in forward, LEFT x RIGHT in the gradient of the kernel, MOST_SUMS where vectors run over
   channels, CHANNELS in winograd_gradient.h. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 8
#define LEFT 4
#define RIGHT 6
#define MOST_SUMS 28
#define CHANNELS 8
#else
#define ROWS 4
#define LEFT 2
#define RIGHT 4
#define MOST_SUMS 12
#define CHANNELS 4
#endif
#define VECTORS 3
#define SLACK (VECTORS * LANES)      /* vectors may be read this far past the end */

#define GRADIENT_POSITIONS 1088      /* the kernel's gradient: LEFT rows of so many stay in a 32 KiB L1 cache, and one
                                        folding of vectors is little work beside them */
#define MAPS_BYTES (16 << 10)        /* dense_gradient.h: outputs of so many bytes stay in the L1 cache */
#define MOST_CHANNELS 160            /* of the image and the result together, in winograd_gradient.h */
#define SMALL_IMAGE 320              /* pixels of an image and its result: below, depthwise_small.h is 1.05 to 7 times as fast */
#define SIDE_BY_SIDE 64              /* pixels of an image: below, side_by_side.h is 1 to 3.6 times as fast */
#define POSITION_SLOWNESS 1.4
#define EVEN_2 0, 2
#define ODD_2 1, 3
#define HALVES_2 0, 2                                           /* the first half of each of two vectors */
#define HALVES_4 0, 1, 4, 5
#define HALVES_8 0, 1, 2, 3, 8, 9, 10, 11
#define HALVES_16 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define INLINE static inline __attribute__((always_inline))

/* sum + a * b, where a is one number, or a vector; where numbers are pairs of bfloat16, sum + both of their products. */
#ifndef ADD_SCALED
#define ADD_SCALED(sum, a, b) ((sum) + (a) * (b))
#define ADD_PRODUCT(sum, a, b) ((sum) + (a) * (b))
#endif
