/* Multiply-adds that wait for nothing and touch no memory: what the arithmetic of a core can do at most.

   CHAINS vectors x become x * a + b, round after round. Two units with a latency of 4 or 5 cycles are busy with ten chains; more
   than twelve, with a and b, would not stay in 16 registers. All x go towards b / (1 - a) = 1, so nothing overflows or becomes
   denormal. */

#include <stdint.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT ON
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define CHAINS 12

/* `x` has room for 16 numbers, which become what the chains end with. Returns the multiplications and additions done. */
#define PEAK(T, NAME)                                                                                                   \
                                                                                                                        \
typedef T vector_##NAME __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));                      \
                                                                                                                        \
int64_t peak_##NAME(T *x, int64_t rounds)                                                                               \
{                                                                                                                       \
    const int lanes = VECTOR_BYTES / sizeof(T);                                                                         \
    vector_##NAME chain[CHAINS], a, b;                                                                                  \
    for (int l = 0; l < lanes; l++) a[l] = (T)0.75, b[l] = (T)0.25;                                                     \
    for (int c = 0; c < CHAINS; c++) for (int l = 0; l < lanes; l++) chain[c][l] = x[l] + c;                            \
    for (int64_t r = 0; r < rounds; r++)                                                                                \
        for (int c = 0; c < CHAINS; c++) chain[c] = chain[c] * a + b;                                                   \
    for (int c = 1; c < CHAINS; c++) chain[0] += chain[c];                                                              \
    for (int l = 0; l < lanes; l++) x[l] = chain[0][l];                                                                 \
    return 2 * rounds * CHAINS * lanes;                                                                                 \
}

PEAK(float, float32)
PEAK(double, float64)
