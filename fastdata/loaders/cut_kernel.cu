/* Cuts, pads, mirrors and converts stored samples to a batch. A thread makes all channels of a pixel.
 *
 * The package has this file as PTX (cut_kernel.ptx), which .ci/make-ptx makes again. The tests also compile it for the
 * CPU, as C. DeviceCut (device_cut.py) launches it.
 */
#ifdef __CUDA_ARCH__
#define FUNCTION static __device__ __forceinline__
#else
#define FUNCTION static inline
#define fmaf __builtin_fmaf
#endif

enum { UINT8, FLOAT32, FLOAT16, BFLOAT16 };

typedef struct {
    long long samples, channels, rows, columns;
} Axes;

/* All numbers are as large as pointers. */
typedef struct {
    Axes stored;                   /* shape of all stored samples */
    Axes shape, steps;             /* of `out`; steps in elements */
    long long scales, divides, dtype;
    void *out;                     /* (batch, channels, height, width) */
    const unsigned char *samples;  /* (., channels, rows, columns) */
    const long long *index;        /* (batch,) */
    const float *constants;        /* (2, scales): factors or divisors, then summands; null: values stay uint8 */
    const int *lines;              /* (2, batch): a line of row_table and of column_table; null: nothing is cut */
    const long long *row_table;    /* (., height): the stored row of each row; below 0 the row is filled */
    const long long *column_table; /* (., width): the same for columns */
    const unsigned char *fill;     /* (channels,): the fill colour; null if nothing is filled */
} Cut;

/* Round to the nearest float16; of two at equal distance, to the even one. */
FUNCTION unsigned short float16_of(float value)
{
    unsigned short bits;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    _Float16 rounded = (_Float16)value;
    __builtin_memcpy(&bits, &rounded, sizeof bits);
#endif
    return bits;
}

/* The same for bfloat16. Processors before sm_80 have no instruction for it. */
FUNCTION unsigned short bfloat16_of(float value)
{
    union {
        float value;
        unsigned int bits;
    } same;
    same.value = value;
    if (value != value)
        return 0x7fc0;
    return (unsigned short)((same.bits + 0x7fff + (same.bits >> 16 & 1)) >> 16);
}

FUNCTION void write(const Cut *cut, long long at, long long channel, unsigned char value)
{
    if (cut->dtype == UINT8) {
        ((unsigned char *)cut->out)[at] = value;
        return;
    }
    const float *scale = cut->constants + (cut->scales == 1 ? 0 : channel);
    float made = cut->divides ? value / scale[0] : fmaf(value, scale[0], scale[cut->scales]);
    if (cut->dtype == FLOAT32)
        ((float *)cut->out)[at] = made;
    else
        ((unsigned short *)cut->out)[at] = cut->dtype == FLOAT16 ? float16_of(made) : bfloat16_of(made);
}

/* Make the pixels first, first + step ... of a sample of the batch. */
FUNCTION void cut_pixels(const Cut *cut, unsigned int b, unsigned int first, unsigned int step)
{
    long long pixels = cut->shape.rows * cut->shape.columns;
    long long plane = cut->stored.rows * cut->stored.columns;
    const unsigned char *sample = cut->samples + cut->index[b] * cut->stored.channels * plane;
    for (long long pixel = first; pixel < pixels; pixel += step) {
        /* In 32 bits, which are divided faster. Samples have fewer than 2^32 pixels. */
        unsigned int width = (unsigned int)cut->shape.columns;
        unsigned int y = (unsigned int)pixel / width, x = (unsigned int)pixel % width;
        long long row = y, column = x;
        if (cut->lines) {
            row = cut->row_table[cut->lines[b] * cut->shape.rows + y];
            column = cut->column_table[cut->lines[cut->shape.samples + b] * cut->shape.columns + x];
        }
        int is_filled = row < 0 || column < 0;
        long long at = b * cut->steps.samples + y * cut->steps.rows + x * cut->steps.columns;
        for (long long channel = 0; channel < cut->shape.channels; channel++) {
            long long stored = cut->stored.channels == 1 ? 0 : channel; /* a channel may become three */
            unsigned char value = is_filled ? cut->fill[stored] : sample[stored * plane + row * cut->stored.columns + column];
            write(cut, at + channel * cut->steps.channels, channel, value);
        }
    }
}

#ifdef __CUDA_ARCH__
/* A block makes pixels of the sample blockIdx.x; all blocks of a column share its pixels. */
extern "C" __global__ void fastdata_cut(Cut cut)
{
    cut_pixels(&cut, blockIdx.x, blockIdx.y * blockDim.x + threadIdx.x, gridDim.y * blockDim.x);
}
#endif
