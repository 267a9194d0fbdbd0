/* Values of pixels: tables, colour, sharpness and blur.
 *
 * Pillow and torch round each product and each sum: build with -ffp-contract=off; `fused` stands where torch fuses the
 * two.
 */
#include "core.h"

#include <math.h>
#include <string.h>
#if defined(__AVX512VBMI__) || defined(__AVX2__)
#include <immintrin.h>
#endif

enum { V2_SHARP = 3 }; /* a further domain: v2 adjust_sharpness_image sums in an order of its own */
enum { MOST_RADIUS = 1 << 20 };
enum { BLOCK = 1024 }; /* pixels between two passes, in the first cache */

/* Calls f with a domain that the compiler knows, so that each has a loop of its own. */
#define FOR_DOMAIN(domain, f, ...)                                                                                     \
    ((domain) == PIL_DOMAIN  ? f(PIL_DOMAIN, __VA_ARGS__)                                                              \
     : (domain) == V1_DOMAIN ? f(V1_DOMAIN, __VA_ARGS__)                                                               \
     : (domain) == V2_DOMAIN ? f(V2_DOMAIN, __VA_ARGS__)                                                               \
                             : f(V2_SHARP, __VA_ARGS__))

INLINE uint8_t larger(uint8_t a, uint8_t b) { return a > b ? a : b; }
INLINE uint8_t smaller(uint8_t a, uint8_t b) { return a < b ? a : b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t area(const Image *image) { return (int64_t)image->height * image->width; }

INLINE uint8_t clip(float x) {
    x = x > 0.0f ? x : 0.0f;
    return (uint8_t)(int32_t)(x < 255.0f ? x : 255.0f);
}

/* Pillow: Blend.c ImagingBlend(other, value, ratio); torchvision: _blend. rest is 1 - ratio. */
INLINE uint8_t blend(int domain, float value, float other, float ratio, float rest) {
    if (domain == PIL_DOMAIN) return clip(other + ratio * (value - other));
    if (domain == V1_DOMAIN) return clip(ratio * value + rest * other);
    if (domain == V2_DOMAIN) return clip(fused(rest, other, ratio * value));
    return clip(fused(rest, other - value, value));
}

INLINE void blend_row(int domain, uint8_t *restrict value, const uint8_t *restrict other, int64_t size, float ratio,
                      float rest) {
    for (int64_t i = 0; i < size; i++) value[i] = blend(domain, value[i], other[i], ratio, rest);
}

/* Pillow: Convert.c L24; torchvision: rgb_to_grayscale, v2 _rgb_to_grayscale_image. */
INLINE void luma_row(int domain, const uint8_t *restrict red, const uint8_t *restrict green,
                     const uint8_t *restrict blue, uint8_t *restrict out, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        const float r = red[i], g = green[i], b = blue[i];
        const float pil = fused(19595.0f, r, fused(38470.0f, g, fused(7471.0f, b, 32768.0f))); /* exact: below 2^24 */
        out[i] = (uint8_t)(int32_t)(domain == PIL_DOMAIN ? pil * 0x1p-16f
                                    : domain == V1_DOMAIN ? 0.2989f * r + 0.587f * g + 0.114f * b
                                                          : fused(0.114f, b, fused(0.587f, g, 0.2989f * r)));
    }
}

/* The luma of the pixels from `start`: the plane itself if there is only one, else in the buffer. */
static const uint8_t *luma(int domain, const Image *image, int64_t start, int64_t count, uint8_t buffer[BLOCK]) {
    const int64_t size = area(image);
    const uint8_t *r = image->data + start;
    if (image->channels < 3) return r;
    FOR_DOMAIN(domain, luma_row, r, r + size, r + 2 * size, buffer, count);
    return buffer;
}

/* --- Tables ------------------------------------------------------------------------------------------------------- */

/* Pillow: ImageEnhance.Contrast; torchvision: adjust_contrast. */
static float mean_luma(int domain, const Image *image) {
    const int64_t size = area(image);
    uint8_t buffer[BLOCK];
    int64_t sum = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t count = least(size - start, BLOCK);
        const uint8_t *gray = luma(domain, image, start, count, buffer);
        uint32_t part = 0;
        for (int64_t i = 0; i < count; i++) part += gray[i];
        sum += part;
    }
    return domain == PIL_DOMAIN ? (float)(int)((double)sum / (double)size + 0.5) : (float)sum / (float)size;
}

/* Pillow: ImageOps.autocontrast; torchvision: autocontrast, v2 autocontrast_image. */
static void stretch(int domain, const uint8_t *restrict plane, int64_t size, uint8_t table[256]) {
    uint8_t low = 255, high = 0;
    for (int64_t i = 0; i < size; i++) {
        low = smaller(low, plane[i]);
        high = larger(high, plane[i]);
    }
    const double scale = 255.0 / (high - low), offset = -low * scale;
    const float span = (float)(high - low), scale_1 = 1.0f / span * 255.0f, scale_2 = span * (1.0f / 255.0f);
    for (int i = 0; i < 256 && low < high; i++)
        table[i] = clip(domain == PIL_DOMAIN ? (float)(int)(i * scale + offset)
                        : domain == V1_DOMAIN ? (float)(i - low) * scale_1 : (float)(i - low) / scale_2);
}

/* Pillow: ImageOps.equalize, whose table torchvision's equalize follows. */
static void equalize(const uint8_t *restrict plane, int64_t size, uint8_t table[256]) {
    uint32_t count[8][256] = {{0}}; /* neighbours are often equal: their counters should not wait for each other */
    int64_t i = 0, last = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t eight;
        memcpy(&eight, plane + i, 8);
        for (int k = 0; k < 8; k++) count[k][eight >> (8 * k) & 255]++;
    }
    for (; i < size; i++) count[0][plane[i]]++;
    for (i = 0; i < 256; i++) {
        for (int k = 1; k < 8; k++) count[0][i] += count[k][i];
        last = count[0][i] ? count[0][i] : last;
    }
    const int64_t step = (size - last) / 255;
    int64_t sum = step / 2;
    for (i = 0; i < 256 && step; i++) {
        table[i] = (uint8_t)least(sum / step, 255);
        sum += count[0][i];
    }
}

void make_table(const Op *op, const Image *image, uint8_t table_C256[MAX_CHANNELS][256]) {
    const int domain = op->n[8];
    const float ratio = (float)op->v[0], rest = (float)(1.0 - op->v[0]);
    const float other = op->code == OP_CONTRAST ? mean_luma(domain, image) : 0.0f;
    const int dropped = op->code != OP_POSTERIZE || op->n[0] > 8 ? 0 : op->n[0] < 0 ? 8 : 8 - op->n[0];
    for (int i = 0; i < 256; i++) {
        int64_t value = i;
        switch (op->code) {
        case OP_BRIGHTNESS: /* Pillow: ImageEnhance.Brightness; torchvision: adjust_brightness */
        case OP_CONTRAST: value = blend(domain, (float)i, other, ratio, rest); break;
        case OP_SOLARIZE: value = i < op->v[0] ? i : 255 - i; break;          /* ImageOps.solarize */
        case OP_SOLARIZE_ADD: value = i < op->n[1] ? i + op->n[0] : i; break; /* timm: solarize_add */
        case OP_POSTERIZE: value = i >> dropped << dropped; break;            /* ImageOps.posterize */
        case OP_INVERT: value = 255 - i; break;
        }
        for (int c = 0; c < image->channels; c++) table_C256[c][i] = value < 0 ? 0 : (uint8_t)least(value, 255);
    }
    for (int c = 0; c < image->channels; c++) {
        const uint8_t *plane = image->data + c * area(image);
        if (op->code == OP_AUTOCONTRAST) stretch(domain, plane, area(image), table_C256[c]);
        if (op->code == OP_EQUALIZE) equalize(plane, area(image), table_C256[c]);
    }
}

void apply_table(const Image *image, uint8_t table_C256[MAX_CHANNELS][256]) {
    const int64_t size = area(image);
    for (int c = 0; c < image->channels; c++) {
        uint8_t *restrict plane = image->data + c * size;
        const uint8_t *restrict table = table_C256[c];
        int64_t i = 0;
#if defined(__AVX512VBMI__) /* 7 us instead of 50 for 3 x 224 x 224 */
        const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 64);
        const __m512i t2 = _mm512_loadu_si512(table + 128), t3 = _mm512_loadu_si512(table + 192);
        for (; i + 64 <= size; i += 64) {
            const __m512i x = _mm512_loadu_si512(plane + i);
            const __m512i low = _mm512_permutex2var_epi8(t0, x, t1), high = _mm512_permutex2var_epi8(t2, x, t3);
            _mm512_storeu_si512(plane + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high));
        }
#elif defined(__AVX2__) /* 40 us less: sixteenths of the table, each as what it differs by from the one before */
        __m256i low[8], high[8];
        for (int k = 0; k < 8; k++) {
            const __m128i *at = (const __m128i *)table + k, none = _mm_setzero_si128();
            const __m128i before = k ? _mm_loadu_si128(at - 1) : none, before_high = k ? _mm_loadu_si128(at + 7) : none;
            low[k] = _mm256_broadcastsi128_si256(_mm_xor_si128(_mm_loadu_si128(at), before));
            high[k] = _mm256_broadcastsi128_si256(_mm_xor_si128(_mm_loadu_si128(at + 8), before_high));
        }
        const __m256i sixteen = _mm256_set1_epi8(16), half = _mm256_set1_epi8(-128);
        for (; i + 32 <= size; i += 32) { /* a place below 0 gives 0, and others the last four bits' */
            __m256i x = _mm256_loadu_si256((const __m256i *)(plane + i)), y = _mm256_xor_si256(x, half);
            __m256i found = _mm256_xor_si256(_mm256_shuffle_epi8(low[0], x), _mm256_shuffle_epi8(high[0], y));
            for (int k = 1; k < 8; k++) {
                x = _mm256_subs_epi8(x, sixteen), y = _mm256_subs_epi8(y, sixteen);
                found = _mm256_xor_si256(found, _mm256_shuffle_epi8(low[k], x));
                found = _mm256_xor_si256(found, _mm256_shuffle_epi8(high[k], y));
            }
            _mm256_storeu_si256((__m256i *)(plane + i), found);
        }
#endif
        for (; i < size; i++) plane[i] = table[plane[i]];
    }
}

/* --- Colour ------------------------------------------------------------------------------------------------------- */

void grayscale(const Op *op, Image *image) {
    const int64_t size = area(image);
    uint8_t buffer[BLOCK];
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t count = least(size - start, BLOCK);
        const uint8_t *gray = luma(op->n[8], image, start, count, buffer);
        for (int c = 0; c < op->n[0]; c++) memmove(image->data + c * size + start, gray, (size_t)count);
    }
    image->channels = op->n[0];
}

/* Pillow: ImageEnhance.Color; torchvision: adjust_saturation. One channel stays as it is. */
void saturate(const Op *op, Image *image) {
    const int64_t size = area(image);
    const float ratio = (float)op->v[0], rest = (float)(1.0 - op->v[0]);
    uint8_t buffer[BLOCK];
    for (int64_t start = 0; start < size && image->channels == 3; start += BLOCK) {
        const int64_t count = least(size - start, BLOCK);
        luma(op->n[8], image, start, count, buffer);
        for (int c = 0; c < 3; c++)
            FOR_DOMAIN(op->n[8], blend_row, image->data + c * size + start, buffer, count, ratio, rest);
    }
}

/* Pixels on the colour wheel: hue is base + along / range, in sixths of a turn; part is the channel that is neither the
 * high nor the low one. */
typedef struct {
    uint8_t high[BLOCK], low[BLOCK], part[BLOCK], range[BLOCK], sextant[BLOCK], saturation[BLOCK];
    int8_t base[BLOCK];
    int16_t along[BLOCK];
    uint16_t fall[BLOCK];
} Wheel;

INLINE void find_hue(const uint8_t *restrict red, const uint8_t *restrict green, const uint8_t *restrict blue,
                     int64_t size, Wheel *restrict w) {
    for (int64_t i = 0; i < size; i++) {
        const uint8_t r = red[i], g = green[i], b = blue[i];
        const uint8_t high = larger(r, larger(g, b)), low = smaller(r, smaller(g, b));
        const uint8_t below = (uint8_t)(high - larger(smaller(r, g), smaller(larger(r, g), b)));
        const bool falls = r == high ? b == low : g == high ? b != low : r != low;
        w->high[i] = high;
        w->low[i] = low;
        w->range[i] = (uint8_t)(high - low);
        w->along[i] = (int16_t)(falls ? -below : below);
        w->base[i] = (int8_t)((r == high ? -1 : g == high ? 1 : 3) + (falls ? 2 : 0));
    }
}

/* Pillow: Convert.c rgb2hsv_row, hsv2rgb: its floats and doubles give the same for each of the 2^24 colours, there and
 * back. */
INLINE void turn_pil(Wheel *restrict w, uint8_t shift) {
    for (int i = 0; i < BLOCK; i++) {
        const float high = w->high[i], range = w->range[i];
        float hue = ((float)w->base[i] + (float)w->along[i] / (range > 1.0f ? range : 1.0f)) / 6.0f;
        hue += hue < 0.0f ? 1.0f : 0.0f;
        w->sextant[i] = (uint8_t)(int32_t)(hue * 255.0f);
        w->saturation[i] = (uint8_t)(int32_t)(range / (high > 1.0f ? high : 1.0f) * 255.0f);
    }
    for (int i = 0; i < BLOCK; i++) {
        const uint16_t turned = (uint16_t)(6 * (uint8_t)(w->sextant[i] + shift));
        const uint16_t sextant = (uint16_t)((turned + 1u) * 257u >> 16), part = (uint16_t)(turned - 255 * sextant);
        const uint16_t low = (uint16_t)(w->high[i] * (255 - w->saturation[i]) + 128);
        w->sextant[i] = (uint8_t)sextant;
        w->low[i] = (uint8_t)((uint16_t)(low + (low >> 8)) >> 8);
        w->fall[i] = (uint16_t)(w->saturation[i] * (sextant & 1 ? part : 255 - part));
    }
    for (int i = 0; i < BLOCK; i++) {
        const float high = w->high[i];
        w->part[i] = (uint8_t)(int32_t)(high + 0.5f - high * (w->fall[i] * (1.0f / 65025.0f)));
    }
}

/* torchvision: _rgb2hsv, _hsv2rgb; v2 _rgb_to_hsv, _hsv_to_rgb. shift is in sixths of a turn. */
INLINE void turn_tensor(Wheel *restrict w, float shift) {
    for (int i = 0; i < BLOCK; i++) {
        const float range = w->range[i];
        float hue = (float)w->base[i] + (float)w->along[i] / (range > 1.0f ? range : 1.0f) + shift;
        hue += hue < 0.0f ? 6.0f : 0.0f;
        hue -= hue >= 6.0f ? 6.0f : 0.0f;
        const int32_t sextant = (int32_t)hue;
        const float part = hue - (float)sextant;
        w->sextant[i] = (uint8_t)sextant;
        const float value = w->high[i] - range * (sextant & 1 ? part : 1.0f - part);
        w->part[i] = (uint8_t)(int32_t)(value * (255.999f / 255.0f));
    }
}

/* A channel that is high in the sextant `from` and the next, low in the third and fourth after it. */
INLINE uint8_t pick(uint8_t sextant, uint8_t from, uint8_t high, uint8_t low, uint8_t part) {
    const uint8_t k = smaller((uint8_t)(sextant + 6 - from), (uint8_t)(sextant - from));
    const uint8_t other = (uint8_t)(k - 3) < 2 ? low : part;
    return k < 2 ? high : other;
}

INLINE void paint(const Wheel *restrict w, uint8_t *restrict r, uint8_t *restrict g, uint8_t *restrict b,
                  int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        const uint8_t sextant = w->sextant[i], high = w->high[i], low = w->low[i], part = w->part[i];
        r[i] = pick(sextant, 5, high, low, part);
        g[i] = pick(sextant, 1, high, low, part);
        b[i] = pick(sextant, 3, high, low, part);
    }
}

/* torchvision: adjust_hue. One channel stays as it is. */
void shift_hue(const Op *op, Image *image) {
    const int64_t size = area(image);
    Wheel w;
    memset(&w, 0, sizeof w);
    for (int64_t start = 0; start < size && image->channels == 3; start += BLOCK) {
        const int64_t count = least(size - start, BLOCK);
        uint8_t *r = image->data + start, *g = r + size, *b = g + size;
        find_hue(r, g, b, count, &w);
        if (op->n[8] == PIL_DOMAIN) turn_pil(&w, (uint8_t)(int32_t)(op->v[0] * 255));
        else turn_tensor(&w, (float)(op->v[0] * 6));
        paint(&w, r, g, b, count);
    }
}

/* --- Neighbours --------------------------------------------------------------------------------------------------- */

/* ImageFilter.SMOOTH: thirteenths, rounded; the ends of the row stay. column has room for a row and both its sides. */
INLINE void smooth_row(const uint8_t *restrict up, const uint8_t *restrict mid, const uint8_t *restrict down,
                       uint8_t *restrict out, uint16_t *restrict column, int64_t width) {
    for (int64_t x = 0; x < width; x++) column[x + 1] = (uint16_t)(up[x] + mid[x] + down[x]);
    for (int64_t x = 0; x < width; x++)
        out[x] = (uint8_t)((uint16_t)(column[x] + column[x + 1] + column[x + 2] + 4 * mid[x] + 6) * 5042u >> 16);
    out[0] = mid[0];
    out[width - 1] = mid[width - 1];
}

/* Pillow: ImageEnhance.Sharpness, Filter.c ImagingFilter3x3; torchvision: adjust_sharpness. */
bool sharpen(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width;
    const int domain = op->n[8] == V2_DOMAIN ? V2_SHARP : op->n[8];
    const float ratio = (float)op->v[0], rest = (float)(1.0 - op->v[0]);
    uint16_t *column = take(scratch, SLOT_WORK, 3 * width + 4);
    if (!column) return false;
    uint8_t *smooth = (uint8_t *)(column + width + 2);
    column[0] = column[width + 1] = 0;
    for (int64_t y = 0; y < in->channels * height; y++) {
        const uint8_t *mid = in->data + y / height * in->plane + y % height * in->row;
        const bool inner = y % height > 0 && y % height < height - 1;
        memcpy(out->data + y * width, mid, (size_t)width);
        if (height < 3 || width < 3) continue;
        if (inner) smooth_row(mid - in->row, mid, mid + in->row, smooth, column, width);
        FOR_DOMAIN(domain, blend_row, out->data + y * width, inner ? smooth : mid, width, ratio, rest);
    }
    return true;
}

enum { LANE = 32 };

/* Half of a Gaussian kernel; returns its radius without taps that together weigh less than a thousandth of a level. */
static int64_t gaussian(double sigma, int64_t radius, float *half) {
    double sum = 1.0;
    for (int64_t i = 1; i <= radius; i++) sum += 2.0 * exp(-0.5 * (i / sigma) * (i / sigma));
    for (int64_t i = 0; i <= radius; i++) half[i] = (float)(exp(-0.5 * (i / sigma) * (i / sigma)) / sum);
    while (radius > 0 && half[radius] < 1e-6f) radius--;
    return radius;
}

/* rows[0..2 * radius] weighed into one row; width in whole lanes. */
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

/* torchvision: gaussian_blur, v2 gaussian_blur_image. */
static bool blur_gaussian(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, wide = (width + LANE - 1) / LANE * LANE;
    int64_t rx = least(op->n[0] / 2, width - 1), ry = least(op->n[1] / 2, height - 1);
    const int64_t taps = 2 * (rx > ry ? rx : ry) + 1;
    float *plane = take(scratch, SLOT_WORK, height * wide * (int64_t)sizeof(float));
    const float **rows = take(scratch, SLOT_WORK_2, taps * (int64_t)sizeof(float *) + (3 * taps + 2 * wide) * 4);
    if (!plane || !rows) return false;
    float *half_x = (float *)(rows + taps), *half_y = half_x + taps, *line = half_y + taps;
    rx = gaussian(op->v[0], rx, half_x);
    ry = gaussian(op->v[1], ry, half_y);
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
                const float sum = line[x] + 12582912.0f; /* 1.5 * 2^23: the low bits are the integer, half to even */
                uint32_t bits;
                memcpy(&bits, &sum, 4);
                to[x] = (uint8_t)bits;
            }
        }
    }
    return true;
}

/* Down the columns: each row of out is the mean of 2 * radius + 1 rows and a part of the next two. */
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

/* In tiles of 8 x 8; both sides are multiples of 8. */
static void transpose(const uint8_t *restrict in, uint8_t *restrict out, int64_t height, int64_t width) {
    for (int64_t y = 0; y < height; y += 8)
        for (int64_t x = 0; x < width; x += 8)
            for (int i = 0; i < 64; i++) out[(x + i / 8) * height + y + i % 8] = in[(y + i % 8) * width + x + i / 8];
}

/* Pillow: BoxBlur.c ImagingGaussianBlur with 3 passes each way. */
static bool blur_box(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width, tall = (height + 7) / 8 * 8, wide = (width + 7) / 8 * 8;
    const float sigma2 = (float)op->v[0] * (float)op->v[0] / 3.0f;
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

bool blur(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    return op->code == OP_BLUR ? blur_gaussian(op, in, out, scratch) : blur_box(op, in, out, scratch);
}

/* Draws */

bool draw_value(Drawing *d, const Step *step) {
    const double low = step->v[0], high = step->v[1];
    const double value = low != high ? between(d, step->at, 0, low, high) : low;
    const bool is_radius = step->code == OP_BOX_BLUR;
    if (!isfinite(value) || (is_radius && !(value >= 0 && value < MOST_RADIUS))) return deny(d, step, REFUSED_TABLE, NULL, 0);
    Op *op = add(d, step, step->code, step->n[1]);
    if (!op) return false;
    op->n[0] = (int32_t)truncated(low), op->v[0] = value;
    return true;
}

bool draw_grayscale(Drawing *d, const Step *step) {
    const int32_t wanted = step->n[0] ? step->n[0] : d->channels;
    if (step->n[0] && step->n[0] != 1 && step->n[0] != 3) return deny(d, step, REFUSED_TABLE, NULL, 0);
    if (step->n[1] != V1_DOMAIN || d->channels > 1) d->channels = wanted; /* v1 leaves tensors of one channel as they are */
    if (!d->is_probe && d->channels != 1 && d->channels != 3) return deny(d, step, REFUSED_OP, NULL, 0);
    Op *op = add(d, step, OP_GRAYSCALE, step->n[1]);
    if (op) op->n[0] = d->channels;
    return op != NULL;
}

bool draw_blur(Drawing *d, const Step *step) {
    const int32_t *n = step->n;
    const bool is_odd = n[0] > 0 && n[0] % 2 && n[1] > 0 && n[1] % 2;
    if (!is_odd || !(step->v[0] > 0) || !(step->v[1] >= step->v[0])) return deny(d, step, REFUSED_TABLE, NULL, 0);
    if (!d->is_probe && (d->width <= n[0] / 2 || d->height <= n[1] / 2))
        return deny(d, step, REFUSED_BLUR, (int64_t[]){d->height, d->width}, 2);
    Op *op = add(d, step, OP_BLUR, 0);
    if (!op) return false;
    op->n[0] = n[0], op->n[1] = n[1];
    op->v[0] = op->v[1] = between(d, step->at, 0, step->v[0], step->v[1]);
    return true;
}

bool draw_permute(Drawing *d, const Step *step) {
    Op *op = add(d, step, OP_PERMUTE, 0);
    if (!op) return false;
    if (d->channels > MAX_CHANNELS) return deny(d, step, REFUSED_OP, NULL, 0);
    for (int32_t place = 0; place < d->channels; place++) {
        int32_t smaller_ones = 0;
        const double drawn = uniform(d, step->at, place);
        for (int32_t k = 0; k < d->channels; k++) smaller_ones += uniform(d, step->at, k) < drawn;
        op->n[smaller_ones] = place; /* the order that sorts what is drawn */
    }
    return true;
}
