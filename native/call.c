/* Calls a C function with arrays and numbers, as a builtin of the interpreter: 0.5 us where ctypes takes 10, and a small
   operation is a handful of calls. What it needs of Python's stable interface is declared here: no header files have to be
   there.

   The function is called with 16 integers and 4 doubles, of which it looks at as many as it has, in the order of each kind:
   on the machines named below integers (pointers too) and doubles are numbered apart from each other, and the caller cleans
   the stack. `can_call` says whether this is such a machine. */

#include <stdint.h>

typedef int64_t i64;
typedef struct object PyObject;
/* Py_buffer, as the stable interface has it since Python 3.11. */
typedef struct {
    void *memory;
    PyObject *owner;
    intptr_t length, itemsize;
    int readonly, ndim;
    char *format;
    void *rest[4];
} Buffer;

extern PyObject _Py_NoneStruct;
extern PyObject *PyExc_TypeError, *PyExc_ValueError, *PyExc_MemoryError;
extern long long PyLong_AsLongLong(PyObject *);
extern void *PyLong_AsVoidPtr(PyObject *);
extern double PyFloat_AsDouble(PyObject *);
extern int PyObject_GetBuffer(PyObject *, Buffer *, int);
extern void PyBuffer_Release(Buffer *);
extern PyObject *PyErr_Occurred(void);
extern void PyErr_SetString(PyObject *, const char *);
extern void Py_IncRef(PyObject *);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);

#define NO_FIRST "a C function wants an array of float32 or float64 first"
enum { FORMAT = 4, MOST_INTEGERS = 16, MOST_DOUBLES = 4 };

typedef int Function(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, double, double, double,
                     double);

typedef struct {
    Function *float32, *float64;
    const char *signature;           /* p array or None, i integer, d double */
    i64 allocates;                   /* 1 is returned where memory ran out */
} Entry;

i64 can_call(void)
{
#if defined(__linux__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))
    return 1;
#else
    return 0;
#endif
}

static int refuse(PyObject *kind, const char *message)
{
    PyErr_SetString(kind, message);
    return -1;
}

/* An array's memory; 0, or -1 with an exception set. Of the first array the format is asked for too. */
static int hold(PyObject *array, Buffer *buffer, int first)
{
    if (PyObject_GetBuffer(array, buffer, first ? FORMAT : 0))        /* the flags ask for memory without gaps */
        return refuse(PyExc_ValueError, "a C function was handed an array with gaps, or no array");
    if ((uintptr_t)buffer->memory & 7 & (uintptr_t)(buffer->itemsize - 1)) {
        PyBuffer_Release(buffer);
        return refuse(PyExc_ValueError, "a C function was handed an array whose numbers are not aligned");
    }
    return 0;
}

/* Takes the arguments apart; 0, or -1 with an exception set. The buffers are the caller's to release. */
static int take(const char *signature, PyObject *const *arguments, i64 *integers, double *doubles, Buffer *buffers, int *held)
{
    int i = 0, d = 0;
    if (*arguments == &_Py_NoneStruct) return refuse(PyExc_TypeError, NO_FIRST);
    for (; *signature; signature++, arguments++) {
        PyObject *x = *arguments;
        if (*signature == 'd') {
            doubles[d++] = PyFloat_AsDouble(x);
            if (doubles[d - 1] == -1 && PyErr_Occurred()) return -1;
        } else if (*signature == 'i') {
            integers[i++] = PyLong_AsLongLong(x);
            if (integers[i - 1] == -1 && PyErr_Occurred()) return -1;
        } else if (x == &_Py_NoneStruct) {
            integers[i++] = 0;
        } else {
            if (hold(x, buffers + *held, !*held)) return -1;
            integers[i++] = (i64)buffers[(*held)++].memory;
        }
    }
    return 0;
}

static Function *version(const Entry *entry, const Buffer *first)
{
    const char *format = first->format ? first->format : "";
    if (format[0] == 'f' && !format[1]) return entry->float32;
    if (format[0] == 'd' && !format[1]) return entry->float64;
    refuse(PyExc_TypeError, NO_FIRST);
    return 0;
}

PyObject *call(PyObject *self, PyObject *const *arguments, intptr_t count)
{
    const Entry *entry = PyLong_AsVoidPtr(self);
    i64 n[MOST_INTEGERS] = {0};
    double d[MOST_DOUBLES] = {0};
    Buffer buffers[MOST_INTEGERS];
    int held = 0, failed = 0;
    intptr_t wanted = 0;
    while (entry->signature[wanted]) wanted++;
    if (count != wanted) {
        refuse(PyExc_TypeError, "a C function was called with another number of arguments than it has");
        return 0;
    }
    failed = take(entry->signature, arguments, n, d, buffers, &held);
    Function *function = failed ? 0 : version(entry, buffers);
    if (function) {
        void *state = PyEval_SaveThread();
        int code = function(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15],
                            d[0], d[1], d[2], d[3]);
        PyEval_RestoreThread(state);
        failed = entry->allocates && code;
        if (failed) refuse(PyExc_MemoryError, "no memory for packed copies");
    }
    while (held) PyBuffer_Release(buffers + --held);
    if (failed || !function) return 0;
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}
