/* Kernels of OP_RESIZE with the pixels of OpenCV's resize for uint8 where OpenCV sums integers: linear, exact linear,
 * cubic, Lanczos, and averages of whole blocks. resize.c has the filters that use floats.
 *
 * References are functions of OpenCV's modules/imgproc/src/resize.cpp, which has channels side by side.
 */
#include "core.h"
#include "lanes.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { COEF_BITS = 11, EXACT_BITS = 8, CUBIC_TAPS = 4, LANCZOS_TAPS = 8 };
enum { WINDOW = 16, COLUMNS = 8 }; /* pixels that a shuffle chooses from; columns at a time */
enum { RING = 8, ALIGN = 32 };     /* rows that are kept; their length is a multiple of ALIGN */

/* One axis: pixel i of the `to` that are made is the sum of pixels place[i * taps + k], times weight[i * taps + k]. */
typedef struct {
    int64_t from, to, taps;
    int32_t *place;
    int16_t *weight;
} Axis;

/* Two taps of each of four columns: which of 16 bytes, and weights. */
typedef struct {
    uint32_t index[4], weight[4];
    int64_t base; /* where the 16 bytes begin */
    bool fresh;   /* elsewhere than those of the step before */
} Quartet;

INLINE int64_t clipped(int64_t at, int64_t length) { return at < 0 ? 0 : at < length ? at : length - 1; }

/* interpolateLanczos4 */
static void weigh_lanczos(float x, float weight[LANCZOS_TAPS]) {
    static const double half = 0.70710678118654752440, pi = 3.14159265358979323846;
    static const double turns[][2] = {{1, 0},  {-half, -half}, {0, 1},  {half, -half},
                                      {-1, 0}, {half, half},   {0, -1}, {-half, half}};
    memset(weight, 0, sizeof(float) * LANCZOS_TAPS);
    if (x < FLT_EPSILON) {
        weight[3] = 1;
        return;
    }
    const double start = -(double)(x + 3) * pi * 0.25, sine = sin(start), cosine = cos(start);
    float sum = 0;
    for (int i = 0; i < LANCZOS_TAPS; i++) {
        const double y = -(double)(x + 3 - (float)i) * pi * 0.25;
        weight[i] = (float)((turns[i][0] * sine + turns[i][1] * cosine) / (y * y));
        sum += weight[i];
    }
    for (int i = 0; i < LANCZOS_TAPS; i++) weight[i] *= 1 / sum;
}

/* interpolateCubic */
static void weigh_cubic(float x, float weight[CUBIC_TAPS]) {
    const float a = -0.75f, before = x + 1, after = 1 - x;
    weight[0] = ((a * before - 5 * a) * before + 8 * a) * before - 4 * a;
    weight[1] = ((a + 2) * x - (a + 3)) * x * x + 1;
    weight[2] = ((a + 2) * after - (a + 3)) * after * after + 1;
    weight[3] = 1 - weight[0] - weight[1] - weight[2];
}

/* The weights of pixel i of an axis in hal::resize, from its place in float32. */
static void weigh_place(const Axis *a, int64_t i, int64_t base, float share) {
    if (share >= 1) base++, share = 0; /* just before pixel 0, where Lanczos would divide by 0 */
    float weight[LANCZOS_TAPS] = {1 - share, share};
    if (a->taps == LANCZOS_TAPS) weigh_lanczos(share, weight);
    if (a->taps == CUBIC_TAPS) weigh_cubic(share, weight);
    for (int64_t k = 0; k < a->taps; k++) {
        a->place[i * a->taps + k] = (int32_t)clipped(base - a->taps / 2 + 1 + k, a->from);
        a->weight[i * a->taps + k] = (int16_t)rintf(weight[k] * (1 << COEF_BITS));
    }
}

/* hal::resize. With the linear filter, a column whose place is outside of the image has the weight of one pixel at the edge; a
 * row keeps both weights, and both rows are that at the edge. `is_area`: as INTER_AREA enlarges. */
static void weigh(const Axis *a, int64_t wanted, int64_t first, bool is_area, bool is_columns) {
    const double scale = cv_scale(a->from, wanted), inverse = (double)wanted / (double)a->from;
    for (int64_t i = 0; i < a->to; i++) {
        const double at = (double)(first + i);
        float place = (float)((at + 0.5) * scale - 0.5);
        int64_t base = (int64_t)floorf(place);
        float share = place - (float)base;
        if (is_area) {
            base = (int64_t)floor(at * scale);
            place = (float)(at + 1 - (double)(base + 1) * inverse);
            share = place <= 0 ? 0 : place - floorf(place);
        }
        const bool is_linear = a->taps == 2, is_outside = base < 0 || base >= a->from - 1;
        if (is_columns && is_linear && is_outside) base = clipped(base, a->from), share = 0;
        weigh_place(a, i, base, share);
    }
}

/* interpolationLinear: weights of 8 bits, from places in float64. */
static void weigh_exactly(const Axis *a, int64_t wanted, int64_t first) {
    const double scale = (double)a->from / (double)wanted;
    for (int64_t i = 0; i < a->to; i++) {
        const double place = scale * ((double)(first + i) + 0.5) - 0.5, base = floor(place);
        const bool is_outside = base < 0 || base >= (double)(a->from - 1);
        const double share = is_outside ? 0 : rint((place - base) * (1 << EXACT_BITS));
        const int64_t at = clipped((int64_t)base, a->from);
        a->place[2 * i] = (int32_t)at, a->place[2 * i + 1] = (int32_t)clipped(at + 1, a->from);
        a->weight[2 * i] = (int16_t)((1 << EXACT_BITS) - share), a->weight[2 * i + 1] = (int16_t)share;
    }
}

/* Linear: sums along rows are shifted to 15 bits, products along columns to 16 (HResizeLinear, VResizeLinear) */

/* Plan four columns at a time, up to a whole number of COLUMNS: the last column is repeated. False if the pixels of four columns
 * are too far apart for WINDOW bytes. */
static bool plan_quartets(const Axis *a, Quartet *quartet) {
    int64_t base = INT32_MIN;
    if (a->from < WINDOW) return false;
    for (int64_t x = 0; x < a->to; x += COLUMNS)
        for (int64_t i = x; i < x + COLUMNS; i += 4, quartet++) {
            const int64_t last = a->to - 1, first = a->place[2 * (i < last ? i : last)];
            const int64_t end = a->place[2 * (i + 3 < last ? i + 3 : last) + 1];
            quartet->fresh = first < base || end >= base + WINDOW;
            if (quartet->fresh) base = first < a->from - WINDOW ? first : a->from - WINDOW;
            if (end >= base + WINDOW) return false;
            quartet->base = base;
            for (int64_t q = 0; q < 4; q++) {
                const int64_t column = 2 * (i + q < last ? i + q : last);
                const uint32_t place = (uint32_t)(a->place[column] - base), next = (uint32_t)(a->place[column + 1] - base);
                quartet->index[q] = 0x80008000 | place | next << 16; /* bytes place, none, next, none */
                quartet->weight[q] = (uint16_t)a->weight[column] | (uint32_t)(uint16_t)a->weight[column + 1] << 16;
            }
        }
    return true;
}

/* Sum LANES rows at a time. Rows of `to` have room for a whole number of COLUMNS. */
static void sum_quartets(const Quartet *quartet, int64_t width, const uint8_t *const *from, int16_t *const *to) {
    Vec window = {0};
    uint8_t *rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = (uint8_t *)to[i];
    for (int64_t x = 0; x < width; x += COLUMNS) {
        Vec sum[2];
        for (int half = 0; half < 2; half++, quartet++) {
            if (quartet->fresh) window = gather(from, quartet->base);
            const Vec pixels = X(shuffle_epi8, window, SPREAD(AT(Quad, quartet->index)));
            sum[half] = X(madd_epi16, pixels, SPREAD(AT(Quad, quartet->weight))) >> 4;
        }
        scatter(X(packs_epi32, sum[0], sum[1]), rows, x * (int64_t)sizeof(int16_t));
    }
}

static void sum_pairs(const Axis *a, const uint8_t *restrict from, int16_t *restrict to) {
    for (int64_t x = 0; x < a->to; x++) {
        const int32_t sum = from[a->place[2 * x]] * a->weight[2 * x] + from[a->place[2 * x + 1]] * a->weight[2 * x + 1];
        to[x] = (int16_t)(sum >> 4);
    }
}

static void mix_rows(const int16_t *restrict upper, const int16_t *restrict lower, const int16_t weight[2], int64_t width,
                     uint8_t *restrict out) {
    const int32_t above = weight[0], below = weight[1];
    for (int64_t x = 0; x < width; x++) {
        const int16_t sum = (int16_t)((int16_t)(above * upper[x] >> 16) + (int16_t)(below * lower[x] >> 16));
        out[x] = (uint8_t)((int16_t)(sum + 2) >> 2);
    }
}

/* Number the rows of the image that are read, from 0 on, and replace the places in `rows` by these numbers. The two places of an
 * output row are never above those of the row before, so each is one of the last two, or new. Returns the number of rows;
 * `source` gets their places in the image. */
static int64_t number_rows(const Axis *rows, int32_t *source) {
    int64_t count = 0;
    for (int64_t k = 0; k < 2 * rows->to; k++) {
        const int32_t place = rows->place[k];
        if (!count || place > source[count - 1]) source[count++] = place;
        rows->place[k] = (int32_t)(place < source[count - 1] ? count - 2 : count - 1);
    }
    return count;
}

static bool resize_linear(const Axis *rows, const Axis *columns, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t w = out->width, row_w = (w + ALIGN - 1) / ALIGN * ALIGN, quartets = 2 * (w / COLUMNS + 1);
    const int64_t ring_bytes = RING * row_w * (int64_t)sizeof(int16_t), plan_bytes = quartets * (int64_t)sizeof(Quartet);
    int16_t *ring = take(scratch, SLOT_WORK_2, ring_bytes + plan_bytes + 2 * rows->to * (int64_t)sizeof(int32_t));
    if (!ring) return false;
    Quartet *plan = (Quartet *)(ring + RING * row_w);
    int32_t *source = (int32_t *)(plan + quartets);
    const bool is_near = plan_quartets(columns, plan);
    const int64_t count = number_rows(rows, source);
    for (int32_t c = 0; c < in->channels; c++) {
        const uint8_t *plane = in->data + c * in->plane;
        uint8_t *to = out->data + c * out->plane;
        int64_t made = 0;
        for (int64_t y = 0; y < rows->to; y++, to += w) {
            const int64_t upper = rows->place[2 * y], lower = rows->place[2 * y + 1];
            for (; made <= lower; made += is_near ? LANES : 1) {
                const uint8_t *from[LANES];
                int16_t *sums[LANES];
                for (int i = 0; i < LANES; i++) {
                    from[i] = plane + source[made + i < count ? made + i : count - 1] * in->row;
                    sums[i] = ring + (made + i) % RING * row_w;
                }
                if (is_near) sum_quartets(plan, w, from, sums);
                else sum_pairs(columns, from[0], sums[0]);
            }
            mix_rows(ring + upper % RING * row_w, ring + lower % RING * row_w, rows->weight + 2 * y, w, to);
        }
    }
    return true;
}

INLINE void sum_taps(const Axis *a, int64_t taps, const uint8_t *restrict from, int32_t *restrict to) {
    const int32_t *restrict place = a->place;
    const int16_t *restrict weight = a->weight;
    for (int64_t x = 0; x < a->to; x++, place += taps, weight += taps) {
        int32_t sum = 0;
        for (int64_t k = 0; k < taps; k++) sum += from[place[k]] * weight[k];
        to[x] = sum;
    }
}

/* Rows of sums become a row of pixels, rounded once: vlineResize of the exact linear filter, VResizeCubic and
 * VResizeLanczos4. */
static void mix_sums(const int32_t *const *from, const int16_t *weight, int64_t taps, int bits, int64_t begin,
                     int64_t width, uint8_t *restrict to) {
    for (int64_t x = begin; x < width; x++) {
        int32_t total = 1 << (bits - 1);
        for (int64_t k = 0; k < taps; k++) total += from[k][x] * weight[k];
        to[x] = (uint8_t)clipped(total >> bits, 256);
    }
}

/* VResizeCubicVec_32s8u: in float32, for whole groups of eight values. */
static void mix_floats(const int32_t *const *from, const int16_t *weight, int64_t width, uint8_t *restrict to) {
    const float part = 1.0f / (1 << 2 * COEF_BITS);
    const float a = weight[0] * part, b = weight[1] * part, c = weight[2] * part, d = weight[3] * part;
    const int32_t *restrict first = from[0], *restrict second = from[1];
    const int32_t *restrict third = from[2], *restrict last = from[3];
    for (int64_t x = 0; x < width; x++) {
        const float sum = (float)first[x] * a + ((float)second[x] * b + ((float)third[x] * c + (float)last[x] * d));
        to[x] = (uint8_t)clipped((int64_t)rintf(sum), 256);
    }
}

/* Columns of channel c that are among whole groups of eight values. */
static int64_t grouped(const Op *op, const Image *in, int32_t c, int64_t made) {
    const int64_t values = (int64_t)op->resize.width * in->channels / 8 * 8;
    const int64_t columns = (values - c + in->channels - 1) / in->channels - op->resize.first_column;
    return columns < 0 ? 0 : columns < made ? columns : made;
}

static bool resize_exactly(const Op *op, const Axis *rows, const Axis *columns, int bits, const Image *in, const Image *out,
                           Scratch *scratch) {
    const int64_t w = out->width, taps = rows->taps, top = rows->place[0];
    const int64_t height = rows->place[rows->to * taps - 1] + 1 - top;
    int32_t *narrow = take(scratch, SLOT_WORK_2, height * w * (int64_t)sizeof(int32_t));
    if (!narrow) return false;
    for (int32_t c = 0; c < in->channels; c++) {
        const uint8_t *plane = in->data + c * in->plane + top * in->row;
        uint8_t *to = out->data + c * out->plane;
        for (int64_t y = 0; y < height; y++) {
            const uint8_t *from = plane + y * in->row;
            int32_t *sums = narrow + y * w;
            if (taps == 2) sum_taps(columns, 2, from, sums);
            else if (taps == CUBIC_TAPS) sum_taps(columns, CUBIC_TAPS, from, sums);
            else sum_taps(columns, LANCZOS_TAPS, from, sums);
        }
        const int64_t floats = taps == CUBIC_TAPS ? grouped(op, in, c, w) : 0;
        for (int64_t y = 0; y < rows->to; y++, to += w) {
            const int32_t *from[LANCZOS_TAPS];
            const int16_t *weight = rows->weight + y * taps;
            for (int64_t k = 0; k < taps; k++) from[k] = narrow + (rows->place[y * taps + k] - top) * w;
            if (floats) mix_floats(from, weight, floats, to);
            mix_sums(from, weight, taps, bits, floats, w, to);
        }
    }
    return true;
}

/* Averages of blocks of whole pixels: ResizeAreaFast_Invoker, which rounds blocks of 2 x 2 up, and others to even */

/* The factor by which an axis shrinks, if it is a whole number; otherwise 0. */
static int64_t whole_scale(int64_t from, int64_t to) {
    const double scale = cv_scale(from, to), whole = rint(scale);
    return fabs(scale - whole) < DBL_EPSILON && from % to == 0 ? (int64_t)whole : 0;
}

static bool has_blocks(const Op *op, const Image *in) {
    const int64_t high = whole_scale(in->height, op->resize.height), wide = whole_scale(in->width, op->resize.width);
    return op->resize.interpolation == CV_AREA ? high && wide : high == 2 && wide == 2;
}

static bool average_blocks(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t high = in->height / op->resize.height, wide = in->width / op->resize.width, w = out->width;
    const uint8_t *first = in->data + op->resize.first_row * high * in->row + op->resize.first_column * wide;
    uint32_t *sums = take(scratch, SLOT_WORK, w * wide * (int64_t)sizeof(uint32_t));
    if (!sums) return false;
    const float share = 1 / (float)(high * wide);
    for (int64_t c = 0; c < in->channels; c++)
        for (int64_t y = 0; y < out->height; y++) {
            const uint8_t *from = first + c * in->plane + y * high * in->row, *next = from + in->row;
            uint8_t *restrict to = out->data + c * out->plane + y * w;
            if (high == 2 && wide == 2) {
                for (int64_t x = 0; x < w; x++)
                    to[x] = (uint8_t)((from[2 * x] + from[2 * x + 1] + next[2 * x] + next[2 * x + 1] + 2) >> 2);
                continue;
            }
            memset(sums, 0, (size_t)(w * wide) * sizeof(uint32_t));
            for (int64_t k = 0; k < high; k++, from += in->row)
                for (int64_t x = 0; x < w * wide; x++) sums[x] += from[x];
            for (int64_t x = 0; x < w; x++) {
                int64_t sum = 0;
                for (int64_t k = 0; k < wide; k++) sum += sums[x * wide + k];
                to[x] = (uint8_t)rintf((float)sum * share);
            }
        }
    return true;
}

/* INTER_AREA averages only where neither side grows. */
static bool averages(const Op *op, const Image *in) {
    return op->resize.interpolation == CV_AREA && in->height >= op->resize.height && in->width >= op->resize.width;
}

bool resizes_whole(const Op *op, const Image *in) {
    const bool is_small = in->height < CUBIC_TAPS || in->width < CUBIC_TAPS || in->channels == 2; /* not for IPP */
    if (op->resize.interpolation == CV_IPP_CUBIC) return is_small;
    return has_blocks(op, in) || !averages(op, in);
}

/* As many rows and columns of the resized image as `out` has, from op->resize.first_row and first_column on; `in` is the box. */
bool resize_whole(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int32_t filter = op->resize.interpolation, height = op->resize.height, width = op->resize.width;
    const bool is_linear = filter == CV_LINEAR || filter == CV_AREA, is_exact = filter == CV_LINEAR_EXACT;
    const bool is_cubic = filter == CV_CUBIC || filter == CV_IPP_CUBIC;
    if (is_linear && has_blocks(op, in)) return average_blocks(op, in, out, scratch);
    const int64_t taps = filter == CV_LANCZOS ? LANCZOS_TAPS : is_cubic ? CUBIC_TAPS : 2;
    const int64_t made = taps * ((int64_t)out->height + out->width);
    int32_t *memory = take(scratch, SLOT_WORK, made * (int64_t)(sizeof(int32_t) + sizeof(int16_t)));
    if (!memory) return false;
    int16_t *weights = (int16_t *)(memory + made);
    const Axis rows = {in->height, out->height, taps, memory, weights};
    const Axis columns = {in->width, out->width, taps, memory + taps * out->height, weights + taps * out->height};
    if (is_exact) {
        weigh_exactly(&rows, height, op->resize.first_row), weigh_exactly(&columns, width, op->resize.first_column);
        return resize_exactly(op, &rows, &columns, 2 * EXACT_BITS, in, out, scratch);
    }
    weigh(&rows, height, op->resize.first_row, filter == CV_AREA, false);
    weigh(&columns, width, op->resize.first_column, filter == CV_AREA, true);
    if (is_linear) return resize_linear(&rows, &columns, in, out, scratch);
    return resize_exactly(op, &rows, &columns, 2 * COEF_BITS, in, out, scratch);
}
