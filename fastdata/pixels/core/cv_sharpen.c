/* albumentations: Sharpen and UnsharpMask, with the pixels of OpenCV. */
#include "core.h"

#include <math.h>

enum { MOST_SHARPENED = 255 }; /* pixels of a kernel's side */

/* Draws */

static bool is_odd(int32_t size) { return size > 0 && size % 2 && size <= MOST_SHARPENED; }

bool draw_sharpen(Drawing *d, const Step *step) {
    const int32_t size = step->sharpen.size;
    if (size && (!is_odd(size) || !(step->sharpen.sigma > 0))) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_SHARPEN);
    if (!op) return false;
    op->sharpen.size = size, op->sharpen.sigma = step->sharpen.sigma;
    op->sharpen.alpha = between(d, step->at, 0, step->sharpen.alpha[0], step->sharpen.alpha[1]);
    op->sharpen.lightness = between(d, step->at, 1, step->sharpen.lightness[0], step->sharpen.lightness[1]);
    return true;
}

bool draw_unsharp_mask(Drawing *d, const Step *step) {
    const int32_t smallest = step->unsharp_mask.smallest, largest = step->unsharp_mask.largest;
    if (!is_odd(smallest) || !is_odd(largest) || smallest > largest) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_UNSHARP_MASK);
    if (!op) return false;
    op->unsharp_mask.size = smallest + 2 * (int32_t)integer(d, step->at, 0, (largest - smallest) / 2 + 1);
    op->unsharp_mask.sigma = between(d, step->at, 1, step->unsharp_mask.sigma[0], step->unsharp_mask.sigma[1]);
    op->unsharp_mask.alpha = between(d, step->at, 2, step->unsharp_mask.alpha[0], step->unsharp_mask.alpha[1]);
    op->unsharp_mask.threshold = step->unsharp_mask.threshold;
    return true;
}

/* Pixels */

/* albumentations: Sharpen.__generate_sharpening_matrix (augmentations/pixel/transforms.py), convolve. */
static bool sharpen_by_kernel(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const float alpha = (float)op->sharpen.alpha, effect = alpha * (float)(8 + op->sharpen.lightness);
    float kernel[9];
    for (int k = 0; k < 9; k++) kernel[k] = -alpha;
    kernel[4] = (float)(1 - op->sharpen.alpha) + effect;
    return filter_image(in, out, kernel, 1, scratch);
}

/* OpenCV: getGaussianKernelFixedPoint_ED (smooth.dispatch.cpp): shares of 256, whose errors go on to the next one. */
static void share_levels(const double *half, int64_t radius, uint32_t *shares) {
    double error = 0;
    uint32_t sum = 0;
    for (int64_t i = radius; i > 0; i--) {
        const double wanted = half[i] * 256 + error, share = rint(wanted);
        error = wanted - share;
        shares[i] = (uint32_t)share;
        sum += shares[i];
    }
    shares[0] = 256 - 2 * sum;
}

/* OpenCV: GaussianBlur of uint8 (smooth.simd.hpp), down the columns first, which integers allow. albumentations:
 * sharpen_gaussian, whose differences of uint8 wrap around. */
static bool sharpen_by_blur(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, radius = op->sharpen.size / 2;
    double half[MOST_SHARPENED / 2 + 1];
    uint32_t shares[MOST_SHARPENED / 2 + 1];
    uint32_t *memory = take(scratch, SLOT_WORK, (2 * width + 2 * radius) * (int64_t)sizeof *memory);
    if (!memory || radius > MOST_SHARPENED / 2) return false;
    uint32_t *restrict down = memory + radius, *restrict sum = memory + width + 2 * radius;
    cv_gaussian(radius, op->sharpen.sigma, half);
    share_levels(half, radius, shares);
    for (int64_t c = 0; c < in->channels; c++)
        for (int64_t y = 0; y < height; y++) {
            const uint8_t *plane = in->data + c * in->plane, *restrict row = plane + y * in->row;
            for (int64_t x = 0; x < width; x++) down[x] = shares[0] * row[x];
            for (int64_t j = 1; j <= radius; j++) {
                const uint8_t *restrict above = plane + mirror(y - j, height) * in->row;
                const uint8_t *restrict below = plane + mirror(y + j, height) * in->row;
                for (int64_t x = 0; x < width; x++) down[x] += shares[j] * (uint32_t)(above[x] + below[x]);
            }
            for (int64_t x = 1; x <= radius; x++) {
                down[-x] = down[mirror(-x, width)];
                down[width - 1 + x] = down[mirror(width - 1 + x, width)];
            }
            for (int64_t x = 0; x < width; x++) sum[x] = shares[0] * down[x] + (1u << 15);
            for (int64_t j = 1; j <= radius; j++)
                for (int64_t x = 0; x < width; x++) sum[x] += shares[j] * (down[x - j] + down[x + j]);
            uint8_t *restrict to = out->data + c * out->plane + y * out->row;
            for (int64_t x = 0; x < width; x++) {
                const uint8_t difference = (uint8_t)(row[x] - (sum[x] >> 16));
                const double sharp = row[x] + op->sharpen.alpha * difference;
                to[x] = (uint8_t)(int32_t)(sharp > 0 ? sharp < 255 ? sharp : 255 : 0);
            }
        }
    return true;
}

int run_sharpen(Sample *sample, Op *op) {
    Kernel *kernel = op->sharpen.size ? sharpen_by_blur : sharpen_by_kernel;
    return remake(sample, op, sample->image.height, sample->image.width, kernel);
}

/* A Gaussian of floats, by rows and then by columns, as OpenCV blurs a channel of an image of float32. */
typedef struct {
    float half[MOST_SHARPENED / 2 + 1], *line, *rows; /* line: one row and its borders; rows: blurred along */
    int64_t radius, height, width, wide, fused_until;
    Tap taps[MOST_SHARPENED];
} Softener;

static void soften_row(Softener *s, int64_t y) { /* blur the line to row y; first it gets borders */
    widen_floats(s->line, s->width, s->radius);
    const int64_t count = row_taps(s->line, s->half, s->radius, true, s->taps);
    add_taps(s->taps, count, s->width, s->fused_until, s->rows + y * s->wide);
}

static void soften_column(Softener *s, int64_t y, float *out) {
    const int64_t count = column_taps(s->rows, s->wide, y, s->height, s->half, s->radius, s->taps);
    add_taps(s->taps, count, s->width, s->fused_until, out);
}

/* albumentations: unsharp_mask (augmentations/pixel/functional.py), on floats in [0, 1]. */
static void sharpen_row(const Op *op, const uint8_t *restrict row, int64_t width, float *restrict soft,
                        float *restrict sharp, float *restrict mask) {
    const float alpha = (float)op->unsharp_mask.alpha, threshold = (float)op->unsharp_mask.threshold;
    for (int64_t x = 0; x < width; x++) {
        const float value = (float)row[x] / 255.0f, residual = value - soft[x], moved = value + alpha * residual;
        mask[x] = fabsf(residual) * 255.0f > threshold;
        sharp[x] = moved > 0 ? moved < 1 ? moved : 1 : 0;
    }
}

static float bounded(float value) { return value > 0 ? value < 1 ? value : 1 : 0; }

static bool mask_sharply(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, wide = whole_lanes(width);
    Softener s = {.radius = op->unsharp_mask.size / 2, .height = height, .width = width, .wide = wide};
    double half[MOST_SHARPENED / 2 + 1];
    float *planes = take(scratch, SLOT_WORK, 3 * height * wide * (int64_t)sizeof *planes);
    s.line = take(scratch, SLOT_WORK_2, (2 * wide + whole_lanes(2 * s.radius)) * (int64_t)sizeof *s.line);
    if (!planes || !s.line || s.radius > MOST_SHARPENED / 2) return false;
    s.rows = planes;
    float *sharp = planes + height * wide, *mask = sharp + height * wide, *soft = s.line + wide + whole_lanes(2 * s.radius);
    cv_gaussian(s.radius, op->unsharp_mask.sigma, half);
    for (int64_t i = 0; i <= s.radius; i++) s.half[i] = (float)half[i];
    for (int64_t c = 0; c < in->channels; c++) {
        const uint8_t *plane = in->data + c * in->plane;
        s.fused_until = fused_columns(width, in->channels, c, 8);
        for (int64_t y = 0; y < height; y++) {
            for (int64_t x = 0; x < width; x++) s.line[s.radius + x] = (float)plane[y * in->row + x] / 255.0f;
            soften_row(&s, y);
        }
        for (int64_t y = 0; y < height; y++) {
            soften_column(&s, y, soft);
            sharpen_row(op, plane + y * in->row, width, soft, sharp + y * wide, mask + y * wide);
        }
        for (int64_t y = 0; y < height; y++) {
            memcpy(s.line + s.radius, mask + y * wide, (size_t)width * sizeof *mask);
            soften_row(&s, y);
        }
        for (int64_t y = 0; y < height; y++) {
            soften_column(&s, y, soft);
            const uint8_t *restrict row = plane + y * in->row;
            const float *restrict edge = sharp + y * wide;
            for (int64_t x = 0; x < width; x++)
                soft[x] = 255.0f * bounded(bounded(edge[x] * soft[x]) + bounded((float)row[x] / 255.0f * (1 - soft[x])));
            round_levels(soft, width, out->data + c * out->plane + y * out->row);
        }
    }
    return true;
}

int run_unsharp_mask(Sample *sample, Op *op) {
    return remake(sample, op, sample->image.height, sample->image.width, mask_sharply);
}
