/* Matrix products c (m, n) = a (m, k) b (k, n) + bias (n; or NULL) of floats whose operands are rounded to bfloat16 (to the
   nearest, ties to even) and whose sums are floats; one thread. The loops are those of product.c.

   AVX512-BF16 multiplies two pairs of numbers and adds both products to a float, so packing puts two neighbouring terms into
   one 32-bit word, the first in its low half; it is also where the rounding happens, so that nothing in 16 bits is ever
   stored outside the blocks in the caches. Without the instruction the same sums are made of two fused multiply-adds, in
   its order (the later term of a pair first): slower than product.c, there for tests. The instruction takes numbers below
   2^-126 for zeros and makes zeros of results below it, the multiply-adds do not.

   A number of c is the sum over blocks of TERMS terms, each summed pair after pair, and the bias last. That does not depend
   on m, n, or the layout of a and b: a row of the result has the same bits whatever batch it is part of. */

#include "tile.h"
#include "pairs.h"

#define TERMS 512                   /* part of the order of the sums */
#define PAIRS (TERMS / 2)
#define PACKED_BYTES (528 << 10)    /* of b: in a 1 MiB L2 cache with what passes through */
#define NEAR 8                      /* pairs from a line's way into the L1 cache to its use */
#define LINE 64

#define T u32
#define LANES FLOATS
#define WIDTH (VECTORS * LANES)     /* columns of a panel of b */
#define NAME(name) name##_pairs
#define INTEGER int32_t

#include "turn.h"

/* Whether products run on the CPU's own bfloat16 instruction. */
int product_bfloat16_is_fast(void) { return HAS_INSTRUCTION; }

i64 product_bfloat16_work_bytes(void) { return PAIRS * ROWS * sizeof(u32) + PACKED_BYTES; }

/* The pairs that `terms` numbers make, `term` apart; an odd number's last partner is zero. */
INLINE u32 pair_at(const float *from, i64 term, i64 pair, i64 terms)
{
    return pair_of(from[2 * pair * term], 2 * pair + 1 < terms ? from[(2 * pair + 1) * term] : 0);
}

/* LANES pairs from 2 LANES numbers in a row. */
INLINE Words pairs_in_a_row(const float *from)
{
    Words one = *(const Words *)from, two = *(const Words *)(from + LANES);
    return pairs_of(PICK(Mask, one, two, ORDER(EVEN, LANES)), PICK(Mask, one, two, ORDER(ODD, LANES)));
}

/* `lines` runs of 2 LANES terms, `step` apart, turned round: pair r of line i goes to to[r * to_step + i]. */
INLINE void turn_lines(const float *from, i64 step, u32 *to, i64 to_step, const int lines)
{
    Words kept[LANES];
    for (int i = 0; i < lines; i++) kept[i] = pairs_in_a_row(from + i * step);
    turn_pairs((const u32 *)kept, LANES, to, to_step, lines);
}

/* ROWS rows of a: to[r * ROWS + i] = terms 2r and 2r + 1 of row i, zero for rows that are not there. */
INLINE void pack_rows(const float *a, i64 row, i64 term, i64 rows, i64 terms, u32 *to)
{
    i64 r = 0, pairs = (terms + 1) / 2;
    if (rows == ROWS && row == 1)
        for (; r < terms / 2; r++)
            for (int i = 0; i < ROWS; i++) to[r * ROWS + i] = pair_of(a[2 * r * term + i], a[(2 * r + 1) * term + i]);
    if (rows == ROWS && term == 1 && ROWS <= LANES)
        for (; r + LANES <= terms / 2; r += LANES) turn_lines(a + 2 * r, row, to + r * ROWS, LANES, ROWS <= LANES ? ROWS : 1);
    for (; r < pairs; r++)
        for (i64 i = 0; i < ROWS; i++) to[r * ROWS + i] = i < rows ? pair_at(a + i * row, term, r, terms) : 0;
}

/* Columns of b in panels of WIDTH: to[(p * pairs + r) * WIDTH + j] = terms 2r and 2r + 1 of column p * WIDTH + j, zero past
   the last column. */
static void pack_columns(const float *b, i64 term, i64 column, i64 terms, i64 columns, u32 *to)
{
    i64 pairs = (terms + 1) / 2;
    for (i64 j = 0; j < columns; j += LANES) {
        u32 *panel = to + j / WIDTH * pairs * WIDTH + j % WIDTH;
        i64 r = 0, there = columns - j < LANES ? columns - j : LANES;
        if (there == LANES && column == 1)
            for (; r < terms / 2; r++) {
                const float *from = b + 2 * r * term + j;
                *(Words *)(panel + r * WIDTH) = pairs_of(*(const Words *)from, *(const Words *)(from + term));
            }
        if (there == LANES && term == 1)
            for (; r + LANES <= terms / 2; r += LANES) turn_lines(b + 2 * r + j * column, column, panel + r * WIDTH, WIDTH, LANES);
        for (; r < pairs; r++)
            for (i64 i = 0; i < LANES; i++) panel[r * WIDTH + i] = i < there ? pair_at(b + (j + i) * column, term, r, terms) : 0;
    }
    i64 rest = columns % WIDTH;
    u32 *last = to + (columns - rest) * pairs;
    if (rest) for (i64 r = 0; r < pairs; r++) for (i64 j = (rest + LANES - 1) / LANES * LANES; j < WIDTH; j++) last[r * WIDTH + j] = 0;
}

/* ROWS x (vectors * LANES) numbers of c: the products of one block of terms, added to what is there or not. */
INLINE void tile(const u32 *restrict a, const u32 *restrict b, i64 pairs, float *restrict c, i64 step, int add, const float *bias,
                 const int vectors)
{
    Floats sum[ROWS][VECTORS] = {0};
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < vectors; v++) __builtin_prefetch(c + i * step + v * LANES, 1, 3);
    const u32 *stop = b + pairs * WIDTH;
    do {                             /* at least once: a loop that may be left out makes GCC keep the sums in memory around it */
        Words right[VECTORS];
        for (int v = 0; v < vectors; v++) {
            right[v] = *(const Words *)(b + v * LANES);
            if (v * VECTOR_BYTES % LINE == 0) __builtin_prefetch(b + NEAR * WIDTH + v * LANES, 0, 3);
        }
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < vectors; v++) sum[i][v] = add_products(sum[i][v], a[i], right[v]);
        a += ROWS, b += WIDTH;
    } while (b < stop);
    if (add) for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < vectors; v++) sum[i][v] += *(const Floats *)(c + i * step + v * LANES);
    if (bias) for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < vectors; v++) sum[i][v] += *(const Floats *)(bias + v * LANES);
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < vectors; v++) *(Floats *)(c + i * step + v * LANES) = sum[i][v];
}

/* A tile that c holds a part of: computed beside it, and that part copied. */
static void edge(const u32 *a, const u32 *b, i64 pairs, float *c, i64 step, i64 rows, i64 columns, int add, const float *bias)
{
    float whole[ROWS * WIDTH] = {0}, added[WIDTH] = {0};
    if (add) for (i64 i = 0; i < rows; i++) memcpy(whole + i * WIDTH, c + i * step, columns * sizeof(float));
    if (bias) memcpy(added, bias, columns * sizeof(float));
    tile(a, b, pairs, whole, WIDTH, add, bias ? added : NULL, VECTORS);
    for (i64 i = 0; i < rows; i++) memcpy(c + i * step, whole + i * WIDTH, columns * sizeof(float));
}

/* Element (i, r) of a is a[i * a_row + r * a_term], (r, j) of b is b[r * b_term + j * b_column]; one step of each is 1. Rows
   of c are contiguous. `work` holds product_bfloat16_work_bytes() bytes from a cache line on. */
void product_bfloat16(const float *a, const float *b, const float *bias, float *c, u32 *work, i64 m, i64 n, i64 k, i64 a_row,
                      i64 a_term, i64 b_term, i64 b_column)
{
    u32 *left = work, *right = work + PAIRS * ROWS;
    for (i64 i = 0; i < m * n && k <= 0; i++) c[i] = bias ? bias[i % n] : 0;
    if (k <= 0) return;
    i64 most = PACKED_BYTES / (i64)sizeof(u32) / (k < TERMS ? (k + 1) / 2 : PAIRS) / WIDTH * WIDTH;    /* columns packed at a time */
    for (i64 j0 = 0; j0 < n; j0 += most) for (i64 r0 = 0; r0 < k; r0 += TERMS) {
        i64 columns = n - j0 < most ? n - j0 : most, terms = k - r0 < TERMS ? k - r0 : TERMS, pairs = (terms + 1) / 2;
        const float *added = bias && r0 + terms == k ? bias + j0 : NULL;
        pack_columns(b + r0 * b_term + j0 * b_column, b_term, b_column, terms, columns, right);
        for (i64 i = 0; i < m; i += ROWS) {
            i64 rows = m - i < ROWS ? m - i : ROWS;
            float *to = c + i * n + j0;
            pack_rows(a + i * a_row + r0 * a_term, a_row, a_term, rows, terms, left);
            for (i64 j = 0; j < columns; j += WIDTH) {
                const u32 *panel = right + j * pairs;
                const float *last = added ? added + j : NULL;
                i64 there = columns - j < WIDTH ? columns - j : WIDTH;
                if (rows == ROWS && there == WIDTH) tile(left, panel, pairs, to + j, n, r0 > 0, last, VECTORS);
                else if (rows == ROWS && there == 2 * LANES) tile(left, panel, pairs, to + j, n, r0 > 0, last, 2);
                else if (rows == ROWS && there == LANES) tile(left, panel, pairs, to + j, n, r0 > 0, last, 1);
                else edge(left, panel, pairs, to + j, n, rows, there, r0 > 0, last);
            }
        }
    }
}
