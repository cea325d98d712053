/* bfloat16 and float16 beside float, one number at a time: what wire.c and shared.c do alike.

   Rounding is to the nearest, ties to even; beyond the largest number lies infinity; denormal numbers are numbers. A NaN
   becomes the one positive quiet NaN of the format, so that no bit depends on which operand of a sum was NaN. float16 is made
   of integer operations and one float addition, because compilers do not vectorise their own conversion: 8 MiB took 2.8 ms
   with it. */

#include <stdint.h>
#include <string.h>

typedef int64_t i64;
typedef uint16_t u16;
typedef uint32_t u32;

#define INLINE static inline __attribute__((always_inline))

INLINE u32 bits_of(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
INLINE float float_of(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }

INLINE u16 pack_bfloat16_1(float x)
{
    u32 bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;     /* a carry into the exponent is right */
    return (u16)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

INLINE float unpack_bfloat16_1(u16 x) { return float_of((u32)x << 16); }

INLINE u16 pack_float16_1(float x)
{
    u32 bits = bits_of(x), size = bits & 0x7fffffff;
    u32 normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;        /* 112: the difference of the exponents' biases */
    u32 denormal = bits_of(float_of(size) + 0.5f) - 0x3f000000;                 /* 0.5: its last bit is float16's last, 2^-24 */
    u32 packed = size < (113u << 23) ? denormal : size < (143u << 23) ? normal : 0x7c00;
    return (u16)(size > 0x7f800000 ? 0x7e00 : packed | bits >> 16 & 0x8000);
}

INLINE float unpack_float16_1(u16 x)
{
    u32 size = (u32)(x & 0x7fff) << 13, exponent = size & (31u << 23);
    u32 normal = size + (exponent == (31u << 23) ? 224u << 23 : 112u << 23);
    u32 denormal = bits_of(float_of(size + (113u << 23)) - 0x1p-14f);
    return float_of((exponent ? normal : denormal) | (u32)(x & 0x8000) << 16);
}
