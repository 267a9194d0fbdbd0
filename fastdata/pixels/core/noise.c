/* Noise and random erasing, on uint8 or on the floats of a batch. */
#include "core.h"

#include <math.h>
#include <string.h>

/* Draws */

uint64_t noise_key(const Drawing *d, int64_t at) { return d->key ^ sample_key((uint64_t)at, 0, 0); }

bool draw_noise(Drawing *d, const Step *step) {
    Op *op = add(d, step, OP_NOISE);
    if (!op) return false;
    op->noise.clips = step->noise.clips;
    op->noise.mean = step->noise.mean, op->noise.sigma = step->noise.sigma;
    op->noise.key = noise_key(d, step->at);
    return true;
}

bool draw_erase(Drawing *d, const Step *step) {
    const int64_t fewest = step->erase.fewest, most = step->erase.most;
    if (fewest < 0 || fewest > most || most > MAX_OPS) return deny(d, step, REFUSED_TABLE);
    const int64_t count = fewest + integer(d, step->at, 1, most - fewest + 1);
    if (d->is_probe) return add(d, step, OP_ERASE) != NULL;
    if (uniform(d, step->at, 0) >= step->erase.p) return true;
    for (int64_t number = 0; number < count; number++) {
        Box box;
        const int64_t first = 2 + 40 * number; /* a box uses at most 40 draws */
        if (!draw_box(d, step->at, first, step->erase.scale, step->erase.log_ratio, (double)count, false, &box)) continue;
        Op *op = add(d, step, OP_ERASE);
        if (!op) return false;
        op->erase.box = box;
        op->erase.mode = step->erase.mode, op->erase.is_normalized = step->erase.is_normalized;
        if (step->erase.mode != FILLED) op->erase.key = noise_key(d, child(step->at, number));
    }
    return true;
}

/* Pixels */

const int64_t ITEM_BYTES[] = {[UINT8] = 1, [FLOAT32] = 4, [FLOAT64] = 8, [FLOAT16] = 2, [BFLOAT16] = 2, [INT32] = 4,
                              [INT64] = 8};

static uint16_t to_bfloat16(float value) { /* to the nearest, halves to even; the value is never NaN */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__F16C__) || defined(__aarch64__)
static uint16_t to_float16(float value) {
    const _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

static float from_float16(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}
#else
/* Written out, because the compiler's own conversions would link its own sin, cos, exp and log, which differ from those of the
 * system. */
static uint16_t to_float16(float value) { /* to the nearest, halves to even; the value is never NaN */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000)
        return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
    float small; /* adding 0.5 rounds it to multiples of the smallest half float */
    memcpy(&small, &magnitude, 4);
    small += 0.5f;
    memcpy(&bits, &small, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
}

static float from_float16(uint16_t half) {
    const uint32_t magnitude = half & 0x7fff, bits = magnitude << 13;
    float value;
    memcpy(&value, &bits, 4);
    value = magnitude < 0x7c00 ? value * 0x1p112f : INFINITY;
    return half & 0x8000 ? -value : value;
}
#endif

void store(int32_t dtype, const float *restrict in, int64_t count, uint8_t *out) {
    for (int64_t i = 0; i < count && dtype == UINT8; i++) {
        const float bounded = in[i] > -1e9f ? in[i] : -1e9f;
        out[i] = (uint8_t)(int32_t)(bounded < 1e9f ? bounded : 1e9f);
    }
    for (int64_t i = 0; i < count && dtype == FLOAT32; i++) ((float *)out)[i] = in[i];
    for (int64_t i = 0; i < count && dtype == FLOAT64; i++) ((double *)out)[i] = in[i];
    for (int64_t i = 0; i < count && dtype == FLOAT16; i++) ((uint16_t *)out)[i] = to_float16(in[i]);
    for (int64_t i = 0; i < count && dtype == BFLOAT16; i++) ((uint16_t *)out)[i] = to_bfloat16(in[i]);
}

void load(int32_t dtype, const uint8_t *in, int64_t count, float *restrict out) {
    for (int64_t i = 0; i < count && dtype == UINT8; i++) out[i] = in[i];
    for (int64_t i = 0; i < count && dtype == FLOAT32; i++) out[i] = ((const float *)in)[i];
    for (int64_t i = 0; i < count && dtype == FLOAT64; i++) out[i] = (float)((const double *)in)[i];
    for (int64_t i = 0; i < count && dtype == FLOAT16; i++) out[i] = from_float16(((const uint16_t *)in)[i]);
    for (int64_t i = 0; i < count && dtype == BFLOAT16; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)in)[i] << 16;
        memcpy(out + i, &bits, 4);
    }
}

/* The inverse of the normal distribution at p = (2 * bits + 1) / 2^33, below the middle, and mirrored above it. It is a
 * polynomial in sqrt(5 - log(4 p (1 - p))), in the form of M. Giles, "Approximating the erfinv function", 2011, fitted so that
 * the error is at most 4e-5. The largest number is 6.3. */
static float normal(uint32_t bits) {
    const float p = ((float)(int32_t)(bits & 0x7FFFFFFF) + 0.5f) * 0x1p-32f, y = 4.0f * p * (1.0f - p);
    int32_t exponent, mantissa;
    memcpy(&mantissa, &y, 4);
    exponent = (mantissa - 0x3F2AAAAB) & (int32_t)0xFF800000; /* y = 2^exponent * (1 + f), f in [-1/3, 1/3] */
    mantissa -= exponent;
    float f, log_y, u, z;
    memcpy(&f, &mantissa, 4);
    f -= 1.0f;
    log_y = ((((-0.201713483f * f + 0.230738461f) * f - 0.247217585f) * f + 0.331607216f) * f - 0.50006475f) * f;
    log_y = (log_y + 1.00002285f) * f + (float)exponent * (0.693147181f * 0x1p-23f);
    u = sqrtf(5.0f - log_y) - 3.7f;
    z = (((0.00130432012f * u - 0.00333003918f) * u - 0.00354536808f) * u + 0.0186475359f) * u - 0.0198215155f;
    z = ((((z * u + 0.0015663323f) * u + 0.0319934818f) * u - 0.113794969f) * u + 1.77593848f) * u + 3.93262777f;
    z *= 1.0f - 2.0f * p;
    return bits >> 31 ? z : -z;
}

void draw_normal(uint64_t key, int64_t first, int64_t count, float out[CHUNK]) {
    uint32_t bits[CHUNK];
    count = (count + 15) / 16 * 16;
    for (int64_t i = 0; i < count; i++) bits[i] = (uint32_t)(scramble(key + (uint64_t)(first + i + 1) * GAMMA) >> 32);
    for (int64_t i = 0; i < count; i++) out[i] = normal(bits[i]);
}

/* Uniform numbers in [0, 1), multiples of 2^-24. */
static void draw_uniform(uint64_t key, int64_t first, int64_t count, float out[CHUNK]) {
    for (int64_t i = 0; i < count; i++)
        out[i] = (float)(int32_t)(scramble(key + (uint64_t)(first + i + 1) * GAMMA) >> 40) * 0x1p-24f;
}

static bool is_uniform(int32_t mode) { return mode == UNIFORM_PIXELS || mode == UNIFORM_CHANNELS; }

static void draw_numbers(int32_t mode, uint64_t key, int64_t first, int64_t count, float out[CHUNK]) {
    if (is_uniform(mode)) draw_uniform(key, first, count, out);
    else draw_normal(key, first, count, out);
}

/* Copy values of `bytes` bytes each, from places with a distance of `from` values to places with a distance of `to`. */
static void move_values(const uint8_t *in, int64_t from, int64_t count, int64_t bytes, uint8_t *out, int64_t to) {
    for (int64_t i = 0; i < count; i++) memcpy(out + i * to * bytes, in + i * from * bytes, (size_t)bytes);
}

/* OP_ERASE and OP_NOISE, on an image of uint8, or after the conversion on the floats of the batch, normalised or not.
 * torchvision: RandomErasing, gaussian_noise_image (v2/functional/_misc.py); timm: RandomErasing; albumentations: holes. */
int rewrite(const Op *op, const Image *image, const Values *served) {
    if (op->code == OP_GRID) return rewrite_grid(op, image, served);
    const bool erases = op->code == OP_ERASE;
    if (!erases && op->code != OP_NOISE) return REFUSED_OP;
    const int32_t dtype = served ? served->dtype : UINT8;
    const Box whole = {0, 0, image->height, image->width}, box = erases ? op->erase.box : whole;
    const int32_t mode = erases ? op->erase.mode : NORMAL_PIXELS;
    const bool is_each = mode == NORMAL_PIXELS || mode == UNIFORM_PIXELS; /* each value gets another number */
    const bool is_level = dtype == UINT8 && is_uniform(mode);
    const uint64_t key = erases ? op->erase.key : op->noise.key;
    const int64_t width = box.width, ahead = width < 1 || width > CHUNK ? 1 : CHUNK / width; /* rows drawn at a time */
    float values[CHUNK], drawn[CHUNK] = {0};
    uint8_t together[CHUNK * sizeof(double)];
    if (erases && (!is_inside(&box, image->height, image->width) || (dtype == UINT8 && mode && !is_level))) return REFUSED_OUTSIDE;
    for (int64_t k = 0; k < (int64_t)image->channels * box.height; k++) {
        const int64_t c = k / box.height, y = box.top + k % box.height, channel = c < 4 ? c : 3;
        double unit = is_level ? 256 : served ? 1 : 255, zero = 0, filled = op->fill[channel];
        if (served && served->normalizes && !(erases && op->erase.is_normalized)) {
            const double mean = served->mean[c % served->channels], std = served->std[c % served->channels];
            unit /= std, zero = (zero - mean) / std, filled = (filled - mean) / std;
        }
        const float scale = (float)unit, low = (float)zero, high = low + scale;
        if (mode && !is_each) draw_numbers(mode, key, c, 1, drawn);
        const float fill = mode ? drawn[0] * scale + low : (float)filled;
        for (int64_t x = 0; x < width; x += CHUNK) {
            const int64_t count = width - x < CHUNK ? width - x : CHUNK;
            const int64_t bytes = ITEM_BYTES[dtype], pixel = image->pixel, place = (box.left + x) * pixel;
            uint8_t *at = image->data + (c * image->plane + y * image->row + place) * bytes;
            uint8_t *packed = pixel == 1 ? at : together;
            float *out = drawn + k % ahead * width;
            if (!is_each) for (int64_t i = 0; i < count; i++) out[i] = fill;
            else if (out == drawn) draw_numbers(mode, key, k * width + x, ahead > 1 ? ahead * width : count, drawn);
            for (int64_t i = 0; i < count && erases && is_each; i++) out[i] = out[i] * scale + low;
            if (!erases) {
                if (pixel != 1) move_values(at, pixel, count, bytes, packed, 1);
                load(dtype, packed, count, values);
                for (int64_t i = 0; i < count; i++) {
                    const float value = values[i] + ((float)op->noise.mean + out[i] * (float)op->noise.sigma) * scale;
                    out[i] = !op->noise.clips ? value : value < low ? low : value > high ? high : value;
                }
            }
            store(dtype, out, count, packed);
            if (pixel != 1) move_values(packed, 1, count, bytes, at, pixel);
        }
    }
    return OK;
}

int run_noise(Sample *sample, Op *op) {
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    return rewrite(op, &sample->image, NULL);
}

int run_erase(Sample *sample, Op *op) { return run_noise(sample, op); }
