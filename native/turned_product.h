/* Products of few rows by a matrix whose columns are contiguous, as of a layer's inputs by its weights: c' = b' a'.

   All of a is packed once and stays in the L2 cache, and columns of b are read as they lie, or a few at a time packed, where
   product.h would pack all of b for few rows. Tiles of c' are summed beside c and turned on their way there, a line of the cache
   at a time. The sums are those of product.h, in the same order. */

#define TOGETHER (ROWS > LANES ? ROWS : LANES)                                /* columns of c made together */

static i64 NAME(panels_of)(i64 rows) { return (rows + WIDTH - 1) / WIDTH * WIDTH; }

/* Whether it is made for these sizes and layouts, and packs less than half as much, which leaves room in the L2 cache for b: with
   a batch of 128 a layer of 784 inputs took a tenth less, one of 1024, whose inputs fill PACKED_BYTES, as long as before. */
static int NAME(turns)(i64 m, i64 n, i64 k, i64 b_term)
{
    return b_term == 1 && m % LANES == 0 && n % TOGETHER == 0 && n >= 2 * m &&
           (TOGETHER + k) * NAME(panels_of)(m) * (i64)sizeof(T) <= PACKED_BYTES;
}

/* Columns first ... of c from rows of c', `step` numbers apart; the bias is added. */
static void NAME(turn_back)(const T *from, i64 step, const T *bias, T *c, i64 m, i64 n)
{
    T block[LANES * LANES] __attribute__((aligned(CACHE_LINE)));
    for (i64 j = 0; j < TOGETHER; j += LANES) for (i64 i = 0; i < m; i += LANES) {
        NAME(turn)(from + j * step + i, step, block, LANES, LANES);
        for (i64 r = 0; r < LANES; r++) {
            V row = *(const V *)(block + r * LANES);
            if (bias) row += *(const V *)(bias + j);
            *(V *)(c + (i + r) * n + j) = row;
        }
    }
}

static void NAME(multiply_turned)(const T *a, const T *b, const T *bias, T *c, T *work, i64 m, i64 n, i64 k, i64 a_row,
                                  i64 a_term, i64 b_column)
{
    i64 size = even_parts(k, TERMS, GROUP), step = NAME(panels_of)(m);
    T *left = work, *sums = left + TERMS * ROWS, *right = sums + TOGETHER * step;
    int in_place = b_column * sizeof(T) % SAME_PLACES != 0;
    const NAME(Tile) *tiles = in_place ? NAME(placed_tile) : NAME(whole_tile);
    for (i64 r0 = 0; r0 < k; r0 += size)
        NAME(pack_columns)(a + r0 * a_term, a_term, a_row, least(k - r0, size), m, right + r0 * step);
    for (i64 j = 0; j < n; j += ROWS) {
        T *to = sums + j % TOGETHER * step;
        for (i64 r0 = 0; r0 < k; r0 += size) {
            i64 terms = least(k - r0, size);
            const T *from = b + j * b_column + r0;
            Ahead next = look_ahead(from + ROWS * b_column, sizeof(T), b_column, least(n - j - ROWS, ROWS), terms);
            NAME(Factors) f = {in_place ? from : left, b_column, right + r0 * step, NULL, 0, terms, {0}};
            if (!in_place) NAME(pack_rows)(from, b_column, 1, ROWS, terms, left);
            for (i64 i = 0; i < m; i += WIDTH, f.b += terms * WIDTH) {
                f.run = take(&next, terms / GROUP * 2);
                tiles[(least(m - i, WIDTH) - 1) / LANES](&f, to + i, step, r0 > 0, NULL);
            }
        }
        if ((j + ROWS) % TOGETHER == 0) {
            i64 first = j + ROWS - TOGETHER;
            NAME(turn_back)(sums, step, bias ? bias + first : NULL, c + first, m, n);
        }
    }
}

#undef TOGETHER
