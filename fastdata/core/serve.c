/* One batch: each sample's program, step by step through buffers in the cache, then its values to the batch. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

enum { UINT8, FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };
enum { OK, NO_MEMORY, OUTSIDE, WRONG_SHAPE, UNKNOWN_OP };

/* How uint8 becomes what is served. This and Batch are mirrored by fastdata/core/__init__.py. */
typedef struct {
    int32_t dtype;
    int32_t by_formula; /* floats are (x / factor - mean) / std, or with x * factor if not `divides`; else of the table */
    int32_t divides, normalizes; /* whether there are mean and std */
    float factor;
    const float *mean_C, *std_C;
    const double *table_C256;
} Values;

typedef struct {
    const uint8_t *const *sources_B; /* first byte of each sample, uint8 */
    const int32_t *shapes_B3;        /* channels, height, width */
    const Op *ops_BS;
    int32_t ops_per_sample;
    int32_t interleaved; /* sources are (H, W, C), not (C, H, W) */
    uint8_t *out_B;      /* (B, C, h, w), or (B, h, w, C) if channels_last */
    int32_t channels, height, width, channels_last;
    Values values;
} Batch;

void *take(Scratch *scratch, int slot, int64_t bytes) {
    if (scratch->bytes[slot] < bytes) {
        free(scratch->data[slot]);
        int64_t size = (bytes + bytes / 4 + 191) / 64 * 64;
        char *memory = malloc(size + 64);
        scratch->data[slot] = memory;
        scratch->bytes[slot] = memory ? size - 64 : 0;
        if (!memory) return NULL;
    }
    return (void *)(((uintptr_t)scratch->data[slot] + 63) / 64 * 64);
}

/* The image that a sample is at present. It lies in the store, or packed or as a view of that in `slot`. */
typedef struct {
    Image image;
    int slot; /* SLOT_A or SLOT_B; -1: not ours to write to */
    bool has_table;
    uint8_t table_C256[MAX_CHANNELS][256];
    Scratch *scratch;
} Sample;

static int64_t size_of(const Image *image) { return (int64_t)image->channels * image->height * image->width; }

static bool is_packed(const Image *image) {
    return image->pixel == 1 && image->row == image->width && image->plane == (int64_t)image->height * image->width;
}

static void pack(Image *image, uint8_t *data) {
    image->data = data;
    image->pixel = 1;
    image->row = image->width;
    image->plane = (int64_t)image->height * image->width;
}

/* An image of that size in the buffer that the sample does not use. */
static bool room(Sample *sample, int32_t channels, int32_t height, int32_t width, Image *out) {
    out->channels = channels, out->height = height, out->width = width;
    int64_t planes = channels < 3 ? 3 : channels; /* grayscale may go back to 3 */
    uint8_t *data = take(sample->scratch, sample->slot == SLOT_A ? SLOT_B : SLOT_A, planes * height * width);
    if (data) pack(out, data);
    return data != NULL;
}

static void become(Sample *sample, const Image *image) {
    sample->image = *image;
    sample->slot = sample->slot == SLOT_A ? SLOT_B : SLOT_A;
}

static void copy_row(const uint8_t *restrict in, int64_t pixel, int64_t count, uint8_t *restrict out) {
    if (pixel == 1)
        memcpy(out, in, count);
    else if (pixel == -1)
        for (int64_t x = 0; x < count; x++) out[x] = in[-x];
    else if (pixel == 3)
        for (int64_t x = 0; x < count; x++) out[x] = in[3 * x];
    else
        for (int64_t x = 0; x < count; x++) out[x] = in[x * pixel];
}

static void copy_image(const Image *in, const Image *out) {
    for (int32_t c = 0; c < in->channels; c++) {
        const uint8_t *from = in->data + c * in->plane;
        uint8_t *to = out->data + c * out->plane;
        if (in->pixel == 1 && in->row == in->width) {
            memcpy(to, from, (int64_t)in->height * in->width);
            continue;
        }
        for (int32_t y = 0; y < in->height; y++) copy_row(from + y * in->row, in->pixel, in->width, to + y * out->row);
    }
}

/* Make the image packed memory of our own. */
static bool own(Sample *sample) {
    if (sample->slot >= 0 && is_packed(&sample->image)) return true;
    Image out;
    if (!room(sample, sample->image.channels, sample->image.height, sample->image.width, &out)) return false;
    copy_image(&sample->image, &out);
    become(sample, &out);
    return true;
}

static bool settle(Sample *sample) { /* run the pending table */
    if (!sample->has_table) return true;
    if (!own(sample)) return false;
    apply_table(&sample->image, sample->table_C256);
    sample->has_table = false;
    return true;
}

static int mapped(Sample *sample, const Op *op) {
    if (sample->image.channels > MAX_CHANNELS) return UNKNOWN_OP;
    bool reads_image = op->code == OP_CONTRAST || op->code == OP_AUTOCONTRAST || op->code == OP_EQUALIZE;
    if (reads_image && !(settle(sample) && own(sample))) return NO_MEMORY;
    uint8_t table_C256[MAX_CHANNELS][256];
    make_table(op, &sample->image, table_C256);
    for (int32_t c = 0; c < sample->image.channels; c++)
        for (int x = 0; x < 256; x++)
            sample->table_C256[c][x] = table_C256[c][sample->has_table ? sample->table_C256[c][x] : x];
    sample->has_table = true;
    return OK;
}

/* Windows: torchvision's pad, crop, hflip and vflip (transforms/functional.py), Pillow's ImageOps.expand. */

/* The place in the image of place `at` of the image with borders; -1 where it is filled. */
static int64_t source_place(int64_t at, int64_t length, int mode) {
    if (at >= 0 && at < length) return at;
    if (mode == PAD_CONSTANT) return -1;
    if (mode == PAD_EDGE) return at < 0 ? 0 : length - 1;
    int64_t period = mode == PAD_SYMMETRIC ? 2 * length : length > 1 ? 2 * (length - 1) : 1;
    at = (at % period + period) % period;
    return at < length ? at : (mode == PAD_SYMMETRIC ? 2 * length - 1 : 2 * (length - 1)) - at;
}

static void fill_window(const Op *op, const Image *in, int64_t top, int64_t left, const Image *out) {
    int mode = op->n[8] >> 8;
    int64_t before = left < 0 ? (-left < out->width ? -left : out->width) : 0; /* columns before the image */
    int64_t after = in->width - left < out->width ? in->width - left : out->width; /* where it ends */
    if (after < before) after = before;
    for (int32_t c = 0; c < out->channels; c++)
        for (int32_t y = 0; y < out->height; y++) {
            uint8_t *to = out->data + c * out->plane + y * out->row, fill = (uint8_t)op->v[8 + (c < 4 ? c : 3)];
            int64_t from_y = source_place(top + y, in->height, mode);
            if (from_y < 0) {
                memset(to, fill, out->width);
                continue;
            }
            const uint8_t *from = in->data + c * in->plane + from_y * in->row;
            copy_row(from + (left + before) * in->pixel, in->pixel, after - before, to + before);
            if (mode == PAD_CONSTANT) {
                memset(to, fill, before);
                memset(to + after, fill, out->width - after);
                continue;
            }
            for (int64_t x = 0; x < before; x++) to[x] = from[source_place(left + x, in->width, mode) * in->pixel];
            for (int64_t x = after; x < out->width; x++)
                to[x] = from[source_place(left + x, in->width, mode) * in->pixel];
        }
}

static int window(Sample *sample, const Op *op) {
    const int32_t *n = op->n;
    Image *image = &sample->image;
    int64_t bordered_h = (int64_t)image->height + n[1] + n[3], bordered_w = (int64_t)image->width + n[0] + n[2];
    if (n[4] < 0 || n[5] < 0 || n[6] < 1 || n[7] < 1 || n[4] + (int64_t)n[6] > bordered_h) return OUTSIDE;
    if (n[5] + (int64_t)n[7] > bordered_w) return OUTSIDE;
    int64_t top = (int64_t)n[4] - n[1], left = (int64_t)n[5] - n[0];
    if (top >= 0 && left >= 0 && top + n[6] <= image->height && left + n[7] <= image->width) {
        image->data += top * image->row + left * image->pixel;
        image->height = n[6], image->width = n[7];
    } else {
        Image out; /* the fill is a value after the table */
        if (!settle(sample) || !room(sample, image->channels, n[6], n[7], &out)) return NO_MEMORY;
        fill_window(op, image, top, left, &out);
        become(sample, &out);
    }
    if (n[8] & 1) {
        image->data += (image->width - 1) * image->pixel;
        image->pixel = -image->pixel;
    }
    if (n[8] & 2) {
        image->data += (image->height - 1) * image->row;
        image->row = -image->row;
    }
    return OK;
}

/* Quarter turns: Image.transpose(ROTATE_90, _180, _270). */
static int turn(Sample *sample, int quarters) {
    Image *image = &sample->image, out;
    int64_t row = image->row, pixel = image->pixel, height = image->height, width = image->width;
    if (quarters == 2) {
        image->data += (height - 1) * row + (width - 1) * pixel;
        image->row = -row, image->pixel = -pixel;
        return OK;
    }
    image->data += quarters == 1 ? (width - 1) * pixel : (height - 1) * row;
    image->row = quarters == 1 ? -pixel : pixel;
    image->pixel = quarters == 1 ? row : -row;
    image->height = (int32_t)width, image->width = (int32_t)height;
    if (!room(sample, image->channels, image->height, image->width, &out)) return NO_MEMORY;
    copy_image(image, &out);
    become(sample, &out);
    return OK;
}

/* Kernels that write another image. */
static int remake(Sample *sample, const Op *op, int32_t height, int32_t width,
                  bool (*kernel)(const Op *, const Image *, const Image *, Scratch *)) {
    Image *image = &sample->image, out;
    if (height < 1 || width < 1) return OUTSIDE;
    if (!settle(sample) || (image->pixel != 1 && !own(sample))) return NO_MEMORY;
    if (!room(sample, image->channels, height, width, &out)) return NO_MEMORY;
    if (!kernel(op, image, &out, sample->scratch)) return NO_MEMORY;
    become(sample, &out);
    return OK;
}

static int resized(Sample *sample, const Op *op) {
    const int32_t *n = op->n;
    Image *image = &sample->image;
    if (n[0] < 0 || n[1] < 0 || n[2] < 1 || n[3] < 1) return OUTSIDE;
    if (n[0] + (int64_t)n[2] > image->height || n[1] + (int64_t)n[3] > image->width) return OUTSIDE;
    image->data += n[0] * image->row + n[1] * image->pixel;
    image->height = n[2], image->width = n[3];
    if (n[2] == n[4] && n[3] == n[5]) return OK;
    Op whole = *op; /* the view is the box already */
    whole.n[0] = whole.n[1] = 0;
    return remake(sample, &whole, n[4], n[5], resize);
}

static int permute(Sample *sample, const int32_t *n) {
    Image *image = &sample->image, out;
    if (image->channels > MAX_CHANNELS) return UNKNOWN_OP;
    if (!settle(sample) || !room(sample, image->channels, image->height, image->width, &out)) return NO_MEMORY;
    for (int32_t c = 0; c < image->channels; c++) {
        if (n[c] < 0 || n[c] >= image->channels) return OUTSIDE;
        Image from = *image, to = out;
        from.data += n[c] * from.plane, to.data += c * to.plane;
        from.channels = to.channels = 1;
        copy_image(&from, &to);
    }
    become(sample, &out);
    return OK;
}

/* AugMix: _sample_dirichlet and forward in torchvision's transforms/autoaugment.py. */
static int mix(Sample *sample, const Op *op) {
    if (!settle(sample) || !own(sample)) return NO_MEMORY;
    Image *image = &sample->image;
    int64_t size = size_of(image);
    uint8_t *kept = take(sample->scratch, SLOT_KEPT, size);
    float *restrict sum = take(sample->scratch, SLOT_MIX, size * (int64_t)sizeof(float)), weight = (float)op->v[0];
    if (!kept || !sum) return NO_MEMORY;
    uint8_t *restrict data = image->data;
    if (op->code == OP_MIX_BEGIN) {
        memcpy(kept, data, size);
        for (int64_t i = 0; i < size; i++) sum[i] = weight * data[i];
    } else if (op->code == OP_MIX_ADD) {
        for (int64_t i = 0; i < size; i++) sum[i] += weight * data[i];
        memcpy(data, kept, size);
    } else {
        for (int64_t i = 0; i < size; i++) {
            float value = op->n[0] ? __builtin_rintf(sum[i]) : sum[i];
            data[i] = value < 0 ? 0 : value > 255 ? 255 : (uint8_t)value;
        }
    }
    return OK;
}

static int in_place(Sample *sample, const Op *op) {
    if (sample->image.channels != 1 && sample->image.channels != 3) return UNKNOWN_OP;
    if (!settle(sample) || !own(sample)) return NO_MEMORY;
    if (op->code == OP_GRAYSCALE) {
        Op gray = *op;
        if (gray.n[0] == 0) gray.n[0] = sample->image.channels;
        grayscale(&gray, &sample->image);
    }
    if (op->code == OP_SATURATION) saturate(op, &sample->image);
    if (op->code == OP_HUE) shift_hue(op, &sample->image);
    return OK;
}

static uint64_t key_of(const Op *op) { return (uint32_t)op->n[4] | (uint64_t)(uint32_t)op->n[5] << 32; }

static bool is_inside(const Op *op, int32_t height, int32_t width) {
    const int32_t *n = op->n;
    return n[0] >= 0 && n[1] >= 0 && n[2] >= 0 && n[3] >= 0 && n[0] + (int64_t)n[2] <= height &&
           n[1] + (int64_t)n[3] <= width;
}

/* Noise on uint8: gaussian_noise_image in torchvision's v2/functional/_misc.py. */
static int add_noise(Sample *sample, const Op *op) {
    if (!settle(sample) || !own(sample)) return NO_MEMORY;
    int64_t size = size_of(&sample->image);
    float *noise = take(sample->scratch, SLOT_WORK, size * (int64_t)sizeof(float));
    if (!noise) return NO_MEMORY;
    draw_normal(key_of(op), 0, size, noise);
    uint8_t *data = sample->image.data;
    for (int64_t i = 0; i < size; i++) {
        float value = data[i] + 255 * ((float)op->v[0] + noise[i] * (float)op->v[1]);
        data[i] = op->n[0] ? (value < 0 ? 0 : value > 255 ? 255 : (uint8_t)value) : (uint8_t)(int64_t)value;
    }
    return OK;
}

static int erase(Sample *sample, const Op *op) {
    const int32_t *n = op->n;
    Image *image = &sample->image;
    if (!is_inside(op, image->height, image->width) || n[6]) return OUTSIDE;
    if (!settle(sample) || !own(sample)) return NO_MEMORY;
    for (int32_t c = 0; c < image->channels; c++)
        for (int32_t y = n[0]; y < n[0] + n[2]; y++)
            memset(image->data + c * image->plane + y * image->row + n[1], (int)op->v[8 + (c < 4 ? c : 3)], n[3]);
    return OK;
}

static int run_op(Sample *sample, const Op *op) {
    const Image *image = &sample->image;
    switch (op->code) {
    case OP_NOTHING: return OK;
    case OP_WINDOW: return window(sample, op);
    case OP_RESIZE: return resized(sample, op);
    case OP_AFFINE:
    case OP_PERSPECTIVE: return remake(sample, op, op->n[0], op->n[1], warp);
    case OP_TURN: return turn(sample, op->n[0]);
    case OP_BRIGHTNESS: case OP_CONTRAST: case OP_SOLARIZE: case OP_SOLARIZE_ADD: case OP_POSTERIZE: case OP_INVERT:
    case OP_AUTOCONTRAST: case OP_EQUALIZE: return mapped(sample, op);
    case OP_GRAYSCALE: case OP_SATURATION: case OP_HUE: return in_place(sample, op);
    case OP_SHARPNESS: return remake(sample, op, image->height, image->width, sharpen);
    case OP_BLUR: case OP_BOX_BLUR: return remake(sample, op, image->height, image->width, blur);
    case OP_PERMUTE: return permute(sample, op->n);
    case OP_NOISE: return add_noise(sample, op);
    case OP_ERASE: return erase(sample, op);
    case OP_MIX_BEGIN: case OP_MIX_ADD: case OP_MIX_END: return mix(sample, op);
    default: return UNKNOWN_OP;
    }
}

/* Values to the batch */

static uint16_t to_bfloat16(float value) { /* to the nearest, halves to even; there are no NaNs here */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* a / b, rounded correctly for the few values that occur; Python holds every one of the 256 against the division. */
static inline float divide(float a, float b, float inverse) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    float quotient = a * inverse;
    return __builtin_fmaf(__builtin_fmaf(-b, quotient, a), inverse, quotient);
#else
    (void)inverse;
    return a / b;
#endif
}

typedef struct {
    float factor, inverse, mean, std, inverse_std;
    bool divides, normalizes;
    const double *table_256;
} Floats;

/* ToTensor / ToDtype, then Normalize: torchvision's transforms/_functional_tensor.py and v2/functional/_misc.py. */
static inline __attribute__((always_inline)) void convert(const Floats *f, const uint8_t *restrict in, int64_t count,
                                                         float *restrict out, bool divides, bool normalizes) {
    float factor = f->factor, inverse = f->inverse, mean = f->mean, std = f->std, inverse_std = f->inverse_std;
    for (int64_t i = 0; i < count; i++) {
        float value = divides ? divide(in[i], factor, inverse) : in[i] * factor;
        out[i] = normalizes ? divide(value - mean, std, inverse_std) : value;
    }
}

static void to_floats(const Floats *f, const uint8_t *restrict in, int64_t count, float *restrict out) {
    if (f->table_256)
        for (int64_t i = 0; i < count; i++) out[i] = (float)f->table_256[in[i]];
    else if (f->divides)
        f->normalizes ? convert(f, in, count, out, true, true) : convert(f, in, count, out, true, false);
    else
        f->normalizes ? convert(f, in, count, out, false, true) : convert(f, in, count, out, false, false);
}

enum { CHUNK = 512 };

/* `count` values at places `step` apart; `in` is one row of a plane, or several that lie end to end. */
static void write_values(const Batch *batch, const Floats *f, const uint8_t *in, int64_t count, uint8_t *out, int64_t step) {
    float floats[CHUNK];
    for (int64_t from = 0; from < count; from += CHUNK) {
        int64_t part = count - from < CHUNK ? count - from : CHUNK;
        const uint8_t *values = in + from;
        if (batch->values.dtype == UINT8) {
            for (int64_t i = 0; i < part; i++) out[(from + i) * step] = values[i];
            continue;
        }
        if (batch->values.dtype == FLOAT64) {
            for (int64_t i = 0; i < part; i++) ((double *)out)[(from + i) * step] = f->table_256[values[i]];
            continue;
        }
        to_floats(f, values, part, floats);
        if (batch->values.dtype == FLOAT32)
            for (int64_t i = 0; i < part; i++) ((float *)out)[(from + i) * step] = floats[i];
        else if (batch->values.dtype == FLOAT16)
            for (int64_t i = 0; i < part; i++) ((_Float16 *)out)[(from + i) * step] = (_Float16)floats[i];
        else
            for (int64_t i = 0; i < part; i++) ((uint16_t *)out)[(from + i) * step] = to_bfloat16(floats[i]);
    }
}

static int64_t item_bytes(const Batch *batch) {
    return batch->values.dtype == UINT8 ? 1 : batch->values.dtype == FLOAT32 ? 4 : batch->values.dtype == FLOAT64 ? 8 : 2;
}

static void write_plane(const Batch *batch, const Image *image, int32_t c, uint8_t *out, uint8_t *row_buffer) {
    float mean = batch->values.normalizes ? batch->values.mean_C[c] : 0, std = batch->values.normalizes ? batch->values.std_C[c] : 1;
    Floats floats = {batch->values.factor, 1 / batch->values.factor, mean, std, 1 / std, batch->values.divides,
                     batch->values.normalizes, batch->values.by_formula ? NULL : batch->values.table_C256 + 256 * (int64_t)c};
    int64_t bytes = item_bytes(batch), width = image->width, height = image->height;
    int64_t step = batch->channels_last ? batch->channels : 1;
    out += (batch->channels_last ? c : c * height * width) * bytes;
    const uint8_t *plane = image->data + (image->channels == 1 ? 0 : c) * image->plane;
    if (image->pixel == 1 && image->row == width) width *= height, height = 1;
    for (int64_t y = 0; y < height; y++, out += width * step * bytes) {
        const uint8_t *row = plane + y * image->row;
        if (batch->values.dtype == UINT8 && step == 1) {
            copy_row(row, image->pixel, width, out);
            continue;
        }
        if (image->pixel != 1) {
            copy_row(row, image->pixel, width, row_buffer);
            row = row_buffer;
        }
        if (batch->values.dtype == FLOAT32 && step == 1)
            to_floats(&floats, row, width, (float *)out);
        else
            write_values(batch, &floats, row, width, out, step);
    }
}

/* Erasing and noise among the floats: torchvision's RandomErasing and GaussianNoise behind the conversion, timm's too. */
static void write_float(const Batch *batch, uint8_t *out, int64_t at, float value) {
    if (batch->values.dtype == FLOAT32)
        ((float *)out)[at] = value;
    else if (batch->values.dtype == FLOAT64)
        ((double *)out)[at] = value;
    else if (batch->values.dtype == FLOAT16)
        ((_Float16 *)out)[at] = (_Float16)value;
    else
        ((uint16_t *)out)[at] = to_bfloat16(value);
}

static int erase_floats(const Batch *batch, const Op *op, uint8_t *out, Scratch *scratch) {
    const int32_t *n = op->n;
    if (!is_inside(op, batch->height, batch->width) || batch->values.dtype == UINT8) return OUTSIDE;
    int64_t count = (int64_t)n[2] * n[3], area = (int64_t)batch->height * batch->width;
    float *noise = take(scratch, SLOT_WORK, (n[6] == 1 ? batch->channels * count : batch->channels) * (int64_t)sizeof(float));
    if (!noise) return NO_MEMORY;
    if (n[6]) draw_normal(key_of(op), 0, n[6] == 1 ? batch->channels * count : batch->channels, noise);
    for (int32_t c = 0; c < batch->channels; c++)
        for (int64_t y = 0; y < n[2]; y++)
            for (int64_t x = 0; x < n[3]; x++) {
                int64_t place = (n[0] + y) * batch->width + n[1] + x;
                int64_t at = batch->channels_last ? place * batch->channels + c : c * area + place;
                float value = n[6] == 1 ? noise[c * count + y * n[3] + x] : n[6] ? noise[c] : (float)op->v[8 + (c < 4 ? c : 3)];
                write_float(batch, out, at, value);
            }
    return OK;
}

static float read_float(const Batch *batch, const uint8_t *out, int64_t at) {
    if (batch->values.dtype == FLOAT32) return ((const float *)out)[at];
    if (batch->values.dtype == FLOAT64) return (float)((const double *)out)[at];
    if (batch->values.dtype == FLOAT16) return (float)((const _Float16 *)out)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)out)[at] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static int add_noise_to_floats(const Batch *batch, const Op *op, uint8_t *out, Scratch *scratch) {
    int64_t area = (int64_t)batch->height * batch->width, size = batch->channels * area;
    float *noise = take(scratch, SLOT_WORK, size * (int64_t)sizeof(float));
    if (!noise) return NO_MEMORY;
    if (batch->channels > MAX_CHANNELS || batch->values.dtype == UINT8) return UNKNOWN_OP;
    draw_normal(key_of(op), 0, size, noise);
    for (int32_t c = 0; c < batch->channels; c++) {
        float scale = (float)op->v[2 + c], low = (float)op->v[6 + c], high = low + scale;
        for (int64_t place = 0; place < area; place++) {
            int64_t at = batch->channels_last ? place * batch->channels + c : c * area + place;
            float value = read_float(batch, out, at) + ((float)op->v[0] + noise[c * area + place] * (float)op->v[1]) * scale;
            write_float(batch, out, at, !op->n[0] ? value : value < low ? low : value > high ? high : value);
        }
    }
    return OK;
}

static int serve_one(const Batch *batch, int64_t b, Scratch *scratch) {
    const int32_t *shape = batch->shapes_B3 + 3 * b;
    int64_t channels = shape[0], height = shape[1], width = shape[2];
    if (channels < 1 || height < 1 || width < 1) return WRONG_SHAPE;
    Sample sample = {.slot = -1, .scratch = scratch};
    sample.image = (Image){.data = (uint8_t *)batch->sources_B[b], .channels = shape[0], .height = shape[1], .width = shape[2]};
    sample.image.plane = batch->interleaved ? 1 : height * width;
    sample.image.row = batch->interleaved ? width * channels : width;
    sample.image.pixel = batch->interleaved ? channels : 1;

    const Op *op = batch->ops_BS + b * batch->ops_per_sample, *end = op + batch->ops_per_sample;
    for (; op < end && op->code != OP_CAST; op++) {
        int problem = run_op(&sample, op);
        if (problem) return problem;
    }
    const Image *image = &sample.image;
    bool widens = image->channels == 1 && batch->channels > 1 && batch->values.normalizes;
    if (image->height != batch->height || image->width != batch->width) return WRONG_SHAPE;
    if (image->channels != batch->channels && !widens) return WRONG_SHAPE;
    if (!settle(&sample)) return NO_MEMORY;
    uint8_t *row_buffer = take(scratch, SLOT_WORK, image->width);
    if (!row_buffer) return NO_MEMORY;
    uint8_t *out = batch->out_B + b * batch->channels * batch->height * batch->width * item_bytes(batch);
    for (int32_t c = 0; c < batch->channels; c++) write_plane(batch, image, c, out, row_buffer);
    for (; op < end; op++) {
        int problem = op->code == OP_NOTHING || op->code == OP_CAST ? OK
                      : op->code == OP_ERASE                        ? erase_floats(batch, op, out, scratch)
                      : op->code == OP_NOISE                        ? add_noise_to_floats(batch, op, out, scratch)
                                                                    : UNKNOWN_OP;
        if (problem) return problem;
    }
    return OK;
}

/* Serve samples [first, last) of a batch. Returns -1, or 8 * (the sample that failed) + why. */
EXPORT int64_t fastdata_serve(const Batch *batch, int64_t first, int64_t last) {
    Scratch scratch = {0};
    int64_t outcome = -1;
    for (int64_t b = first; b < last && outcome < 0; b++) {
        int problem = serve_one(batch, b, &scratch);
        if (problem) outcome = 8 * b + problem;
    }
    for (int slot = 0; slot < SLOT_COUNT; slot++) free(scratch.data[slot]);
    return outcome;
}
