/* Normalisation by numbers of each image: albumentations' Normalize (normalize_per_image_lut of albucore's functions.py). Sums
 * are equal to NumPy's in every bit: in pairs over all channels (pairwise_sum of loops_utils.h.src), or, for each channel on
 * its own, from the first pixel to the last. */
#include "core.h"

#include <math.h>

enum { BLOCK = 128, LANES = 8 };
static const double EPSILON = 1e-4, MOST = 20;

static double pairwise_sum(const uint8_t *levels, int64_t count, const double square_256[256]) {
    double sum = 0, lanes[LANES];
    if (count < LANES) {
        for (int64_t i = 0; i < count; i++) sum += square_256[levels[i]];
        return sum;
    }
    if (count > BLOCK) {
        const int64_t half = count / 2 - count / 2 % LANES;
        return pairwise_sum(levels, half, square_256) + pairwise_sum(levels + half, count - half, square_256);
    }
    for (int k = 0; k < LANES; k++) lanes[k] = square_256[levels[k]];
    int64_t i = LANES;
    for (; i + LANES <= count; i += LANES)
        for (int k = 0; k < LANES; k++) lanes[k] += square_256[levels[i + k]];
    sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    for (; i < count; i++) sum += square_256[levels[i]];
    return sum;
}

static double running_sum(const uint8_t *levels, int64_t count, int64_t step, const double square_256[256]) {
    double sum = 0;
    for (int64_t i = 0; i < count; i += step) sum += square_256[levels[i]];
    return sum;
}

/* Fill the table of one channel, or of all together, from every `step`-th of `count` levels. */
static void fill_table(double *table_256, const uint8_t *levels, int64_t count, int64_t step, bool is_range) {
    int64_t times_256[256] = {0}, total = 0, pixels = 0;
    double square_256[256];
    int low = 255, high = 0;
    for (int64_t i = 0; i < count; i += step) times_256[levels[i]]++;
    for (int x = 0; x < 256; x++) {
        if (!times_256[x]) continue;
        total += x * times_256[x], pixels += times_256[x];
        low = x < low ? x : low, high = x;
    }
    const double mean = (double)total / (double)pixels;
    for (int x = 0; x < 256; x++) square_256[x] = (x - mean) * (x - mean);
    double zero = low, unit = high - low + EPSILON;
    if (!is_range) {
        const double sum = step == 1 ? pairwise_sum(levels, count, square_256) : running_sum(levels, count, step, square_256);
        zero = mean, unit = sqrt(sum / (double)pixels) + EPSILON;
    }
    for (int x = 0; x < 256; x++) table_256[x] = fmin(fmax((x - zero) / unit, -MOST), MOST);
}

bool measure(Values *v, const Image *image, Scratch *scratch) {
    const int64_t channels = image->channels, count = channels * image->height * image->width;
    uint8_t *levels = take(scratch, SLOT_WORK, count);
    if (!levels || channels > MAX_CHANNELS) return false;
    for (int64_t c = 0; c < channels; c++)
        for (int64_t y = 0, i = c; y < image->height; y++) {
            const uint8_t *row = image->data + c * image->plane + y * image->row;
            for (int64_t x = 0; x < image->width; x++, i += channels) levels[i] = row[x * image->pixel];
        }
    const bool is_range = v->statistic == RANGE_OF_IMAGE || v->statistic == RANGE_OF_CHANNELS;
    const bool is_each = channels > 1 && (v->statistic == OF_CHANNELS || v->statistic == RANGE_OF_CHANNELS);
    v->channels = is_each ? (int32_t)channels : 1, v->by_formula = false;
    for (int64_t c = 0; c < v->channels; c++)
        fill_table(v->table_C256 + 256 * c, levels + c, count - c, v->channels, is_range);
    return true;
}
