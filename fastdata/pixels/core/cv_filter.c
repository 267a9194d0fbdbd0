/* Weighted sums of pixels, rounded in the order in which OpenCV adds them.
 *
 * OpenCV works on rows of interleaved channels. In whole vectors, a product and its sum are rounded once (fused). For the few
 * values after the last vector of a row they are rounded separately. Which values these are depends on the number of channels
 * and, as images are planar here, on the channel. Sums are often halves, where the last bit decides how a level is rounded.
 */
#include "core.h"

#include <math.h>

/* OpenCV: borderInterpolate with BORDER_REFLECT_101. */
int64_t mirror(int64_t at, int64_t length) {
    const int64_t period = length > 1 ? 2 * (length - 1) : 1, place = (at % period + period) % period;
    return place < length ? place : period - place;
}

int64_t whole_lanes(int64_t width) { return (width + LANE - 1) / LANE * LANE; }

/* A row as floats with `radius` mirrored values before and behind it. */
void widen_row(const uint8_t *restrict row, int64_t width, int64_t radius, float *restrict out) {
    for (int64_t x = 0; x < width; x++) out[radius + x] = row[x];
    widen_floats(out, width, radius);
}

void widen_floats(float *line, int64_t width, int64_t radius) {
    for (int64_t x = 1; x <= radius; x++) {
        line[radius - x] = line[radius + mirror(-x, width)];
        line[radius + width - 1 + x] = line[radius + mirror(width - 1 + x, width)];
    }
}

/* Sums of one row of a plane; `out` has room for whole lanes. Columns from `fused_until` on are not fused. */
void add_taps(const Tap *taps, int64_t count, int64_t width, int64_t fused_until, float *restrict out) {
    for (int64_t x = 0; x < fused_until; x += LANE) {
        float sum[LANE] = {0};
        for (int64_t t = 0; t < count; t++) {
            const float weight = taps[t].weight, *restrict one = taps[t].one + x;
            if (taps[t].other) {
                const float *restrict other = taps[t].other + x;
                for (int k = 0; k < LANE; k++) sum[k] = fused(weight, one[k] + other[k], sum[k]);
            } else
                for (int k = 0; k < LANE; k++) sum[k] = fused(weight, one[k], sum[k]);
        }
        memcpy(out + x, sum, sizeof sum);
    }
    for (int64_t x = fused_until; x < width; x++) {
        float sum = 0;
        for (int64_t t = 0; t < count; t++)
            sum += taps[t].weight * (taps[t].other ? taps[t].one[x] + taps[t].other[x] : taps[t].one[x]);
        out[x] = sum;
    }
}

/* How many columns of a channel are in whole vectors, if a row of all channels is taken in blocks. */
int64_t fused_columns(int64_t width, int64_t channels, int64_t channel, int64_t block) {
    const int64_t end = width * channels / block * block;
    return end > channel ? (end - channel + channels - 1) / channels : 0;
}

/* OpenCV: saturate_cast<uchar>, halves to even. */
void round_levels(const float *restrict in, int64_t width, uint8_t *restrict out) {
    for (int64_t x = 0; x < width; x++) {
        const float above = in[x] > 0 ? in[x] : 0, level = (above < 255 ? above : 255) + 12582912.0f; /* 1.5 * 2^23 */
        uint32_t bits;
        memcpy(&bits, &level, 4);
        out[x] = (uint8_t)bits;
    }
}

/* Taps along a row, whose first value is at `line`. OpenCV: RowFilter; for floats and kernels of 3 or 5 SymmRowSmallVec_32f,
 * in filter.simd.hpp. */
int64_t row_taps(const float *line, const float *half, int64_t radius, bool is_symmetric, Tap *taps) {
    const float *center = line + radius;
    if (is_symmetric && (radius == 1 || radius == 2)) {
        taps[0] = (Tap){center - 1, center + 1, half[1]};
        taps[1] = (Tap){center, NULL, half[0]};
        if (radius == 2) taps[2] = (Tap){center - 2, center + 2, half[2]};
        return radius + 1;
    }
    for (int64_t j = -radius; j <= radius; j++) taps[radius + j] = (Tap){center + j, NULL, half[j < 0 ? -j : j]};
    return 2 * radius + 1;
}

/* Taps down the columns of a plane whose rows are `wide` apart. OpenCV: SymmColumnVec_32f8u and SymmColumnVec_32f. */
int64_t column_taps(const float *plane, int64_t wide, int64_t y, int64_t height, const float *half, int64_t radius,
                    Tap *taps) {
    taps[0] = (Tap){plane + y * wide, NULL, half[0]};
    for (int64_t j = 1; j <= radius; j++)
        taps[j] = (Tap){plane + mirror(y - j, height) * wide, plane + mirror(y + j, height) * wide, half[j]};
    return radius + 1;
}

/* OpenCV: filter2D of smooth.dispatch.cpp and FilterVec_8u, for kernels that it does not apply by a Fourier transform. */
bool filter_image(const Image *in, const Image *out, const float *kernel, int64_t radius, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, size = 2 * radius + 1;
    const int64_t wide = whole_lanes(width) + whole_lanes(2 * radius);
    Tap taps[MOST_TAPS];
    float *plane = take(scratch, SLOT_WORK, height * wide * (int64_t)sizeof *plane);
    float *line = take(scratch, SLOT_WORK_2, whole_lanes(width) * (int64_t)sizeof *line);
    if (!plane || !line || size * size > MOST_TAPS) return false;
    for (int64_t c = 0; c < in->channels; c++) {
        const int64_t fused_until = fused_columns(width, in->channels, c, 4);
        for (int64_t y = 0; y < height; y++)
            widen_row(in->data + c * in->plane + y * in->row, width, radius, plane + y * wide);
        for (int64_t y = 0; y < height; y++) {
            int64_t count = 0;
            for (int64_t k = 0; k < size * size; k++) {
                const float *row = plane + mirror(y + k / size - radius, height) * wide;
                if (kernel[k] != 0) taps[count++] = (Tap){row + k % size, NULL, kernel[k]};
            }
            add_taps(taps, count, width, fused_until, line);
            round_levels(line, width, out->data + c * out->plane + y * out->row);
        }
    }
    return true;
}

/* OpenCV: getGaussianKernelBitExact (smooth.dispatch.cpp); sigma 0 follows from the size. */
void cv_gaussian(int64_t radius, double sigma, double *half) {
    static const double small[5][5] = {
        {1}, {1 / 2., 1 / 4.}, {6 / 16., 4 / 16., 1 / 16.}, {9 / 32., 7 / 32., 3.5 / 32, 1 / 32.},
        {60 / 256., 51 / 256., 30 / 256., 13 / 256., 4 / 256.},
    };
    if (!(sigma > 0) && radius < 5) {
        memcpy(half, small[radius], (size_t)(radius + 1) * sizeof *half);
        return;
    }
    const double wide = sigma > 0 ? sigma : (double)(2 * radius + 1) * 0.15 + 0.35, scale = -0.125 / (wide * wide);
    double sum = 0;
    for (int64_t i = radius; i > 0; i--) sum += half[i] = exp((double)(4 * i * i) * scale);
    const double share = 1 / (sum * 2 + 1);
    for (int64_t i = 1; i <= radius; i++) half[i] *= share;
    half[0] = share;
}
