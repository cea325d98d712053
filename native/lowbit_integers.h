/* Products of whole numbers, for lowbit.c: y = x w' * scales + bias, where x is int8 with a scale for each row. Tiles have rows x
   columns numbers of y. */

#define SPAN 128                    /* weights of int4 in 64 bytes: four groups */
#define NEAR 24576                  /* bytes of x that stay in the L1 cache while weights go along them */

/* What a tile reads: rows of x, `step` numbers apart, with their `scales` and `sums`, rows of w with their scales `by`; and where
   it writes. `last`: less than a vector lies behind these rows of w. */
typedef struct {
    const i8 *x; i64 step; const float *scales; const i32 *sums; const u8 *w; const void *by; const float *bias; float *y;
    i64 n, k; int last;
} Factors;

#ifdef DOTS
#define EACH_ROW UNROLL for (int i = 0; i < rows; i++)
#define EACH_TURN UNROLL for (int j = 0; j < columns; j++)

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

/* Writes sums * scales + bias of four columns, without fusing. */
INLINE void put_four(const Factors *f, int row, int column, __m128 sums, __m128 scales)
{
    __m128 y = _mm_mul_ps(sums, scales);
    if (f->bias) y = _mm_add_ps(y, _mm_loadu_ps(f->bias + column));
    _mm_storeu_ps(f->y + row * f->n + column, y);
}

/* Adds to `sum` the products of bytes without a sign, `u`, and with one, `i`, four in each number. As an intrinsic, GCC 12 moved
   and spilled sums around each of these: a tile took twice as long. */
INLINE void add_dots(__m512i *sum, __m512i u, __m512i i) { __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(u), "v"(i)); }

/* vpdpbusd takes bytes without a sign on its left: w + 128 there, and 128 times the sum of x is subtracted. Rows of x are padded
   with zeros to whole vectors, so that what comes behind a row of w does not count. */
INLINE __m512i unsigned_at(const u8 *w) { return _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8((char)0x80)); }

INLINE __m512i unsigned_rest(const u8 *w, i64 there)
{
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8(((__mmask64)1 << there) - 1, w), _mm512_set1_epi8((char)0x80));
}

/* The sum of each of 16 vectors. */
INLINE __m512i halves_of_integers(__m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_mask_blend_epi32(0xff00, a, b), _mm512_shuffle_i64x2(a, b, 0x4e));
}

INLINE __m512i quarters_of_integers(const __m512i *v)
{
    __m512i a = halves_of_integers(v[0], v[1]), b = halves_of_integers(v[2], v[3]);
    return _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
}

INLINE __m512i pairs_of_integers(__m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

INLINE __m512i sixteen_sums(const __m512i *v)
{
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = pairs_of_integers(quarters_of_integers(v), quarters_of_integers(v + 4));
    __m512i high = pairs_of_integers(quarters_of_integers(v + 8), quarters_of_integers(v + 12));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    return _mm512_permutexvar_epi32(turned, all);
}

/* Writes `rows` rows of COLUMNS numbers, without fusing. */
INLINE void put_integers(const Factors *f, const __m512i *sum, const int rows)
{
    const __m512i second = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __mmask8 there = rows == 2 ? 3 : 1;
    __m512i less = _mm512_permutexvar_epi32(second, _mm512_castsi128_si512(_mm_maskz_loadu_epi32(there, f->sums)));
    V by = _mm512_permutexvar_ps(second, _mm512_castps128_ps512(_mm_maskz_loadu_ps(there, f->scales)));
    V scales = _mm512_mul_ps(by, _mm512_broadcast_f32x8(_mm256_loadu_ps(f->by)));
    V y = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sixteen_sums(sum), _mm512_slli_epi32(less, 7))), scales);
    if (f->bias) y = _mm512_add_ps(y, _mm512_broadcast_f32x8(_mm256_loadu_ps(f->bias)));
    _mm256_storeu_ps(f->y, _mm512_castps512_ps256(y));
    if (rows == 2) _mm256_storeu_ps(f->y + f->n, _mm512_extractf32x8_ps(y, 1));
}

/* A row of x by COLUMNS rows of w. Only behind the last row of w a mask is needed, which took 12 cycles a load. */
static void int8_one_row(const Factors *f)
{
    const i64 k = f->k;
    __m512i sum[2 * COLUMNS];
    i64 r = 0;
    UNROLL for (int s = 0; s < 2 * COLUMNS; s++) sum[s] = _mm512_setzero_si512();
    for (; r + 64 <= k || (r < k && !f->last); r += 64) {
        __m512i left = _mm512_loadu_si512(f->x + r);
        EACH_COLUMN NEXT(f->w + r * COLUMNS + c * 64, 2 * COLUMNS * k);       /* in the order of memory: a tenth more of it a second */
        EACH_COLUMN add_dots(&sum[c], unsigned_at(f->w + c * k + r), left);
    }
    if (r < k) EACH_COLUMN add_dots(&sum[c], unsigned_rest(f->w + c * k + r, k - r), _mm512_loadu_si512(f->x + r));
    put_integers(f, sum, 1);
}

#define BYTES 3072                  /* terms of a panel: 24 KiB */

/* `rows` rows of x by a panel of COLUMNS rows of w + 128: vector v of row c is panel[v * COLUMNS + c]. `kept` has sums of other
   parts of k. */
INLINE void int8_tile(const Factors *f, const __m512i *panel, __m512i *kept, int begins, int ends, const int rows)
{
    const __m512i *end = panel + (least(f->k, BYTES) + 63) / 64 * COLUMNS;
    const i8 *x = f->x;
    __m512i sum[2 * COLUMNS], left[2];
    UNROLL for (int s = 0; s < 2 * COLUMNS; s++) sum[s] = begins || s >= rows * COLUMNS ? _mm512_setzero_si512() : kept[s];
    for (; panel < end; panel += COLUMNS, x += 64) {
        UNROLL for (int i = 0; i < rows; i++) left[i] = _mm512_loadu_si512(x + i * f->step);
        EACH_COLUMN {
            __m512i right = panel[c];
            __asm__("" : "+v"(right));                           /* loaded once, as in lowbit_floats.h */
            UNROLL for (int i = 0; i < rows; i++) add_dots(&sum[i * COLUMNS + c], right, left[i]);
        }
    }
    if (ends) put_integers(f, sum, rows);
    else UNROLL for (int s = 0; s < rows * COLUMNS; s++) kept[s] = sum[s];
}

static __attribute__((noinline)) void int8_tile_2(const Factors *f, const __m512i *panel, __m512i *kept, int begins, int ends)
{
    int8_tile(f, panel, kept, begins, ends, 2);
}

static __attribute__((noinline)) void int8_tile_1(const Factors *f, const __m512i *panel, __m512i *kept, int begins, int ends)
{
    int8_tile(f, panel, kept, begins, ends, 1);
}

/* m rows of x by COLUMNS rows of w. */
static void int8_many_rows(const Factors *all, i64 m)
{
    __m512i panel[BYTES / 64 * COLUMNS], sum[BLOCK / 2][2 * COLUMNS];
    for (i64 i0 = 0; i0 < m; i0 += BLOCK)
        for (i64 r = 0; r < all->k; r += BYTES) {
            const i64 k = all->k, end = least(m, i0 + BLOCK), count = least(BYTES, k - r);
            for (i64 v = 0; v < count; v += 64)
                EACH_COLUMN {
                    const u8 *w = all->w + c * k + r + v;
                    NEXT(w, COLUMNS * k);
                    panel[v / 64 * COLUMNS + c] = v + 64 <= count ? unsigned_at(w) : unsigned_rest(w, count - v);
                }
            Factors f = *all;
            f.x += i0 * f.step + r, f.scales += i0, f.sums += i0, f.y += i0 * f.n, f.k = count;
            for (i64 i = i0; i < end; i += 2, f.x += 2 * f.step, f.scales += 2, f.sums += 2, f.y += 2 * f.n)
                (i + 2 <= end ? int8_tile_2 : int8_tile_1)(&f, panel, sum[(i - i0) / 2], r == 0, r + BYTES >= k);
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
    EACH_TURN {
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
    EACH_ROW EACH_TURN sum[i][j] = _mm512_setzero_ps();
    for (; g + 4 <= groups; g += 4) {
        if (rows == 1) EACH_TURN NEXT(f->w + g * HALF * columns + j * 64, 2 * columns * groups * HALF);
        int4_integers_step(f, g, groups, 4, 1, sum, rows, columns);
    }
    if (g < groups) int4_integers_step(f, g, groups, groups - g, 0, sum, rows, columns);
    EACH_ROW UNROLL for (int j = 0; j < columns; j += 4)
        put_four(f, i, j, four_folded(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]), _mm_set1_ps(f->scales[i]));
}
#endif

static void multiply_int8(const Factors *all, i64 m)
{
    const i64 n = all->n, k = all->k;
    i64 j = 0;
#ifdef DOTS
    for (; j < n && n >= COLUMNS; j += COLUMNS) {            /* the last ones begin earlier: some are written again, the same */
        const i64 from = least(j, n - COLUMNS);
        Factors f = *all;
        f.w += from * k, f.by = (const float *)f.by + from, f.bias = f.bias ? f.bias + from : NULL, f.y += from;
        f.last = (n - from - COLUMNS) * k < 64;
        if (m == 1) int8_one_row(&f);
        else int8_many_rows(&f, m);
    }
#endif
    for (; j < n; j++)
        for (i64 i = 0; i < m; i++) {
            const i8 *x = all->x + i * all->step, *w = (const i8 *)all->w + j * k;
            i32 sum = 0;
            for (i64 r = 0; r < k; r++) sum += (i32)x[r] * w[r];
            float y = (float)sum * (all->scales[i] * ((const float *)all->by)[j]);
            all->y[i * n + j] = all->bias ? y + all->bias[j] : y;
        }
}

static float int4_number(const Factors *f)
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

#ifdef DOTS
static void int4_1x8(const Factors *f) { int4_integers(f, 1, 8); }
static void int4_1(const Factors *f) { int4_integers(f, 1, 4); }
static void int4_2(const Factors *f) { int4_integers(f, 2, 4); }
static void int4_3(const Factors *f) { int4_integers(f, 3, 4); }
static void int4_4(const Factors *f) { int4_integers(f, 4, 4); }
static void (*const int4_tiles[])(const Factors *) = {int4_1x8, int4_1, int4_2, int4_3, int4_4};
#endif

/* Rows i0 to `end` of y, in tiles of at most four rows and `wide` columns; or number by number, where `wide` is 0. */
static void int4_rows(const Factors *all, i64 i0, i64 end, const i64 wide)
{
    const i64 groups = (all->k + GROUP - 1) / GROUP;
    for (i64 j = 0; j < all->n; j += wide ? wide : 1) {
        i64 from = wide ? least(j, all->n - wide) : j, rows;
        for (i64 i = i0; i < end; i += rows) {
            Factors f = *all;
            rows = wide ? least(end - i, 4) : 1;
            f.x += i * f.step, f.scales += i, f.w += from * groups * HALF, f.by = (const u16 *)f.by + from * groups;
            f.bias = f.bias ? f.bias + from : NULL, f.y += i * f.n + from;
#ifdef DOTS
            if (wide) int4_tiles[wide == 8 ? 0 : rows](&f);
#endif
            if (!wide) *f.y = f.bias ? int4_number(&f) + *f.bias : int4_number(&f);
        }
    }
}

/* Rows of x that the L1 cache holds go along the weights together. */
static void multiply_int4(const Factors *all, i64 m)
{
    const i64 block = all->step * 4 < NEAR ? NEAR / all->step / 4 * 4 : 4;
    i64 wide = 0;
#ifdef DOTS
    if (all->n >= 4) wide = m == 1 && all->n >= 8 ? 8 : 4;
#endif
    for (i64 i = 0; i < m; i += block) int4_rows(all, i, least(m, i + block), wide);
}
