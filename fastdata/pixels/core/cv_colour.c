/* Colours as OpenCV converts them for albumentations 2.0.8: grey, saturation, HSV, YCrCb, on uint8 RGB.
 *
 * Sources: OpenCV's modules/imgproc/src/color_rgb.simd.hpp, color_hsv.simd.hpp and color_yuv.simd.hpp, which compute with
 * integers, except from HSV to RGB; albumentations/augmentations/pixel/functional.py.
 */
#include "core.h"

#include <math.h>

enum { BLOCK = 1024 }; /* pixels in a pass, so that they stay in the first cache */

INLINE uint8_t larger(uint8_t a, uint8_t b) { return a > b ? a : b; }
INLINE uint8_t smaller(uint8_t a, uint8_t b) { return a < b ? a : b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t area(const Image *image) { return (int64_t)image->height * image->width; }
INLINE uint8_t saturate(int32_t x) { return (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x); }

INLINE float larger_of(float a, float b) { return a > b ? a : b; }
INLINE float smaller_of(float a, float b) { return a < b ? a : b; }
INLINE float within(float x) { return smaller_of(larger_of(x, 0.0f), 255.0f); }
INLINE float nearest(float x) { return x + 0x1p23f - 0x1p23f; } /* for x from 0 to 2^22; halves to even */

/* Grey */

/* OpenCV: RGB2Gray. All sums are whole numbers below 2^24, so floats are exact. */
INLINE uint8_t grey_of(float red, float green, float blue) {
    return (uint8_t)(int32_t)((9798.0f * red + 19235.0f * green + 3735.0f * blue + 16384.0f) * 0x1p-15f);
}

void grey_row(const uint8_t *restrict red, const uint8_t *restrict green, const uint8_t *restrict blue, int64_t size,
              uint8_t *restrict out) {
    for (int64_t i = 0; i < size; i++) out[i] = grey_of(red[i], green[i], blue[i]);
}

/* albumentations: to_gray_desaturation, to_gray_average, to_gray_max; for an image in L*a*b*, to_gray_from_lab. */
static void grey_by(int32_t method, const uint8_t *restrict red, const uint8_t *restrict green,
                    const uint8_t *restrict blue, int64_t size, uint8_t *restrict out) {
    if (method == GREY_WEIGHTED) grey_row(red, green, blue, size, out);
    if (method == GREY_LIGHTNESS) memcpy(out, red, (size_t)size);
    if (method == GREY_WEIGHTED || method == GREY_LIGHTNESS) return;
    for (int64_t i = 0; i < size; i++) {
        const uint8_t r = red[i], g = green[i], b = blue[i], high = larger(r, larger(g, b)), low = smaller(r, smaller(g, b));
        out[i] = method == GREY_LARGEST ? high : (uint8_t)(method == GREY_AVERAGE ? (r + g + b) / 3 : (high + low) / 2);
    }
}

int run_cv_grey(Sample *sample, Op *op) {
    Image *image = &sample->image;
    if (image->channels != 3) return image->channels == 1 && op->cv_grey.channels == 1 ? OK : REFUSED_OP;
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    if (op->cv_grey.method == GREY_LIGHTNESS && !to_lab(image, sample->scratch)) return REFUSED_MEMORY;
    const int64_t size = area(image);
    uint8_t grey[BLOCK];
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t count = least(size - start, BLOCK);
        uint8_t *red = image->data + start;
        grey_by(op->cv_grey.method, red, red + size, red + 2 * size, count, grey);
        for (int c = 0; c < op->cv_grey.channels; c++) memcpy(red + c * size, grey, (size_t)count);
    }
    image->channels = op->cv_grey.channels;
    return OK;
}

/* albumentations: adjust_saturation_torchvision; OpenCV: addWeighted. */
INLINE void saturate_row(uint8_t *restrict value, const uint8_t *restrict grey, int64_t size, float factor, float rest,
                         bool fuses) {
    for (int64_t i = 0; i < size; i++) {
        const float other = grey[i] * rest;
        const float sum = fuses ? fused(value[i], factor, other) : value[i] * factor + other;
        value[i] = (uint8_t)(int32_t)nearest(within(sum));
    }
}

int run_cv_saturation(Sample *sample, Op *op) {
    const Image *image = &sample->image;
    const int64_t size = area(image);
    const float factor = (float)op->cv_saturation.factor, rest = (float)(1.0 - op->cv_saturation.factor);
    if (image->channels == 1) return OK;
    if (image->channels != 3) return REFUSED_OP;
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    uint8_t grey[BLOCK];
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t count = least(size - start, BLOCK);
        uint8_t *red = image->data + start;
        grey_row(red, red + size, red + 2 * size, count, grey);
        for (int c = 0; c < 3; c++) {
            if (op->cv_saturation.fuses) saturate_row(red + c * size, grey, count, factor, rest, true);
            else saturate_row(red + c * size, grey, count, factor, rest, false);
        }
    }
    return OK;
}

/* HSV */

/* Amounts to add to hue (a whole number from 0 to 179), saturation and value. */
typedef struct {
    float hue, saturation, value;
} Shift;

/* 1 minus a share of the saturation. The share of a channel is 0 in two sextants of the hue, 1 in the two opposite ones, and
 * rises or falls between them. Shares equal OpenCV's to the last bit, because only one difference is rounded in each. */
INLINE float lacking(float saturation, float share, bool fuses) {
    share = smaller_of(larger_of(share, 0.0f), 1.0f);
    return fuses ? fused(-saturation, share, 1.0f) : 1.0f - saturation * share;
}

/* OpenCV: RGB2HSV_b; albumentations: shift_hsv; OpenCV: HSV2RGB_simd, and HSV2RGB_native, which rounds. OpenCV divides by
 * tables of whole numbers; here they are quotients. Except from HSV to RGB, all sums and products are exact in floats. The
 * tests compare all colours. */
INLINE void shift_pixels(uint8_t *restrict red, uint8_t *restrict green, uint8_t *restrict blue, int64_t size, Shift shift,
                         bool rounds, bool fuses) {
    for (int64_t i = 0; i < size; i++) {
        const float r = red[i], g = green[i], b = blue[i];
        const float top = larger_of(r, larger_of(g, b)), range = top - smaller_of(r, smaller_of(g, b));
        const float by_value = nearest(1044480.0f / larger_of(top, 1.0f)) * 0x1p-12f;
        const float by_range = nearest(122880.0f / larger_of(range, 1.0f)) * 0x1p-12f;
        const float along = r == top ? g - b : g == top ? b - r + 2 * range : r - g + 4 * range;
        float hue = along * by_range + 0.5f;
        hue += hue < 0.0f ? 180.0f : 0.0f;
        hue = (float)(int32_t)hue + shift.hue;
        hue = (hue < 180.0f ? hue : hue - 180.0f) * (6.0f / 180);
        float saturation = (float)(int32_t)(range * by_value + 0.5f);
        saturation = saturation > 0.0f ? within(saturation + shift.saturation) : 0.0f; /* grey stays grey */
        saturation *= 1.0f / 255;
        const float value = within(top + shift.value) * (1.0f / 255);

        const float to_r = value * lacking(saturation, smaller_of(hue - 1, 5 - hue), fuses) * 255.0f;
        const float to_g = value * lacking(saturation, larger_of(1 - hue, hue - 3), fuses) * 255.0f;
        const float to_b = value * lacking(saturation, larger_of(3 - hue, hue - 5), fuses) * 255.0f;
        red[i] = (uint8_t)(int32_t)(rounds ? nearest(to_r) : to_r);
        green[i] = (uint8_t)(int32_t)(rounds ? nearest(to_g) : to_g);
        blue[i] = (uint8_t)(int32_t)(rounds ? nearest(to_b) : to_b);
    }
}

/* One row, or all rows together if each consists of whole vectors. */
static void shift_row(const Op *op, Shift shift, uint8_t *red, int64_t plane, int64_t size) {
    const int64_t vector = op->cv_hsv.vector > 0 ? op->cv_hsv.vector : 1, whole = size / vector * vector;
    uint8_t *green = red + plane, *blue = green + plane;
    if (op->cv_hsv.fuses) {
        shift_pixels(red, green, blue, whole, shift, false, true);
        shift_pixels(red + whole, green + whole, blue + whole, size - whole, shift, true, true);
    } else {
        shift_pixels(red, green, blue, whole, shift, false, false);
        shift_pixels(red + whole, green + whole, blue + whole, size - whole, shift, true, false);
    }
}

int run_cv_hsv(Sample *sample, Op *op) {
    Image *image = &sample->image;
    const double hue = op->cv_hsv.hue, saturation = op->cv_hsv.saturation, value = op->cv_hsv.value;
    if (image->channels != 3 && image->channels != 1) return REFUSED_OP;
    if (hue == 0 && saturation == 0 && value == 0) return OK;
    if (image->channels == 1) {
        uint8_t table_C256[MAX_CHANNELS][256];
        for (int x = 0; x < 256; x++) table_C256[0][x] = saturate(x + (int32_t)truncated(value));
        compose_table(sample, table_C256);
        return OK;
    }
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    /* np.mod(hue + shift, 180) without its fraction, for whole hues: the fraction of the shift does not matter. */
    const double turned = fmod(floor(hue), 180);
    const Shift shift = {(float)(turned < 0 ? turned + 180 : turned), (float)truncated(saturation), (float)truncated(value)};
    const int64_t size = area(image), width = image->width;
    const bool is_whole = op->cv_hsv.vector > 0 && width % op->cv_hsv.vector == 0;
    for (int64_t at = 0; at < size; at += is_whole ? size : width)
        shift_row(op, shift, image->data + at, size, is_whole ? size : width);
    return OK;
}

/* Y Cr Cb. OpenCV: RGB2YCrCb_i, YCrCb2RGB_i */

INLINE int32_t descale(int32_t x) { return (x + 8192) >> 14; }

void to_ycc(Image *image) {
    const int64_t size = area(image);
    uint8_t *restrict red = image->data, *restrict green = red + size, *restrict blue = green + size;
    for (int64_t i = 0; i < size; i++) {
        const int32_t r = red[i], b = blue[i], y = descale(4899 * r + 9617 * green[i] + 1868 * b);
        red[i] = (uint8_t)y;
        green[i] = saturate(descale((r - y) * 11682 + (128 << 14)));
        blue[i] = saturate(descale((b - y) * 9241 + (128 << 14)));
    }
}

void from_ycc(Image *image) {
    const int64_t size = area(image);
    uint8_t *restrict red = image->data, *restrict green = red + size, *restrict blue = green + size;
    for (int64_t i = 0; i < size; i++) {
        const int32_t y = red[i], cr = green[i] - 128, cb = blue[i] - 128;
        red[i] = saturate(y + descale(cr * 22987));
        green[i] = saturate(y + descale(cb * -5636 + cr * -11698));
        blue[i] = saturate(y + descale(cb * 29049));
    }
}

/* Draws */

bool draw_cv_grey(Drawing *d, const Step *step) {
    const int32_t wanted = step->cv_grey.channels, method = step->cv_grey.method;
    if ((wanted != 1 && wanted != 3) || method < GREY_WEIGHTED || method > GREY_LIGHTNESS) return deny(d, step, REFUSED_TABLE);
    if (!d->is_probe && d->channels != 1 && d->channels != 3) return deny(d, step, REFUSED_OP);
    if (d->channels != 1) d->channels = wanted; /* grey images are not changed */
    Op *op = add(d, step, OP_CV_GREY);
    if (!op) return false;
    op->cv_grey.method = method, op->cv_grey.channels = d->channels;
    return true;
}

bool draw_cv_saturation(Drawing *d, const Step *step) {
    const double factor = between(d, step->at, 0, step->cv_saturation.factor[0], step->cv_saturation.factor[1]);
    if (!isfinite(factor)) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_CV_SATURATION);
    if (!op) return false;
    op->cv_saturation.fuses = step->cv_saturation.fuses, op->cv_saturation.factor = factor;
    return true;
}

bool draw_cv_hsv(Drawing *d, const Step *step) {
    const double hue = between(d, step->at, 0, step->cv_hsv.hue[0], step->cv_hsv.hue[1]);
    const double saturation = between(d, step->at, 1, step->cv_hsv.saturation[0], step->cv_hsv.saturation[1]);
    const double value = between(d, step->at, 2, step->cv_hsv.value[0], step->cv_hsv.value[1]);
    const bool is_small = fabs(saturation) < 1 << 20 && fabs(value) < 1 << 20; /* their sums are exact */
    if (!isfinite(hue) || !is_small) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_CV_HSV);
    if (!op) return false;
    op->cv_hsv.vector = step->cv_hsv.vector, op->cv_hsv.fuses = step->cv_hsv.fuses;
    op->cv_hsv.hue = hue, op->cv_hsv.saturation = saturation, op->cv_hsv.value = value;
    return true;
}
