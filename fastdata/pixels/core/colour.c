/* Values of pixels: tables, colour and sharpness.
 *
 * Pillow and torch round each product and each sum, so build with -ffp-contract=off. `fused` is used where torch fuses them.
 */
#include "core.h"

#include <math.h>
#include <string.h>
#if defined(__AVX512VBMI__) || defined(__AVX2__)
#include <immintrin.h>
#endif

enum { V2_SHARP = 3 }; /* one more domain: v2's adjust_sharpness_image sums in another order */
enum { MOST_RADIUS = 1 << 20 };
enum { ADDED_BELOW = 128 }; /* the threshold of timm's solarize_add, which timm never changes */
enum { BLOCK = 1024 }; /* pixels between two passes, in the first cache */

/* Call f with a constant domain, so that the compiler makes a separate loop for each. */
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

/* The luma of `count` pixels from `start` on: the plane itself if there is only one, otherwise computed in the buffer. */
static const uint8_t *luma(int domain, const Image *image, int64_t start, int64_t count, uint8_t buffer[BLOCK]) {
    const int64_t size = area(image);
    const uint8_t *r = image->data + start;
    if (image->channels < 3) return r;
    FOR_DOMAIN(domain, luma_row, r, r + size, r + 2 * size, buffer, count);
    return buffer;
}

/* Tables */

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

/* Pillow: ImageOps.equalize; torchvision's equalize has the same table. */
static void equalize(const uint8_t *restrict plane, int64_t size, uint8_t table[256]) {
    uint32_t count[256];
    count_values(plane, size, count);
    int64_t last = 0;
    for (int i = 0; i < 256; i++) last = count[i] ? count[i] : last;
    const int64_t step = (size - last) / 255;
    int64_t sum = step / 2;
    for (int i = 0; i < 256 && step; i++) {
        table[i] = (uint8_t)least(sum / step, 255);
        sum += count[i];
    }
}

static void make_table(const Op *op, const Image *image, uint8_t table_C256[MAX_CHANNELS][256]) {
    const int32_t domain = op->value.domain, kind = op->value.kind, whole = op->value.whole;
    const double amount = op->value.amount;
    const float ratio = (float)amount, rest = (float)(1.0 - amount);
    const float other = kind == CONTRAST ? mean_luma(domain, image) : 0.0f;
    const int dropped = kind != POSTERIZE || whole > 8 ? 0 : whole < 0 ? 8 : 8 - whole;
    for (int i = 0; i < 256; i++) {
        int64_t value = i;
        switch (kind) {
        case BRIGHTNESS: /* Pillow: ImageEnhance.Brightness; torchvision: adjust_brightness */
        case CONTRAST: value = blend(domain, (float)i, other, ratio, rest); break;
        case SOLARIZE: value = i < amount ? i : 255 - i; break;               /* ImageOps.solarize */
        case SOLARIZE_ADD: value = i < ADDED_BELOW ? value + whole : i; break; /* timm: solarize_add */
        case POSTERIZE: value = i >> dropped << dropped; break;               /* ImageOps.posterize */
        case INVERT: value = 255 - i; break;
        }
        for (int c = 0; c < image->channels; c++) table_C256[c][i] = value < 0 ? 0 : (uint8_t)least(value, 255);
    }
    for (int c = 0; c < image->channels; c++) {
        const uint8_t *plane = image->data + c * area(image);
        if (kind == AUTOCONTRAST) stretch(domain, plane, area(image), table_C256[c]);
        if (kind == EQUALIZE) equalize(plane, area(image), table_C256[c]);
    }
}

void look_up(uint8_t *restrict values, int64_t size, const uint8_t table[256]) {
    int64_t i = 0;
#if defined(__AVX512VBMI__) /* 7 us instead of 50 for 3 x 224 x 224 */
    const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 64);
    const __m512i t2 = _mm512_loadu_si512(table + 128), t3 = _mm512_loadu_si512(table + 192);
    for (; i + 64 <= size; i += 64) {
        const __m512i x = _mm512_loadu_si512(values + i);
        const __m512i low = _mm512_permutex2var_epi8(t0, x, t1), high = _mm512_permutex2var_epi8(t2, x, t3);
        _mm512_storeu_si512(values + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high));
    }
#elif defined(__AVX2__) /* 40 us less: each sixteenth of the table is stored as the XOR with the sixteenth before it */
    __m256i low[8], high[8];
    for (int k = 0; k < 8; k++) {
        const __m128i *at = (const __m128i *)table + k, none = _mm_setzero_si128();
        const __m128i before = k ? _mm_loadu_si128(at - 1) : none, before_high = k ? _mm_loadu_si128(at + 7) : none;
        low[k] = _mm256_broadcastsi128_si256(_mm_xor_si128(_mm_loadu_si128(at), before));
        high[k] = _mm256_broadcastsi128_si256(_mm_xor_si128(_mm_loadu_si128(at + 8), before_high));
    }
    const __m256i sixteen = _mm256_set1_epi8(16), half = _mm256_set1_epi8(-128);
    for (; i + 32 <= size; i += 32) { /* the shuffle gives 0 for negative places, and uses the last four bits of all others */
        __m256i x = _mm256_loadu_si256((const __m256i *)(values + i)), y = _mm256_xor_si256(x, half);
        __m256i found = _mm256_xor_si256(_mm256_shuffle_epi8(low[0], x), _mm256_shuffle_epi8(high[0], y));
        for (int k = 1; k < 8; k++) {
            x = _mm256_subs_epi8(x, sixteen), y = _mm256_subs_epi8(y, sixteen);
            found = _mm256_xor_si256(found, _mm256_shuffle_epi8(low[k], x));
            found = _mm256_xor_si256(found, _mm256_shuffle_epi8(high[k], y));
        }
        _mm256_storeu_si256((__m256i *)(values + i), found);
    }
#endif
    for (; i < size; i++) values[i] = table[values[i]];
}

void apply_table(const Image *image, uint8_t table_C256[MAX_CHANNELS][256]) {
    const int64_t size = area(image);
    for (int c = 0; c < image->channels; c++) look_up(image->data + c * size, size, table_C256[c]);
}

/* Colour */

/* In place: 3 -> 1 only reduces image->channels, and 1 -> 3 has room (see `room`). torchvision: rgb_to_grayscale; Pillow:
 * Image.convert("L"). */
static void grayscale(const Op *op, Image *image) {
    const int32_t channels = op->grayscale.channels;
    const int64_t size = area(image);
    uint8_t buffer[BLOCK];
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t count = least(size - start, BLOCK);
        const uint8_t *gray = luma(op->grayscale.domain, image, start, count, buffer);
        for (int c = 0; c < channels; c++) memmove(image->data + c * size + start, gray, (size_t)count);
    }
    image->channels = channels;
}

/* Pillow: ImageEnhance.Color; torchvision: adjust_saturation. One channel does not change. */
static void saturate(const Op *op, Image *image) {
    const int64_t size = area(image);
    const float ratio = (float)op->value.amount, rest = (float)(1.0 - op->value.amount);
    uint8_t buffer[BLOCK];
    for (int64_t start = 0; start < size && image->channels == 3; start += BLOCK) {
        const int64_t count = least(size - start, BLOCK);
        luma(op->value.domain, image, start, count, buffer);
        for (int c = 0; c < 3; c++)
            FOR_DOMAIN(op->value.domain, blend_row, image->data + c * size + start, buffer, count, ratio, rest);
    }
}

/* Pixels on the colour wheel. Hue is base + along / range, in sixths of a turn; `part` is the value of the channel that is
 * neither the highest nor the lowest. */
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

/* Pillow: Convert.c rgb2hsv_row, hsv2rgb, which use doubles in places. The results are equal for all 2^24 colours, in both
 * directions. */
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

/* The value of a channel that is high in the sextant `from` and the next one, and low in the third and fourth after it. */
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

/* torchvision: adjust_hue. One channel does not change. */
static void shift_hue(const Op *op, Image *image) {
    const int64_t size = area(image);
    Wheel w;
    memset(&w, 0, sizeof w);
    for (int64_t start = 0; start < size && image->channels == 3; start += BLOCK) {
        const int64_t count = least(size - start, BLOCK);
        uint8_t *r = image->data + start, *g = r + size, *b = g + size;
        find_hue(r, g, b, count, &w);
        if (op->value.domain == PIL_DOMAIN) turn_pil(&w, (uint8_t)(int32_t)(op->value.amount * 255));
        else turn_tensor(&w, (float)(op->value.amount * 6));
        paint(&w, r, g, b, count);
    }
}

/* Neighbours */

/* Pillow: ImageFilter.SMOOTH, a sum of thirteenths, rounded. The ends of the row do not change. `column` has room for a row and
 * one value on both sides. */
INLINE void smooth_row(const uint8_t *restrict up, const uint8_t *restrict mid, const uint8_t *restrict down,
                       uint8_t *restrict out, uint16_t *restrict column, int64_t width) {
    for (int64_t x = 0; x < width; x++) column[x + 1] = (uint16_t)(up[x] + mid[x] + down[x]);
    for (int64_t x = 0; x < width; x++)
        out[x] = (uint8_t)((uint16_t)(column[x] + column[x + 1] + column[x + 2] + 4 * mid[x] + 6) * 5042u >> 16);
    out[0] = mid[0];
    out[width - 1] = mid[width - 1];
}

/* Pillow: ImageEnhance.Sharpness, Filter.c ImagingFilter3x3; torchvision: adjust_sharpness. */
static bool sharpen(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t height = in->height, width = in->width;
    const int domain = op->value.domain == V2_DOMAIN ? V2_SHARP : op->value.domain;
    const float ratio = (float)op->value.amount, rest = (float)(1.0 - op->value.amount);
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

/* Ops */

/* Compose a table with the pending one, so that several ops pass over the pixels only once. */
void compose_table(Sample *sample, uint8_t table_C256[MAX_CHANNELS][256]) {
    for (int32_t c = 0; c < sample->image.channels; c++)
        for (int x = 0; x < 256; x++)
            sample->table_C256[c][x] = table_C256[c][sample->has_table ? sample->table_C256[c][x] : x];
    sample->has_table = true;
}

static int add_table(Sample *sample, const Op *op) {
    if (sample->image.channels > MAX_CHANNELS) return REFUSED_OP;
    const int32_t kind = op->value.kind;
    const bool reads_image = kind == CONTRAST || kind == AUTOCONTRAST || kind == EQUALIZE;
    if (reads_image && !(settle(sample) && own(sample))) return REFUSED_MEMORY;
    uint8_t table_C256[MAX_CHANNELS][256];
    make_table(op, &sample->image, table_C256);
    compose_table(sample, table_C256);
    return OK;
}

static int run_in_place(Sample *sample, const Op *op, void (*kernel)(const Op *, Image *)) {
    if (sample->image.channels != 1 && sample->image.channels != 3) return REFUSED_OP;
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    kernel(op, &sample->image);
    return OK;
}

int run_value(Sample *sample, Op *op) {
    const int32_t kind = op->value.kind, height = sample->image.height, width = sample->image.width;
    if (kind >= BRIGHTNESS && kind <= EQUALIZE) return add_table(sample, op);
    switch (kind) {
    case SATURATION: return run_in_place(sample, op, saturate);
    case HUE: return run_in_place(sample, op, shift_hue);
    case SHARPNESS: return remake(sample, op, height, width, sharpen);
    case BOX_BLUR: return remake(sample, op, height, width, blur_box);
    default: return REFUSED_OP;
    }
}

int run_grayscale(Sample *sample, Op *op) { return run_in_place(sample, op, grayscale); }

/* torchvision: permute_channels of v2/functional/_color.py. */
int run_permute(Sample *sample, Op *op) {
    Image *image = &sample->image, out;
    if (image->channels > MAX_CHANNELS) return REFUSED_OP;
    if (!settle(sample) || !room(sample, image->channels, image->height, image->width, &out)) return REFUSED_MEMORY;
    for (int32_t c = 0; c < image->channels; c++) {
        const int32_t channel = op->permute.from[c];
        if (channel < 0 || channel >= image->channels) return REFUSED_OUTSIDE;
        Image from = *image, to = out;
        from.data += channel * from.plane, to.data += c * to.plane;
        from.channels = to.channels = 1;
        copy_image(&from, &to);
    }
    become(sample, &out);
    return OK;
}

/* Draws */

bool draw_value(Drawing *d, const Step *step) {
    const int32_t kind = step->value.kind, domain = step->value.domain;
    const double low = step->value.low, high = step->value.high;
    const double amount = low != high ? between(d, step->at, 0, low, high) : low;
    const bool is_known = kind >= BRIGHTNESS && kind <= BOX_BLUR && isfinite(amount);
    if (!is_known || !is_domain(d, step, domain)) return deny(d, step, REFUSED_TABLE);
    if (kind == BOX_BLUR && !(amount >= 0 && amount < MOST_RADIUS)) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_VALUE);
    if (!op) return false;
    op->value.kind = kind, op->value.domain = domain;
    op->value.whole = (int32_t)truncated(low), op->value.amount = amount;
    return true;
}

bool draw_grayscale(Drawing *d, const Step *step) {
    const int32_t wanted = step->grayscale.channels, domain = step->grayscale.domain;
    if (wanted != 0 && wanted != 1 && wanted != 3) return deny(d, step, REFUSED_TABLE);
    if (!is_domain(d, step, domain)) return false;
    /* v1 returns tensors of one channel unchanged. */
    if (wanted && (domain != V1_DOMAIN || d->channels > 1)) d->channels = wanted;
    if (!d->is_probe && d->channels != 1 && d->channels != 3) return deny(d, step, REFUSED_OP);
    Op *op = add(d, step, OP_GRAYSCALE);
    if (!op) return false;
    op->grayscale.channels = d->channels, op->grayscale.domain = domain;
    return true;
}

bool draw_permute(Drawing *d, const Step *step) {
    Op *op = add(d, step, OP_PERMUTE);
    if (!op) return false;
    if (d->channels > MAX_CHANNELS) return deny(d, step, REFUSED_OP);
    for (int32_t place = 0; place < d->channels; place++) {
        int32_t smaller_ones = 0;
        const double drawn = uniform(d, step->at, place);
        for (int32_t k = 0; k < d->channels; k++) smaller_ones += uniform(d, step->at, k) < drawn;
        op->permute.from[smaller_ones] = place; /* the permutation that sorts the drawn numbers */
    }
    return true;
}
