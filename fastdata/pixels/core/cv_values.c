/* Values as albumentations 2.0.8 changes them: tables of 256 entries for each channel.
 *
 * Sources: albumentations/augmentations/pixel/transforms.py and functional.py, albucore/functions.py. They make tables in
 * float32, clip them and drop the fraction.
 */
#include "core.h"

#include <math.h>

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t area(const Image *image) { return (int64_t)image->height * image->width; }

/* albucore: clip */
INLINE uint8_t clip(float x) {
    x = x > 0.0f ? x : 0.0f;
    return (uint8_t)(int32_t)(x < 255.0f ? x : 255.0f);
}

/* np.round, then clip */
INLINE uint8_t clip_rounded(double x) {
    x = x > 0.0 ? x : 0.0;
    return (uint8_t)(int32_t)rint(x < 255.0 ? x : 255.0);
}

void count_values(const uint8_t *restrict plane, int64_t size, uint32_t total[256]) {
    uint32_t count[8][256] = {{0}}; /* neighbours are often equal: their counters should not wait for each other */
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t eight;
        memcpy(&eight, plane + i, 8);
        for (int k = 0; k < 8; k++) count[k][eight >> (8 * k) & 255]++;
    }
    for (; i < size; i++) count[0][plane[i]]++;
    for (i = 0; i < 256; i++) {
        total[i] = count[0][i];
        for (int k = 1; k < 8; k++) total[i] += count[k][i];
    }
}

static double mean_of(const uint8_t *values, int64_t size) {
    int64_t sum = 0;
    for (int64_t start = 0; start < size; start += 1024) {
        uint32_t part = 0;
        for (int64_t i = start; i < least(start + 1024, size); i++) part += values[i];
        sum += part;
    }
    return (double)sum / (double)size;
}

/* The mean of cv2.cvtColor(image, COLOR_RGB2GRAY). */
static double mean_grey(const Image *image) {
    const int64_t size = area(image);
    uint8_t grey[1024];
    double sum = 0; /* exact */
    if (image->channels < 3) return mean_of(image->data, size);
    for (int64_t start = 0; start < size; start += 1024) {
        const int64_t count = least(size - start, 1024);
        const uint8_t *red = image->data + start;
        grey_row(red, red + size, red + 2 * size, count, grey);
        sum += mean_of(grey, count) * (double)count;
    }
    return sum / (double)size;
}

/* Ops */

/* albucore: multiply_add_lut; albumentations: get_safe_brightness_contrast_params, adjust_contrast_torchvision. */
int run_cv_linear(Sample *sample, Op *op) {
    if (sample->image.channels > MAX_CHANNELS) return REFUSED_OP;
    const int32_t added = op->cv_linear.added;
    if (added != SHARE_OF_255 && !(settle(sample) && own(sample))) return REFUSED_MEMORY;
    const Image *image = &sample->image;
    double alpha = op->cv_linear.alpha, beta = op->cv_linear.beta;
    if (added == GREY_THAT_STAYS) beta = mean_grey(image) * (1 - alpha);
    else beta *= added == SHARE_OF_255 ? 255 : mean_of(image->data, image->channels * area(image));
    if (added == GREY_THAT_STAYS && alpha == 0) beta = floor(beta + 0.5);
    if (op->cv_linear.is_safe && alpha > 0) {
        beta = fmin(fmax(beta, 0), 255);
        alpha = fmin(alpha, (255 - beta) / 255);
    } else if (op->cv_linear.is_safe) {
        beta = fmin(beta, 255);
        alpha = fmax(alpha, -beta / 255);
    }
    uint8_t table_C256[MAX_CHANNELS][256];
    for (int c = 0; c < image->channels; c++)
        for (int x = 0; x < 256; x++) table_C256[c][x] = clip((float)x * (float)alpha + (float)beta);
    compose_table(sample, table_C256);
    return OK;
}

/* albucore: create_lut_array; albumentations: posterize, gamma_transform. */
static uint8_t change(int32_t kind, double amount, int x) {
    const int64_t whole = truncated(amount), dropped = whole < 0 ? 8 : whole > 8 ? 0 : 8 - whole;
    switch (kind) {
    case CHANNEL_ADD: return clip((float)x + (float)whole);
    case CHANNEL_MULTIPLY: return clip((float)x * (float)amount);
    case CHANNEL_POSTERIZE: return (uint8_t)(x >> dropped << dropped);
    default: return clip((float)trunc(pow(x * (1.0 / 255), amount) * 255)); /* at most 255, as gamma is positive */
    }
}

int run_cv_channels(Sample *sample, Op *op) {
    const Image *image = &sample->image;
    if (image->channels > MAX_CHANNELS) return REFUSED_OP;
    uint8_t table_C256[MAX_CHANNELS][256];
    for (int c = 0; c < image->channels; c++) {
        const double amount = op->cv_channels.amount[c];
        if (c && amount == op->cv_channels.amount[c - 1]) memcpy(table_C256[c], table_C256[c - 1], 256);
        else for (int x = 0; x < 256; x++) table_C256[c][x] = change(op->cv_channels.kind, amount, x);
    }
    compose_table(sample, table_C256);
    return OK;
}

/* albumentations: channel_dropout of dropout/functional.py. */
int run_cv_drop(Sample *sample, Op *op) {
    const Image *image = &sample->image;
    if (image->channels > MAX_CHANNELS) return REFUSED_OP;
    uint8_t table_C256[MAX_CHANNELS][256];
    for (int c = 0; c < image->channels; c++)
        for (int x = 0; x < 256; x++) table_C256[c][x] = op->cv_drop.is_dropped[c] ? clip((float)op->fill[c]) : (uint8_t)x;
    compose_table(sample, table_C256);
    return OK;
}

/* Histograms */

/* OpenCV: histogram.cpp equalizeHist */
static void equalize_cv(const uint32_t count[256], int64_t size, uint8_t table[256]) {
    int first = 0;
    while (first < 255 && !count[first]) first++;
    const float scale = 255.0f / (float)(size - count[first]);
    int64_t sum = 0;
    for (int x = 0; x < 256; x++) {
        sum += x > first ? count[x] : 0;
        table[x] = count[first] == size ? (uint8_t)first : clip_rounded((float)sum * scale);
    }
}

/* albumentations: _equalize_pil, which counts a value itself among those below it. */
static void equalize_pil(const uint32_t count[256], int64_t size, uint8_t table[256]) {
    int64_t last = 0, sum = 0;
    for (int x = 0; x < 256; x++) last = count[x] ? count[x] : last;
    const int64_t step = (size - last) / 255;
    for (int x = 0; x < 256; x++) {
        sum += count[x];
        table[x] = step ? (uint8_t)least((sum + step / 2) / step, 255) : (uint8_t)x;
    }
}

/* albumentations: get_histogram_bounds. */
static void find_bounds(const uint32_t count[256], int64_t size, double cutoff, int *low, int *high) {
    int64_t sum = 0;
    const float cut = (float)(cutoff != 0 ? (double)size * cutoff / 100 : 0.5); /* no cutoff: up to the first pixel */
    int first = 0, last = 255;
    while (first < 255 && (float)(sum += count[first]) < cut) first++;
    sum = 0;
    while (last > 0 && (float)(sum += count[last]) < cut) last--;
    *low = cutoff != 0 ? (int)least(first + 1, 255) : first, *high = last;
}

/* albumentations: auto_contrast, create_contrast_lut. cv2.calcHist with the range [0, 255] does not count 255. */
static void stretch(const uint32_t counted[256], int64_t size, int32_t kind, double cutoff, uint8_t table[256]) {
    uint32_t count[256];
    memcpy(count, counted, sizeof count);
    size -= count[255], count[255] = 0;
    int low, high;
    find_bounds(count, size, cutoff, &low, &high);
    for (int x = 0; x < 256; x++) table[x] = (uint8_t)x;
    if (low >= high || !size) return;
    int64_t sum = 0, whole = 0;
    for (int x = low + 1; x <= high; x++) whole += count[x];
    if (kind == STRETCH_CDF && !whole && !count[low]) return;
    for (int x = 0; x < 256; x++) {
        sum += x > low && x <= high ? count[x] : 0;
        const double share = kind == STRETCH_CDF ? (float)sum * 255.0f / (float)whole : (x - low) * (255.0 / (high - low));
        table[x] = x < low ? 0 : x > high ? 255 : clip_rounded(share);
    }
}

int run_cv_histogram(Sample *sample, Op *op) {
    const int32_t kind = op->cv_histogram.kind, channels = sample->image.channels;
    if (channels > MAX_CHANNELS) return REFUSED_OP;
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    const int64_t size = area(&sample->image);
    const bool is_of_luma = op->cv_histogram.is_of_luma && channels == 3;
    if (is_of_luma) to_ycc(&sample->image);
    uint8_t table_C256[MAX_CHANNELS][256];
    for (int c = 0; c < (is_of_luma ? 1 : channels); c++) {
        uint32_t count[256];
        count_values(sample->image.data + c * size, size, count);
        if (kind == EQUALIZE_CV) equalize_cv(count, size, table_C256[c]);
        else if (kind == EQUALIZE_PIL) equalize_pil(count, size, table_C256[c]);
        else stretch(count, size, kind, op->cv_histogram.cutoff, table_C256[c]);
    }
    if (is_of_luma) {
        look_up(sample->image.data, size, table_C256[0]);
        from_ycc(&sample->image);
    } else {
        compose_table(sample, table_C256);
    }
    return OK;
}

/* Draws */

bool draw_cv_linear(Drawing *d, const Step *step) {
    const double alpha = between(d, step->at, 0, step->cv_linear.alpha[0], step->cv_linear.alpha[1]);
    const double beta = between(d, step->at, 1, step->cv_linear.beta[0], step->cv_linear.beta[1]);
    if (!isfinite(alpha) || !isfinite(beta)) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_CV_LINEAR);
    if (!op) return false;
    op->cv_linear.added = step->cv_linear.added, op->cv_linear.is_safe = step->cv_linear.is_safe;
    op->cv_linear.alpha = alpha, op->cv_linear.beta = beta;
    return true;
}

bool draw_cv_channels(Drawing *d, const Step *step) {
    const int32_t kind = step->cv_channels.kind;
    if (kind < CHANNEL_ADD || kind > CHANNEL_GAMMA) return deny(d, step, REFUSED_TABLE);
    if (d->channels > MAX_CHANNELS) return deny(d, step, REFUSED_OP);
    Op *op = add(d, step, OP_CV_CHANNELS);
    if (!op) return false;
    op->cv_channels.kind = kind;
    for (int c = 0; c < d->channels; c++) {
        const int from = step->cv_channels.is_shared ? 0 : c;
        const double low = step->cv_channels.low[from], high = step->cv_channels.high[from];
        double amount = between(d, step->at, from, low, high);
        if (kind == CHANNEL_POSTERIZE) amount = low + (double)integer(d, step->at, from, truncated(high - low) + 1);
        if (kind == CHANNEL_GAMMA) amount /= 100;
        if (!isfinite(amount) || (kind == CHANNEL_GAMMA && amount <= 0)) return deny(d, step, REFUSED_TABLE);
        op->cv_channels.amount[c] = amount;
    }
    return true;
}

bool draw_cv_drop(Drawing *d, const Step *step) {
    const int64_t fewest = step->cv_drop.fewest, most = step->cv_drop.most;
    if (fewest < 1 || fewest > most || most >= MAX_CHANNELS) return deny(d, step, REFUSED_TABLE);
    if (!d->is_probe && (d->channels > MAX_CHANNELS || most >= d->channels)) return deny(d, step, REFUSED_OP);
    Op *op = add(d, step, OP_CV_DROP);
    if (!op || d->is_probe) return op != NULL;
    int64_t wanted = fewest + integer(d, step->at, 0, most - fewest + 1);
    for (int c = 0; c < d->channels; c++) { /* of those that are left, each with the same chance */
        op->cv_drop.is_dropped[c] = integer(d, step->at, 1 + c, d->channels - c) < wanted;
        wanted -= op->cv_drop.is_dropped[c];
    }
    return true;
}

bool draw_cv_histogram(Drawing *d, const Step *step) {
    const int32_t kind = step->cv_histogram.kind;
    const double cutoff = step->cv_histogram.cutoff;
    if (kind < EQUALIZE_CV || kind > STRETCH_PIL || !(cutoff >= 0 && cutoff <= 100)) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_CV_HISTOGRAM);
    if (!op) return false;
    op->cv_histogram.kind = kind, op->cv_histogram.is_of_luma = step->cv_histogram.is_of_luma;
    op->cv_histogram.cutoff = cutoff;
    return true;
}
