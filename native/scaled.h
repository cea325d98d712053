/* Whole numbers with a scale: what the sources of such blocks share. The source includes compress.h first. */

#define TINY 0x1p-100f              /* scales below count as 0: 1 / scale might overflow */
#define HUGE 0x7f000000             /* 2^127: 127 scales might overflow from there on */
#define NEAREST 0x1.8p23f           /* added, it leaves the nearest whole number in the last bits, ties to even */

/* The scale that travels, and 1 / scale, or 0 where all become zeros; 0: the block is not finite. */
INLINE int scaled(i32 top, float most, float *scale, float *inverse)
{
    float found = float_of((u32)top) / most;
    *inverse = 0;
    if (top >= HUGE) { *scale = nan_(); return 0; }
    if (found < TINY) { *scale = 0; return 1; }
    *scale = found;
    *inverse = 1 / found;
    return 1;
}

INLINE float whole(float a, float inverse) { return (a * inverse + NEAREST) - NEAREST; }

INLINE void leave(const float *restrict a, float *restrict error, float scale, float inverse, i64 size)
{
    if (error) for (i64 i = 0; i < size; i++) error[i] = a[i] - whole(a[i], inverse) * scale;
}
