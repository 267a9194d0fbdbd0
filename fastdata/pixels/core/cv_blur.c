/* Blurs of albumentations, with the pixels of OpenCV: Blur, MedianBlur, GaussianBlur and MotionBlur. */
#include "core.h"

#include <math.h>

enum { MOST_BOX = 99, MOST_MEDIAN = 15, MOST_GAUSSIAN = 255, MOST_KERNEL = 11, MEDIAN_LANE = 64 };

/* Draws */

static bool is_range(int32_t smallest, int32_t largest, int32_t most) {
    return smallest > 0 && smallest % 2 && largest % 2 && smallest <= largest && largest <= most;
}

/* albumentations: sample_odd_from_range (augmentations/blur/functional.py). */
static int32_t odd_number(const Drawing *d, const Step *step, int32_t smallest, int32_t largest) {
    return smallest + 2 * (int32_t)integer(d, step->at, 0, (largest - smallest) / 2 + 1);
}

bool draw_cv_blur(Drawing *d, const Step *step) {
    const int32_t smallest = step->cv_blur.smallest, largest = step->cv_blur.largest;
    const bool is_median = step->cv_blur.is_median;
    if (!is_range(smallest, largest, is_median ? MOST_MEDIAN : MOST_BOX)) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_CV_BLUR);
    if (!op) return false;
    op->cv_blur.is_median = is_median;
    op->cv_blur.size = odd_number(d, step, smallest, largest);
    return true;
}

/* albumentations: GaussianBlur.get_params_dependent_on_data; a size of 0 follows from sigma. */
bool draw_gaussian(Drawing *d, const Step *step) {
    const int32_t smallest = step->gaussian.smallest, largest = step->gaussian.largest;
    const double low = step->gaussian.sigma[0], high = step->gaussian.sigma[1];
    const bool is_sized = smallest >= 0 && smallest <= largest && largest <= MOST_GAUSSIAN;
    if (!is_sized || !(low >= 0) || !(high > 0 && low <= high && high * 7 < MOST_GAUSSIAN)) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_GAUSSIAN);
    if (!op) return false;
    const double sigma = between(d, step->at, 0, low, high);
    const int32_t drawn = smallest + (int32_t)integer(d, step->at, 1, largest - smallest + 1);
    const int32_t size = drawn ? drawn : (int32_t)(sigma * 3.5) * 2 + 1;
    op->gaussian.sigma = sigma;
    op->gaussian.size = size % 2 ? size : size + 1;
    return true;
}

/* albumentations: MotionBlur.get_params, create_motion_kernel. */
bool draw_motion(Drawing *d, const Step *step) {
    const int32_t smallest = step->motion.smallest, largest = step->motion.largest;
    if (!is_range(smallest, largest, MOST_KERNEL)) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_MOTION);
    if (!op) return false;
    op->motion.size = odd_number(d, step, smallest, largest);
    op->motion.angle = between(d, step->at, 1, step->motion.angle[0], step->motion.angle[1]);
    op->motion.direction = between(d, step->at, 2, step->motion.direction[0], step->motion.direction[1]);
    const double most = step->motion.shifts ? op->motion.size / 2 / 2.0 : 0;
    op->motion.shift_x = between(d, step->at, 3, -1, 1) * most;
    op->motion.shift_y = between(d, step->at, 4, -1, 1) * most;
    return true;
}

/* Pixels */

/* OpenCV: blur. Means of an odd number of levels are never halves, so any exact rounding gives its pixels. */
static bool blur_mean(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, size = op->cv_blur.size, radius = size / 2;
    const float share = 1.0f / (float)(size * size);
    uint32_t *down = take(scratch, SLOT_WORK, (width + 2 * radius) * (int64_t)sizeof *down);
    uint32_t *line = take(scratch, SLOT_WORK_2, width * (int64_t)sizeof *line);
    if (!down || !line) return false;
    uint32_t *restrict sum = down + radius; /* of a column, with mirrored columns on both sides */
    for (int64_t c = 0; c < in->channels; c++) {
        const uint8_t *plane = in->data + c * in->plane;
        memset(sum, 0, (size_t)width * sizeof *sum);
        for (int64_t j = -radius; j < radius; j++) {
            const uint8_t *restrict row = plane + mirror(j, height) * in->row;
            for (int64_t x = 0; x < width; x++) sum[x] += row[x];
        }
        for (int64_t y = 0; y < height; y++) {
            const uint8_t *restrict new = plane + mirror(y + radius, height) * in->row;
            const uint8_t *restrict old = plane + mirror(y - radius, height) * in->row;
            for (int64_t x = 0; x < width; x++) sum[x] += new[x];
            for (int64_t x = 1; x <= radius; x++) {
                sum[-x] = sum[mirror(-x, width)];
                sum[width - 1 + x] = sum[mirror(width - 1 + x, width)];
            }
            memset(line, 0, (size_t)width * sizeof *line);
            for (int64_t j = -radius; j <= radius; j++)
                for (int64_t x = 0; x < width; x++) line[x] += sum[x + j];
            uint8_t *restrict to = out->data + c * out->plane + y * out->row;
            for (int64_t x = 0; x < width; x++) to[x] = (uint8_t)(int32_t)((float)(int32_t)line[x] * share + 0.5f);
            for (int64_t x = 0; x < width; x++) sum[x] -= old[x];
        }
    }
    return true;
}

/* The medians of MEDIAN_LANE pixels. A median is the largest level that at most half of the pixels are below; it is found bit by
 * bit, from the highest on. All numbers are bytes, so that all vectors have one length. */
static void find_medians(const uint8_t *const *rows, int64_t size, int64_t x, uint8_t *restrict to) {
    const uint8_t half = (uint8_t)(size * size / 2);
    uint8_t level[MEDIAN_LANE] = {0};
    for (int bit = 128; bit; bit /= 2) {
        const uint8_t mask = (uint8_t)bit;
        uint8_t below[MEDIAN_LANE] = {0};
        for (int k = 0; k < MEDIAN_LANE; k++) level[k] |= mask;
        for (int64_t y = 0; y < size; y++)
            for (int64_t j = 0; j < size; j++) {
                const uint8_t *restrict in = rows[y] + x + j;
                for (int k = 0; k < MEDIAN_LANE; k++) below[k] = (uint8_t)(below[k] + (in[k] < level[k]));
            }
        for (int k = 0; k < MEDIAN_LANE; k++) level[k] = (uint8_t)(level[k] ^ (below[k] <= half ? 0 : mask));
    }
    memcpy(to + x, level, sizeof level);
}

/* OpenCV: medianBlur, whose borders repeat the pixels at the edge. */
static bool blur_median(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, size = op->cv_blur.size, radius = size / 2;
    const int64_t wide = (width + MEDIAN_LANE - 1) / MEDIAN_LANE * MEDIAN_LANE, row = wide + 2 * MEDIAN_LANE;
    const uint8_t *rows[MOST_MEDIAN];
    uint8_t *plane = take(scratch, SLOT_WORK, height * row), *line = take(scratch, SLOT_WORK_2, wide);
    if (!plane || !line || size > MOST_MEDIAN) return false;
    for (int64_t c = 0; c < in->channels; c++) {
        for (int64_t y = 0; y < height; y++) {
            const uint8_t *from = in->data + c * in->plane + y * in->row;
            uint8_t *to = plane + y * row;
            memset(to, from[0], (size_t)radius);
            memcpy(to + radius, from, (size_t)width);
            memset(to + radius + width, from[width - 1], (size_t)(row - radius - width));
        }
        for (int64_t y = 0; y < height; y++) {
            for (int64_t j = 0; j < size; j++) {
                const int64_t above = y + j - radius > 0 ? y + j - radius : 0;
                rows[j] = plane + (above < height ? above : height - 1) * row;
            }
            for (int64_t x = 0; x < width; x += MEDIAN_LANE) find_medians(rows, size, x, line);
            memcpy(out->data + c * out->plane + y * out->row, line, (size_t)width);
        }
    }
    return true;
}

int run_cv_blur(Sample *sample, Op *op) {
    Kernel *kernel = op->cv_blur.is_median ? blur_median : blur_mean;
    return remake(sample, op, sample->image.height, sample->image.width, kernel);
}

/* albumentations: create_gaussian_kernel_1d; OpenCV: sepFilter2D of uint8. */
static bool blur_separately(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, radius = op->gaussian.size / 2;
    const int64_t wide = whole_lanes(width), line_floats = wide + whole_lanes(2 * radius);
    float half[MOST_GAUSSIAN / 2 + 1];
    double sum = 1;
    Tap taps[MOST_GAUSSIAN];
    float *plane = take(scratch, SLOT_WORK, height * wide * (int64_t)sizeof *plane);
    float *line = take(scratch, SLOT_WORK_2, line_floats * (int64_t)sizeof *line);
    if (!plane || !line || radius > MOST_GAUSSIAN / 2) return false;
    for (int64_t i = 1; i <= radius; i++) sum += 2 * exp(-0.5 * (i / op->gaussian.sigma) * (i / op->gaussian.sigma));
    for (int64_t i = 0; i <= radius; i++)
        half[i] = (float)(exp(-0.5 * (i / op->gaussian.sigma) * (i / op->gaussian.sigma)) / sum);
    for (int64_t c = 0; c < in->channels; c++) {
        for (int64_t y = 0; y < height; y++) {
            widen_row(in->data + c * in->plane + y * in->row, width, radius, line);
            const int64_t count = row_taps(line, half, radius, false, taps);
            add_taps(taps, count, width, fused_columns(width, in->channels, c, 32), plane + y * wide);
        }
        for (int64_t y = 0; y < height; y++) {
            const int64_t count = column_taps(plane, wide, y, height, half, radius, taps);
            add_taps(taps, count, width, fused_columns(width, in->channels, c, 4), line);
            round_levels(line, width, out->data + c * out->plane + y * out->row);
        }
    }
    return true;
}

int run_gaussian(Sample *sample, Op *op) {
    if (op->gaussian.size == 1) return OK;
    return remake(sample, op, sample->image.height, sample->image.width, blur_separately);
}

/* albumentations: create_motion_kernel. The points of a line are rounded to pixels, which all have the same weight. */
static bool blur_motion(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t size = op->motion.size, center = size / 2;
    const double direction = op->motion.direction, radians = op->motion.angle * (3.14159265358979323846 / 180);
    const double first = direction > 0 ? -(double)center * (1 - direction) : -(double)center;
    const double last = direction < 0 ? (double)center * (1 + direction) : (double)center;
    float kernel[MOST_KERNEL * MOST_KERNEL] = {0}, points = 0;
    if (size > MOST_KERNEL) return false;
    for (int64_t i = 0; i < size; i++) {
        const double along = i == size - 1 ? last : (double)i * ((last - first) / (double)(size - 1)) + first;
        const int64_t x = truncated(rint((double)center + cos(radians) * along + op->motion.shift_x));
        const int64_t y = truncated(rint((double)center + sin(radians) * along + op->motion.shift_y));
        const int64_t column = x < 0 ? 0 : x < size ? x : size - 1, row = y < 0 ? 0 : y < size ? y : size - 1;
        kernel[row * size + column] = 1;
    }
    for (int64_t k = 0; k < size * size; k++) points += kernel[k];
    for (int64_t k = 0; k < size * size; k++) kernel[k] /= points;
    return filter_image(in, out, kernel, center, scratch);
}

int run_motion(Sample *sample, Op *op) {
    return remake(sample, op, sample->image.height, sample->image.width, blur_motion);
}
