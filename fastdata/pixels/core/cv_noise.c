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

/* What is added loses its fraction first, what was multiplied afterwards. */
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
