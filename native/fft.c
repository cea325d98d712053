/* Discrete Fourier transforms of many lines, for float and double; `mpitrain/kernels/fft.py` plans them.

   Vectors hold one number of LANES lines each. A line of n numbers is a column of n vectors of real and n of imaginary parts:

       a line of up to 256 or so      LANES lines side by side, turned round on their way in and out
       a longer one                   is a matrix (n1, n2) by itself: the lines are its columns, then, after a factor for each
                                      number, its rows, and the result is read down the columns (four steps: Bailey, "FFTs in
                                      external or hierarchical memory", J. Supercomputing 4, 1990)

   Both are transformed in passes without a permutation (Stockham; see fft_passes.h). The length alone decides, and lanes do not
   meet: a line has the same bits whatever it stands beside. The inverse exchanges real and imaginary parts before and after.
   Multiply-adds are fused, on every machine that can. */

#ifndef T

#include "tile.h"

#define UNROLL _Pragma("GCC unroll 16")
#define LARGEST_RADIX 128
#define STEPS 28                     /* passes of one transform, at most; also in kernels/fft.py */

/* One pass: its radix, and where in the tables its factors and the roots of unity of an odd radix lie. */
typedef struct { i64 radix, factors, roots; } Step;
typedef struct { i64 length, count; Step step[STEPS]; } Steps;

/* `length` complex numbers are n1 x n2, n1 = 1 where lines lie side by side. Tables: `middle`, the factors between rows and
   columns; `halves`, those that join the halves of a real line. All as kernels/fft.py writes them, in 64-bit integers. */
typedef struct { i64 length, padded, middle, halves; Steps columns, rows; } Plan;

INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

#define SOURCE "fft.c"
#include "both.h"

#else

#include "turn.h"
#include "fft_passes.h"
#include "fft_lines.h"
#include "fft_real.h"
#undef V
#undef MASK

#endif
