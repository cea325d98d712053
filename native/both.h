/* Includes SOURCE twice, for float and double: T is the type, INTEGER and WORD the signed and the unsigned number of its size, LANES
   how many fill a vector, and NAME(x) what a function of it is called. SOURCE takes its own macros back at its end. */

#define T float
#define INTEGER int32_t
#define WORD uint32_t
#define LANES FLOATS
#define NAME(name) name##_float32
#include SOURCE
#undef T
#undef INTEGER
#undef WORD
#undef LANES
#undef NAME

#define T double
#define INTEGER int64_t
#define WORD uint64_t
#define LANES DOUBLES
#define NAME(name) name##_float64
#include SOURCE
#undef T
#undef INTEGER
#undef WORD
#undef LANES
#undef NAME
#undef SOURCE
