/* Complex lines in and out of the vectors of fft_passes.h, and those transforms, for one number type T. */

/* Working memory: two columns of vectors, the matrix of a long line, a long line. */
typedef struct { T *a, *b, *matrix, *line; } NAME(Work);

static NAME(Work) NAME(work)(const Plan *plan, void *memory)
{
    const i64 n1 = plan->columns.length, n2 = plan->rows.length, column = ((n1 > n2 ? n1 : n2) + 1) * PAIR;
    T *matrix = (T *)memory + 2 * column;
    T *line = matrix + (n1 > 1 ? (n1 + LANES - 1) / LANES * LANES * plan->padded * 2 : 0);
    return (NAME(Work)){memory, (T *)memory + column, matrix, line};
}

/* `count` lines begin at x[l]: their first n numbers as columns, `step` apart; lanes without a line repeat the last. */
static void NAME(turn_in)(const T *const *x, i64 n, T *y, i64 step)
{
    i64 j = 0;
    for (; j + LANES <= n; j += LANES) {
        V row[LANES];
        for (int l = 0; l < LANES; l++) row[l] = *(const V *)(x[l] + j);
        NAME(shuffled)(row, LANES);
        for (int l = 0; l < LANES; l++) *(V *)(y + (j + l) * step) = row[l];
    }
    for (; j < n; j++) for (int l = 0; l < LANES; l++) y[j * step + l] = x[l][j];
}

static void NAME(turn_out)(const T *x, i64 step, T *const *y, i64 n, i64 count)
{
    i64 j = 0;
    for (; j + LANES <= n; j += LANES) {
        V row[LANES];
        for (int l = 0; l < LANES; l++) row[l] = *(const V *)(x + (j + l) * step);
        NAME(shuffled)(row, LANES);
        for (i64 l = 0; l < count; l++) *(V *)(y[l] + j) = row[l];
    }
    for (; j < n; j++) for (i64 l = 0; l < count; l++) y[l][j] = x[j * step + l];
}

static void NAME(scale)(T *x, i64 vectors, T by)
{
    if (by != 1) for (i64 j = 0; j < vectors; j++) *(V *)(x + j * LANES) *= by;
}

/* LANES complex numbers side by side in memory, from and to vectors of real and imaginary parts. */
INLINE void NAME(split)(const T *x, T *y)
{
    V low = *(const V *)x, high = *(const V *)(x + LANES);
    *(V *)y = PICK(MASK, low, high, ORDER(EVEN, LANES));
    *(V *)(y + LANES) = PICK(MASK, low, high, ORDER(ODD, LANES));
}

INLINE void NAME(join)(const T *x, T *y, T scale)
{
    V re = *(const V *)x * scale, im = *(const V *)(x + LANES) * scale;
    *(V *)y = PICK(MASK, re, im, ORDER(LOW, LANES));
    *(V *)(y + LANES) = PICK(MASK, re, im, ORDER(HIGH, LANES));
}

/* Like these, of `count` numbers; the other lanes are 0. */
static void NAME(split_some)(const T *x, T *y, i64 count)
{
    memset(y, 0, PAIR * sizeof(T));
    for (i64 l = 0; l < count; l++) { y[l] = x[2 * l]; y[LANES + l] = x[2 * l + 1]; }
}

static void NAME(join_some)(const T *x, T *y, T scale, i64 count)
{
    for (i64 l = 0; l < count; l++) { y[2 * l] = x[l] * scale; y[2 * l + 1] = x[LANES + l] * scale; }
}

/* One long line, in four steps; y may be x. */
static void NAME(long_line)(const Plan *plan, const T *tables, NAME(Work) w, const T *x, T *y, int inverse, T scale)
{
    const i64 n1 = plan->columns.length, n2 = plan->rows.length, padded = plan->padded;
    const T *middle = tables + plan->middle;
    for (i64 column = 0; column < n2; column += LANES) {
        const i64 width = least(LANES, n2 - column);
        for (i64 j = 0; j < n1; j++) {
            const T *from = x + 2 * (j * n2 + column);
            if (width == LANES) NAME(split)(from, w.a + j * PAIR);
            else NAME(split_some)(from, w.a + j * PAIR, width);
        }
        const T *found = NAME(passes)(&plan->columns, tables, w.a, w.b, inverse, 0);
        for (i64 top = 0; top < n1; top += LANES) {
            V re[LANES] = {0}, im[LANES] = {0};
            for (i64 k = 0; k < least(LANES, n1 - top); k++) {
                const T *factor = middle + 2 * ((top + k) * padded) + column;
                V r = *(const V *)(found + (top + k) * PAIR), i = *(const V *)(found + (top + k) * PAIR + LANES);
                V c = *(const V *)factor, d = *(const V *)(factor + padded);
                re[k] = r * c - i * d;
                im[k] = r * d + i * c;
            }
            NAME(shuffled)(re, LANES);
            NAME(shuffled)(im, LANES);
            T *to = w.matrix + 2 * (top * padded + column * LANES);
            for (int l = 0; l < LANES; l++) { *(V *)(to + l * PAIR) = re[l]; *(V *)(to + l * PAIR + LANES) = im[l]; }
        }
    }
    for (i64 top = 0; top < n1; top += LANES) {
        const T *found = NAME(passes)(&plan->rows, tables, w.matrix + 2 * top * padded, w.b, 0, inverse);
        const i64 height = least(LANES, n1 - top);
        for (i64 k = 0; k < n2; k++) {
            T *to = y + 2 * (k * n1 + top);
            if (height == LANES) NAME(join)(found + k * PAIR, to, scale);
            else NAME(join_some)(found + k * PAIR, to, scale, height);
        }
    }
}

/* LANES columns side by side in memory, of rows `step` apart. */
static void NAME(columns)(const Plan *plan, const T *tables, NAME(Work) w, const T *x, T *y, i64 step, int inverse, T scale)
{
    for (i64 j = 0; j < plan->length; j++) NAME(split)(x + j * step, w.a + j * PAIR);
    const T *found = NAME(passes)(&plan->rows, tables, w.a, w.b, inverse, inverse);
    for (i64 j = 0; j < plan->length; j++) NAME(join)(found + j * PAIR, y + j * step, scale);
}

/* Lines that begin anywhere, with their numbers `step` apart; `count` of them count. */
static void NAME(scattered)(const Plan *plan, const T *tables, NAME(Work) w, const T *const *x, T *const *y, i64 step, i64 count,
                            int inverse, T scale)
{
    const i64 n = plan->length;
    if (step == 2) NAME(turn_in)(x, 2 * n, w.a, LANES);
    else for (i64 j = 0; j < n; j++) for (int l = 0; l < LANES; l++) {
        w.a[j * PAIR + l] = x[l][j * step];
        w.a[j * PAIR + LANES + l] = x[l][j * step + 1];
    }
    T *found = NAME(passes)(&plan->rows, tables, w.a, w.b, inverse, inverse);
    NAME(scale)(found, 2 * n, scale);
    if (step == 2) NAME(turn_out)(found, LANES, y, 2 * n, count);
    else for (i64 j = 0; j < n; j++) for (i64 l = 0; l < count; l++) {
        y[l][j * step] = found[j * PAIR + l];
        y[l][j * step + 1] = found[j * PAIR + LANES + l];
    }
}

/* A long line whose numbers lie `step` apart. */
static void NAME(long_column)(const Plan *plan, const T *tables, NAME(Work) w, const T *x, T *y, i64 step, int inverse, T scale)
{
    for (i64 j = 0; j < plan->length; j++) { w.line[2 * j] = x[j * step]; w.line[2 * j + 1] = x[j * step + 1]; }
    NAME(long_line)(plan, tables, w, w.line, w.line, inverse, scale);
    for (i64 j = 0; j < plan->length; j++) { y[j * step] = w.line[2 * j]; y[j * step + 1] = w.line[2 * j + 1]; }
}

/* x and y (outer, n, inner), complex; y may be x. */
void NAME(fft)(const T *x, T *y, const T *tables, const i64 *how, void *memory, i64 bytes, i64 outer, i64 size, i64 inner,
               i64 inverse, double by)
{
    (void)bytes;
    const Plan *plan = (const Plan *)how;
    NAME(Work) w = NAME(work)(plan, memory);
    const T scale = (T)by;
    const i64 step = 2 * inner, whole = plan->columns.length > 1 ? inner : inner / LANES * LANES, rest = inner - whole;
    for (i64 o = 0; o < outer; o++) for (i64 i = 0; i < whole; ) {
        const i64 at = 2 * (o * inner * size + i);
        if (plan->columns.length == 1) NAME(columns)(plan, tables, w, x + at, y + at, step, (int)inverse, scale), i += LANES;
        else if (inner > 1) NAME(long_column)(plan, tables, w, x + at, y + at, step, (int)inverse, scale), i++;
        else NAME(long_line)(plan, tables, w, x + at, y + at, (int)inverse, scale), i++;
    }
    for (i64 first = 0; first < outer * rest; first += LANES) {
        const T *from[LANES];
        T *to[LANES];
        for (int l = 0; l < LANES; l++) {
            const i64 line = least(first + l, outer * rest - 1), at = 2 * (line / rest * inner * size + whole + line % rest);
            from[l] = x + at;
            to[l] = y + at;
        }
        NAME(scattered)(plan, tables, w, from, to, step, least(LANES, outer * rest - first), (int)inverse, scale);
    }
}
