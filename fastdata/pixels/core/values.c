/* The last step of a batch: the uint8 values of an image are converted to the batch's dtype, planar or with channels last. */
#include "core.h"

#include <string.h>

enum { BUFFER = 4096, SHORT_ROW = 128 }; /* bytes; of rows shorter than SHORT_ROW several are converted at a time */
enum { PERIOD = 48 }; /* values: a multiple of 2, 3 and 4 channels, and of the vectors' length */

/* A divisor, and its inverse as a sum of two floats. */
typedef struct {
    float value, high, low;
} Divisor;

static inline Divisor divisor_of(float value) {
    const float high = 1 / value;
    return (Divisor){value, high, (float)((1.0 - (double)high * value) / value)};
}

/* a / b as a product with the inverse in two parts, which is faster. The last bit may differ from that of a division. But a
 * channel has only 256 values: `agrees` compares all of them with the table, and the table is used if one differs. */
static inline float divide(float a, Divisor b) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b.high, a * b.low);
#else
    return a / b.value;
#endif
}

/* ToTensor / ToDtype, then Normalize: torchvision's transforms/_functional_tensor.py and v2/functional/_misc.py. */
INLINE void convert(const Values *v, int32_t c, const uint8_t *restrict in, int64_t count, float *restrict out,
                    bool divides) {
    const float factor = v->factor, mean = (float)v->mean[c];
    const Divisor whole = divisor_of(factor), std = divisor_of((float)v->std[c]);
    for (int64_t i = 0; i < count; i++) out[i] = divide((divides ? divide(in[i], whole) : in[i] * factor) - mean, std);
}

/* albumentations' Normalize: normalize_lut of albucore's functions.py. */
static void convert_after(const Values *v, int32_t c, const uint8_t *restrict in, int64_t count, float *restrict out) {
    const float mean = (float)v->mean[c], std = (float)v->std[c];
    for (int64_t i = 0; i < count; i++) out[i] = (in[i] - mean) * std;
}

static void to_floats(const Values *v, int32_t c, const uint8_t *restrict in, int64_t count, float *restrict out) {
    c %= v->channels;
    if (!v->by_formula)
        for (int64_t i = 0; i < count; i++) out[i] = (float)v->table_C256[256 * c + in[i]];
    else if (v->scaling == SCALE_AFTER) convert_after(v, c, in, count, out);
    else
        v->scaling == SCALE_DIVIDE ? convert(v, c, in, count, out, true) : convert(v, c, in, count, out, false);
}

/* True if the formula gives exactly the values of the table. */
static bool agrees(const Values *v) {
    uint8_t every[256];
    float values[256];
    for (int x = 0; x < 256; x++) every[x] = (uint8_t)x;
    for (int32_t c = 0; c < v->channels; c++) {
        to_floats(v, c, every, 256, values);
        for (int x = 0; x < 256; x++)
            if (values[x] != (float)v->table_C256[256 * c + x]) return false;
    }
    return true;
}

/* Fill `table->values` from the CAST step: a table of all 256 values by torchvision's own arithmetic (doubles for FLOAT64,
 * otherwise floats), and by_formula: a formula, which vectors compute faster than a look-up, gives the same values. */
void fastdata_values(Table *table) {
    Values *v = &table->values;
    const Step *cast = table->steps;
    v->channels = 1;
    if (!is_sound(table)) return;
    while (cast < table->steps + table->count && cast->code != STEP_CAST) cast++;
    if (cast == table->steps + table->count) return;
    v->dtype = cast->cast.dtype, v->scaling = cast->cast.scaling;
    v->normalizes = cast->cast.means > 0, v->widens = cast->cast.widens, v->statistic = cast->cast.statistic;
    v->channels = v->normalizes ? cast->cast.means : 1;
    const bool divides = v->scaling == SCALE_DIVIDE;
    const double factor = divides ? 255 : v->scaling == SCALE_MULTIPLY ? 1 / 255.0 : 1;
    v->factor = (float)factor;
    for (int32_t c = 0; c < v->channels; c++) {
        const double mean = v->normalizes ? cast->cast.mean[c] : 0, std = v->normalizes ? cast->cast.std[c] : 1;
        v->mean[c] = mean, v->std[c] = std;
        for (int x = 0; x < 256; x++) {
            const bool is_after = v->scaling == SCALE_AFTER;
            const double wide = (divides ? x / factor : x * factor) - mean;
            const float value = (divides ? (float)x / v->factor : (float)x * v->factor) - (float)mean;
            const float narrow = is_after ? value * (float)std : value / (float)std;
            v->table_C256[256 * c + x] = v->dtype != FLOAT64 ? narrow : is_after ? wide * std : wide / std;
        }
    }
    v->by_formula = true; /* so that `agrees` converts by the formula */
    v->by_formula = v->dtype != FLOAT64 && agrees(v);
}

/* Numbers without their fraction; 0 for those that do not fit, such as NaN. */
INLINE int32_t int32_of(double value) { return value >= -0x1p31 && value < 0x1p31 ? (int32_t)value : 0; }
INLINE int64_t int64_of(double value) { return value >= -0x1p63 && value < 0x1p63 ? (int64_t)value : 0; }

static bool is_half(const Values *v) { return v->dtype == FLOAT16 || v->dtype == BFLOAT16; }

/* Convert the values of one row of a plane, or of several rows that follow each other in memory. */
static void write_row(const Values *v, int32_t c, const uint8_t *in, int64_t count, uint8_t *out) {
    float floats[CHUNK];
    if (v->dtype == FLOAT32) to_floats(v, c, in, count, (float *)out);
    const double *table = v->table_C256 + 256 * (c % v->channels);
    for (int64_t i = 0; i < count && v->dtype == FLOAT64; i++) ((double *)out)[i] = table[in[i]];
    for (int64_t i = 0; i < count && v->dtype == INT32; i++) ((int32_t *)out)[i] = int32_of(table[in[i]]);
    for (int64_t i = 0; i < count && v->dtype == INT64; i++) ((int64_t *)out)[i] = int64_of(table[in[i]]);
    for (int64_t from = 0; from < count && is_half(v); from += CHUNK) {
        const int64_t part = count - from < CHUNK ? count - from : CHUNK;
        to_floats(v, c, in + from, part, floats);
        store(v->dtype, floats, part, out + from * ITEM_BYTES[v->dtype]);
    }
}

static void write_plane(const Output *output, const Image *image, int32_t c, uint8_t *out, uint8_t *buffer) {
    const Values *v = &output->table->values;
    int64_t bytes = ITEM_BYTES[v->dtype], width = image->width, height = image->height, rows;
    out += c * height * width * bytes;
    const uint8_t *row = image->data + (image->channels == 1 ? 0 : c) * image->plane;
    if (image->pixel == 1 && image->row == width) width *= height, height = 1;
    bool copies = v->dtype == UINT8 || image->pixel != 1 || width < SHORT_ROW;
    for (int64_t y = 0; y < height; y += rows, row += rows * image->row, out += rows * width * bytes) {
        rows = copies && width < BUFFER ? BUFFER / width : 1;
        if (rows > height - y) rows = height - y;
        uint8_t *to = v->dtype == UINT8 ? out : buffer;
        for (int64_t k = 0; k < rows && copies; k++) copy_row(row + k * image->row, image->pixel, width, to + k * width);
        if (v->dtype != UINT8) write_row(v, c, copies ? buffer : row, rows * width, out);
    }
}

/* Channels last: the uint8 values of pixels are interleaved in a buffer, then converted with constants that repeat. */

INLINE void lay_pixels(const uint8_t *restrict in, int64_t plane, int64_t pixel, int64_t count, int64_t channels,
                       uint8_t *restrict out) {
    for (int64_t x = 0; x < count; x++)
        for (int64_t c = 0; c < channels; c++) out[x * channels + c] = in[c * plane + x * pixel];
}

static void lay_row(const Image *image, const uint8_t *row, int64_t count, int64_t channels, uint8_t *out) {
    const int64_t plane = image->channels == 1 ? 0 : image->plane, pixel = image->pixel;
    if (plane == 1 && pixel == channels) memcpy(out, row, (size_t)(count * channels));
    else if (channels == 3 && pixel == 1) lay_pixels(row, plane, 1, count, 3, out);
    else if (channels == 3 && pixel == -1) lay_pixels(row, plane, -1, count, 3, out);
    else lay_pixels(row, plane, pixel, count, channels, out);
}

/* The constants for PERIOD values of interleaved pixels. */
typedef struct {
    float mean[PERIOD], value[PERIOD], high[PERIOD], low[PERIOD];
} Pattern;

static void repeat(const Values *v, int64_t channels, Pattern *pattern) {
    for (int64_t c = 0; c < channels; c++) {
        const float mean = (float)v->mean[c % v->channels];
        const Divisor std = divisor_of((float)v->std[c % v->channels]);
        for (int64_t k = c; k < PERIOD; k += channels)
            pattern->mean[k] = mean, pattern->value[k] = std.value, pattern->high[k] = std.high, pattern->low[k] = std.low;
    }
}

INLINE void convert_pattern(const Values *v, const Pattern *p, Divisor whole, const uint8_t *restrict in,
                            float *restrict out, int32_t scaling) {
    for (int k = 0; k < PERIOD; k++) {
        const float scaled = scaling == SCALE_DIVIDE ? divide(in[k], whole) : in[k] * v->factor, from = scaled - p->mean[k];
        if (scaling == SCALE_AFTER) out[k] = from * p->value[k];
        else out[k] = divide(from, (Divisor){p->value[k], p->high[k], p->low[k]});
    }
}

INLINE void convert_pixels(const Values *v, const Pattern *pattern, const uint8_t *in, int64_t count, float *out,
                           int32_t scaling) {
    const Divisor whole = divisor_of(v->factor);
    for (; count >= PERIOD; count -= PERIOD, in += PERIOD, out += PERIOD)
        convert_pattern(v, pattern, whole, in, out, scaling);
    uint8_t last[PERIOD] = {0};
    float made[PERIOD];
    memcpy(last, in, (size_t)count);
    convert_pattern(v, pattern, whole, last, made, scaling);
    memcpy(out, made, (size_t)count * sizeof *made);
}

/* Value i of interleaved pixels, from the table. */
INLINE double value_of(const Values *v, int64_t channels, int64_t i, uint8_t level) {
    return v->table_C256[256 * (i % channels % v->channels) + level];
}

/* Convert values of whole pixels, by the formula with the constants of `pattern`, or by the table if that is NULL. */
static void write_pixels(const Values *v, const Pattern *pattern, int64_t channels, const uint8_t *in, int64_t count,
                         uint8_t *out) {
    float floats[CHUNK];
    const int64_t chunk = pattern ? CHUNK / PERIOD * PERIOD : CHUNK / channels * channels, step = is_half(v) ? chunk : count;
    for (int64_t from = 0; from < count; from += step, in += step) {
        const int64_t part = count - from < step ? count - from : step;
        float *to = is_half(v) ? floats : (float *)out;
        if (v->dtype == FLOAT64)
            for (int64_t i = 0; i < part; i++) ((double *)out)[i] = value_of(v, channels, i, in[i]);
        else if (v->dtype == INT32)
            for (int64_t i = 0; i < part; i++) ((int32_t *)out)[i] = int32_of(value_of(v, channels, i, in[i]));
        else if (v->dtype == INT64)
            for (int64_t i = 0; i < part; i++) ((int64_t *)out)[i] = int64_of(value_of(v, channels, i, in[i]));
        else if (!pattern)
            for (int64_t i = 0; i < part; i++) to[i] = (float)value_of(v, channels, i, in[i]);
        else if (v->scaling == SCALE_DIVIDE) convert_pixels(v, pattern, in, part, to, SCALE_DIVIDE);
        else if (v->scaling == SCALE_AFTER) convert_pixels(v, pattern, in, part, to, SCALE_AFTER);
        else convert_pixels(v, pattern, in, part, to, SCALE_NONE);
        if (is_half(v)) store(v->dtype, floats, part, out + from * ITEM_BYTES[v->dtype]);
    }
}

/* Write an image with channels last; `buffer` has room for BUFFER values. */
static void write_channels_last(const Output *output, const Image *image, uint8_t *out, uint8_t *buffer) {
    const Values *v = &output->table->values;
    const int64_t channels = output->channels, width = image->width, most = BUFFER / channels;
    const bool by_formula = v->by_formula && PERIOD % channels == 0;
    Pattern pattern;
    if (by_formula) repeat(v, channels, &pattern);
    int64_t waiting = 0; /* values in the buffer */
    for (int64_t y = 0; y < image->height; y++)
        for (int64_t x = 0; x < width; x += most) {
            const int64_t pixels = width - x < most ? width - x : most, count = pixels * channels;
            const uint8_t *from = image->data + y * image->row + x * image->pixel;
            if (v->dtype == UINT8) {
                lay_row(image, from, pixels, channels, out);
                out += count;
                continue;
            }
            if (waiting + count > BUFFER) {
                write_pixels(v, by_formula ? &pattern : NULL, channels, buffer, waiting, out);
                out += waiting * ITEM_BYTES[v->dtype], waiting = 0;
            }
            lay_row(image, from, pixels, channels, buffer + waiting);
            waiting += count;
        }
    if (waiting) write_pixels(v, by_formula ? &pattern : NULL, channels, buffer, waiting, out);
}

void write_run(const Output *output, int32_t c, const uint8_t *in, int64_t count, uint8_t *out) {
    const Values *v = &output->table->values;
    const bool by_formula = v->by_formula && PERIOD % output->channels == 0;
    Pattern pattern;
    if (!output->channels_last) {
        write_row(v, c, in, count, out);
        return;
    }
    if (by_formula) repeat(v, output->channels, &pattern);
    write_pixels(v, by_formula ? &pattern : NULL, output->channels, in, count, out);
}

/* Convert two samples, multiply each by its share, and add them. */
INLINE void convert_both(const Values *v, int32_t c, const uint8_t *restrict own, const uint8_t *restrict other,
                         int64_t count, float share, float other_share, float *restrict out, bool divides) {
    const float factor = v->factor, mean = (float)v->mean[c];
    const Divisor whole = divisor_of(factor), std = divisor_of((float)v->std[c]);
    for (int64_t i = 0; i < count; i++) {
        const float a = (divides ? divide(own[i], whole) : own[i] * factor) - mean;
        const float b = (divides ? divide(other[i], whole) : other[i] * factor) - mean;
        out[i] = divide(a, std) * share + divide(b, std) * other_share;
    }
}

bool blend_run(const Output *output, int32_t c, const uint8_t *own, const uint8_t *other, int64_t count, float share,
               float other_share, float *out) {
    const Values *v = &output->table->values;
    if (v->dtype != FLOAT32 || !v->by_formula || output->channels_last) return false;
    c %= v->channels;
    if (v->scaling == SCALE_DIVIDE) convert_both(v, c, own, other, count, share, other_share, out, true);
    else convert_both(v, c, own, other, count, share, other_share, out, false);
    return true;
}

bool write_values(const Output *output, const Image *image, uint8_t *out, Scratch *scratch) {
    uint8_t *buffer = take(scratch, SLOT_WORK, image->width + BUFFER);
    if (!buffer) return false;
    if (output->channels_last) write_channels_last(output, image, out, buffer);
    else for (int32_t c = 0; c < output->channels; c++) write_plane(output, image, c, out, buffer);
    return true;
}
