/* Transforms of LANES lines side by side, for one number type T: number j of all lines is a vector of real parts, and behind it
   one of imaginary parts.

   A pass of radix r over lines of m r s numbers makes, of every r that lie m s apart, their transform of length r, and multiplies
   it by roots of unity; what belongs together comes to lie together, so that the last pass leaves the result in order:

       y[q + s (r p + k)] = w^(p k) sum over j of  x[q + s (p + m j)] exp(-2 pi i j k / r),    w = exp(-2 pi i / (m r))  */

#define PAIR (2 * LANES)

/* Where a pass reads or writes real and imaginary parts. */
typedef struct { T *re, *im; } NAME(Parts);

static NAME(Parts) NAME(parts)(T *x, int exchanged)
{
    return exchanged ? (NAME(Parts)){x + LANES, x} : (NAME(Parts)){x, x + LANES};
}

INLINE void NAME(transform2)(V *re, V *im, int a, int b)
{
    V r = re[a], i = im[a];
    re[a] = r + re[b]; im[a] = i + im[b];
    re[b] = r - re[b]; im[b] = i - im[b];
}

/* Of numbers a, b, c, d, in place; the result is in the order a, c, b, d. */
INLINE void NAME(transform4)(V *re, V *im, int a, int b, int c, int d)
{
    NAME(transform2)(re, im, a, c);
    NAME(transform2)(re, im, b, d);
    NAME(transform2)(re, im, a, b);
    V r = re[c], i = im[c], s = re[d], t = im[d];
    re[c] = r + t; im[c] = i - s;
    re[d] = r - t; im[d] = i + s;
}

INLINE void NAME(transform8)(V *re, V *im)
{
    const T half = (T)0.70710678118654752440;
    NAME(transform4)(re, im, 0, 2, 4, 6);            /* even ones: 0, 4, 2, 6 */
    NAME(transform4)(re, im, 1, 3, 5, 7);            /* odd ones: 1, 5, 3, 7 */
    V r = re[5], i = im[5];
    re[5] = (r + i) * half; im[5] = (i - r) * half;
    r = re[3]; re[3] = im[3]; im[3] = -r;
    r = re[7]; i = im[7];
    re[7] = (i - r) * half; im[7] = -(r + i) * half;
    NAME(transform2)(re, im, 0, 1);                  /* 0, 4 of the result */
    NAME(transform2)(re, im, 4, 5);                  /* 1, 5 */
    NAME(transform2)(re, im, 2, 3);                  /* 2, 6 */
    NAME(transform2)(re, im, 6, 7);                  /* 3, 7 */
    V order_re[8] = {re[0], re[4], re[2], re[6], re[1], re[5], re[3], re[7]};
    V order_im[8] = {im[0], im[4], im[2], im[6], im[1], im[5], im[3], im[7]};
    for (int k = 0; k < 8; k++) { re[k] = order_re[k]; im[k] = order_im[k]; }
}

/* Of an odd number r of them, by sums and differences of those that are conjugate to each other; `roots` are r cosines and r
   sines of 2 pi j / r. */
INLINE void NAME(transform_odd)(V *re, V *im, const int r, const T *roots)
{
    V first_re = re[0], first_im = im[0];
    UNROLL for (int j = 1; j <= r / 2; j++) {
        NAME(transform2)(re, im, j, r - j);
        re[0] += re[j]; im[0] += im[j];
    }
    V out_re[LARGEST_RADIX], out_im[LARGEST_RADIX];
    UNROLL for (int k = 1; k <= r / 2; k++) {
        V even_re = first_re, even_im = first_im, odd_re = {0}, odd_im = {0};
        UNROLL for (int j = 1; j <= r / 2; j++) {
            const T c = roots[j * k % r], s = roots[r + j * k % r];
            even_re += re[j] * c; even_im += im[j] * c;
            odd_re += re[r - j] * s; odd_im += im[r - j] * s;
        }
        out_re[k] = even_re + odd_im; out_im[k] = even_im - odd_re;
        out_re[r - k] = even_re - odd_im; out_im[r - k] = even_im + odd_re;
    }
    UNROLL for (int k = 1; k < r; k++) { re[k] = out_re[k]; im[k] = out_im[k]; }
}

INLINE void NAME(transform)(V *re, V *im, const int r, const T *roots)
{
    if (r == 2) NAME(transform2)(re, im, 0, 1);
    else if (r == 4) {
        NAME(transform4)(re, im, 0, 1, 2, 3);
        V a = re[1], b = im[1];
        re[1] = re[2]; im[1] = im[2]; re[2] = a; im[2] = b;
    } else if (r == 8) NAME(transform8)(re, im);
    else NAME(transform_odd)(re, im, r, roots);
}

INLINE void NAME(pass)(NAME(Parts) x, NAME(Parts) y, const int r, i64 m, i64 s, const T *factors, const T *roots)
{
    V re[LARGEST_RADIX], im[LARGEST_RADIX];
    for (i64 q = 0; q < s; q++) {
        UNROLL for (int j = 0; j < r; j++) {
            re[j] = *(const V *)(x.re + (q + s * m * j) * PAIR);
            im[j] = *(const V *)(x.im + (q + s * m * j) * PAIR);
        }
        NAME(transform)(re, im, r, roots);
        UNROLL for (int k = 0; k < r; k++) {
            *(V *)(y.re + (q + s * k) * PAIR) = re[k];
            *(V *)(y.im + (q + s * k) * PAIR) = im[k];
        }
    }
    for (i64 p = 1; p < m; p++, factors += 2 * (r - 1)) for (i64 q = 0; q < s; q++) {
        UNROLL for (int j = 0; j < r; j++) {
            re[j] = *(const V *)(x.re + (q + s * (p + m * j)) * PAIR);
            im[j] = *(const V *)(x.im + (q + s * (p + m * j)) * PAIR);
        }
        NAME(transform)(re, im, r, roots);
        *(V *)(y.re + (q + s * r * p) * PAIR) = re[0];
        *(V *)(y.im + (q + s * r * p) * PAIR) = im[0];
        UNROLL for (int k = 1; k < r; k++) {
            const T c = factors[2 * k - 2], d = factors[2 * k - 1];
            *(V *)(y.re + (q + s * (r * p + k)) * PAIR) = re[k] * c - im[k] * d;
            *(V *)(y.im + (q + s * (r * p + k)) * PAIR) = re[k] * d + im[k] * c;
        }
    }
}

#define PASS(r) static void NAME(pass_##r)(NAME(Parts) x, NAME(Parts) y, i64 m, i64 s, const T *factors, const T *roots) \
    { NAME(pass)(x, y, r, m, s, factors, roots); }
PASS(2)
PASS(3)
PASS(4)
PASS(5)
PASS(7)
PASS(8)
#undef PASS

static void NAME(pass_odd)(NAME(Parts) x, NAME(Parts) y, int r, i64 m, i64 s, const T *factors, const T *roots)
{
    NAME(pass)(x, y, r, m, s, factors, roots);
}

/* Transforms the lines in `a`, with `b` of the same size beside it; where the result is. The first pass exchanges real and
   imaginary parts of what it reads, the last of what it writes, where that is asked for. */
static T *NAME(passes)(const Steps *steps, const T *tables, T *a, T *b, int before, int after)
{
    i64 s = 1, m = steps->length;
    if (!steps->count && before != after)
        for (int l = 0; l < LANES; l++) { T t = a[l]; a[l] = a[LANES + l]; a[LANES + l] = t; }
    for (i64 i = 0; i < steps->count; i++) {
        const i64 r = steps->step[i].radix;
        const T *factors = tables + steps->step[i].factors, *roots = tables + steps->step[i].roots;
        NAME(Parts) x = NAME(parts)(a, before && i == 0), y = NAME(parts)(b, after && i == steps->count - 1);
        m /= r;
        if (r == 8) NAME(pass_8)(x, y, m, s, factors, roots);
        else if (r == 4) NAME(pass_4)(x, y, m, s, factors, roots);
        else if (r == 2) NAME(pass_2)(x, y, m, s, factors, roots);
        else if (r == 3) NAME(pass_3)(x, y, m, s, factors, roots);
        else if (r == 5) NAME(pass_5)(x, y, m, s, factors, roots);
        else if (r == 7) NAME(pass_7)(x, y, m, s, factors, roots);
        else NAME(pass_odd)(x, y, (int)r, m, s, factors, roots);
        s *= r;
        T *t = a; a = b; b = t;
    }
    return a;
}
