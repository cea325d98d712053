/* Working memory of one call: pieces of what the caller hands over, and of malloc's where that is too small. The caller is told
   how much would have done. */
#ifndef MPITRAIN_BORROWED_H
#define MPITRAIN_BORROWED_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LINE_BYTES 64

typedef struct { char *at, *end; void **spilled; int64_t wanted; } Memory;

/* `memory` begins with a cache line and holds `bytes`. */
static Memory memory_of(void *memory, int64_t bytes) { return (Memory){memory, (char *)memory + bytes, NULL, 0}; }

/* Begins with a cache line, so that whole vectors in it do not straddle two; NULL where there is no memory. */
static void *borrow(Memory *m, int64_t bytes)
{
    int64_t size = (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    m->wanted += size;
    if (m->end - m->at >= size) return (m->at += size) - size;
    void **block = aligned_alloc(LINE_BYTES, LINE_BYTES + size);
    if (!block) return NULL;
    *block = m->spilled;
    m->spilled = block;
    return (char *)block + LINE_BYTES;
}

static void *borrow_zeros(Memory *m, int64_t bytes)
{
    void *memory = borrow(m, bytes);
    return memory ? memset(memory, 0, bytes) : NULL;
}

/* `wanted` becomes what the call took. Written once: threads that do the same at the same time may share it. */
static void give_back(Memory *m, int64_t *wanted)
{
    *wanted = m->wanted;
    while (m->spilled) {
        void **block = m->spilled;
        m->spilled = *block;
        free(block);
    }
}

#endif
