/* What the sources of compressed blocks share: see kernels/compress.py. The source includes sixteen.h first. */

typedef uint8_t u8;
typedef int8_t i8;
typedef int32_t i32;

#define BLOCK 4096
#define SIZE 0x7fffffff

INLINE float nan_(void) { return float_of(0x7fc00000); }

/* Where a block ends that begins at `start`; -1 where bounds are wrong. */
INLINE i64 end_of(const i64 *bounds, i64 i, i64 start, i64 n)
{
    i64 end = bounds[i + 1] - bounds[0];
    return end < start || end > n || end - start > BLOCK ? -1 : end;
}

/* a = values + error of one block; gives the largest size as bits. */
INLINE i32 loaded(const float *restrict values, const float *restrict error, float *restrict a, i64 size)
{
    i32 top = 0;
    if (error)
        for (i64 i = 0; i < size; i++) {
            a[i] = values[i] + error[i];
            i32 bits = (i32)(bits_of(a[i]) & SIZE);
            top = bits > top ? bits : top;
        }
    else
        for (i64 i = 0; i < size; i++) {
            a[i] = values[i];
            i32 bits = (i32)(bits_of(a[i]) & SIZE);
            top = bits > top ? bits : top;
        }
    return top;
}
