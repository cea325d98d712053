/* The blocking all-reduce of a small array between two ranks, in one call from Python: at 8 bytes the message takes 2 us, and
   every Python call around it half a one more. The function is a builtin of the interpreter (see comm/messages/pair.py), because a
   call through ctypes takes as long as the message. What it needs of Python's and MPI's interfaces is declared here: no header
   files have to be there. MPI's handles are pointers, which the caller makes sure of. */

#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct object PyObject;
/* Py_buffer, of which Python's stable interface fixes the first three members; the rest is room. */
typedef struct { void *memory; PyObject *owner; intptr_t length; void *rest[16]; } Buffer;

extern long long PyLong_AsLongLong(PyObject *);
extern PyObject *PyLong_FromLong(long);
extern int PyObject_GetBuffer(PyObject *, Buffer *, int);
extern void PyBuffer_Release(Buffer *);
extern void PyErr_Clear(void);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);

enum { WRITABLE = 1, DIFFERENT = -1, UNSUITED = -2, HEADER = 128, COMPARED = 12 };        /* sequence number and checksum come first */

typedef struct {
    int (*sendrecv)(const void *, int, void *, int, int, void *, int, void *, int, int, void *, void *);
    void *byte, *comm;
    const char *header;
    char *sending, *arriving;
    int64_t peer, tag, nbytes, room, kind;
    int64_t began;                  /* ns, CLOCK_MONOTONIC: when the call that runs now did; another thread may look */
} Entry;

#define ADD(T, NAN_OF_T) \
    for (int64_t i = 0; i < nbytes / (int64_t)sizeof(T); i++) { \
        T x = ((const T *)arrived)[i] + ((const T *)mine)[i]; \
        ((T *)sum)[i] = x == x ? x : NAN_OF_T; \
    }

/* Every NaN becomes the one that is positive and quiet: of two, a processor keeps the one on the left, and compilers take either
   order of an addition's operands for the other. So the other rank has the same bits, whatever adds there. */
static void add(const void *restrict arrived, const void *restrict mine, void *restrict sum, int64_t nbytes, int64_t kind)
{
    if (kind == 0) ADD(float, __builtin_nanf(""))
    else if (kind == 1) ADD(double, __builtin_nan(""))
    else ADD(uint64_t, 0)                                       /* int64, whose sum wraps around */
}

/* exchange(entry's address, array, sequence number): 0; MPI's error; DIFFERENT when the other rank runs something else;
   UNSUITED, with nothing sent, for an array of another size, with gaps, read-only, or not in host memory. */
PyObject *exchange(PyObject *self, PyObject *const *arguments, intptr_t count)
{
    (void)self; (void)count;
    Entry *e = (Entry *)(intptr_t)PyLong_AsLongLong(arguments[0]);
    Buffer buffer;
    if (PyObject_GetBuffer(arguments[1], &buffer, WRITABLE)) {
        PyErr_Clear();
        return PyLong_FromLong(UNSUITED);
    }
    if (buffer.length != e->nbytes) {
        PyBuffer_Release(&buffer);
        return PyLong_FromLong(UNSUITED);
    }
    int64_t sequence = PyLong_AsLongLong(arguments[2]);
    memcpy(e->sending, e->header, HEADER);
    memcpy(e->sending, &sequence, sizeof sequence);
    memcpy(e->sending + HEADER, buffer.memory, e->nbytes);
    char status[128];
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    e->began = t.tv_sec * 1000000000LL + t.tv_nsec;
    void *state = PyEval_SaveThread();
    int code = e->sendrecv(e->sending, (int)(HEADER + e->nbytes), e->byte, (int)e->peer, (int)e->tag,
                           e->arriving, (int)e->room, e->byte, (int)e->peer, (int)e->tag, e->comm, status);
    PyEval_RestoreThread(state);
    e->began = 0;
    if (!code) {
        if (memcmp(e->sending, e->arriving, COMPARED)) code = DIFFERENT;
        else {
            add(e->arriving + HEADER, buffer.memory, e->sending + HEADER, e->nbytes, e->kind);
            memcpy(buffer.memory, e->sending + HEADER, e->nbytes);
        }
    }
    PyBuffer_Release(&buffer);
    return PyLong_FromLong(code);
}
