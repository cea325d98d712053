/* The gates of recurrent cells, forward and backward, for one row of a batch: `n` hidden numbers. Gates of a row lie side by side,
   each of n numbers. For both number types; what is fused is said. */

#include "pointwise.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#endif

#define GATES static __attribute__((noinline, unused)) void

/* LSTM: i, f, g, o stand in `a`, before the sigmoids and the tanh and then after them; c' = f c + i g, h = o tanh c'. Backward: the
   gradients of h and c' become those of a (in its place) and c; `now` and `before` are c' and c. */
#define LSTM_GATES(T, NAME, FUSED)                                                                                          \
    GATES lstm_gates_##NAME(T *a, T *c, T *kept, T *h, i64 n)                                                               \
    {                                                                                                                       \
        EACH(j, n) {                                                                                                        \
            T i = sigmoid_of_##NAME(a[j]), f = sigmoid_of_##NAME(a[n + j]), g = tanh_##NAME(a[2 * n + j]);                  \
            T o = sigmoid_of_##NAME(a[3 * n + j]), next = FUSED(f, c[j], i * g);                                            \
            a[j] = i, a[n + j] = f, a[2 * n + j] = g, a[3 * n + j] = o;                                                     \
            c[j] = kept[j] = next;                                                                                          \
            h[j] = o * tanh_##NAME(next);                                                                                   \
        }                                                                                                                   \
    }                                                                                                                       \
    GATES lstm_gates_back_##NAME(T *a, const T *dh, T *dc, const T *now, const T *before, i64 n)                            \
    {                                                                                                                       \
        EACH(j, n) {                                                                                                        \
            T i = a[j], f = a[n + j], g = a[2 * n + j], o = a[3 * n + j], t = tanh_##NAME(now[j]);                          \
            T by_c = FUSED(dh[j] * o, (T)1 - t * t, dc[j]);                                                                 \
            dc[j] = by_c * f;                                                                                               \
            a[j] = by_c * g * (i * ((T)1 - i));                                                                             \
            a[n + j] = by_c * before[j] * (f * ((T)1 - f));                                                                 \
            a[2 * n + j] = by_c * i * ((T)1 - g * g);                                                                       \
            a[3 * n + j] = dh[j] * t * (o * ((T)1 - o));                                                                    \
        }                                                                                                                   \
    }

/* GRU: r, z, n stand in `a`, from the input, and in `s` from the state; n = tanh(a_n + r s_n), h' = n + z (h - n). Backward: the
   gradient of h' becomes that of a (in its place), of s, and of h as far as it is not s's. */
#define GRU_GATES(T, NAME, FUSED)                                                                                           \
    GATES gru_gates_##NAME(T *a, const T *s, T *kept, T *h, T *out, i64 n)                                                  \
    {                                                                                                                       \
        EACH(j, n) {                                                                                                        \
            T r = sigmoid_of_##NAME(a[j] + s[j]), z = sigmoid_of_##NAME(a[n + j] + s[n + j]), inner = s[2 * n + j];         \
            T fresh = tanh_##NAME(FUSED(r, inner, a[2 * n + j]));                                                           \
            a[j] = r, a[n + j] = z, a[2 * n + j] = fresh, kept[j] = inner;                                                  \
            h[j] = out[j] = FUSED(z, h[j] - fresh, fresh);                                                                  \
        }                                                                                                                   \
    }                                                                                                                       \
    GATES gru_gates_back_##NAME(T *a, T *s, const T *kept, T *dh, const T *before, i64 n)                                   \
    {                                                                                                                       \
        EACH(j, n) {                                                                                                        \
            T r = a[j], z = a[n + j], fresh = a[2 * n + j], d = dh[j];                                                      \
            T by_n = d * ((T)1 - z) * ((T)1 - fresh * fresh), by_z = d * (before[j] - fresh) * (z * ((T)1 - z));            \
            T by_r = by_n * kept[j] * (r * ((T)1 - r));                                                                     \
            a[j] = s[j] = by_r, a[n + j] = s[n + j] = by_z, a[2 * n + j] = by_n, s[2 * n + j] = by_n * r;                   \
            dh[j] = d * z;                                                                                                  \
        }                                                                                                                   \
    }

#define RNN_GATES(T, NAME)                                                                                                  \
    GATES rnn_gates_##NAME(const T *a, T *h, i64 n, i64 relu)                                                               \
    {                                                                                                                       \
        if (relu) EACH(j, n) h[j] = relu_of_##NAME(a[j]);                                                                   \
        else EACH(j, n) h[j] = tanh_##NAME(a[j]);                                                                           \
    }                                                                                                                       \
    GATES rnn_gates_back_##NAME(T *a, const T *dh, const T *out, i64 n, i64 relu)                                           \
    {                                                                                                                       \
        if (relu) EACH(j, n) a[j] = out[j] <= 0 ? (T)0 : dh[j];                                                             \
        else EACH(j, n) a[j] = dh[j] * ((T)1 - out[j] * out[j]);                                                            \
    }                                                                                                                       \
    GATES add_row_##NAME(T *a, const T *b, i64 n)                                                                           \
    {                                                                                                                       \
        EACH(j, n) a[j] += b[j];                                                                                            \
    }

LSTM_GATES(float, float32, fmaf)
LSTM_GATES(double, float64, fma)
GRU_GATES(float, float32, fmaf)
GRU_GATES(double, float64, fma)
RNN_GATES(float, float32)
RNN_GATES(double, float64)

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
