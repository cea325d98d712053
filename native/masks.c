/* Numbers whose bit is 0 become 0, for float and double: bit i of a mask is bit i % 8 of its byte i / 8. One thread. */

#include <stdint.h>
#include <string.h>

#include "vectors.h"

typedef int64_t i64;

/* Memory decides how long it takes: bits are looked at one by one, in a form that compilers make vectors of. */
#define KEEP(T, INTEGER, suffix)                                                                                                \
void keep_bits_##suffix(T *values, const uint8_t *bits, i64 count, i64 first, i64 n_bytes)                                      \
{                                                                                                                               \
    i64 i = 0;                                                                                                                  \
    (void)n_bytes;                                                                                                              \
    for (; i < count && (first + i) % 8; i++) if (!(bits[(first + i) / 8] >> (first + i) % 8 & 1)) values[i] = 0;                \
    for (const uint8_t *byte = bits + (first + i) / 8; i + 8 <= count; i += 8, byte++) {                                        \
        INTEGER whole[8];                                                                                                       \
        memcpy(whole, values + i, sizeof whole);                                                                                \
        for (int j = 0; j < 8; j++) whole[j] &= -(INTEGER)(*byte >> j & 1);                                                     \
        memcpy(values + i, whole, sizeof whole);                                                                                \
    }                                                                                                                           \
    for (; i < count; i++) if (!(bits[(first + i) / 8] >> (first + i) % 8 & 1)) values[i] = 0;                                   \
}

KEEP(float, int32_t, float32)
KEEP(double, int64_t, float64)
