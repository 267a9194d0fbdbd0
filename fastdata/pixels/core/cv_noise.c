/* Noise as albumentations 2.0.8 adds and multiplies it on uint8: pixel/functional.py add_noise, albucore/functions.py. */
#include "core.h"

#include <math.h>

/* The numbers of a row in units of levels, or factors, from number `first` on. */
static void draw_numbers(const Op *op, int64_t first, int64_t count, float numbers[CHUNK]) {
    if (!op->cv_noise.multiplies) {
        const float mean = (float)op->cv_noise.mean, sigma = (float)op->cv_noise.sigma;
        draw_normal(op->cv_noise.key, first, count, numbers);
        for (int64_t i = 0; i < count; i++) numbers[i] = (mean + sigma * numbers[i]) * 255.0f;
        return;
    }
    const float low = (float)op->cv_noise.range[0], width = (float)(op->cv_noise.range[1] - op->cv_noise.range[0]);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t bits = scramble(op->cv_noise.key + (uint64_t)(first + i + 1) * GAMMA);
        numbers[i] = low + width * ((float)(int32_t)(bits >> 40) * 0x1p-24f);
    }
}

/* Noise that is added is truncated before the sum; a product is truncated after it. */
INLINE void apply_numbers(uint8_t *restrict values, const float *restrict numbers, int64_t count, bool multiplies) {
    for (int64_t i = 0; i < count; i++) {
        float number = numbers[i];
        if (multiplies) number *= values[i];
        number = number > -256.0f ? number : -256.0f;
        number = number < 256.0f ? number : 256.0f;
        const int32_t value = (int32_t)number + (multiplies ? 0 : values[i]);
        values[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}

int run_cv_noise(Sample *sample, Op *op) {
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    const Image *image = &sample->image;
    const int64_t plane = image->plane;
    float numbers[CHUNK];
    for (int64_t start = 0; start < plane; start += CHUNK) {
        const int64_t count = plane - start < CHUNK ? plane - start : CHUNK;
        for (int64_t c = 0; c < image->channels; c++) {
            uint8_t *values = image->data + c * plane + start;
            if (!c || !op->cv_noise.is_shared) draw_numbers(op, c * plane + start, count, numbers);
            if (op->cv_noise.multiplies) apply_numbers(values, numbers, count, true);
            else apply_numbers(values, numbers, count, false);
        }
    }
    return OK;
}

bool draw_cv_noise(Drawing *d, const Step *step) {
    const double mean = between(d, step->at, 0, step->cv_noise.mean[0], step->cv_noise.mean[1]);
    const double sigma = between(d, step->at, 1, step->cv_noise.sigma[0], step->cv_noise.sigma[1]);
    Op *op = add(d, step, OP_CV_NOISE);
    if (!op) return false;
    op->cv_noise.multiplies = step->cv_noise.multiplies, op->cv_noise.is_shared = step->cv_noise.is_shared;
    op->cv_noise.mean = mean, op->cv_noise.sigma = sigma;
    op->cv_noise.range[0] = step->cv_noise.range[0], op->cv_noise.range[1] = step->cv_noise.range[1];
    op->cv_noise.key = noise_key(d, child(step->at, 0));
    return true;
}

/* ISONoise: albumentations/augmentations/pixel/functional.py iso_noise; OpenCV's color_hsv.simd.hpp RGB2HLS_f, HLS2RGB_f. */

enum { MOST_INTENSITY = 16, COUNTS = 64 }; /* a deviation is 0.5 at most, so that less than COUNTS grains are expected */

INLINE float larger(float a, float b) { return a > b ? a : b; }
INLINE float smaller(float a, float b) { return a < b ? a : b; }
INLINE float within_1(float x) { return smaller(larger(x, 0.0f), 1.0f); }
INLINE float distance(float a, float b) { return a > b ? a - b : b - a; }

/* The standard deviation of lightness, which is half of the sum of the largest and the least value. */
static double deviation_of_lightness(const Image *image) {
    const int64_t size = image->plane;
    const uint8_t *red = image->data, *green = red + size, *blue = green + size;
    double sum = 0, squares = 0;
    for (int64_t start = 0; start < size; start += CHUNK) {
        uint32_t part = 0, part_squares = 0;
        for (int64_t i = start; i < (size - start < CHUNK ? size : start + CHUNK); i++) {
            const uint8_t high_rg = red[i] > green[i] ? red[i] : green[i], low_rg = red[i] < green[i] ? red[i] : green[i];
            const uint32_t high = high_rg > blue[i] ? high_rg : blue[i], low = low_rg < blue[i] ? low_rg : blue[i];
            part += high + low, part_squares += (high + low) * (high + low);
        }
        sum += part, squares += part_squares;
    }
    const double mean = sum / (double)size, variance = squares / (double)size - mean * mean;
    return sqrt(variance > 0 ? variance : 0) / 510;
}

/* Numbers of a Poisson distribution: how many of its cumulative probabilities each draw reaches. */
static void draw_counts(uint64_t key, const uint64_t sums[COUNTS], int64_t first, int64_t count, float counts[CHUNK]) {
    for (int64_t i = 0; i < count; i++) {
        const uint64_t bits = scramble(key + (uint64_t)(first + i + 1) * GAMMA) >> 32;
        int k = 0;
        while (k < COUNTS - 1 && bits >= sums[k]) k++;
        counts[i] = (float)k;
    }
}

/* To hue (in sixths of a turn), lightness and saturation, and back with more lightness and another hue. */
INLINE void shift_hls(uint8_t *restrict red, uint8_t *restrict green, uint8_t *restrict blue, int64_t size,
                      const float *restrict turns, const float *restrict grains, float intensity) {
    for (int64_t i = 0; i < size; i++) {
        const float r = red[i] / 255.0f, g = green[i] / 255.0f, b = blue[i] / 255.0f;
        const float high = larger(r, larger(g, b)), low = smaller(r, smaller(g, b)), range = high - low;
        const float sum = high + low, room = sum < 1.0f ? sum : 2.0f - sum;
        const float saturation = range > 0.0f ? range / room : 0.0f, by_range = range > 0.0f ? 1.0f / range : 0.0f;
        float hue = r == high ? (g - b) * by_range : g == high ? (b - r) * by_range + 2 : (r - g) * by_range + 4;
        hue += turns[i];
        hue += hue < 0.0f ? 6.0f : 0.0f;
        hue -= hue >= 6.0f ? 6.0f : 0.0f;
        const float lightness = within_1(sum * 0.5f + grains[i] * intensity * (1.0f - sum * 0.5f));
        const float chroma = (lightness < 0.5f ? lightness : 1.0f - lightness) * saturation; /* half of the new range */
        const float to_r = within_1(distance(hue, 3) - 1), to_g = within_1(2 - distance(hue, 2));
        const float to_b = within_1(2 - distance(hue, 4)), least = (lightness - chroma) * 255.0f + 0.5f;
        red[i] = (uint8_t)(int32_t)smaller(larger(least + 510.0f * chroma * to_r, 0.0f), 255.0f);
        green[i] = (uint8_t)(int32_t)smaller(larger(least + 510.0f * chroma * to_g, 0.0f), 255.0f);
        blue[i] = (uint8_t)(int32_t)smaller(larger(least + 510.0f * chroma * to_b, 0.0f), 255.0f);
    }
}

int run_cv_iso(Sample *sample, Op *op) {
    if (sample->image.channels != 3) return REFUSED_OP;
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    const Image *image = &sample->image;
    const double expected = deviation_of_lightness(image) * op->cv_iso.intensity;
    double probability = exp(-expected), sum = probability;
    uint64_t sums[COUNTS];
    for (int k = 0; k < COUNTS; k++) {
        sums[k] = (uint64_t)(fmin(sum, 1) * 0x1p32);
        probability *= expected / (k + 1), sum += probability;
    }
    const float scale = (float)(op->cv_iso.colour * op->cv_iso.intensity / 60);
    float turns[CHUNK], grains[CHUNK];
    for (int64_t start = 0; start < image->plane; start += CHUNK) {
        const int64_t count = image->plane - start < CHUNK ? image->plane - start : CHUNK;
        uint8_t *red = image->data + start;
        draw_normal(op->cv_iso.key, start, count, turns);
        draw_counts(op->cv_iso.grain_key, sums, start, count, grains);
        for (int64_t i = 0; i < count; i++) turns[i] *= scale;
        shift_hls(red, red + image->plane, red + 2 * image->plane, count, turns, grains, (float)op->cv_iso.intensity);
    }
    return OK;
}

bool draw_cv_iso(Drawing *d, const Step *step) {
    const double colour = between(d, step->at, 0, step->cv_iso.colour[0], step->cv_iso.colour[1]);
    const double intensity = between(d, step->at, 1, step->cv_iso.intensity[0], step->cv_iso.intensity[1]);
    const bool is_bounded = colour >= 0 && colour <= 1 && intensity >= 0 && intensity <= MOST_INTENSITY;
    if (!is_bounded) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_CV_ISO);
    if (!op) return false;
    op->cv_iso.colour = colour, op->cv_iso.intensity = intensity;
    op->cv_iso.key = noise_key(d, child(step->at, 0)), op->cv_iso.grain_key = noise_key(d, child(step->at, 1));
    return true;
}
