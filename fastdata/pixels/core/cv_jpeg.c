/* albumentations: ImageCompression as JPEG. Only the lossy parts are computed; no bytes are coded, as coding is lossless.
 *
 * The integers are those of libjpeg-turbo with its settings in OpenCV: colours of JFIF, chroma of half the size, the
 * quantisation tables of the standard, and "slow" transforms.
 */
#include "core.h"

#include <math.h>

enum { SIDE = 8 };

bool draw_compress(Drawing *d, const Step *step) {
    const int32_t lowest = step->compress.lowest, highest = step->compress.highest;
    if (lowest < 1 || lowest > highest || highest > 100) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_COMPRESS);
    if (!op) return false;
    op->compress.quality = lowest + (int32_t)integer(d, step->at, 0, highest - lowest + 1);
    return true;
}

/* Blocks */

/* The tables of ITU T.81, annex K.1, for luma and for chroma. */
static const uint8_t QUANTA[2][SIDE * SIDE] = {
    {16, 11, 10, 16, 24,  40,  51,  61,  12, 12, 14, 19, 26,  58,  60,  55,  14, 13, 16, 24, 40,  57,
     69, 56, 14, 17, 22,  29,  51,  87,  80, 62, 18, 22, 37,  56,  68,  109, 103, 77, 24, 35, 55, 64,
     81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99},
    {17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99,
     99, 99, 47, 66, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99,
     99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99},
};

/* libjpeg-turbo: jpeg_quality_scaling, jpeg_add_quant_table (jcparam.c). */
static void scale_quanta(int32_t quality, bool is_chroma, float *quanta) {
    const int32_t bounded = quality < 1 ? 1 : quality > 100 ? 100 : quality;
    const int32_t percent = bounded < 50 ? 5000 / bounded : 200 - 2 * bounded;
    for (int k = 0; k < SIDE * SIDE; k++) {
        const int32_t quantum = (QUANTA[is_chroma][k] * percent + 50) / 100;
        quanta[k] = (float)(quantum < 1 ? 1 : quantum > 255 ? 255 : quantum);
    }
}

typedef int32_t Block[SIDE][SIDE];

/* The cosine transform of 8 values, times 2^13, as libjpeg-turbo's jfdctint.c and jidctint.c add up its constants: a row
 * for each frequency, and turned. */
static const Block COSINES = {
    {8192, 8192, 8192, 8192, 8192, 8192, 8192, 8192},       {11363, 9633, 6437, 2260, -2260, -6437, -9633, -11363},
    {10703, 4433, -4433, -10703, -10703, -4433, 4433, 10703}, {9633, -2259, -11362, -6436, 6436, 11362, 2259, -9633},
    {8192, -8192, -8192, 8192, 8192, -8192, -8192, 8192},   {6437, -11362, 2261, 9633, -9633, -2261, 11362, -6437},
    {4433, -10704, 10704, -4433, -4433, 10704, -10704, 4433}, {2260, -6436, 9633, -11363, 11363, -9633, 6436, -2260},
};
static const Block TURNED = {
    {8192, 11363, 10703, 9633, 8192, 6437, 4433, 2260},    {8192, 9633, 4433, -2259, -8192, -11362, -10704, -6436},
    {8192, 6437, -4433, -11362, -8192, 2261, 10704, 9633}, {8192, 2260, -10703, -6436, 8192, 9633, -4433, -11363},
    {8192, -2260, -10703, 6436, 8192, -9633, -4433, 11363}, {8192, -6437, -4433, 11362, -8192, -2261, 10704, -9633},
    {8192, -9633, 4433, 2259, -8192, 11362, -10704, 6436}, {8192, -11363, 10703, -9633, 8192, -6437, 4433, -2260},
};

/* The product of two matrices, rounded by a shift. */
INLINE void multiply(const Block a, const Block b, int shift, Block out) {
    for (int y = 0; y < SIDE; y++) {
        int32_t sum[SIDE];
        for (int x = 0; x < SIDE; x++) sum[x] = 1 << (shift - 1);
        for (int j = 0; j < SIDE; j++)
            for (int x = 0; x < SIDE; x++) sum[x] += a[y][j] * b[j][x];
        for (int x = 0; x < SIDE; x++) out[y][x] = sum[x] >> shift;
    }
}

INLINE uint8_t level_of(int32_t value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

/* To frequencies, to multiples of the quanta, and back. */
static void lose(uint8_t *pixels, int64_t row, const float *restrict quanta) {
    Block a, b;
    for (int y = 0; y < SIDE; y++)
        for (int x = 0; x < SIDE; x++) a[y][x] = pixels[y * row + x] - 128;
    multiply(a, TURNED, 11, b);
    multiply(COSINES, b, 15, a);
    for (int k = 0; k < SIDE * SIDE; k++) { /* they are 8 times too large; halves go away from 0, and all floats are exact */
        const int32_t value = a[k / SIDE][k % SIDE];
        const float magnitude = fabsf((float)value) + 4 * quanta[k] + 0.5f;
        const int32_t whole = (int32_t)(magnitude * (0.125f / quanta[k])) * (int32_t)quanta[k];
        a[k / SIDE][k % SIDE] = value < 0 ? -whole : whole;
    }
    multiply(TURNED, a, 11, b);
    multiply(b, COSINES, 18, a);
    for (int y = 0; y < SIDE; y++)
        for (int x = 0; x < SIDE; x++) pixels[y * row + x] = level_of(a[y][x] + 128);
}

/* Planes */

/* One plane in whole blocks. */
typedef struct {
    uint8_t *data;
    int64_t height, width, row, rows;
} Plane;

static int64_t whole_blocks(int64_t side) { return (side + SIDE - 1) / SIDE * SIDE; }

static Plane plane_of(int64_t height, int64_t width) {
    return (Plane){.height = height, .width = width, .row = whole_blocks(width), .rows = whole_blocks(height)};
}

static void lose_plane(const Plane *plane, int32_t quality, bool is_chroma) {
    float quanta[SIDE * SIDE];
    scale_quanta(quality, is_chroma, quanta);
    const uint8_t *last = plane->data + (plane->height - 1) * plane->row;
    for (int64_t y = plane->height; y < plane->rows; y++) memcpy(plane->data + y * plane->row, last, (size_t)plane->row);
    for (int64_t y = 0; y < plane->rows; y += SIDE)
        for (int64_t x = 0; x < plane->row; x += SIDE) lose(plane->data + y * plane->row + x, plane->row, quanta);
}

static void repeat_last(uint8_t *line, int64_t width, int64_t wide) {
    memset(line + width, line[width - 1], (size_t)(wide - width));
}

/* libjpeg-turbo: rgb_ycc_convert (jccolext.c). The first channel counts as blue, as OpenCV has it. */
static void split_colours(const Image *in, int64_t y, uint8_t *restrict luma, uint8_t *restrict blue,
                          uint8_t *restrict red) {
    const uint8_t *restrict b = in->data + y * in->row, *restrict g = b + in->plane, *restrict r = g + in->plane;
    const int32_t half = 1 << 15, middle = (128 << 16) + half - 1;
    for (int64_t x = 0; x < in->width; x++) {
        luma[x] = (uint8_t)((19595 * r[x] + 38470 * g[x] + 7471 * b[x] + half) >> 16);
        blue[x] = (uint8_t)((-11059 * r[x] - 21709 * g[x] + 32768 * b[x] + middle) >> 16);
        red[x] = (uint8_t)((32768 * r[x] - 27439 * g[x] - 5329 * b[x] + middle) >> 16);
    }
}

/* libjpeg-turbo: h2v2_downsample (jcsample.c). */
static void halve(const uint8_t *restrict upper, const uint8_t *restrict lower, int64_t width, uint8_t *restrict out) {
    for (int64_t x = 0; x < width; x++) {
        const int sum = upper[2 * x] + upper[2 * x + 1] + lower[2 * x] + lower[2 * x + 1];
        out[x] = (uint8_t)((sum + 1 + x % 2) >> 2);
    }
}

/* libjpeg-turbo: h2v2_fancy_upsample (jdsample.c); h2v2_upsample where there are 2 columns at most. */
static void double_row(const Plane *plane, int64_t y, int32_t *restrict sum, uint8_t *restrict out) {
    const int64_t last = plane->width - 1, other = y % 2 ? y / 2 + 1 : y / 2 - 1;
    const int64_t there = other < 0 ? 0 : other < plane->height ? other : plane->height - 1;
    const uint8_t *restrict near = plane->data + y / 2 * plane->row, *restrict far = plane->data + there * plane->row;
    if (last < 2) {
        for (int64_t x = 0; x <= last; x++) out[2 * x] = out[2 * x + 1] = near[x];
        return;
    }
    for (int64_t x = 0; x <= last; x++) sum[x + 1] = 3 * near[x] + far[x];
    sum[0] = sum[1], sum[last + 2] = sum[last + 1];
    for (int64_t x = 0; x <= last; x++) {
        out[2 * x] = (uint8_t)((3 * sum[x + 1] + sum[x] + 8) >> 4);
        out[2 * x + 1] = (uint8_t)((3 * sum[x + 1] + sum[x + 2] + 7) >> 4);
    }
}

/* libjpeg-turbo: ycc_rgb_convert (jdcolext.c). */
static void join_colours(const uint8_t *restrict luma, const uint8_t *restrict blue, const uint8_t *restrict red,
                         const Image *out, int64_t y) {
    uint8_t *restrict b = out->data + y * out->row, *restrict g = b + out->plane, *restrict r = g + out->plane;
    for (int64_t x = 0; x < out->width; x++) {
        const int32_t cb = blue[x] - 128, cr = red[x] - 128, half = 1 << 15;
        r[x] = level_of(luma[x] + ((91881 * cr + half) >> 16));
        g[x] = level_of(luma[x] + ((-22554 * cb - 46802 * cr + half) >> 16));
        b[x] = level_of(luma[x] + ((116130 * cb + half) >> 16));
    }
}

static bool compress(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, wide = 2 * whole_blocks((width + 1) / 2);
    const bool is_grey = in->channels != 3;
    Plane luma = plane_of(height, width), blue = plane_of((height + 1) / 2, (width + 1) / 2), red = blue;
    uint8_t *memory = take(scratch, SLOT_WORK, luma.rows * luma.row + 2 * blue.rows * blue.row);
    uint8_t *lines = take(scratch, SLOT_WORK_2, 4 * wide + (blue.width + 2) * (int64_t)sizeof(int32_t));
    if (!memory || !lines) return false;
    int32_t *sum = (int32_t *)(lines + 4 * wide);
    luma.data = memory, blue.data = memory + luma.rows * luma.row, red.data = blue.data + blue.rows * blue.row;
    for (int64_t c = 0; c < in->channels && is_grey; c++) {
        for (int64_t y = 0; y < height; y++) {
            memcpy(luma.data + y * luma.row, in->data + c * in->plane + y * in->row, (size_t)width);
            repeat_last(luma.data + y * luma.row, width, luma.row);
        }
        lose_plane(&luma, op->compress.quality, false);
        for (int64_t y = 0; y < height; y++)
            memcpy(out->data + c * out->plane + y * out->row, luma.data + y * luma.row, (size_t)width);
    }
    if (is_grey) return true;
    for (int64_t y = 0; y < height; y++) {
        uint8_t *blues = lines + y % 2 * wide, *reds = lines + (2 + y % 2) * wide;
        split_colours(in, y, luma.data + y * luma.row, blues, reds);
        repeat_last(luma.data + y * luma.row, width, luma.row);
        repeat_last(blues, width, wide), repeat_last(reds, width, wide);
        if (y % 2 == 0 && y + 1 < height) continue;
        halve(lines, blues, blue.row, blue.data + y / 2 * blue.row);
        halve(lines + 2 * wide, reds, red.row, red.data + y / 2 * red.row);
    }
    lose_plane(&luma, op->compress.quality, false);
    lose_plane(&blue, op->compress.quality, true);
    lose_plane(&red, op->compress.quality, true);
    for (int64_t y = 0; y < height; y++) {
        double_row(&blue, y, sum, lines);
        double_row(&red, y, sum, lines + wide);
        join_colours(luma.data + y * luma.row, lines, lines + wide, out, y);
    }
    return true;
}

int run_compress(Sample *sample, Op *op) {
    return remake(sample, op, sample->image.height, sample->image.width, compress);
}
