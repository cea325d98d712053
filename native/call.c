/* Calls a C function with arrays and numbers, as a builtin of the interpreter: 1 us where ctypes takes 10, and a small
   operation is a handful of calls. What it needs of Python's stable interface is declared here: no header files have to be
   there.

   It is the door to C: an array passes where it has the dtype, no gaps, its numbers aligned, and as many of them as the
   integers of the call say (kernels/library.py has the signatures). The function behind it checks nothing.

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
extern PyObject *PyExc_TypeError, *PyExc_ValueError, *PyExc_MemoryError, *PyExc_IndexError;
extern long long PyLong_AsLongLong(PyObject *);
extern void *PyLong_AsVoidPtr(PyObject *);
extern double PyFloat_AsDouble(PyObject *);
extern int PyObject_GetBuffer(PyObject *, Buffer *, int);
extern void PyBuffer_Release(Buffer *);
extern PyObject *PyObject_GetAttr(PyObject *, PyObject *);
extern PyObject *PyErr_Occurred(void);
extern void PyErr_Clear(void);
extern PyObject *PyErr_Format(PyObject *, const char *, ...);
extern void Py_IncRef(PyObject *);
extern void Py_DecRef(PyObject *);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define NATIVE '<'
#else
#define NATIVE '>'
#endif

enum { FORMAT = 4, MOST_INTEGERS = 16, MOST_DOUBLES = 4 };

typedef int Function(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, double, double, double,
                     double);

/* What the function takes in one place; dtypes: the letters that it may have, none for any. */
typedef struct { char kind, optional, written; const char *size, *dtypes; } Slot;

typedef struct { PyObject *dtype; char letter; } Known;

typedef struct {
    Function *float32, *float64;
    const Slot *slots;
    i64 count;
    i64 answers;                     /* it returns 1 where memory ran out, 2 where an index lies outside */
    const Known *known;
    PyObject *dtype;                 /* the word */
    const char *name;
} Entry;

typedef struct { const Slot *slot; intptr_t place; Buffer buffer; } Held;

i64 can_call(void)
{
#if defined(__linux__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))
    return 1;
#else
    return 0;
#endif
}

/* The letter of an array's dtype; 0 where it has none that is one letter. Nearly all arrays have one of the `known` objects;
   NumPy makes the text of the format anew at each request, which takes longer than all the rest. */
static char letter_of(const Entry *entry, PyObject *array)
{
    PyObject *dtype = PyObject_GetAttr(array, entry->dtype);
    Buffer buffer;
    char found = 0;
    if (dtype) {
        Py_DecRef(dtype);                                    /* the array has it still */
        for (const Known *k = entry->known; k->dtype; k++) if (k->dtype == dtype) return k->letter;
    } else {
        PyErr_Clear();
    }
    if (PyObject_GetBuffer(array, &buffer, FORMAT)) { PyErr_Clear(); return 0; }
    const char *format = buffer.format ? buffer.format : "";
    format += *format == '=' || *format == NATIVE;           /* a dtype that was turned around twice says its order */
    if (*format && !format[1]) found = *format;
    PyBuffer_Release(&buffer);
    return found;
}

static int is_among(char letter, const char *letters)
{
    while (*letters && *letters != letter) letters++;
    return *letters != 0;
}

#define REFUSE(kind, ...) (PyErr_Format(kind, __VA_ARGS__), -1)

/* Takes hold of an array; 0, or -1 with an exception set. `chosen` becomes the letter of the first one that chooses. */
static int hold(const Entry *entry, PyObject *array, Held *held, char *chosen)
{
    const Slot *slot = held->slot;
    if (slot->kind != 'M') {
        char letter = letter_of(entry, array);
        if (slot->kind == 'X' && !*chosen && (letter == 'f' || letter == 'd')) *chosen = letter;
        if (!letter || (slot->kind == 'X' ? letter != *chosen : !is_among(letter, slot->dtypes)))
            return REFUSE(PyExc_TypeError, "%s: argument %zd has another dtype than it is taken for", entry->name, held->place);
    }
    if (PyObject_GetBuffer(array, &held->buffer, 0))         /* the flags ask for memory without gaps */
        return REFUSE(PyExc_ValueError, "%s: argument %zd is an array with gaps, or no array", entry->name, held->place);
    const char *wrong = (uintptr_t)held->buffer.memory & 7 & (uintptr_t)(held->buffer.itemsize - 1) ? "not aligned"
                        : slot->written && held->buffer.readonly ? "read-only, and would be written to" : 0;
    if (!wrong) return 0;
    PyBuffer_Release(&held->buffer);
    return REFUSE(PyExc_ValueError, "%s: argument %zd is an array whose numbers are %s", entry->name, held->place, wrong);
}

/* How many numbers an array must have, by its slot's text; -1 where a factor is negative, a divisor not positive, or all of
   it too large. */
static i64 wanted(const char *size, const i64 *integers)
{
    i64 total = 0, term = 1;
    for (int divides = 0; ; size++) {
        if (!*size || *size == '+') {
            if (__builtin_add_overflow(total, term, &total)) return -1;
            if (!*size) return total;
            term = 1;
        } else if (*size == '/') {
            divides = 1;
        } else {
            i64 factor = 0;
            if (*size >= 'a') factor = integers[*size - 'a'];
            else for (size--; size[1] >= '0' && size[1] <= '9'; size++) factor = 10 * factor + (size[1] - '0');
            if (factor < divides) return -1;
            if (divides) term = term / factor + (term % factor > 0);
            else if (__builtin_mul_overflow(term, factor, &term)) return -1;
            divides = 0;
        }
    }
}

/* Takes the arguments apart; 0, or -1 with an exception set. The arrays in `held` are the caller's to release. */
static int take(const Entry *entry, PyObject *const *arguments, i64 *integers, double *doubles, Held *held, int *count,
                char *chosen)
{
    int i = 0, d = 0;
    for (intptr_t place = 0; place < entry->count; place++) {
        const Slot *slot = entry->slots + place;
        PyObject *x = arguments[place];
        if (slot->kind == 'd') {
            doubles[d++] = PyFloat_AsDouble(x);
            if (doubles[d - 1] == -1 && PyErr_Occurred()) return -1;
        } else if (slot->kind == 'i') {
            integers[i++] = PyLong_AsLongLong(x);
            if (integers[i - 1] == -1 && PyErr_Occurred()) return -1;
        } else if (x == &_Py_NoneStruct && slot->optional) {
            integers[i++] = 0;
        } else {
            held[*count].slot = slot;
            held[*count].place = place;
            if (hold(entry, x, held + *count, chosen)) return -1;
            integers[i++] = (i64)held[(*count)++].buffer.memory;
        }
    }
    for (const Held *h = held; h < held + *count; h++) {
        if (!*h->slot->size) continue;
        i64 least = wanted(h->slot->size, integers), itemsize = h->slot->kind == 'M' ? 1 : h->buffer.itemsize;
        if (least < 0 || least > h->buffer.length / itemsize)
            return REFUSE(PyExc_ValueError, "%s: argument %zd has %zd numbers, and those of the call say %lld", entry->name,
                          h->place, (intptr_t)(h->buffer.length / itemsize), (long long)least);
    }
    return 0;
}

PyObject *call(PyObject *self, PyObject *const *arguments, intptr_t count)
{
    const Entry *entry = PyLong_AsVoidPtr(self);
    i64 n[MOST_INTEGERS] = {0};
    double d[MOST_DOUBLES] = {0};
    Held held[MOST_INTEGERS];
    int arrays = 0, failed = 0;
    char chosen = 0;
    if (count != entry->count) {
        REFUSE(PyExc_TypeError, "%s: called with another number of arguments than it has", entry->name);
        return 0;
    }
    failed = take(entry, arguments, n, d, held, &arrays, &chosen);
    if (!failed) {
        Function *function = chosen == 'd' ? entry->float64 : entry->float32;
        void *state = PyEval_SaveThread();
        int code = function(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15],
                            d[0], d[1], d[2], d[3]);
        PyEval_RestoreThread(state);
        failed = entry->answers && code;
        if (failed && code == 1) REFUSE(PyExc_MemoryError, "%s: no memory for packed copies", entry->name);
        else if (failed) REFUSE(PyExc_IndexError, "%s: an index lies outside of what it counts", entry->name);
    }
    while (arrays) PyBuffer_Release(&held[--arrays].buffer);
    if (failed) return 0;
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}
