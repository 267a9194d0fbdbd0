/* One batch: each sample's ops, step by step through buffers in the cache, then its values to the batch. */
#include "core.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { BUFFER = 4096, SHORT_ROW = 128 }; /* bytes: rows shorter than that are converted several at a time */
enum { PERIOD = 48 }; /* values: whole pixels of 2, 3 and 4 channels, and whole vectors */
enum { POOLED = 32, POOLED_BYTES = 8 << 20 }; /* scratches, and the most that one of them holds */
enum { FETCHED_BYTES = 16 << 10, LINE = 64 };
enum { MARGIN = 64 }; /* bytes before and behind a decoded image that kernels may read */

/* What was drawn for a sample by one program. */
typedef struct {
    Op ops[MAX_OPS];
    int32_t count;
} Drawn;

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

/* Of calls that have ended, for those to come: where a call serves one sample, fresh pages are a tenth of it. */
static _Atomic(Scratch *) pool[POOLED];

Scratch *borrow(void) {
    for (int i = 0; i < POOLED; i++) {
        Scratch *found = atomic_exchange(&pool[i], NULL);
        if (found) return found;
    }
    return calloc(1, sizeof(Scratch));
}

void give_back(Scratch *scratch) {
    int64_t bytes = 0;
    for (int slot = 0; slot < SLOT_COUNT; slot++) bytes += scratch->bytes[slot];
    for (int i = 0; i < POOLED && bytes <= POOLED_BYTES; i++) {
        Scratch *none = NULL;
        if (atomic_compare_exchange_strong(&pool[i], &none, scratch)) return;
    }
    for (int slot = 0; slot < SLOT_COUNT; slot++) free(scratch->data[slot]);
    drop_decoder(scratch->decoder);
    free(scratch);
}

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
bool room(Sample *sample, int32_t channels, int32_t height, int32_t width, Image *out) {
    out->channels = channels, out->height = height, out->width = width;
    int64_t planes = channels < 3 ? 3 : channels; /* grayscale may go back to 3 */
    uint8_t *data = take(sample->scratch, sample->slot == SLOT_A ? SLOT_B : SLOT_A, planes * height * width);
    if (data) pack(out, data);
    return data != NULL;
}

void become(Sample *sample, const Image *image) {
    sample->image = *image;
    sample->slot = sample->slot == SLOT_A ? SLOT_B : SLOT_A;
}

void copy_row(const uint8_t *restrict in, int64_t pixel, int64_t count, uint8_t *restrict out) {
    if (pixel == 1)
        memcpy(out, in, count);
    else if (pixel == -1)
        for (int64_t x = 0; x < count; x++) out[count - 1 - x] = in[x - (count - 1)];
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
bool own(Sample *sample) {
    if (sample->slot >= 0 && is_packed(&sample->image)) return true;
    Image out;
    if (!room(sample, sample->image.channels, sample->image.height, sample->image.width, &out)) return false;
    copy_image(&sample->image, &out);
    become(sample, &out);
    return true;
}

bool settle(Sample *sample) { /* run the pending table */
    if (!sample->has_table) return true;
    if (!own(sample)) return false;
    apply_table(&sample->image, sample->table_C256);
    sample->has_table = false;
    return true;
}

static int mapped(Sample *sample, const Op *op) {
    if (sample->image.channels > MAX_CHANNELS) return REFUSED_OP;
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

/* Quarter turns counterclockwise: Image.transpose(ROTATE_90, _180, _270). */
static int turn(Sample *sample, int quarters) {
    Image *image = &sample->image;
    for (; quarters > 0; quarters--) {
        const Image before = *image;
        image->data += (before.width - 1) * before.pixel;
        image->row = -before.pixel, image->pixel = before.row;
        image->height = before.width, image->width = before.height;
    }
    return OK;
}

/* Kernels that write another image. */
static int remake(Sample *sample, const Op *op, int32_t height, int32_t width,
                  bool (*kernel)(const Op *, const Image *, const Image *, Scratch *)) {
    Image *image = &sample->image, out;
    if (height < 1 || width < 1) return REFUSED_OUTSIDE;
    if (!settle(sample) || (image->pixel != 1 && !own(sample))) return NO_MEMORY;
    if (!room(sample, image->channels, height, width, &out)) return NO_MEMORY;
    if (!kernel(op, image, &out, sample->scratch)) return NO_MEMORY;
    become(sample, &out);
    return OK;
}

/* Whether of a resize only what a window cuts out of it is made. */
static bool is_cut(const Op *op, const Op *next) {
    const int32_t *n = op->n, *cut = next->n;
    const bool has_borders = cut[0] || cut[1] || cut[2] || cut[3], resizes_both = n[2] != n[4] && n[3] != n[5];
    return next->code == OP_WINDOW && !has_borders && resizes_both && cut[4] >= 0 && cut[5] >= 0 && cut[6] >= 1 &&
           cut[7] >= 1 && cut[4] + (int64_t)cut[6] <= n[4] && cut[5] + (int64_t)cut[7] <= n[5];
}

/* A resize, and of the window that may come next, which is an op of our own then, all but that it mirrors. */
static int resized(Sample *sample, const Op *op, Op *next) {
    const int32_t *n = op->n;
    int32_t *cut = next->n;
    Image *image = &sample->image;
    if (!is_inside(op, image->height, image->width) || n[2] < 1 || n[3] < 1) return REFUSED_OUTSIDE;
    image->data += n[0] * image->row + n[1] * image->pixel;
    image->height = n[2], image->width = n[3];
    if (n[2] == n[4] && n[3] == n[5]) return OK;
    Op part = *op; /* the view is the box already */
    part.n[0] = part.n[1] = 0;
    if (!is_cut(op, next)) return remake(sample, &part, n[4], n[5], resize);
    part.n[0] = cut[4], part.n[1] = cut[5], cut[4] = cut[5] = 0;
    return remake(sample, &part, cut[6], cut[7], resize);
}

static int permute(Sample *sample, const int32_t *n) {
    Image *image = &sample->image, out;
    if (image->channels > MAX_CHANNELS) return REFUSED_OP;
    if (!settle(sample) || !room(sample, image->channels, image->height, image->width, &out)) return NO_MEMORY;
    for (int32_t c = 0; c < image->channels; c++) {
        if (n[c] < 0 || n[c] >= image->channels) return REFUSED_OUTSIDE;
        Image from = *image, to = out;
        from.data += n[c] * from.plane, to.data += c * to.plane;
        from.channels = to.channels = 1;
        copy_image(&from, &to);
    }
    become(sample, &out);
    return OK;
}

static int in_place(Sample *sample, const Op *op, void (*kernel)(const Op *, Image *)) {
    if (sample->image.channels != 1 && sample->image.channels != 3) return REFUSED_OP;
    if (!settle(sample) || !own(sample)) return NO_MEMORY;
    kernel(op, &sample->image);
    return OK;
}

static int run_op(Sample *sample, const Op *op, Op *next) {
    const Image *image = &sample->image;
    switch (op->code) {
    case OP_NOTHING: return OK;
    case OP_WINDOW: return window(sample, op);
    case OP_RESIZE: return resized(sample, op, next);
    case OP_AFFINE:
    case OP_PERSPECTIVE: return remake(sample, op, op->n[0], op->n[1], warp);
    case OP_TURN: return turn(sample, op->n[0]);
    case OP_BRIGHTNESS: case OP_CONTRAST: case OP_SOLARIZE: case OP_SOLARIZE_ADD: case OP_POSTERIZE: case OP_INVERT:
    case OP_AUTOCONTRAST: case OP_EQUALIZE: return mapped(sample, op);
    case OP_GRAYSCALE: return in_place(sample, op, grayscale);
    case OP_SATURATION: return in_place(sample, op, saturate);
    case OP_HUE: return in_place(sample, op, shift_hue);
    case OP_SHARPNESS: return remake(sample, op, image->height, image->width, sharpen);
    case OP_BLUR: case OP_BOX_BLUR: return remake(sample, op, image->height, image->width, blur);
    case OP_PERMUTE: return permute(sample, op->n);
    case OP_NOISE: case OP_ERASE: return settle(sample) && own(sample) ? rewrite(op, image, NULL) : NO_MEMORY;
    case OP_MIX_BEGIN: case OP_MIX_ADD: case OP_MIX_END: return mix(sample, op);
    default: return REFUSED_OP;
    }
}

/* Values to the batch */

/* What to divide by, and its inverse as a sum. */
typedef struct {
    float value, high, low;
} Divisor;

static inline Divisor divisor_of(float value) {
    const float high = 1 / value;
    return (Divisor){value, high, (float)((1.0 - (double)high * value) / value)};
}

/* a / b, rounded correctly for the few values that occur; `agrees` holds every one of the 256 against the table. */
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

static void to_floats(const Values *v, int32_t c, const uint8_t *restrict in, int64_t count, float *restrict out) {
    c %= v->channels;
    if (!v->by_formula)
        for (int64_t i = 0; i < count; i++) out[i] = (float)v->table_C256[256 * c + in[i]];
    else
        v->scaling == SCALE_DIVIDE ? convert(v, c, in, count, out, true) : convert(v, c, in, count, out, false);
}

/* Whether the formula gives what the table has. */
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

/* How a table's values are served, by torchvision's own arithmetic, of doubles for FLOAT64, else of floats. */
EXPORT void fastdata_values(Table *table) {
    Values *v = &table->values;
    const Step *cast = table->steps;
    v->channels = 1;
    if (!is_sound(table)) return;
    while (cast < table->steps + table->count && cast->code != OP_CAST) cast++;
    if (cast == table->steps + table->count) return;
    v->dtype = cast->n[0], v->scaling = cast->n[1], v->normalizes = cast->n[2] > 0, v->widens = cast->n[3];
    v->channels = v->normalizes ? cast->n[2] : 1;
    const bool divides = v->scaling == SCALE_DIVIDE;
    const double factor = divides ? 255 : v->scaling == SCALE_MULTIPLY ? 1 / 255.0 : 1;
    v->factor = (float)factor;
    for (int32_t c = 0; c < v->channels; c++) {
        const double mean = v->normalizes ? cast->v[2 * c] : 0, std = v->normalizes ? cast->v[2 * c + 1] : 1;
        v->mean[c] = mean, v->std[c] = std;
        for (int x = 0; x < 256; x++) {
            const double wide = (divides ? x / factor : x * factor) - mean;
            const float value = (divides ? (float)x / v->factor : (float)x * v->factor) - (float)mean;
            v->table_C256[256 * c + x] = v->dtype == FLOAT64 ? wide / std : value / (float)std;
        }
    }
    v->by_formula = true;
    v->by_formula = v->dtype != FLOAT64 && agrees(v);
}

static bool is_half(const Values *v) { return v->dtype == FLOAT16 || v->dtype == BFLOAT16; }

/* Values of one row of a plane, or of several that lie end to end. */
static void write_values(const Values *v, int32_t c, const uint8_t *in, int64_t count, uint8_t *out) {
    float floats[CHUNK];
    if (v->dtype == FLOAT32) to_floats(v, c, in, count, (float *)out);
    const double *table = v->table_C256 + 256 * (c % v->channels);
    for (int64_t i = 0; i < count && v->dtype == FLOAT64; i++) ((double *)out)[i] = table[in[i]];
    for (int64_t i = 0; i < count && v->dtype == INT32; i++) ((int32_t *)out)[i] = (int32_t)table[in[i]];
    for (int64_t i = 0; i < count && v->dtype == INT64; i++) ((int64_t *)out)[i] = (int64_t)table[in[i]];
    for (int64_t from = 0; from < count && is_half(v); from += CHUNK) {
        const int64_t part = count - from < CHUNK ? count - from : CHUNK;
        to_floats(v, c, in + from, part, floats);
        store(v->dtype, floats, part, out + from * ITEM_BYTES[v->dtype]);
    }
}

static void write_plane(const Batch *batch, const Image *image, int32_t c, uint8_t *out, uint8_t *buffer) {
    const Values *v = &batch->table->values;
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
        if (v->dtype != UINT8) write_values(v, c, copies ? buffer : row, rows * width, out);
    }
}

/* Channels-last: pixels are laid together as uint8, then converted by constants that repeat. */

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

/* The constants of PERIOD values of pixels one after the other. */
typedef struct {
    float mean[PERIOD], value[PERIOD], high[PERIOD], low[PERIOD];
} Pattern;

static void repeat(const Values *v, int64_t channels, Pattern *pattern) {
    for (int64_t c = 0; c < channels; c++) {
        const Divisor std = divisor_of((float)v->std[c % v->channels]);
        for (int64_t k = c; k < PERIOD; k += channels)
            pattern->mean[k] = (float)v->mean[c % v->channels], pattern->value[k] = std.value, pattern->high[k] = std.high, pattern->low[k] = std.low;
    }
}

INLINE void convert_pattern(const Values *v, const Pattern *p, Divisor whole, const uint8_t *restrict in,
                            float *restrict out, bool divides) {
    for (int k = 0; k < PERIOD; k++) {
        const float scaled = divides ? divide(in[k], whole) : in[k] * v->factor;
        out[k] = divide(scaled - p->mean[k], (Divisor){p->value[k], p->high[k], p->low[k]});
    }
}

INLINE void convert_pixels(const Values *v, const Pattern *pattern, const uint8_t *in, int64_t count, float *out,
                           bool divides) {
    const Divisor whole = divisor_of(v->factor);
    for (; count >= PERIOD; count -= PERIOD, in += PERIOD, out += PERIOD)
        convert_pattern(v, pattern, whole, in, out, divides);
    uint8_t last[PERIOD] = {0};
    float made[PERIOD];
    memcpy(last, in, (size_t)count);
    convert_pattern(v, pattern, whole, last, made, divides);
    memcpy(out, made, (size_t)count * sizeof *made);
}

/* Values of whole pixels; of a table where `pattern` is NULL. */
static void write_pixels(const Values *v, const Pattern *pattern, int64_t channels, const uint8_t *in, int64_t count,
                         uint8_t *out) {
    float floats[CHUNK];
    const int64_t chunk = pattern ? CHUNK / PERIOD * PERIOD : CHUNK / channels * channels, step = is_half(v) ? chunk : count;
    for (int64_t from = 0; from < count; from += step, in += step) {
        const int64_t part = count - from < step ? count - from : step;
        float *to = is_half(v) ? floats : (float *)out;
        if (v->dtype == FLOAT64)
            for (int64_t i = 0; i < part; i++) ((double *)out)[i] = v->table_C256[256 * (i % channels % v->channels) + in[i]];
        else if (v->dtype == INT32)
            for (int64_t i = 0; i < part; i++) ((int32_t *)out)[i] = (int32_t)v->table_C256[256 * (i % channels % v->channels) + in[i]];
        else if (v->dtype == INT64)
            for (int64_t i = 0; i < part; i++) ((int64_t *)out)[i] = (int64_t)v->table_C256[256 * (i % channels % v->channels) + in[i]];
        else if (!pattern)
            for (int64_t i = 0; i < part; i++) to[i] = (float)v->table_C256[256 * (i % channels % v->channels) + in[i]];
        else v->scaling == SCALE_DIVIDE ? convert_pixels(v, pattern, in, part, to, true) : convert_pixels(v, pattern, in, part, to, false);
        if (is_half(v)) store(v->dtype, floats, part, out + from * ITEM_BYTES[v->dtype]);
    }
}

/* `buffer` has room for BUFFER values. */
static void write_channels_last(const Batch *batch, const Image *image, uint8_t *out, uint8_t *buffer) {
    const Values *v = &batch->table->values;
    const int64_t channels = batch->channels, width = image->width, most = BUFFER / channels;
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

/* Samples that are files */

/* The part of an image (height, width) that a program reads, which its first op may narrow. */
static Box read_box(const Drawn *drawn, int32_t height, int32_t width) {
    const Op *op = drawn->ops, *next = drawn->count > 1 ? op + 1 : op;
    Box box = {0, 0, height, width};
    if (!drawn->count) return box;
    const int32_t *n = op->n;
    if (op->code == OP_RESIZE && is_inside(op, height, width) && n[2] > 0 && n[3] > 0) {
        box = (Box){n[0], n[1], n[2], n[3]};
        if (next == op || !is_cut(op, next)) return box;
        Op part = *op;
        part.n[0] = next->n[4], part.n[1] = next->n[5];
        resize_reads(&part, n + 2, next->n + 6, &box);
        box.top += n[0], box.left += n[1];
    } else if (op->code == OP_WINDOW) {
        const int64_t top = (int64_t)n[4] - n[1], left = (int64_t)n[5] - n[0], bottom = top + n[6], right = left + n[7];
        const bool is_within = top >= 0 && left >= 0 && bottom <= height && right <= width;
        if (n[6] < 1 || n[7] < 1 || bottom < 1 || right < 1 || top >= height || left >= width) return box;
        if (!is_within && n[8] >> 8 != PAD_CONSTANT) return box; /* borders repeat what lies anywhere */
        box.top = top > 0 ? (int32_t)top : 0, box.left = left > 0 ? (int32_t)left : 0;
        box.height = (int32_t)(bottom < height ? bottom : height) - box.top;
        box.width = (int32_t)(right < width ? right : width) - box.left;
    }
    return box;
}

static Box join(Box a, Box b) {
    const int32_t bottom = a.top + a.height > b.top + b.height ? a.top + a.height : b.top + b.height;
    const int32_t right = a.left + a.width > b.left + b.width ? a.left + a.width : b.left + b.width;
    const int32_t top = a.top < b.top ? a.top : b.top, left = a.left < b.left ? a.left : b.left;
    return (Box){top, left, bottom - top, right - left};
}

/* EXIF orientations, as PIL.ImageOps.exif_transpose has them: what is mirrored in the file, before 5 to 8 transpose it. */
static bool mirrors_rows(int turn) { return turn == 3 || turn == 4 || turn == 6 || turn == 7; }
static bool mirrors_columns(int turn) { return turn == 2 || turn == 3 || turn == 7 || turn == 8; }

static void turn_upright(Image *image, int turn) {
    if (mirrors_rows(turn)) image->data += (image->height - 1) * image->row, image->row = -image->row;
    if (mirrors_columns(turn)) image->data += (image->width - 1) * image->pixel, image->pixel = -image->pixel;
    if (turn < 5) return;
    const Image before = *image;
    image->row = before.pixel, image->pixel = before.row;
    image->height = before.width, image->width = before.height;
}

/* Decode what the programs read of a sample. `image` is as large as the whole, and what is not there must not be read. */
static bool decode_sample(const Batch *batch, int64_t b, const Drawn *drawn, Image *image, Scratch *scratch) {
    const int turn = batch->turns_B ? batch->turns_B[b] : 1;
    Box box = read_box(drawn++, image->height, image->width);
    for (const Batch *next = batch->next; next; next = next->next)
        box = join(box, read_box(drawn++, image->height, image->width));
    Box there = turn < 5 ? box : (Box){box.left, box.top, box.width, box.height}; /* in the file */
    const int32_t height = turn < 5 ? image->height : image->width, width = turn < 5 ? image->width : image->height;
    if (mirrors_rows(turn)) there.top = height - there.top - there.height;
    if (mirrors_columns(turn)) there.left = width - there.left - there.width;

    const int64_t bytes = (int64_t)image->channels * box.height * box.width + 2 * MARGIN;
    uint8_t *memory = take(scratch, SLOT_DECODED, bytes), *other = turn == 1 ? memory : take(scratch, SLOT_KEPT, bytes);
    if (!memory || !other) return false;
    Image found = {.channels = image->channels, .height = there.height, .width = there.width}, upright = found;
    pack(&found, other + MARGIN);
    if (!decode(batch->jpeg, batch->sources_B[b], batch->sizes_B[b], height, width, there.top, there.left, &found, scratch))
        return false;
    if (turn != 1) {
        turn_upright(&found, turn);
        upright.height = box.height, upright.width = box.width;
        pack(&upright, memory + MARGIN);
        copy_image(&found, &upright);
        found = upright;
    }
    image->data = found.data - box.top * found.row - box.left;
    image->row = found.row, image->plane = found.plane, image->pixel = 1;
    return true;
}

/* Fetch the next sample into the cache while this one is served, if it is small and its pixels are in memory. Samples of a
 * shuffled batch are far apart, and a small one ends before the processor has noticed a pattern. CIFAR's recipe is served
 * 1.2 times as fast on an EPYC and 1.1 to 1.2 times on a Xeon (benchmarks/program.py). */
static void fetch(const Batch *batch, int64_t b) {
    const int32_t *shape = batch->shapes_B3 + 3 * b;
    const int64_t bytes = (int64_t)shape[0] * shape[1] * shape[2];
    if (bytes > FETCHED_BYTES || (batch->sizes_B && batch->sizes_B[b])) return;
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(batch->sources_B[b] + at);
}

static int64_t row_of(const Batch *batch, int64_t b) { return batch->rows_B ? batch->rows_B[b] : b; }

static int64_t row_bytes(const Batch *batch) {
    return (int64_t)batch->channels * batch->height * batch->width * ITEM_BYTES[batch->table->values.dtype];
}

/* Where a sample is served. */
static Image place_of(const Batch *batch, int64_t b) {
    Image out = {.channels = batch->channels, .height = batch->height, .width = batch->width};
    pack(&out, batch->out_B + row_of(batch, b) * row_bytes(batch));
    if (batch->channels_last) out.plane = 1, out.pixel = out.channels, out.row = (int64_t)out.width * out.channels;
    return out;
}

/* Run the ops of a sample and write what comes out. */
static int serve_image(const Batch *batch, int64_t b, Drawn *drawn, const Image *source, Scratch *scratch,
                       Refusal *refusal) {
    Sample sample; /* its table of values stays as it is: to clear that costs a tenth of a small image */
    sample.image = *source, sample.slot = -1, sample.has_table = false, sample.scratch = scratch;
    Op nothing = {0}, *op = drawn->ops, *end = op + drawn->count;
    for (; op < end && op->code != OP_CAST; op++) {
        int problem = run_op(&sample, op, op + 1 < end ? op + 1 : &nothing);
        if (problem) return problem;
    }
    const Image *image = &sample.image;
    const bool widens = image->channels == 1 && batch->table->values.widens, is_room = image->channels == batch->channels || widens;
    if (image->height != batch->height || image->width != batch->width || !is_room) {
        const int64_t found[6] = {widens ? batch->channels : image->channels, image->height, image->width,
                                  batch->channels, batch->height, batch->width};
        memcpy(refusal->n, found, sizeof found);
        return REFUSED_SHAPE;
    }
    if (!settle(&sample)) return NO_MEMORY;
    uint8_t *buffer = take(scratch, SLOT_WORK, image->width + BUFFER);
    if (!buffer) return NO_MEMORY;
    const Image served = place_of(batch, b);
    if (batch->channels_last) write_channels_last(batch, image, served.data, buffer);
    else for (int32_t c = 0; c < batch->channels; c++) write_plane(batch, image, c, served.data, buffer);
    for (; op < end; op++) {
        int problem = op->code == OP_CAST ? OK : rewrite(op, &served, &batch->table->values);
        if (problem) return problem;
    }
    return OK;
}

static bool draw_sample(const Batch *batch, int64_t b, const int32_t shape[3], uint64_t key, uint64_t turn, Drawn *drawn,
                        Refusal *refusal) {
    Drawing d = {.table = batch->table, .key = key, .turn = turn, .channels = shape[0], .height = shape[1], .width = shape[2]};
    d.ops = drawn->ops, d.refusal = refusal;
    if (batch->solved_BS8) d.solved_room = batch->solved, d.solved = batch->solved_BS8 + 8 * b * batch->solved;
    const bool is_drawn = resolve(&d);
    drawn->count = d.count;
    return is_drawn;
}

/* Whether a file is all that a sample is to be, so that it is decoded where it is served. */
static bool is_served_whole(const Batch *batch, int64_t b, const Drawn *drawn, const Image *image) {
    const bool is_alike = image->channels == batch->channels && image->height == batch->height && image->width == batch->width;
    const bool is_turned = batch->turns_B && batch->turns_B[b] != 1;
    return is_alike && !is_turned && !batch->next && !drawn->count && batch->table->values.dtype == UINT8;
}

static int serve_one(const Batch *batch, int64_t b, int64_t programs, Scratch *scratch, Refusal *refusal) {
    const int32_t *shape = batch->shapes_B3 + 3 * b;
    int64_t number = 0;
    if (shape[0] < 1 || shape[1] < 1 || shape[2] < 1) return REFUSED_SHAPE;
    Drawn *drawn = take(scratch, SLOT_DRAWN, programs * (int64_t)sizeof(Drawn));
    if (!drawn) return NO_MEMORY;
    const int64_t visit = batch->visits_B[b], index = batch->indices_B[b];
    const uint64_t key = sample_key(batch->seed, visit, index), turn = turn_of(visit, index);
    for (const Batch *each = batch; each; each = each->next, number++) {
        refusal->program = number;
        const int64_t row = row_of(each, b);
        if (row < 0 || row >= each->rows) {
            refusal->n[0] = row, refusal->n[1] = each->rows;
            return REFUSED_ROW;
        }
        if (!draw_sample(each, b, shape, key, turn, drawn + number, refusal)) return (int)refusal->reason;
    }
    Image image = {.channels = shape[0], .height = shape[1], .width = shape[2]};
    pack(&image, (uint8_t *)batch->sources_B[b]);
    const bool is_file = batch->sizes_B && batch->sizes_B[b];
    if (is_file && is_served_whole(batch, b, drawn, &image)) {
        const Image out = place_of(batch, b);
        const int32_t height = image.height, width = image.width;
        const bool is_decoded = decode(batch->jpeg, image.data, batch->sizes_B[b], height, width, 0, 0, &out, scratch);
        return is_decoded ? OK : REFUSED_FILE;
    }
    if (is_file && !decode_sample(batch, b, drawn, &image, scratch)) return REFUSED_FILE;
    int problem = OK;
    for (refusal->program = 0; batch && !problem; batch = batch->next, drawn++) {
        problem = serve_image(batch, b, drawn, &image, scratch, refusal);
        refusal->program += !problem;
    }
    return problem;
}

/* Serve samples [first, last) of a batch by `programs` of them. Returns -1, or the sample that was refused. */
EXPORT int64_t fastdata_serve(const uint8_t *const *sources_B, const int32_t *shapes_B3, const Jpeg *jpeg,
                              const int64_t *sizes_B, const int32_t *turns_B, uint64_t seed, const int64_t *visits_B,
                              const int64_t *indices_B, const int64_t *rows_B, Batch *every, int64_t programs,
                              int64_t first, int64_t last, Refusal *refusal) {
    Batch *batch = every;
    batch->sources_B = sources_B, batch->shapes_B3 = shapes_B3, batch->jpeg = jpeg;
    batch->sizes_B = sizes_B, batch->turns_B = turns_B;
    batch->seed = seed, batch->visits_B = visits_B, batch->indices_B = indices_B;
    for (int64_t k = 0; k < programs; k++) {
        Batch *each = every + k;
        each->rows_B = rows_B, each->next = k + 1 < programs ? each + 1 : NULL;
        refusal->program = k, refusal->reason = REFUSED_TABLE;
        if (!is_sound(each->table)) return first;
        each->rows = row_bytes(each) > 0 ? each->out_bytes / row_bytes(each) : 0;
    }
    Scratch *scratch = borrow();
    refusal->reason = NO_MEMORY;
    if (!scratch) return first;
    int64_t refused = -1;
    for (int64_t b = first; b < last && refused < 0; b++) {
        if (b + 1 < last) fetch(batch, b + 1);
        refusal->reason = serve_one(batch, b, programs, scratch, refusal);
        if (refusal->reason != OK) refused = b;
    }
    give_back(scratch);
    return refused;
}
