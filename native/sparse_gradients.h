/* What training needs of blocks, for one number type T: their values out of a weight, and the gradients of x and of the weight.

   Both gradients hold HEIGHT vectors of g in registers, those that a row of blocks meets, and go along its blocks: each block adds
   to sums of its own, a vector, HEIGHT products one after the other. The sums are those of product.c, in the same order. */

/* values (blocks, HEIGHT) of w (n, k). */
int NAME(block_values)(const T *w, const i64 *starts, const int32_t *columns, T *values, i64 n, i64 k, i64 n_starts, i64 blocks)
{
    const i64 groups = n / HEIGHT, pieces = pieces_of(k);
    if (n % HEIGHT || wrong(starts, n_starts, columns, groups, blocks, k) || unordered(starts, columns, groups, pieces)) return 2;
    for (i64 g = 0; g < groups; g++) {
        const i64 end = starts[(g + 1) * pieces];
        for (i64 b = starts[g * pieces], stop; b < end; b = stop) {
            const i64 c0 = columns[b] / LANES * LANES;
            for (stop = b + 1; stop < end && columns[stop] < c0 + LANES; stop++);
            for (i64 v = 0; v < HEIGHT; v += LANES) {
                const T *from = w + (g * HEIGHT + v) * k + c0;
                if (c0 + LANES <= k) {
                    V row[LANES];
                    UNROLL for (int l = 0; l < LANES; l++) row[l] = *(const V *)(from + l * k);
                    NAME(shuffled)(row, LANES);
                    for (i64 i = b; i < stop; i++) *(V *)(values + i * HEIGHT + v) = row[columns[i] - c0];
                } else for (i64 i = b; i < stop; i++)
                    for (i64 l = 0; l < LANES; l++) values[i * HEIGHT + v + l] = from[l * k + columns[i] - c0];
            }
        }
    }
    return 0;
}

/* by_w (n, k) of the sums (blocks, HEIGHT), zero elsewhere. */
static void NAME(write_blocks)(const T *sums, const i64 *starts, i64 pieces, const int32_t *columns, T *by_w, i64 n, i64 k)
{
    for (i64 g = 0; g < n / HEIGHT; g++) for (i64 v = 0; v < HEIGHT; v += LANES) {
        i64 b = starts[g * pieces], end = starts[(g + 1) * pieces], stop;
        for (i64 c0 = 0; c0 < k; c0 += LANES, b = stop) {
            T *to = by_w + (g * HEIGHT + v) * k + c0;
            V row[LANES] = {0};
            for (stop = b; stop < end && columns[stop] < c0 + LANES; stop++)
                row[columns[stop] - c0] = *(const V *)(sums + stop * HEIGHT + v);
            NAME(shuffled)(row, LANES);
            if (c0 + LANES <= k) UNROLL for (int l = 0; l < LANES; l++) *(V *)(to + l * k) = row[l];
            else for (int l = 0; l < LANES; l++) memcpy(to + l * k, row + l, (k - c0) * sizeof(T));
        }
    }
}

/* The terms first .. stop of a row of blocks, added to columns of by_x turned; left[j] is column j of g there. */
INLINE void NAME(to_columns)(const V *left, const int32_t *columns, const T *values, i64 blocks, T *part, const int first,
                             const int stop)
{
    i64 b = 0;
    for (; b + BESIDE <= blocks; b += BESIDE) {
        V sum[BESIDE];
        UNROLL for (int q = 0; q < BESIDE; q++) sum[q] = *(const V *)(part + columns[b + q] * (i64)LANES);
        UNROLL for (int j = first; j < stop; j++)
            UNROLL for (int q = 0; q < BESIDE; q++) sum[q] += left[j] * values[(b + q) * HEIGHT + j];
        UNROLL for (int q = 0; q < BESIDE; q++) *(V *)(part + columns[b + q] * (i64)LANES) = sum[q];
    }
    for (; b < blocks; b++) {
        V sum = *(const V *)(part + columns[b] * (i64)LANES);
        UNROLL for (int j = first; j < stop; j++) sum += left[j] * values[b * HEIGHT + j];
        *(V *)(part + columns[b] * (i64)LANES) = sum;
    }
}

/* The terms n0 .. stop, of `rows` rows of g: part (k, LANES) is their sum. */
static void NAME(piece_of_terms)(const T *g, i64 rows, const i64 *starts, i64 pieces, const int32_t *columns, const T *values,
                                 T *part, i64 n, i64 k, i64 n0, i64 stop)
{
    memset(part, 0, k * LANES * sizeof(T));
    for (i64 j0 = n0, j1; j0 < stop; j0 = j1) {
        const i64 group = j0 / HEIGHT, first = starts[group * pieces], count = starts[(group + 1) * pieces] - first;
        j1 = least(stop, (group + 1) * HEIGHT);
        V left[HEIGHT];
        for (int v = 0; v < HEIGHT; v += LANES) {
            UNROLL for (int i = 0; i < LANES; i++) left[v + i] = i < rows ? *(const V *)(g + i * n + group * HEIGHT + v) : (V){0};
            NAME(shuffled)(left + v, LANES);
        }
        const int32_t *c = columns + first;
        const T *from = values + first * HEIGHT;
        if (j1 - j0 == HEIGHT) NAME(to_columns)(left, c, from, count, part, 0, HEIGHT);
        else if (j0 % HEIGHT == 0) NAME(to_columns)(left, c, from, count, part, 0, HEIGHT / 2);
        else NAME(to_columns)(left, c, from, count, part, HEIGHT / 2, HEIGHT);
    }
}

/* by_x (m, k) = g (m, n) w. `work` has room for (PANEL + 16) * k numbers. */
int NAME(block_input_gradient)(const T *g, const i64 *starts, const int32_t *columns, const T *values, T *work, T *by_x, i64 m, i64 n,
                               i64 k, i64 n_starts, i64 blocks)
{
    const i64 groups = n / HEIGHT, pieces = pieces_of(k), size = piece_of(n);
    if (n % HEIGHT || wrong(starts, n_starts, columns, groups, blocks, k)) return 2;
    T *part = work + PANEL * k;
    for (i64 i0 = 0; i0 < m; i0 += PANEL) {
        const i64 rows = least(m - i0, PANEL);
        if (n <= 0) memset(work, 0, PANEL * k * sizeof(T));
        for (i64 n0 = 0; n0 < n; n0 += size) for (i64 i = 0; i < rows; i += LANES) {
            T *total = work + i * k;
            NAME(piece_of_terms)(g + (i0 + i) * n, least(rows - i, LANES), starts, pieces, columns, values, n0 ? part : total, n,
                                 k, n0, least(n, n0 + size));
            if (n0) for (i64 c = 0; c < k * LANES; c += LANES) *(V *)(total + c) = *(const V *)(part + c) + *(const V *)(total + c);
        }
        for (i64 i = 0; i < rows; i += LANES) {
            const T *total = work + i * k;
            T *to = by_x + (i0 + i) * k;
            i64 c = 0;
            if (rows - i >= LANES) for (; c + LANES <= k; c += LANES) NAME(turn)(total + c * LANES, LANES, to + c, k, LANES);
            for (; c < k; c++) for (i64 r = 0; r < least(rows - i, LANES); r++) to[r * k + c] = total[c * LANES + r];
        }
    }
    return 0;
}

/* LANES rows of g and of x turned: products of their terms, added to the sums of a row of blocks or the first of them. */
INLINE void NAME(to_blocks)(const T *g, i64 rows, i64 n, const T *turned, const int32_t *columns, i64 blocks, T *sums, const int add)
{
    V left[LANES][PER_BLOCK];
    for (int i = 0; i < LANES; i++)
        UNROLL for (int v = 0; v < PER_BLOCK; v++) left[i][v] = i < rows ? *(const V *)(g + i * n + v * LANES) : (V){0};
#define TO(count)                                                                                                               \
    do {                                                                                                                        \
        V sum[count][PER_BLOCK];                                                                                                \
        UNROLL for (int q = 0; q < count; q++) UNROLL for (int v = 0; v < PER_BLOCK; v++)                                       \
            sum[q][v] = add ? *(const V *)(sums + (b + q) * HEIGHT + v * LANES) : (V){0};                                       \
        UNROLL for (int i = 0; i < LANES; i++) UNROLL for (int q = 0; q < count; q++) UNROLL for (int v = 0; v < PER_BLOCK; v++) \
            sum[q][v] += turned[columns[b + q] * (i64)LANES + i] * left[i][v];                                                  \
        UNROLL for (int q = 0; q < count; q++) UNROLL for (int v = 0; v < PER_BLOCK; v++)                                       \
            *(V *)(sums + (b + q) * HEIGHT + v * LANES) = sum[q][v];                                                            \
    } while (0)
    i64 b = 0;
    for (; b + BESIDE <= blocks; b += BESIDE) TO(BESIDE);
    for (; b < blocks; b++) TO(1);
#undef TO
}

/* by_w (n, k) = g' (n, m) x (m, k) where w has blocks, zero elsewhere. `work` has room for MOST_ROWS * k + 32 * blocks numbers. */
int NAME(block_weight_gradient)(const T *g, const T *x, const i64 *starts, const int32_t *columns, T *work, T *by_w, i64 m, i64 n,
                                i64 k, i64 n_starts, i64 blocks)
{
    const i64 groups = n / HEIGHT, pieces = pieces_of(k), size = piece_of(m);
    if (n % HEIGHT || wrong(starts, n_starts, columns, groups, blocks, k) || unordered(starts, columns, groups, pieces)) return 2;
    T *turned = work, *total = work + MOST_ROWS * k, *part = total + HEIGHT * blocks;
    if (m <= 0) memset(total, 0, HEIGHT * blocks * sizeof(T));
    for (i64 m0 = 0; m0 < m; m0 += size) {
        const i64 end = least(m, m0 + size);
        T *sums = m0 ? part : total;
        for (i64 i0 = m0; i0 < end; i0 += MOST_ROWS) {
            const i64 rows = least(end - i0, MOST_ROWS);
            for (i64 i = 0; i < rows; i += LANES)
                NAME(turn_rows)(x + (i0 + i) * k, least(rows - i, LANES), k, turned + i * k, LANES);
            for (i64 group = 0; group < groups; group++) {
                const i64 first = starts[group * pieces], count = starts[(group + 1) * pieces] - first;
                for (i64 i = 0; i < rows; i += LANES) {
                    const T *left = g + (i0 + i) * n + group * HEIGHT;
                    T *to = sums + first * HEIGHT;
                    if (i0 + i > m0) NAME(to_blocks)(left, least(rows - i, LANES), n, turned + i * k, columns + first, count, to, 1);
                    else NAME(to_blocks)(left, least(rows - i, LANES), n, turned + i * k, columns + first, count, to, 0);
                }
            }
        }
        if (m0) for (i64 b = 0; b < HEIGHT * blocks; b += LANES) *(V *)(total + b) = *(const V *)(part + b) + *(const V *)(total + b);
    }
    NAME(write_blocks)(total, starts, pieces, columns, by_w, n, k);
    return 0;
}

#undef V
#undef MASK
#undef PER_BLOCK
