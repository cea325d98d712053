/* The body of recurrent.c for one number type T. Letters: n hidden, p numbers of h (n, unless it is projected), k gates.

   gates (rows, k n): the products with the inputs, all biases in them but a GRU's of the state; after forward what the gates are,
   after backward their gradients. h, c: the states (batch, p) and (batch, n), first to last; dh, dc: their gradients, last to first.
   out (rows, p). w (k n, p), by_h (n, p) or NULL: weights of the state, and of the projection. `memory` is recurrent_memory()
   numbers from a cache line on. */

static i64 NAME(columns_of)(i64 columns) { return (columns + VECTORS * LANES - 1) / (VECTORS * LANES) * (VECTORS * LANES); }

/* Numbers that a call packs or keeps, forward or backward. */
i64 NAME(recurrent_memory)(i64 n, i64 p, i64 k)
{
    i64 forward = p * NAME(columns_of)(k * n) + n * NAME(columns_of)(p), backward = k * n * NAME(columns_of)(p) + p * NAME(columns_of)(n);
    return TERMS * ROWS + ROWS * (k * n + p) + (forward > backward ? forward : backward);
}

/* Element (r, j) of the weight is w[r * term + j * column]. */
static void NAME(pack_weight)(const T *w, i64 term, i64 column, i64 terms, i64 columns, T *to)
{
    i64 size = even_parts(terms, TERMS, GROUP);
    for (i64 r = 0; r < terms; r += size)
        NAME(pack_columns)(w + r * term, term, column, least(size, terms - r), columns, to + r * NAME(columns_of)(columns));
}

/* c (rows, columns; rows `step` apart) = a w + bias, or c + a w, for `rows` that are rows_at_once(). */
static void NAME(times)(const T *a, i64 a_row, i64 rows, const T *packed, i64 terms, i64 columns, const T *bias, int add, T *left,
                        T *c, i64 step)
{
    i64 size = even_parts(terms, TERMS, GROUP);
    int in_place = rows == ROWS && a_row * sizeof(T) % SAME_PLACES;
    const NAME(Tile) *tiles = in_place ? NAME(placed_tile) : rows == ROWS ? NAME(whole_tile) :
                              rows == ROWS / 2 ? NAME(half_tile) : NAME(row_tile);
    for (i64 r = 0; r < terms; r += size) {
        i64 count = least(size, terms - r);
        const T *added = bias && r + count == terms ? bias : NULL;
        if (!in_place) NAME(pack_rows)(a + r, a_row, 1, rows, count, left);
        NAME(Factors) f = {in_place ? a + r : left, a_row, (T *)packed + r * NAME(columns_of)(columns), NULL, 0, count,
                           {(const char *)packed, 0}};
        for (i64 j = 0; j < columns; j += VECTORS * LANES, f.b += count * VECTORS * LANES) {
            i64 there = least(columns - j, VECTORS * LANES);
            NAME(Tile) tile = tiles[(there - 1) / LANES];
            if (there % LANES == 0) tile(&f, c + j, step, add || r > 0, added ? added + j : NULL);
            else NAME(edge)(tile, &f, c + j, step, rows, there, add || r > 0, added ? added + j : NULL);
        }
    }
}

/* Row `row` of the step that a walk goes to next, or of the state before the first one. */
#define BEFORE(values, first_values, row, width) \
    ((row) < b.rows ? (values) + (b.first + (row)) * (width) : (first_values) + (row) * (width))

/* cells (rows, n) takes every c; raw (rows, n), where h is projected, every o tanh c. */
void NAME(lstm)(T *gates, T *h, T *c, T *out, T *cells, T *raw, const T *w, const T *by_h, const i64 *sizes, T *memory, i64 steps,
                i64 n, i64 p, i64 reverse)
{
    T *left = memory, *packed = left + TERMS * ROWS, *projection = packed + p * NAME(columns_of)(4 * n);
    NAME(pack_weight)(w, 1, p, p, 4 * n, packed);
    if (by_h) NAME(pack_weight)(by_h, 1, n, n, p, projection);
    for (Walk s = walk(sizes, steps, reverse); take_step(&s);)
        for (i64 i = 0, rows; i < s.rows; i += rows) {
            i64 first = s.first + i;
            rows = rows_at_once(s.rows - i);
            NAME(times)(h + i * p, p, rows, packed, p, 4 * n, NULL, 1, left, gates + first * 4 * n, 4 * n);
            for (i64 r = 0; r < rows; r++)
                NAME(lstm_gates)(gates + (first + r) * 4 * n, c + (i + r) * n, cells + (first + r) * n,
                                 (by_h ? raw : out) + (first + r) * n, n);
            if (by_h) NAME(times)(raw + first * n, n, rows, projection, n, p, NULL, 0, left, out + first * p, p);
            memcpy(h + i * p, out + first * p, rows * p * sizeof(T));
        }
}

/* c: the state before the first step. projected (rows, p), where h is: the gradient of h. */
void NAME(lstm_gradients)(T *gates, const T *dout, T *dh, T *dc, const T *c, const T *cells, T *projected, const T *w, const T *by_h,
                          const i64 *sizes, T *memory, i64 steps, i64 n, i64 p, i64 reverse)
{
    T *left = memory, *some = left + TERMS * ROWS, *packed = some + ROWS * n, *projection = packed + 4 * n * NAME(columns_of)(p);
    NAME(pack_weight)(w, p, 1, 4 * n, p, packed);
    if (by_h) NAME(pack_weight)(by_h, n, 1, p, n, projection);
    for (Walk s = walk(sizes, steps, !reverse); take_step(&s);) {
        Beyond b = beyond(&s);
        for (i64 i = 0, rows; i < s.rows; i += rows) {
            i64 first = s.first + i;
            T *by_out = dh + i * p;
            rows = rows_at_once(s.rows - i);
            NAME(add_row)(by_out, dout + first * p, rows * p);
            if (by_h) {
                memcpy(projected + first * p, by_out, rows * p * sizeof(T));
                NAME(times)(by_out, p, rows, projection, p, n, NULL, 0, left, some, n);
                by_out = some;
            }
            for (i64 r = 0; r < rows; r++)
                NAME(lstm_gates_back)(gates + (first + r) * 4 * n, by_out + r * n, dc + (i + r) * n, cells + (first + r) * n,
                                      BEFORE(cells, c, i + r, n), n);
            NAME(times)(gates + first * 4 * n, 4 * n, rows, packed, 4 * n, p, NULL, 0, left, dh + i * p, p);
        }
    }
}

/* inner (rows, n) takes what the new gate has of the state. */
void NAME(gru)(T *gates, T *h, T *out, T *inner, const T *w, const T *bias, const i64 *sizes, T *memory, i64 steps, i64 n, i64 reverse)
{
    T *left = memory, *state = left + TERMS * ROWS, *packed = state + ROWS * 3 * n;
    NAME(pack_weight)(w, 1, n, n, 3 * n, packed);
    for (Walk s = walk(sizes, steps, reverse); take_step(&s);)
        for (i64 i = 0, rows; i < s.rows; i += rows) {
            i64 first = s.first + i;
            rows = rows_at_once(s.rows - i);
            NAME(times)(h + i * n, n, rows, packed, n, 3 * n, bias, 0, left, state, 3 * n);
            for (i64 r = 0; r < rows; r++)
                NAME(gru_gates)(gates + (first + r) * 3 * n, state + r * 3 * n, inner + (first + r) * n, h + (i + r) * n,
                                out + (first + r) * n, n);
        }
}

/* states (rows, 3 n): the gradients of the products with the state, which differ from `gates` by the reset of the new gate. h: the
   state before the first step. */
void NAME(gru_gradients)(T *gates, T *states, const T *dout, T *dh, const T *h, const T *out, const T *inner, const T *w,
                         const i64 *sizes, T *memory, i64 steps, i64 n, i64 reverse)
{
    T *left = memory, *packed = left + TERMS * ROWS;
    NAME(pack_weight)(w, n, 1, 3 * n, n, packed);
    for (Walk s = walk(sizes, steps, !reverse); take_step(&s);) {
        Beyond b = beyond(&s);
        for (i64 i = 0, rows; i < s.rows; i += rows) {
            i64 first = s.first + i;
            rows = rows_at_once(s.rows - i);
            NAME(add_row)(dh + i * n, dout + first * n, rows * n);
            for (i64 r = 0; r < rows; r++)
                NAME(gru_gates_back)(gates + (first + r) * 3 * n, states + (first + r) * 3 * n, inner + (first + r) * n,
                                     dh + (i + r) * n, BEFORE(out, h, i + r, n), n);
            NAME(times)(states + first * 3 * n, 3 * n, rows, packed, 3 * n, n, NULL, 1, left, dh + i * n, n);
        }
    }
}

void NAME(rnn)(T *gates, T *h, T *out, const T *w, const i64 *sizes, T *memory, i64 steps, i64 n, i64 reverse, i64 relu)
{
    T *left = memory, *packed = left + TERMS * ROWS;
    NAME(pack_weight)(w, 1, n, n, n, packed);
    for (Walk s = walk(sizes, steps, reverse); take_step(&s);)
        for (i64 i = 0, rows; i < s.rows; i += rows) {
            i64 first = s.first + i;
            rows = rows_at_once(s.rows - i);
            NAME(times)(h + i * n, n, rows, packed, n, n, NULL, 1, left, gates + first * n, n);
            NAME(rnn_gates)(gates + first * n, out + first * n, rows * n, relu);
            memcpy(h + i * n, out + first * n, rows * n * sizeof(T));
        }
}

void NAME(rnn_gradients)(T *gates, const T *dout, T *dh, const T *out, const T *w, const i64 *sizes, T *memory, i64 steps, i64 n,
                         i64 reverse, i64 relu)
{
    T *left = memory, *packed = left + TERMS * ROWS;
    NAME(pack_weight)(w, n, 1, n, n, packed);
    for (Walk s = walk(sizes, steps, !reverse); take_step(&s);)
        for (i64 i = 0, rows; i < s.rows; i += rows) {
            i64 first = s.first + i;
            rows = rows_at_once(s.rows - i);
            NAME(add_row)(dh + i * n, dout + first * n, rows * n);
            NAME(rnn_gates_back)(gates + first * n, dh + i * n, out + first * n, rows * n, relu);
            NAME(times)(gates + first * n, n, rows, packed, n, n, NULL, 0, left, dh + i * n, n);
        }
}

#undef BEFORE
