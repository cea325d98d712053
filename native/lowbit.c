/* Products with weights in few bits: y (m, n) = x (m, k) w' (n, k) * scales + bias, one thread. See kernels/lowbit.py.

   int8: a scale for each output. int4: groups of 32 inputs; byte i of a group has weight i in its low half and weight i + 16 in
   its high one, 8 added to each; its scale is a float16.

   Of floats: weights become floats in registers. Number l of LANES partial sums has the terms r with r % LANES = l, added in order
   by fused multiply-adds (int4: of each group two products first, then that sum times the scale). `folded` adds the partial sums
   as one fixed tree. So a number of y has the same bits at any m and n, and on every CPU that fuses.

   Of whole numbers: x is int8, too, with a scale for each row. Sums of int8 products are exact, so their order is free; they wrap
   nowhere, since k <= 2^16. In int4, sums of 8 products are exact, become floats, are multiplied with the group's scale and are
   added to partial sum l in the order of the groups, without fusing. So these bits are equal on all CPUs, and NumPy's. */

#include "sixteen.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

typedef uint8_t u8;
typedef int8_t i8;
typedef int32_t i32;

#define LANES 16
#define GROUP 32
#define HALF 16
#define SPAN 128                    /* weights of int4 in 64 bytes: four groups */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__F16C__)
#define WIDE 1
#endif
#if defined(WIDE) && defined(__AVX512VNNI__)
#define DOTS 1
#endif

INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

INLINE float folded(const float *lanes)
{
    float half[8], quarter[4];
    for (int l = 0; l < 8; l++) half[l] = lanes[l] + lanes[l + 8];
    for (int l = 0; l < 4; l++) quarter[l] = half[l] + half[l + 4];
    return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

/* ---- x in whole numbers ------------------------------------------------------------------------------------------------ */

#define TINY 0x1p-100f              /* rows without a larger number count as zeros: 127 / size might overflow */
#define INFINITE 0x7f800000

INLINE i8 rounded(float x)
{
    x = x > 127 ? 127 : x < -127 ? -127 : x;
    float shifted = x + 0x1.8p23f;                                  /* to the nearest whole number, ties to even */
    return (i8)(i32)(shifted - 0x1.8p23f);
}

/* Rows of x (m, k) as int8 in rows of `padded` numbers, zeros after the k-th, and the scale of each: its largest size / 127, or
   for all of them `given`, unless that is negative; and the sum of each. A row that is not finite has the scale NaN. */
void lowbit_rows(const float *restrict x, i8 *restrict q, float *restrict scales, i32 *restrict sums, i64 m, i64 k, i64 padded,
                 double given)
{
    for (i64 i = 0; i < m; i++, x += k, q += padded) {
        i32 top = 0;
        for (i64 r = 0; r < k; r++) {
            i32 size = (i32)(bits_of(x[r]) & 0x7fffffff);
            top = size > top ? size : top;
        }
        float size = float_of((u32)top), scale = given >= 0 ? (float)given : size / 127, inverse = 1 / scale;
        if (given < 0) inverse = 127 / size;
        int zeros = top >= INFINITE || (given < 0 ? size < TINY : scale < TINY);
        scales[i] = top >= INFINITE ? float_of(0x7fc00000) : zeros ? 0 : scale;
        if (zeros) memset(q, 0, (size_t)k);
        else for (i64 r = 0; r < k; r++) q[r] = rounded(x[r] * inverse);
        memset(q + k, 0, (size_t)(padded - k));
        i32 sum = 0;
        for (i64 r = 0; r < k; r++) sum += q[r];
        sums[i] = sum;
    }
}

/* ---- tiles: rows x columns numbers of y ---------------------------------------------------------------------------------- */

/* What a tile reads: rows of x from `x` (`step` numbers apart; `scales` and `sums` of them where they are whole numbers), rows of w from
   `w`, and their scales; and where it writes. `last`: nothing comes behind these rows of w. */
typedef struct {
    const void *x; i64 step; const float *scales; const i32 *sums; const u8 *w; const void *by; const float *bias; float *y; i64 n, k; int last;
} Factors;

#define UNROLL _Pragma("GCC unroll 16")

#ifdef WIDE
typedef __m512 V;

INLINE __m128 quarters(V v)
{
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* The folded sums of four vectors. */
INLINE __m128 four_folded(V a, V b, V c, V d)
{
    return _mm_hadd_ps(_mm_hadd_ps(quarters(a), quarters(b)), _mm_hadd_ps(quarters(c), quarters(d)));
}

INLINE __m128i quarters_of_integers(__m512i v)
{
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

INLINE __m128i four_sums(__m512i a, __m512i b, __m512i c, __m512i d)
{
    return _mm_hadd_epi32(_mm_hadd_epi32(quarters_of_integers(a), quarters_of_integers(b)),
                          _mm_hadd_epi32(quarters_of_integers(c), quarters_of_integers(d)));
}

/* Writes sums * scales + bias of four columns, without fusing. */
INLINE void put_four(const Factors *f, int row, int column, __m128 sums, __m128 scales)
{
    __m128 y = _mm_mul_ps(sums, scales);
    if (f->bias) y = _mm_add_ps(y, _mm_loadu_ps(f->bias + column));
    _mm_storeu_ps(f->y + row * f->n + column, y);
}

INLINE V as_floats(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }

#define EACH_ROW UNROLL for (int i = 0; i < rows; i++)
#define EACH_COLUMN UNROLL for (int j = 0; j < columns; j++)
#define NEXT(at, step) _mm_prefetch((const char *)(at) + (step), _MM_HINT_T0)    /* the tile of columns that comes next */

INLINE void int8_floats_step(const Factors *f, i64 r, __mmask16 mask, const int whole, V (*sum)[8], const int rows,
                             const int columns)
{
    const float *x = f->x;
    V left[4];
    EACH_ROW left[i] = whole ? _mm512_loadu_ps(x + i * f->step + r) : _mm512_maskz_loadu_ps(mask, x + i * f->step + r);
    EACH_COLUMN {
        const u8 *w = f->w + j * f->k + r;
        V right = as_floats(whole ? _mm_loadu_si128((const __m128i *)w) : _mm_maskz_loadu_epi8(mask, w));
        EACH_ROW sum[i][j] = _mm512_fmadd_ps(left[i], right, sum[i][j]);
    }
}

INLINE void int8_floats(const Factors *f, const int rows, const int columns)
{
    V sum[4][8];
    const float *scales = f->by;
    i64 r = 0;
    EACH_ROW EACH_COLUMN sum[i][j] = _mm512_setzero_ps();
    for (; r + 4 * LANES <= f->k; r += 4 * LANES) {
        EACH_COLUMN NEXT(f->w + j * f->k + r, columns * f->k);
        UNROLL for (int part = 0; part < 4; part++) int8_floats_step(f, r + part * LANES, 0, 1, sum, rows, columns);
    }
    for (; r + LANES <= f->k; r += LANES) int8_floats_step(f, r, 0, 1, sum, rows, columns);
    if (r < f->k) int8_floats_step(f, r, (__mmask16)((1u << (f->k - r)) - 1), 0, sum, rows, columns);
    EACH_ROW UNROLL for (int j = 0; j < columns; j += 4)
        put_four(f, i, j, four_folded(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]), _mm_loadu_ps(scales + j));
}

INLINE V table_of_nibbles(void)
{
    return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
}

INLINE void int4_floats_step(const Factors *f, i64 g, i64 groups, const int whole, V (*sum)[8], const int rows, const int columns)
{
    const V table = table_of_nibbles();
    const float *x = f->x;
    const u16 *scales = f->by;
    const i64 rest = f->k - g * GROUP;
    const __mmask16 low = rest >= HALF ? 0xffff : (__mmask16)((1u << rest) - 1);
    const __mmask16 high = rest >= GROUP ? 0xffff : rest <= HALF ? 0 : (__mmask16)((1u << (rest - HALF)) - 1);
    V left[4][2];
    EACH_ROW {
        const float *from = x + i * f->step + g * GROUP;
        left[i][0] = whole ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(low, from);
        left[i][1] = whole ? _mm512_loadu_ps(from + HALF) : _mm512_maskz_loadu_ps(high, from + HALF);
    }
    EACH_COLUMN {
        __m512i nibbles = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(f->w + (j * groups + g) * HALF)));
        V first = _mm512_permutexvar_ps(nibbles, table), second = _mm512_permutexvar_ps(_mm512_srli_epi32(nibbles, 4), table);
        V scale = _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(scales[j * groups + g])));
        EACH_ROW sum[i][j] = _mm512_fmadd_ps(_mm512_fmadd_ps(left[i][1], second, _mm512_mul_ps(left[i][0], first)), scale,
                                             sum[i][j]);
    }
}

INLINE void int4_floats(const Factors *f, const int rows, const int columns)
{
    V sum[4][8];
    const i64 groups = (f->k + GROUP - 1) / GROUP;
    i64 g = 0;
    EACH_ROW EACH_COLUMN sum[i][j] = _mm512_setzero_ps();
    for (; g * GROUP + GROUP <= f->k; g++) {
        if (g % 4 == 0) EACH_COLUMN NEXT(f->w + (j * groups + g) * HALF, columns * groups * HALF);
        int4_floats_step(f, g, groups, 1, sum, rows, columns);
    }
    if (g < groups) int4_floats_step(f, g, groups, 0, sum, rows, columns);
    EACH_ROW UNROLL for (int j = 0; j < columns; j += 4)
        put_four(f, i, j, four_folded(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]), _mm_set1_ps(1));
}
#endif

#ifdef DOTS
/* Adds to `sum` the products of bytes without a sign, `u`, and with one, `i`, four in each number. As an intrinsic, GCC 12 moved and
   spilled sums around each of these: a tile took twice as long. */
INLINE void add_dots(__m512i *sum, __m512i u, __m512i i) { __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(u), "v"(i)); }

/* vpdpbusd takes bytes without a sign on its left: w + 128 there, and 128 times the sum of x is subtracted. Rows of x are padded
   with zeros to whole vectors, so that what comes behind a row of w does not count: only behind the last row a mask is needed,
   which took 12 cycles a load. */
INLINE void int8_integers_step(const Factors *f, i64 r, __mmask64 mask, const int whole, __m512i (*sum)[8], const int rows,
                               const int columns)
{
    const __m512i top = _mm512_set1_epi8((char)0x80);
    const i8 *x = f->x;
    __m512i left[4];
    EACH_ROW left[i] = _mm512_loadu_si512(x + i * f->step + r);
    EACH_COLUMN {
        const u8 *w = f->w + j * f->k + r;
        __m512i right = _mm512_xor_si512(whole ? _mm512_loadu_si512(w) : _mm512_maskz_loadu_epi8(mask, w), top);
        EACH_ROW add_dots(&sum[i][j], right, left[i]);
    }
}

/* In each quarter of a vector a part of the sums of four vectors. */
INLINE __m512i turned_sums(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i first = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i second = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
}

/* Four rows of four columns at once: the sums of 16 vectors in one, a row in each quarter. */
INLINE void put_sixteen(const Factors *f, __m512i (*sum)[8])
{
    __m512i row[4];
    UNROLL for (int i = 0; i < 4; i++) row[i] = turned_sums(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    __m512i low = _mm512_add_epi32(_mm512_shuffle_i64x2(row[0], row[1], 0x44), _mm512_shuffle_i64x2(row[0], row[1], 0xee));
    __m512i high = _mm512_add_epi32(_mm512_shuffle_i64x2(row[2], row[3], 0x44), _mm512_shuffle_i64x2(row[2], row[3], 0xee));
    __m512i all = _mm512_add_epi32(_mm512_shuffle_i64x2(low, high, 0x88), _mm512_shuffle_i64x2(low, high, 0xdd));
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __m512i less = _mm512_permutexvar_epi32(spread, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)f->sums)));
    V scales = _mm512_mul_ps(_mm512_permutexvar_ps(spread, _mm512_castps128_ps512(_mm_loadu_ps(f->scales))),
                             _mm512_broadcast_f32x4(_mm_loadu_ps(f->by)));
    V y = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(all, _mm512_slli_epi32(less, 7))), scales);
    if (f->bias) y = _mm512_add_ps(y, _mm512_broadcast_f32x4(_mm_loadu_ps(f->bias)));
    _mm_storeu_ps(f->y, _mm512_castps512_ps128(y));
    _mm_storeu_ps(f->y + f->n, _mm512_extractf32x4_ps(y, 1));
    _mm_storeu_ps(f->y + 2 * f->n, _mm512_extractf32x4_ps(y, 2));
    _mm_storeu_ps(f->y + 3 * f->n, _mm512_extractf32x4_ps(y, 3));
}

INLINE void int8_integers(const Factors *f, const int rows, const int columns)
{
    __m512i sum[4][8];
    i64 r = 0;
    EACH_ROW EACH_COLUMN sum[i][j] = _mm512_setzero_si512();
    for (; r + 64 <= f->k; r += 64) {
        if (rows == 1) EACH_COLUMN NEXT(f->w + j * f->k + r, columns * f->k);
        int8_integers_step(f, r, 0, 1, sum, rows, columns);
    }
    if (r < f->k && !f->last) int8_integers_step(f, r, 0, 1, sum, rows, columns);
    else if (r < f->k) int8_integers_step(f, r, ((__mmask64)1 << (f->k - r)) - 1, 0, sum, rows, columns);
    if (rows == 4) put_sixteen(f, sum);
    else EACH_ROW {
        __m128i less = _mm_set1_epi32(f->sums[i] * 128);
        UNROLL for (int j = 0; j < columns; j += 4) {
            __m128i exact = _mm_sub_epi32(four_sums(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]), less);
            put_four(f, i, j, _mm_cvtepi32_ps(exact), _mm_mul_ps(_mm_set1_ps(f->scales[i]), _mm_loadu_ps((const float *)f->by + j)));
        }
    }
}

/* The nibbles have 8 added, so 8 times the sums of x are subtracted beforehand. */
INLINE void int4_integers_step(const Factors *f, i64 g, i64 groups, i64 there, const int whole, V (*sum)[8], const int rows,
                               const int columns)
{
    const __m512i lows = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8), none = _mm512_setzero_si512();
    const __m512i first = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), second = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const u16 *scales = f->by;
    const i8 *x = f->x;
    __m512i left[4][2], less[4];
    EACH_ROW {
        const i8 *from = x + i * f->step + g * GROUP;                    /* rows of x are padded to whole spans */
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        left[i][0] = _mm512_permutex2var_epi64(a, first, b);
        left[i][1] = _mm512_permutex2var_epi64(a, second, b);
        less[i] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(none, eight, left[i][0]), eight, left[i][1]);
        less[i] = _mm512_sub_epi32(none, less[i]);
    }
    EACH_COLUMN {
        const u8 *w = f->w + (j * groups + g) * HALF;
        const u16 *s = scales + j * groups + g;
        __m512i both = whole ? _mm512_loadu_si512(w) : _mm512_maskz_loadu_epi8(((__mmask64)1 << there * HALF) - 1, w);
        __m128i packed = whole ? _mm_loadl_epi64((const __m128i *)s) : _mm_maskz_loadu_epi16((__mmask8)((1u << there) - 1), s);
        __m512i low = _mm512_and_si512(both, lows), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), lows);
        V scale = _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(_mm_cvtph_ps(packed)));
        EACH_ROW {
            __m512i exact = less[i];
            add_dots(&exact, low, left[i][0]);
            add_dots(&exact, high, left[i][1]);
            sum[i][j] = _mm512_add_ps(sum[i][j], _mm512_mul_ps(_mm512_cvtepi32_ps(exact), scale));
        }
    }
}

INLINE void int4_integers(const Factors *f, const int rows, const int columns)
{
    V sum[4][8];
    const i64 groups = (f->k + GROUP - 1) / GROUP;
    i64 g = 0;
    EACH_ROW EACH_COLUMN sum[i][j] = _mm512_setzero_ps();
    for (; g + 4 <= groups; g += 4) {
        if (rows == 1) EACH_COLUMN NEXT(f->w + (j * groups + g) * HALF, columns * groups * HALF);
        int4_integers_step(f, g, groups, 4, 1, sum, rows, columns);
    }
    if (g < groups) int4_integers_step(f, g, groups, groups - g, 0, sum, rows, columns);
    EACH_ROW UNROLL for (int j = 0; j < columns; j += 4)
        put_four(f, i, j, four_folded(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]), _mm_set1_ps(f->scales[i]));
}
#endif

/* ---- one number of y, in plain C: compilers make vectors of it ----------------------------------------------------------- */

static float int8_floats_one(const Factors *f)
{
    const float *x = f->x, *scale = f->by;
    const i8 *w = (const i8 *)f->w;
    float sum[LANES] = {0};
    i64 r = 0;
    for (; r + LANES <= f->k; r += LANES)
        for (int l = 0; l < LANES; l++) sum[l] = __builtin_fmaf(x[r + l], w[r + l], sum[l]);
    for (int l = 0; l < f->k - r; l++) sum[l] = __builtin_fmaf(x[r + l], w[r + l], sum[l]);
    return folded(sum) * *scale;
}

static float int4_floats_one(const Factors *f)
{
    const float *x = f->x;
    const u16 *scales = f->by;
    float sum[LANES] = {0};
    for (i64 g = 0; g * GROUP < f->k; g++) {
        float part[GROUP] = {0}, scale = unpack_float16_1(scales[g]);
        const u8 *w = f->w + g * HALF;
        memcpy(part, x + g * GROUP, (size_t)least(GROUP, f->k - g * GROUP) * sizeof(float));
        for (int l = 0; l < LANES; l++) {
            float made = part[l] * (float)((w[l] & 15) - 8);
            sum[l] = __builtin_fmaf(__builtin_fmaf(part[l + HALF], (float)((w[l] >> 4) - 8), made), scale, sum[l]);
        }
    }
    return folded(sum);
}

static float int8_integers_one(const Factors *f)
{
    const i8 *x = f->x, *w = (const i8 *)f->w;
    i32 sum = 0;
    for (i64 r = 0; r < f->k; r++) sum += (i32)x[r] * w[r];
    return (float)sum * (*f->scales * *(const float *)f->by);
}

static float int4_integers_one(const Factors *f)
{
    const i8 *x = f->x;
    const u16 *scales = f->by;
    float sum[LANES] = {0};
    for (i64 g = 0; g * GROUP < f->k; g++) {
        const u8 *w = f->w + g * HALF;
        float scale = unpack_float16_1(scales[g]);
        for (int c = 0; c < 4; c++) {
            i32 exact = 0;
            for (int i = 4 * c; i < 4 * c + 4; i++)
                exact += ((w[i] & 15) - 8) * x[g * GROUP + i] + ((w[i] >> 4) - 8) * x[g * GROUP + HALF + i];
            sum[g % 4 * 4 + c] += (float)exact * scale;
        }
    }
    return folded(sum) * *f->scales;
}

/* ---- all of y -------------------------------------------------------------------------------------------------------------- */

/* One version for each number of rows of a tile; rows of 1 have 8 columns. A panel of columns stays in the L1 cache while rows go
   along it; where columns are left, the last tile begins earlier and writes some of them again, with the same bits. */
#define TILES(name)                                                                                                             \
static void name##_1x8(const Factors *f) { name(f, 1, 8); }                                                                     \
static void name##_1(const Factors *f) { name(f, 1, 4); }                                                                       \
static void name##_2(const Factors *f) { name(f, 2, 4); }                                                                       \
static void name##_3(const Factors *f) { name(f, 3, 4); }                                                                       \
static void name##_4(const Factors *f) { name(f, 4, 4); }                                                                       \
static void (*const name##_tiles[])(const Factors *) = {name##_1x8, name##_1, name##_2, name##_3, name##_4};

typedef struct {
    void (*const *tiles)(const Factors *); float (*one)(const Factors *);
    i64 size_of_x, row_of_w, row_of_scales;                      /* bytes of a number of x, of a row of w and of its scales */
} Way;

static void multiply(const Way *way, Factors all, i64 m)
{
    const i64 wide = way->tiles == NULL || all.n < 4 ? 0 : m == 1 && all.n >= 8 ? 8 : 4;
    for (i64 j = 0; j < all.n; j += wide ? wide : 1) {
        i64 first = wide ? least(j, all.n - wide) : j, rows;
        for (i64 i = 0; i < m; i += rows) {
            Factors f = all;
            rows = wide ? least(m - i, 4) : 1;
            f.x = (const char *)all.x + i * all.step * way->size_of_x;
            f.scales = all.scales ? all.scales + i : NULL;
            f.sums = all.sums ? all.sums + i : NULL;
            f.w = all.w + first * way->row_of_w;
            f.last = first + wide == all.n;
            f.by = (const char *)all.by + first * way->row_of_scales;
            f.bias = all.bias ? all.bias + first : NULL;
            f.y = all.y + i * all.n + first;
            if (wide) way->tiles[wide == 8 ? 0 : rows](&f);
            else {
                float y = way->one(&f);
                *f.y = f.bias ? y + *f.bias : y;
            }
        }
    }
}

#ifdef WIDE
TILES(int8_floats)
TILES(int4_floats)
#else
#define int8_floats_tiles NULL
#define int4_floats_tiles NULL
#endif
#ifdef DOTS
TILES(int8_integers)
TILES(int4_integers)
#else
#define int8_integers_tiles NULL
#define int4_integers_tiles NULL
#endif

void lowbit_int8(const float *x, const u8 *w, const float *scales, const float *bias, float *y, i64 m, i64 n, i64 k)
{
    Way way = {int8_floats_tiles, int8_floats_one, sizeof(float), k, sizeof(float)};
    multiply(&way, (Factors){x, k, NULL, NULL, w, scales, bias, y, n, k, 0}, m);
}

void lowbit_int4(const float *x, const u8 *w, const u16 *scales, const float *bias, float *y, i64 m, i64 n, i64 k, i64 groups)
{
    Way way = {int4_floats_tiles, int4_floats_one, sizeof(float), groups * HALF, groups * (i64)sizeof(u16)};
    multiply(&way, (Factors){x, k, NULL, NULL, w, scales, bias, y, n, k, 0}, m);
}

/* x is int8 (m, k), in rows of `padded` numbers: whole vectors, zeros after the k-th; with a scale and the sum of each row. */
void lowbit_int8_integers(const u8 *x, const float *of_x, const i32 *sums, const u8 *w, const float *scales, const float *bias,
                          float *y, i64 m, i64 n, i64 k, i64 padded)
{
    Way way = {int8_integers_tiles, int8_integers_one, 1, k, sizeof(float)};
    multiply(&way, (Factors){x, padded, of_x, sums, w, scales, bias, y, n, k, 0}, m);
}

/* The same, where `padded` numbers are whole spans. */
void lowbit_int4_integers(const u8 *x, const float *of_x, const u8 *w, const u16 *scales, const float *bias, float *y, i64 m,
                          i64 n, i64 k, i64 groups, i64 padded)
{
    Way way = {int4_integers_tiles, int4_integers_one, 1, groups * HALF, groups * (i64)sizeof(u16)};
    multiply(&way, (Factors){x, padded, of_x, NULL, w, scales, bias, y, n, k, 0}, m);
}
