/* One new position of some texts through all blocks of a transformer, in one call, and through its head in another.

   Each step is the function that the op of that name calls, of the library that has it, so the bits are those of the ops one by
   one; what is saved is what lies between them in Python, 0.08 ms a block (2026-11). A block is

       x += out(attention(qkv(norm1(x))));   x += narrow(f(wide(norm2(x)))) */

#include <stdint.h>

typedef int64_t i64;

/* How a weight is kept: as floats as they lie, or packed; in few bits, multiplied with floats, or with rows in whole numbers. */
enum { FLOATS, PACKED, INT8, INT4, INT8_INTEGERS, INT4_INTEGERS };

#define GROUP 32                    /* lowbit.c's */

#define SOURCE "decode.h"
#include "both.h"
