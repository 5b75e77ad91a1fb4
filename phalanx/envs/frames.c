/* Frames from screens of palette indices: what `frames.py` does in numpy, bit for bit, in a fraction of its time.

   Rows of a game's screen often repeat the row above, and so do the rows of the frame: those are copied. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { WIDTH = 160, ROWS = 210, HALF_ROWS = 104, HALF_WIDTH = 80, AREA = 84, MOST_ROWS = 256 };
enum { COLUMN_IN = 21, COLUMN_OUT = 40, TAPS = 3 }; /* widths of a pixel of screen and frame, in their common unit */

static int column_first[AREA];
static uint16_t column_weight[TAPS][AREA];

static inline int overlap(int in, int in_size, int out, int out_size) {
    int first = in * in_size > out * out_size ? in * in_size : out * out_size;
    int end_in = (in + 1) * in_size, end_out = (out + 1) * out_size;
    int end = end_in < end_out ? end_in : end_out;
    return end > first ? end - first : 0;
}

static void find_column_weights(void) {
    for (int out = 0; out < AREA; out++) {
        column_first[out] = out * COLUMN_OUT / COLUMN_IN;
        for (int tap = 0; tap < TAPS; tap++)
            column_weight[tap][out] = (uint16_t)overlap(column_first[out] + tap, COLUMN_IN, out, COLUMN_OUT);
    }
}

static int greatest_common_divisor(int one, int other) {
    return other ? greatest_common_divisor(other, one % other) : one;
}

/* Do so many rows of both screens look like as many before them? */
static inline int repeats(const uint8_t *first, const uint8_t *last, int rows) {
    size_t pixels = (size_t)rows * WIDTH;
    return !memcmp(first, first - pixels, pixels) && !memcmp(last, last - pixels, pixels);
}

/* The greater of both screens' colours, of every pixel of a row. Eight pixels like the eight before are copied too. */
static inline void shade(const uint8_t *first, const uint8_t *last, const uint8_t *table, uint8_t *row) {
    uint64_t ones_before = 0, others_before = 0;
    for (int column = 0; column < WIDTH; column += 8, row += 8) {
        uint64_t ones, others;
        memcpy(&ones, first + column, 8);
        memcpy(&others, last + column, 8);
        if (column && ones == ones_before && others == others_before) {
            memcpy(row, row - 8, 8);
            continue;
        }
        for (int pixel = 0; pixel < 8; pixel++) {
            uint8_t one = table[first[column + pixel]], other = table[last[column + pixel]];
            row[pixel] = one > other ? one : other;
        }
        ones_before = ones;
        others_before = others;
    }
}

/* The mean of each two by two pixels of two rows, halves rounded up. Two pixels are read as one number, whose bytes are
   added whatever their order: so compilers see that they can do many at once. */
static void mean_of_fours(const uint8_t *restrict upper, const uint8_t *restrict lower, uint8_t *restrict frame) {
    uint16_t above[HALF_WIDTH], below[HALF_WIDTH];
    memcpy(above, upper, WIDTH);
    memcpy(below, lower, WIDTH);
    for (int out = 0; out < HALF_WIDTH; out++) {
        unsigned sum = (above[out] & 255u) + (above[out] >> 8) + (below[out] & 255u) + (below[out] >> 8);
        frame[out] = (uint8_t)((sum + 2) >> 2);
    }
}

static void make_half_frame(const uint8_t *first, const uint8_t *last, const uint8_t *table, uint8_t *frame) {
    uint8_t upper[WIDTH], lower[WIDTH];
    for (int row = 0; row < HALF_ROWS; row++, frame += HALF_WIDTH) {
        const uint8_t *one = first + (2 * row + 1) * WIDTH, *other = last + (2 * row + 1) * WIDTH;
        if (row && repeats(one, other, 2)) {
            memcpy(frame, frame - HALF_WIDTH, HALF_WIDTH);
            continue;
        }
        shade(one, other, table, upper);
        if (repeats(one + WIDTH, other + WIDTH, 1)) {
            mean_of_fours(upper, upper, frame);
            continue;
        }
        shade(one + WIDTH, other + WIDTH, table, lower);
        mean_of_fours(upper, lower, frame);
    }
}

/* A function of its own, so that compilers see that they can do many columns at once. */
__attribute__((noinline)) static void add_row(uint16_t *restrict sums, const uint8_t *restrict pixels, uint16_t weight) {
    for (int column = 0; column < WIDTH; column++)
        sums[column] = (uint16_t)(sums[column] + weight * pixels[column]);
}

/* One row of an area frame from sums of columns; ties are rounded to even. */
static void average(const uint16_t *sums, float scale, uint8_t *frame) {
    int32_t totals[AREA];
    for (int out = 0; out < AREA; out++) {
        const uint16_t *in = sums + column_first[out];
        totals[out] = column_weight[0][out] * in[0] + column_weight[1][out] * in[1] + column_weight[2][out] * in[2];
    }
    float means[AREA];
    for (int out = 0; out < AREA; out++)
        means[out] = (float)totals[out] / scale + 0x1p23f; /* so great that no bit is left for a fraction */
    uint32_t bits[AREA];
    memcpy(bits, means, sizeof bits);
    for (int out = 0; out < AREA; out++)
        frame[out] = (uint8_t)bits[out];
}

static void make_area_frame(
    const uint8_t *first, const uint8_t *last, int rows, const uint8_t *table, uint8_t *frame
) {
    uint8_t pixels[MOST_ROWS][WIDTH];
    int unit = greatest_common_divisor(rows, AREA), shaded = 0, differs = 0;
    float scale = (float)(rows / unit * COLUMN_OUT);
    for (int out = 0; out < AREA; out++, frame += AREA) {
        int begin = out * rows / AREA, end = ((out + 1) * rows + AREA - 1) / AREA;
        for (; shaded < end; shaded++) {
            const uint8_t *one = first + shaded * WIDTH, *other = last + shaded * WIDTH;
            if (shaded && repeats(one, other, 1)) {
                memcpy(pixels[shaded], pixels[shaded - 1], WIDTH);
            } else {
                shade(one, other, table, pixels[shaded]);
                differs = shaded; /* the last row unlike the one above */
            }
        }
        if (out && differs <= (out - 1) * rows / AREA) {
            memcpy(frame, frame - AREA, AREA);
            continue;
        }
        uint16_t sums[WIDTH + TAPS] = {0};
        for (int row = begin; row < end; row++)
            add_row(sums, pixels[row], (uint16_t)(overlap(row, AREA, out, rows) / unit));
        average(sums, scale, frame);
    }
}

/* The buffers of a call's arguments. */
typedef struct {
    Py_buffer view[4];
    int held;
} Buffers;

static void release(Buffers *buffers) {
    while (buffers->held)
        PyBuffer_Release(&buffers->view[--buffers->held]);
}

/* Take the arguments' buffers, of which the last is written to. */
static int take(Buffers *buffers, PyObject *const *arguments, Py_ssize_t given, int wanted) {
    buffers->held = 0;
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%d arguments are needed, but %zd were given", wanted, given);
        return 0;
    }
    for (int number = 0; number < wanted; number++) {
        int flags = number == wanted - 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(arguments[number], &buffers->view[number], flags)) {
            release(buffers);
            return 0;
        }
        buffers->held++;
    }
    return 1;
}

static PyObject *finish(Buffers *buffers, int fits) {
    release(buffers);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the sizes of screens, tables and frame do not fit each other");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *half_frame(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Buffers buffers;
    if (!take(&buffers, arguments, given, 4))
        return NULL;
    Py_buffer *first = &buffers.view[0], *last = &buffers.view[1], *table = &buffers.view[2], *frame = &buffers.view[3];
    int fits = first->len == ROWS * WIDTH && last->len == first->len && table->len == 256 &&
               frame->len == HALF_ROWS * HALF_WIDTH;
    if (fits)
        make_half_frame(first->buf, last->buf, table->buf, frame->buf);
    return finish(&buffers, fits);
}

static PyObject *area_frame(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Buffers buffers;
    if (!take(&buffers, arguments, given, 4))
        return NULL;
    Py_buffer *first = &buffers.view[0], *last = &buffers.view[1], *tables = &buffers.view[2], *frame = &buffers.view[3];
    Py_ssize_t rows = first->len / WIDTH, channels = tables->len / 256;
    int fits = rows >= AREA && rows <= MOST_ROWS && first->len == rows * WIDTH && last->len == first->len &&
               tables->len == channels * 256 && frame->len == channels * AREA * AREA;
    for (Py_ssize_t channel = 0; fits && channel < channels; channel++) {
        const uint8_t *table = (const uint8_t *)tables->buf + channel * 256;
        make_area_frame(first->buf, last->buf, (int)rows, table, (uint8_t *)frame->buf + channel * AREA * AREA);
    }
    return finish(&buffers, fits);
}

static PyMethodDef functions[] = {
    {"half_frame", (PyCFunction)(void (*)(void))half_frame, METH_FASTCALL, NULL},
    {"area_frame", (PyCFunction)(void (*)(void))area_frame, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_frames", "Frames from screens of palette indices; see frames.py.", -1, functions,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__frames(void) {
    find_column_weights();
    return PyModule_Create(&module);
}
