/* Collectives between processes that share memory: who has arrived, the sum itself, and waiting without wasting the core.

   Collective number s uses slot s % slots of the control block:

       a rank                         slot: arrived         finished        (both only grow: n a collective)
       writes its record
       arrived += 1            ---->       n * use  ----+
       waits for all           <------------------------+
       compares all records
       sums slice `rank` of all arrays, into all arrays
       finished += 1           ---->                         n * use  ----+
       waits for all           <------------------------------------------+

   The last one to arrive wakes those that sleep: one wake-up for a phase, however many ranks. Each `+=` is a full barrier, so
   that what a rank wrote before it is there for whoever has seen it.

   Functions for outside are called shared_...: without that `advance` was the C library's own. */

#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "sixteen.h"

#define LINE 64                     /* bytes of a cache line */
#define AHEAD 16                    /* lines that are fetched before they are needed */
#define BLOCK 1024                  /* elements; with two on the stack, 8 KiB of float */
#define HELD (64 << 10)             /* bytes of the largest sum (5 us, and looking for others) that lets no other thread run */
#define DEPTH 32                    /* of the stack; comm/shared/fold.py checks programs against it */
#define RECORD 128                  /* bytes of what a rank says about its collective; the first 8 are its number */
#define COMPARED 12                 /* of these: number and checksum */

#define CONVERT(NAME)                                                                                                   \
INLINE void widen_##NAME(const uint16_t *x, float *y, i64 n) { for (i64 i = 0; i < n; i++) y[i] = unpack_##NAME##_1(x[i]); } \
INLINE void narrow_##NAME(const float *x, uint16_t *y, i64 n) { for (i64 i = 0; i < n; i++) y[i] = pack_##NAME##_1(x[i]); }
CONVERT(bfloat16)
CONVERT(float16)

#define NARROW 0
#define T float
#define A float
#define NAME(name) name##_float32
#include "fold.h"
#undef T
#undef A
#undef NAME

#define T double
#define A double
#define NAME(name) name##_float64
#include "fold.h"
#undef T
#undef A
#undef NAME
#undef NARROW

#define NARROW 1
#define T uint16_t
#define A float
#define NAME(name) name##_bfloat16
#include "fold.h"
#undef NAME

#define NAME(name) name##_float16
#include "fold.h"
#undef NAME

enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };

/* Elements [start, stop) of every destination become what the program makes of the sources; in place is allowed. */
void shared_fold(i64 type, const char *const *sources, const int32_t *program, i64 length, char *const *destinations, i64 targets,
                 i64 start, i64 stop)
{
    switch (type) {
    case FLOAT32: fold_float32(sources, program, length, destinations, targets, start, stop); break;
    case FLOAT64: fold_float64(sources, program, length, destinations, targets, start, stop); break;
    case BFLOAT16: fold_bfloat16(sources, program, length, destinations, targets, start, stop); break;
    case FLOAT16: fold_float16(sources, program, length, destinations, targets, start, stop); break;
    }
}

typedef struct { u32 count, sleepers; char rest[120]; } Gate;
typedef struct { Gate arrived, finished; } Slot;

/* What changes from call to call of a channel in this process; both have their layout in comm/shared/engine.py too. */
typedef struct { i64 sequence, spin; } Turn;

/* What is done with elements [start, stop) of a sum, a block at a time while it is in the cache; from comm/shared/engine.py. */
typedef struct {
    void (*part)(char *const *arrays, const char *summed, const char *scalars, i64 from, i64 n);
    char *arrays[4];                /* as they begin at element `start` */
    const char *scalars;
    i64 start, stop;
} Pass;

/* One kind of collective, the same for every call. */
typedef struct {
    i64 n, rank, slots, mode, type, itemsize, count, start, stop, length, scratch_bytes;
    Slot *slot;
    char *records, *scratch;        /* [slots][n][RECORD]; [n][slots][scratch_bytes] */
    const int32_t *program;
    char **arrays;                  /* every rank's array as this process sees it (TWO_SHOT, PARTIAL, SCATTER) */
    char *own;                      /* this rank's, where it is the same in every call */
    Turn *turn;
    const Pass *passes;             /* of SCATTER: what follows the sum, where that needs no other node */
    i64 n_passes;
    i64 taken;                      /* the number that shared_run gave to the last collective of this plan */
    char record[RECORD];
} Plan;

enum { MESSAGE, ONE_SHOT, TWO_SHOT, PARTIAL, SCATTER };     /* mode */
enum { QUEUED, ARRIVED, SUMMED, DONE, PARTLY };             /* state; negative: -1 - rank of one with another record */

static int reached(const Gate *gate, u32 target)
{
    return (int32_t)(__atomic_load_n(&gate->count, __ATOMIC_ACQUIRE) - target) >= 0;
}

static void enter(Gate *gate, u32 target)
{
    u32 count = __atomic_add_fetch(&gate->count, 1, __ATOMIC_SEQ_CST);
    if (count == target && __atomic_load_n(&gate->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &gate->count, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static i64 now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

INLINE void pause_briefly(void)
{
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether the gate has reached the target, within `limit` ns: `spin` ns of looking, then asleep. A sleeper counts itself before
   it looks again, and who enters looks for sleepers after it has counted: one of them sees the other. */
static int wait_for(Gate *gate, u32 target, i64 spin, i64 limit)
{
    if (reached(gate, target)) return 1;
    if (limit <= 0) return 0;
    i64 begin = now(), left;
    if (spin > limit) spin = limit;
    while (spin > 0 && now() - begin < spin)
        for (int i = 0; i < 32; i++) {
            if (reached(gate, target)) return 1;
            pause_briefly();
        }
    while ((left = limit - (now() - begin)) > 0) {
        struct timespec time = {left / 1000000000, left % 1000000000};
        int interrupted = 0;
        __atomic_add_fetch(&gate->sleepers, 1, __ATOMIC_SEQ_CST);
        u32 count = __atomic_load_n(&gate->count, __ATOMIC_SEQ_CST);
        if ((int32_t)(count - target) < 0)
            interrupted = syscall(SYS_futex, &gate->count, FUTEX_WAIT, count, &time, NULL, 0) < 0 && errno == EINTR;
        __atomic_sub_fetch(&gate->sleepers, 1, __ATOMIC_SEQ_CST);
        if (reached(gate, target)) return 1;
        if (interrupted) return 0;                            /* Python must see the signal */
    }
    return 0;
}

static char *scratch_of(const Plan *p, i64 rank, i64 slot) { return p->scratch + (rank * p->slots + slot) * p->scratch_bytes; }

static void sum(const Plan *p, char *own, i64 slot)
{
    if (p->mode == ONE_SHOT) {
        const char *sources[p->n];
        for (i64 r = 0; r < p->n; r++) sources[r] = scratch_of(p, r, slot);
        shared_fold(p->type, sources, p->program, p->length, &own, 1, 0, p->count);
    } else if (p->mode == TWO_SHOT)
        shared_fold(p->type, (const char *const *)p->arrays, p->program, p->length, p->arrays, p->n, p->start, p->stop);
    else if (p->n_passes)
        for (const Pass *pass = p->passes; pass < p->passes + p->n_passes; pass++)
            for (i64 from = pass->start, to; from < pass->stop; from = to) {
                to = from + BLOCK < pass->stop ? from + BLOCK : pass->stop;
                shared_fold(p->type, (const char *const *)p->arrays, p->program, p->length, &own, 1, from, to);
                pass->part(pass->arrays, own + from * p->itemsize, pass->scalars, from - pass->start, to - from);
            }
    else if (p->mode == PARTIAL || p->mode == SCATTER)
        shared_fold(p->type, (const char *const *)p->arrays, p->program, p->length, &own, 1, p->start, p->stop);
}

/* Moves a collective over `own`, this rank's array, on from `state` as far as it goes within `limit` ns of waiting (below 0: to
   ARRIVED at most); returns the state reached. */
int shared_advance(const Plan *p, char *own, i64 sequence, int state, i64 spin, i64 limit)
{
    i64 slot = sequence % p->slots;
    u32 before = (u32)(sequence / p->slots * p->n), target = before + (u32)p->n;
    Gate *arrived = &p->slot[slot].arrived, *finished = &p->slot[slot].finished;
    char *records = p->records + slot * p->n * RECORD, *mine = records + p->rank * RECORD;
    if (state == QUEUED) {
        if (!wait_for(finished, before, spin, limit)) return QUEUED;      /* the slot's last use */
        memcpy(mine, p->record, RECORD);
        memcpy(mine, &sequence, sizeof sequence);
        if (p->mode == ONE_SHOT) memcpy(scratch_of(p, p->rank, slot), own, p->count * p->itemsize);
        enter(arrived, target);
        state = ARRIVED;
    }
    if (state == ARRIVED) {
        if (limit < 0 || !wait_for(arrived, target, spin, limit)) return ARRIVED;
        for (i64 r = 0; r < p->n; r++) if (memcmp(records + r * RECORD, mine, COMPARED)) return -1 - (int)r;
        sum(p, own, slot);
        if ((p->mode == PARTIAL || p->mode == SCATTER) && !p->n_passes) return PARTLY;
        enter(finished, target);
        if (p->mode != TWO_SHOT) return DONE;                 /* the result depends on nobody else any more */
        state = SUMMED;
    }
    if (state == SUMMED && wait_for(finished, target, spin, limit)) return DONE;
    return state;
}

/* What this needs of Python's interface, declared here so that no header files have to be there. */
typedef struct object PyObject;
extern void *PyLong_AsVoidPtr(PyObject *);
extern PyObject *PyLong_FromLong(long);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);

/* A collective that begins with nothing else in flight, all of it in one call: a builtin (backend/native.py) bound to the plan's
   address. Other threads of Python may run meanwhile only where the sum is large enough to be worth letting them in. */
PyObject *shared_run(PyObject *plan, PyObject *none)
{
    (void)none;
    Plan *p = PyLong_AsVoidPtr(plan);
    p->taken = p->turn->sequence++;
    void *state = p->count * p->itemsize > HELD ? PyEval_SaveThread() : NULL;
    int reached = shared_advance(p, p->own, p->taken, QUEUED, p->turn->spin, p->turn->spin);
    if (state) PyEval_RestoreThread(state);
    return PyLong_FromLong(reached);
}

/* After PARTLY: this rank's slice, complete now, goes to the others on the node (PARTIAL), or stays here (SCATTER). */
int shared_spread(const Plan *p, const char *own, i64 sequence)
{
    i64 slot = sequence % p->slots, offset = p->start * p->itemsize, bytes = (p->stop - p->start) * p->itemsize;
    for (i64 r = 0; r < p->n && p->mode == PARTIAL; r++)
        if (r != p->rank && bytes) memcpy(p->arrays[r] + offset, own + offset, bytes);
    enter(&p->slot[slot].finished, (u32)((sequence / p->slots + 1) * p->n));
    return p->mode == PARTIAL ? SUMMED : DONE;                /* a slice that stays depends on nobody else any more */
}
