/* Transforms of real lines to half of their spectrum and back, for one number type T.

   A real line of even length is one of half as many complex numbers, whose transform Z is taken apart (and put together) with
   the conjugate at the mirrored place: X[k] = E + t O, X[h - k] = conj(E - t O), with E, O = Z[k] +- conj Z[h - k] over 2 and
   t = -i exp(-pi i k / h). The way back is the same with the conjugate of t. One of odd length is transformed whole. */

/* Lines that go through together: what all are multiplied by, and those numbers that stand for two. */
typedef struct { T all, inner; int back; } NAME(Weights);

INLINE void NAME(couple)(V zr, V zi, V wr, V wi, V tr, V ti, T c, V *out)
{
    V er = (zr + wr) * c, ei = (zi - wi) * c, or = (zr - wr) * c, oi = (zi + wi) * c;
    V pr = tr * or - ti * oi, pi = tr * oi + ti * or;
    out[0] = er + pr; out[1] = ei + pi;
    out[2] = er - pr; out[3] = pi - ei;
}

/* Lines side by side: of h numbers in z, or h + 1 on the way back; into y. */
static void NAME(halves)(const T *z, T *y, i64 h, const T *t, NAME(Weights) by)
{
    const T *last = by.back ? z + h * PAIR : z + LANES, c = by.back ? by.inner : by.inner * (T)0.5;
    T *end = by.back ? y + LANES : y + h * PAIR;
    V a = *(const V *)z, b = *(const V *)last;
    if (!by.back) *(V *)(y + LANES) = *(V *)(end + LANES) = (V){0};
    *(V *)y = (a + b) * by.all;
    *(V *)end = (a - b) * by.all;
    for (i64 k = 1; k <= h / 2; k++) {
        const T *first = z + k * PAIR, *second = z + (h - k) * PAIR;
        const V zr = *(const V *)first, zi = *(const V *)(first + LANES), wr = *(const V *)second, wi = *(const V *)(second + LANES);
        V out[4], tr = t[k] - (V){0}, ti = (by.back ? -t[h / 2 + 1 + k] : t[h / 2 + 1 + k]) - (V){0};
        NAME(couple)(zr, zi, wr, wi, tr, ti, c, out);
        *(V *)(y + k * PAIR) = out[0];
        *(V *)(y + k * PAIR + LANES) = out[1];
        *(V *)(y + (h - k) * PAIR) = out[2];
        *(V *)(y + (h - k) * PAIR + LANES) = out[3];
    }
}

/* One long line, its numbers as memory has them. LANES numbers at a time, and those that mirror them, backwards; in the middle,
   where they would overlap, what is written twice is the same. */
static void NAME(long_halves)(const T *z, T *y, i64 h, const T *t, NAME(Weights) by)
{
    const T c = by.back ? by.inner : by.inner * (T)0.5, a = z[0], b = by.back ? z[2 * h] : z[1];
    y[0] = (a + b) * by.all;
    y[by.back ? 1 : 2 * h] = (a - b) * by.all;
    if (!by.back) y[1] = y[2 * h + 1] = 0;
    for (i64 k = 1; k <= h / 2; k += LANES) {
        const i64 count = least(LANES, h / 2 + 1 - k), mirrored = h - k - count + 1;
        T first[PAIR], second[PAIR], part[PAIR], joined[PAIR], backwards[PAIR], tr[LANES] = {0}, ti[LANES] = {0};
        if (count == LANES) { NAME(split)(z + 2 * k, first); NAME(split)(z + 2 * mirrored, part); }
        else { NAME(split_some)(z + 2 * k, first, count); NAME(split_some)(z + 2 * mirrored, part, count); }
        memset(second, 0, sizeof second);
        for (i64 l = 0; l < count; l++) {
            second[l] = part[count - 1 - l];
            second[LANES + l] = part[LANES + count - 1 - l];
            tr[l] = t[k + l];
            ti[l] = by.back ? -t[h / 2 + 1 + k + l] : t[h / 2 + 1 + k + l];
        }
        V out[4];
        NAME(couple)(*(V *)first, *(V *)(first + LANES), *(V *)second, *(V *)(second + LANES), *(V *)tr, *(V *)ti, c, out);
        *(V *)joined = out[0];
        *(V *)(joined + LANES) = out[1];
        NAME(join_some)(joined, y + 2 * k, 1, count);
        for (i64 l = 0; l < count; l++) {
            backwards[l] = ((T *)&out[2])[count - 1 - l];
            backwards[LANES + l] = ((T *)&out[3])[count - 1 - l];
        }
        NAME(join_some)(backwards, y + 2 * mirrored, 1, count);
    }
}

typedef struct { const T *from[LANES]; T *to[LANES]; i64 count; } NAME(Lines);

static NAME(Lines) NAME(lines)(const T *x, i64 x_step, T *y, i64 y_step, i64 first, i64 lines)
{
    NAME(Lines) found = {.count = least(LANES, lines - first)};
    for (int l = 0; l < LANES; l++) {
        const i64 line = least(first + l, lines - 1);
        found.from[l] = x + line * x_step;
        found.to[l] = y + line * y_step;
    }
    return found;
}

/* x (lines, n) to y (lines, n / 2 + 1), complex. */
void NAME(fft_half)(const T *x, T *y, const T *tables, const i64 *how, void *memory, i64 bytes, i64 lines, i64 n, i64 numbers,
                    double all, double inner)
{
    (void)bytes;
    const Plan *plan = (const Plan *)how;
    NAME(Work) w = NAME(work)(plan, memory);
    const NAME(Weights) by = {(T)all, (T)inner, 0};
    const T *t = tables + plan->halves;
    const i64 h = n / 2;
    const int even = n % 2 == 0;
    if (plan->columns.length > 1)
        for (i64 line = 0; line < lines; line++, x += n, y += numbers) {
            if (even) {
                NAME(long_line)(plan, tables, w, x, w.line, 0, 1);
                NAME(long_halves)(w.line, y, h, t, by);
                continue;
            }
            for (i64 j = 0; j < n; j++) { w.line[2 * j] = x[j]; w.line[2 * j + 1] = 0; }
            NAME(long_line)(plan, tables, w, w.line, w.line, 0, 1);
            for (i64 k = 0; k < numbers; k++) y[k] = w.line[k] * (k < 2 ? by.all : by.inner);
        }
    else
        for (i64 first = 0; first < lines; first += LANES) {
            NAME(Lines) some = NAME(lines)(x, n, y, numbers, first, lines);
            if (!even) for (i64 j = 0; j < n; j++) *(V *)(w.a + j * PAIR + LANES) = (V){0};
            NAME(turn_in)(some.from, n, w.a, even ? LANES : PAIR);
            T *found = NAME(passes)(&plan->rows, tables, w.a, w.b, 0, 0), *other = found == w.a ? w.b : w.a;
            if (even) NAME(halves)(found, other, h, t, by);
            else NAME(scale)(found, 2, by.all), NAME(scale)(found + PAIR, 2 * h, by.inner);
            NAME(turn_out)(even ? other : found, LANES, some.to, numbers, some.count);
        }
}

/* x (lines, n / 2 + 1), complex, to y (lines, n). */
void NAME(fft_real)(const T *x, T *y, const T *tables, const i64 *how, void *memory, i64 bytes, i64 lines, i64 n, i64 numbers,
                    double all, double inner)
{
    (void)bytes;
    const Plan *plan = (const Plan *)how;
    NAME(Work) w = NAME(work)(plan, memory);
    const NAME(Weights) by = {(T)all, (T)inner, 1};
    const T *t = tables + plan->halves;
    const i64 h = n / 2;
    const int even = n % 2 == 0;
    if (plan->columns.length > 1)
        for (i64 line = 0; line < lines; line++, x += numbers, y += n) {
            if (even) {
                NAME(long_halves)(x, w.line, h, t, by);
                NAME(long_line)(plan, tables, w, w.line, y, 1, 1);
                continue;
            }
            w.line[0] = x[0] * by.all;
            w.line[1] = 0;
            for (i64 k = 1; k <= h; k++) {
                w.line[2 * k] = w.line[2 * (n - k)] = x[2 * k] * by.inner;
                w.line[2 * (n - k) + 1] = -(w.line[2 * k + 1] = x[2 * k + 1] * by.inner);
            }
            NAME(long_line)(plan, tables, w, w.line, w.line, 1, 1);
            for (i64 j = 0; j < n; j++) y[j] = w.line[2 * j];
        }
    else
        for (i64 first = 0; first < lines; first += LANES) {
            NAME(Lines) some = NAME(lines)(x, numbers, y, n, first, lines);
            NAME(turn_in)(some.from, numbers, w.a, LANES);
            T *from = w.a, *other = w.b;
            if (even) {
                NAME(halves)(w.a, w.b, h, t, by);
                from = w.b;
                other = w.a;
            } else {
                NAME(scale)(w.a, 2, by.all);
                NAME(scale)(w.a + PAIR, 2 * h, by.inner);
                *(V *)(w.a + LANES) = (V){0};
                for (i64 k = 1; k <= h; k++) {
                    *(V *)(w.a + (n - k) * PAIR) = *(V *)(w.a + k * PAIR);
                    *(V *)(w.a + (n - k) * PAIR + LANES) = -*(V *)(w.a + k * PAIR + LANES);
                }
            }
            T *found = NAME(passes)(&plan->rows, tables, from, other, 1, 1);
            NAME(turn_out)(found, even ? LANES : PAIR, some.to, n, some.count);
        }
}
