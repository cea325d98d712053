/* Random words by row and place, and uniform and normal numbers: the bits of native/random.c. See mpitrain/kernels/random.py. */
#include "philox.h"

enum { WIDE = 256 };

/* out (rows, width): the first words of each row's stream; a thread makes the four of a counter. */
KERNEL(random_words, WIDE, (uint32 *__restrict__ out, const uint64 *__restrict__ rows,
                            const uint64 *__restrict__ stored, int64 key, int64 height, int64 width)) {
    const int64 blocks = (width + 3) / 4, n = height * blocks;
    const uint64 stream = key_of(stored, key);
    for (int64 i = blockIdx.x * (int64)WIDE + threadIdx.x; i < n; i += (int64)gridDim.x * WIDE) {
        const int64 row = i / blocks, block = i - row * blocks;
        const Words made = philox(stream, rows[row], (uint64)block);
        uint32 *to = out + row * width + 4 * block;
        if (width % 4 == 0) { *(uint4 *)to = make_uint4(made.of[0], made.of[1], made.of[2], made.of[3]); continue; }
#pragma unroll
        for (int w = 0; w < 4; ++w) if (4 * block + w < width) to[w] = made.of[w];
    }
}

/* A number in [0, 1) of 53 random bits, exactly. */
__device__ __forceinline__ double fraction(uint32 high, uint32 low) {
    return ((double)(high >> 5) * 67108864.0 + (double)(low >> 6)) * (1.0 / 9007199254740992.0);
}

/* log x for a normal number x > 0, and cos(2 pi u) for u in [0, 1): those of native/random.c, so that initial values have the
   bits of the host's, which the functions of a GPU would not give. The polynomials are fdlibm's (Sun Microsystems, 1993). */
__device__ __forceinline__ double log_of(double x) {
    const uint64 all = (uint64)__double_as_longlong(x);
    int k = (int)(all >> 52) - 1023;
    double m = __longlong_as_double((int64)((all & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull));
    const int large = m > 1.4142135623730951;
    m = large ? 0.5 * m : m;
    k += large;
    const double f = m - 1.0, s = f / (2.0 + f), z = s * s, half = 0.5 * f * f, n = (double)k;
    double r = 1.479819860511658591e-01;
    r = r * z + 1.531383769920937332e-01; r = r * z + 1.818357216161805012e-01; r = r * z + 2.222219843214978396e-01;
    r = r * z + 2.857142874366239149e-01; r = r * z + 3.999999999940941908e-01; r = r * z + 6.666666666666735130e-01;
    return n * 6.93147180369123816490e-01 - ((half - (s * (half + r * z) + n * 1.90821492927058770002e-10)) - f);
}
__device__ __forceinline__ double cos_of_turns(double u) {
    const int quarter = (int)(4.0 * u + 0.5);
    const double a = (u - 0.25 * quarter) * 6.283185307179586, z = a * a;
    double s = 1.58969099521155010221e-10, c = -1.13596475577881948265e-11;
    s = s * z - 2.50507602534068634195e-08; s = s * z + 2.75573137070700676789e-06; s = s * z - 1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03; s = s * z - 1.66666666666666324348e-01;
    c = c * z + 2.08757232129817482790e-09; c = c * z - 2.75573143513906633035e-07; c = c * z + 2.48015872894767294178e-05;
    c = c * z - 1.38888888888741095749e-03; c = c * z + 4.16666666666666019037e-02;
    const double sine = a + a * z * s, cosine = 1.0 - (0.5 * z - z * z * c), result = quarter & 1 ? sine : cosine;
    return quarter == 1 || quarter == 2 ? -result : result;
}

/* Element start + i of a stream is made of words of its own row. */
#define ELEMENTS(NAME, VALUE) \
KERNEL(NAME, WIDE, (double *__restrict__ out, int64 key, int64 start, int64 n)) { \
    for (int64 i = blockIdx.x * (int64)WIDE + threadIdx.x; i < n; i += (int64)gridDim.x * WIDE) { \
        const Words words = philox((uint64)key, (uint64)(start + i), 0); \
        out[i] = VALUE; \
    } \
}
#define U(W) fraction(words.of[W], words.of[W + 1])
ELEMENTS(random_uniform, U(0))
ELEMENTS(random_normal, sqrt(-2.0 * log_of(1.0 - U(0))) * cos_of_turns(U(2)))
