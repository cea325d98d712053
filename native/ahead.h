/* Fetching memory before it is reached: by itself the CPU stops at the end of a page (4 KiB), and does not see what is going to
   be written. It takes a tenth to a half off a pass over arrays that are in no cache of this core, and little off others. To
   fetch beyond the end of an array has no effect on what anything holds. */

#ifndef MPITRAIN_AHEAD_H
#define MPITRAIN_AHEAD_H

#include <stdint.h>

#define AHEAD(T) (4096 / (int64_t)sizeof(T))         /* numbers: so far before it is reached */
#define LINE(T) (64 / (int64_t)sizeof(T))            /* numbers in a line of the cache */
#define STRETCH(T) (4 * LINE(T))                     /* numbers whose lines are fetched at once: more would wait for each other */

/* The lines of a STRETCH of arrays, two to be read and two to be written, each of which may be NULL. */
static inline __attribute__((always_inline)) void fetch(const void *read, const void *read_too, const void *written,
                                                        const void *written_too)
{
    for (int byte = 0; byte < 256; byte += 64) {
        if (read) __builtin_prefetch((const char *)read + byte);
        if (read_too) __builtin_prefetch((const char *)read_too + byte);
        if (written) __builtin_prefetch((const char *)written + byte, 1);
        if (written_too) __builtin_prefetch((const char *)written_too + byte, 1);
    }
}

#endif
