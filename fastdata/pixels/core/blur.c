/* Blurs: torchvision's GaussianBlur, and Pillow's GaussianBlur, which is three box blurs along each axis. */
#include "core.h"

#include <math.h>
#include <string.h>

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Compute half of a Gaussian kernel. Returns its radius, without the outer taps whose sum changes a pixel by less than a
 * thousandth of a level. */
static int64_t gaussian(double sigma, int64_t radius, float *half) {
    double sum = 1.0;
    for (int64_t i = 1; i <= radius; i++) sum += 2.0 * exp(-0.5 * (i / sigma) * (i / sigma));
    for (int64_t i = 0; i <= radius; i++) half[i] = (float)(exp(-0.5 * (i / sigma) * (i / sigma)) / sum);
    while (radius > 0 && half[radius] < 1e-6f) radius--;
    return radius;
}

/* Compute one row as the weighted sum of rows[0..2 * radius]; the width is a multiple of LANE. */
static void weigh(const float *const *rows, const float *half, int64_t radius, int64_t width, float *restrict out) {
    for (int64_t x = 0; x < width; x += LANE) {
        float sum[LANE];
        for (int k = 0; k < LANE; k++) sum[k] = half[0] * rows[radius][x + k];
        for (int64_t j = 1; j <= radius; j++) {
            const float *restrict before = rows[radius - j] + x, *restrict after = rows[radius + j] + x;
            for (int k = 0; k < LANE; k++) sum[k] = fused(half[j], before[k] + after[k], sum[k]);
        }
        memcpy(out + x, sum, sizeof sum);
    }
}

/* torchvision: gaussian_blur of transforms/_functional_tensor.py, gaussian_blur_image of v2/functional/_misc.py. */
static bool blur_gaussian(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, wide = (width + LANE - 1) / LANE * LANE;
    int64_t rx = least(op->blur.width / 2, width - 1), ry = least(op->blur.height / 2, height - 1);
    const int64_t taps = 2 * (rx > ry ? rx : ry) + 1;
    float *plane = take(scratch, SLOT_WORK, height * wide * (int64_t)sizeof(float));
    const float **rows = take(scratch, SLOT_WORK_2, taps * (int64_t)sizeof(float *) + (3 * taps + 2 * wide) * 4);
    if (!plane || !rows) return false;
    float *half_x = (float *)(rows + taps), *half_y = half_x + taps, *line = half_y + taps;
    rx = gaussian(op->blur.sigma, rx, half_x);
    ry = gaussian(op->blur.sigma, ry, half_y);
    for (int c = 0; c < in->channels; c++) {
        memset(line, 0, (size_t)(wide + 2 * rx) * sizeof(float));
        for (int64_t j = 0; j <= 2 * rx; j++) rows[j] = line + j;
        for (int64_t y = 0; y < height; y++) {
            const uint8_t *restrict row = in->data + c * in->plane + y * in->row;
            for (int64_t x = 0; x < width; x++) line[rx + x] = row[x];
            for (int64_t x = 1; x <= rx; x++) {
                line[rx - x] = row[x];
                line[rx + width - 1 + x] = row[width - 1 - x];
            }
            weigh(rows, half_x, rx, wide, plane + y * wide);
        }
        for (int64_t y = 0; y < height; y++) {
            for (int64_t j = 0; j <= 2 * ry; j++) {
                const int64_t from = y + j - ry < 0 ? ry - j - y : y + j - ry;
                rows[j] = plane + least(from, 2 * (height - 1) - from) * wide;
            }
            weigh(rows, half_y, ry, wide, line);
            uint8_t *restrict to = out->data + (c * height + y) * width;
            for (int64_t x = 0; x < width; x++) {
                const float sum = line[x] + 12582912.0f; /* 1.5 * 2^23: rounds, halves to even; the low bits are the integer */
                uint32_t bits;
                memcpy(&bits, &sum, 4);
                to[x] = (uint8_t)bits;
            }
        }
    }
    return true;
}

/* Box blur along columns: each row of `out` is the mean of 2 * radius + 1 rows and a fraction of the next two. The sum of a
 * column is updated from row to row, so the time does not depend on the radius. Pillow: BoxBlur.c ImagingLineBoxBlur8. */
static void box_pass(const uint8_t *in, uint8_t *out, int64_t height, int64_t width, int64_t row, int64_t radius,
                     uint32_t whole, uint32_t part, uint32_t *restrict sum) {
    const int64_t last = height - 1, ahead = least(radius, height);
    for (int64_t x = 0; x < width; x++)
        sum[x] = (uint32_t)((radius + 1) * in[x] + (radius - ahead) * in[last * row + x]);
    for (int64_t y = 0; y < ahead; y++)
        for (int64_t x = 0; x < width; x++) sum[x] += in[y * row + x];
    for (int64_t y = 0; y < height; y++) {
        const uint8_t *restrict old = in + (y > radius ? y - radius - 1 : 0) * row;
        const uint8_t *restrict new = in + least(y + radius, last) * row;
        const uint8_t *restrict next = in + least(y + radius + 1, last) * row;
        uint8_t *restrict to = out + y * row;
        for (int64_t x = 0; x < width; x++) {
            sum[x] += (uint32_t)(new[x] - old[x]);
            to[x] = (uint8_t)((sum[x] * whole + (uint32_t)(old[x] + next[x]) * part + (1u << 23)) >> 24);
        }
    }
}

/* Transpose in tiles of 8 x 8, which stay in registers; both sides are multiples of 8. */
static void transpose(const uint8_t *restrict in, uint8_t *restrict out, int64_t height, int64_t width) {
    for (int64_t y = 0; y < height; y += 8)
        for (int64_t x = 0; x < width; x += 8)
            for (int i = 0; i < 64; i++) out[(x + i / 8) * height + y + i % 8] = in[(y + i % 8) * width + x + i / 8];
}

/* Pillow: BoxBlur.c ImagingGaussianBlur with 3 passes each way. */
bool blur_box(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, tall = (height + 7) / 8 * 8, wide = (width + 7) / 8 * 8;
    const float sigma = (float)op->value.amount, sigma2 = sigma * sigma / 3.0f;
    const float length = (float)sqrt(12.0 * sigma2 + 1.0), l = (float)floor((length - 1.0) / 2.0);
    const float radius = l + (2 * l + 1) * (l * (l + 1) - 3 * sigma2) / (6 * (sigma2 - (l + 1) * (l + 1)));
    const int64_t r = (int64_t)radius;
    const uint32_t whole = (uint32_t)(16777216.0f / (radius * 2 + 1));
    const uint32_t part = ((1u << 24) - ((uint32_t)r * 2 + 1) * whole) / 2;
    uint8_t *a = take(scratch, SLOT_WORK, 2 * tall * wide);
    uint32_t *sum = take(scratch, SLOT_WORK_2, (tall > wide ? tall : wide) * (int64_t)sizeof *sum);
    if (!a || !sum) return false;
    uint8_t *b = a + tall * wide;
    for (int c = 0; c < in->channels; c++) {
        const uint8_t *from = in->data + c * in->plane;
        for (int64_t y = 0; y < height; y++) memcpy(a + y * wide, from + y * in->row, (size_t)width);
        for (int way = 0; way < 2 && radius != 0.0f; way++) {
            const int64_t h = way ? height : width, w = way ? width : height, row = way ? wide : tall;
            transpose(a, b, row, wide + tall - row);
            box_pass(b, a, h, w, row, r, whole, part, sum);
            box_pass(a, b, h, w, row, r, whole, part, sum);
            box_pass(b, a, h, w, row, r, whole, part, sum);
        }
        for (int64_t y = 0; y < height; y++) memcpy(out->data + (c * height + y) * width, a + y * wide, (size_t)width);
    }
    return true;
}

int run_blur(Sample *sample, Op *op) {
    return remake(sample, op, sample->image.height, sample->image.width, blur_gaussian);
}

/* torchvision: GaussianBlur.get_params. */
bool draw_blur(Drawing *d, const Step *step) {
    const int32_t width = step->blur.width, height = step->blur.height;
    const double low = step->blur.low, high = step->blur.high;
    const bool is_odd = width > 0 && width % 2 && height > 0 && height % 2;
    if (!is_odd || !(low > 0) || !(high >= low)) return deny(d, step, REFUSED_TABLE);
    if (!d->is_probe && (d->width <= width / 2 || d->height <= height / 2)) {
        d->refusal->blur.height = d->height, d->refusal->blur.width = d->width;
        return deny(d, step, REFUSED_BLUR);
    }
    Op *op = add(d, step, OP_BLUR);
    if (!op) return false;
    op->blur.width = width, op->blur.height = height;
    op->blur.sigma = between(d, step->at, 0, low, high);
    return true;
}
