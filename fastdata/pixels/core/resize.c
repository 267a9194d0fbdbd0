/* Kernels of OP_RESIZE: boxes of images resized with the pixels of Pillow's Image.resize, of torch's interpolate, or of those
 * filters of OpenCV's resize that use floats (cv_resize.c has the ones that use integers).
 *
 * All of them are separable: along an axis each output pixel has a first input pixel, and weights from there on. Integer
 * weights (Pillow: 22 bits after the point; torch, uint8: as many as fit into an int16) are summed exactly in int32, then
 * rounded, shifted and clipped to uint8 after each axis. Weights of 22 bits are split into high * 2048 + low, because a 16-bit
 * multiply-add instruction takes two pixels at once. The pass along rows makes 16 columns of LANES rows at a time; each
 * 128-bit lane of a vector has pixels of another row. A byte shuffle collects the pixels for four columns, or for one if they
 * are far apart. Fused products would change the weights from Pillow's: build with -ffp-contract=off.
 */
#include "core.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

#define PI 3.14159265358979323846 /* C11 does not define it */

enum { LOW_BITS = 11, LOW_MASK = (1 << LOW_BITS) - 1, PIL_BITS = 22, TORCH_MOST_BITS = 22 };
enum { BLOCK = 16, PADDING = 64, STRIPE = 8 }; /* columns at a time; alignment of rows; rows at a time */

/* One axis: `from` pixels become `to` pixels; after `cut`, both count only the part that is made. Shapes of the tables: start,
 * count, center and total (to); weight (taps, stride); low and high (steps, stride), with two taps in each entry. */
typedef struct {
    int64_t from, to, stride, taps, steps;
    int32_t bits, *start, *count;
    uint32_t *low, *high; /* 16 bits of each tap */
    bool wide, single;    /* wide: weights need `high`, too; single: low and high are float32 weights of even and odd taps */
    double *center, *total, *weight;
} Axis;

INLINE double sinc(double x) { return x == 0 ? 1 : sin(x * PI) / (x * PI); }

INLINE double cubic(double x, double a) {
    return x < 1 ? ((a + 2) * x - (a + 3)) * x * x + 1 : x < 2 ? ((a * x - 5 * a) * x + 8 * a) * x - 4 * a : 0;
}

double support_of(int filter) {
    switch (filter) {
    case BOX: return 0.5;
    case BICUBIC: case CV_CUBIC: case CV_IPP_CUBIC: return 2;
    case LANCZOS: return 3;
    case CV_LANCZOS: return 4;
    default: return 1;
    }
}

/* The largest possible number of taps. */
static int64_t reach_of(int64_t from, int64_t to, int filter) {
    const double scale = (double)from / to;
    return 2 * (int64_t)ceil(support_of(filter) * (scale < 1 ? 1 : scale)) + 1;
}

/* precompute_coeffs of Pillow's Resample.c; _compute_indices_min_size_weights_aa of torch's UpSampleKernel.cpp, which computes
 * in float32 for float32 images (single). */
INLINE void weigh_smooth(Axis *a, int filter, bool single) {
#define REAL(x) (single ? (double)(float)(x) : (double)(x))
    const int64_t n = a->to, reach = reach_of(a->from, a->to, filter);
    const double scale = REAL((double)a->from / a->to), stretch = scale < 1 ? 1 : scale;
    const double support = REAL(support_of(filter) * stretch), inverse = REAL(1 / stretch);
    int32_t *restrict start = a->start, *restrict count = a->count;
    double *restrict center = a->center, *restrict total = a->total;
    a->taps = 0;
    for (int64_t i = 0; i < n; i++) {
        double c = center[i] = REAL(scale * (i + 0.5));
        int32_t first = (int32_t)(REAL(c - support) + 0.5), last = (int32_t)(REAL(c + support) + 0.5);
        start[i] = first < 0 ? 0 : first;
        count[i] = (last > a->from ? (int32_t)a->from : last) - start[i];
        count[i] = count[i] > reach ? (int32_t)reach : count[i];
        total[i] = 0;
        if (count[i] > a->taps) a->taps = count[i];
    }
#define WEIGH(expression)                                                                                              \
    for (int32_t k = 0; k < a->taps; k++) {                                                                            \
        double *restrict w = a->weight + k * n;                                                                        \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const double s = REAL((REAL(k + start[i] - center[i]) + 0.5) * inverse);                                   \
            w[i] = k < count[i] ? REAL(expression) : 0;                                                                \
            total[i] = REAL(total[i] + w[i]);                                                                          \
        }                                                                                                              \
    }
    switch (filter) {
    case BOX: WEIGH(s > -0.5 && s <= 0.5 ? 1 : 0) break;
    case BILINEAR: WEIGH(fabs(s) < 1 ? 1 - fabs(s) : 0) break;
    case HAMMING: WEIGH(fabs(s) >= 1 ? 0 : s == 0 ? 1 : sinc(fabs(s)) * (0.54f + 0.46f * cos(fabs(s) * PI))) break;
    case BICUBIC: WEIGH(cubic(fabs(s), -0.5)) break;
    default: WEIGH(-3 <= s && s < 3 ? sinc(s) * sinc(s / 3) : 0) break;
    }
    for (int32_t k = 0; k < a->taps; k++) {
        double *restrict w = a->weight + k * n;
        for (int64_t i = 0; i < n; i++) w[i] = REAL(w[i] / (total[i] != 0 ? total[i] : 1));
    }
}

/* computeResizeAreaTab of OpenCV's resize.cpp: the shares of the input pixels that an output pixel covers. */
static void weigh_areas(Axis *a) {
    const int64_t n = a->to, reach = reach_of(a->from, a->to, CV_AREA);
    const double scale = cv_scale(a->from, a->to);
    memset(a->weight, 0, sizeof(double) * (size_t)(reach * n));
    a->taps = 0;
    for (int64_t i = 0; i < n; i++) {
        const double begin = (double)i * scale, end = begin + scale, length = fmin(scale, (double)a->from - begin);
        const int64_t last = (int64_t)fmin(floor(end), (double)a->from - 1);
        const int64_t first = (int64_t)fmin(ceil(begin), (double)last);
        int64_t count = 0;
        double *weight = a->weight + i;
        const bool has_part = (double)first - begin > 1e-3;
        a->start[i] = (int32_t)(has_part && first > 0 ? first - 1 : first);
        if (has_part) weight[n * count++] = (float)(((double)first - begin) / length);
        for (int64_t k = first; k < last && count < reach; k++) weight[n * count++] = (float)(1 / length);
        const double rest = end - (double)last;
        if (rest > 1e-3 && count < reach) weight[n * count++] = (float)(fmin(fmin(rest, 1), length) / length);
        a->count[i] = (int32_t)count;
        if (count > a->taps) a->taps = count;
    }
}

/* OpenCV's cubic resize as Intel's IPP computes it: always from the four nearest pixels, even if the image shrinks. Outside the
 * image, the pixel at the edge is used. */
static void weigh_ipp_cubic(Axis *a) {
    const int64_t n = a->to, taps = a->from < 4 ? a->from : 4;
    const double scale = cv_scale(a->from, a->to);
    memset(a->weight, 0, sizeof(double) * 4 * (size_t)n);
    a->taps = taps;
    for (int64_t i = 0; i < n; i++) {
        const double place = ((double)i + 0.5) * scale - 0.5, base = floor(place);
        const int64_t first = (int64_t)base - 1, most = a->from - taps;
        a->start[i] = (int32_t)(first < 0 ? 0 : first > most ? most : first), a->count[i] = (int32_t)taps;
        for (int64_t k = 0; k < 4; k++) {
            const int64_t at = first + k < 0 ? 0 : first + k >= a->from ? a->from - 1 : first + k;
            a->weight[(at - a->start[i]) * n + i] += cubic(fabs(place - base + 1 - (double)k), -0.75);
        }
    }
}

INLINE int32_t whole(double weight, int bits) {
    return (int32_t)(weight * (1 << bits) + (weight < 0 ? -0.5 : 0.5));
}

/* normalize_coeffs_8bpc of Pillow's Resample.c; _compute_index_ranges_int16_weights of torch's UpSampleKernel.cpp. */
static void round_weights(Axis *a) {
    const int64_t n = a->to;
    for (int64_t j = 0; a->single && j < a->steps; j++)
        for (int64_t i = 0; i < n; i++) {
            const float pair[2] = {(float)a->weight[2 * j * n + i], (float)a->weight[(2 * j + 1) * n + i]};
            memcpy(a->low + j * n + i, pair, 4), memcpy(a->high + j * n + i, pair + 1, 4);
        }
    if (a->single) return;
    const uint32_t mask = a->wide ? LOW_MASK : 0xffff;
    a->bits = PIL_BITS;
    if (!a->wide) {
        double most = 0;
        for (int64_t i = 0; i < a->taps * n; i++) most = a->weight[i] > most ? a->weight[i] : most;
        for (a->bits = 0; a->bits < TORCH_MOST_BITS; a->bits++)
            if ((int32_t)(0.5 + most * (1 << (a->bits + 1))) >= 1 << 15) break;
    }
    for (int64_t j = 0; j < a->steps; j++) {
        const double *restrict even = a->weight + 2 * j * n, *restrict odd = even + n;
        uint32_t *restrict low = a->low + j * n, *restrict high = a->high + j * n;
        for (int64_t i = 0; i < n; i++) {
            const int32_t w0 = whole(even[i], a->bits), w1 = whole(odd[i], a->bits);
            low[i] = ((uint32_t)w0 & mask) | ((uint32_t)w1 & mask) << 16;
            high[i] = ((uint32_t)(w0 >> LOW_BITS) & 0xffff) | (uint32_t)(w1 >> LOW_BITS) << 16;
        }
    }
}

static int64_t axis_bytes(int64_t from, int64_t to, int filter) {
    return to * (12 * (reach_of(from, to, filter) + 3) + 24) + PADDING;
}

static void *weigh(Axis *a, void *memory, int64_t from, int64_t to, const Op *op) {
    const int32_t filter = op->resize.interpolation, domain = op->resize.domain;
    const int64_t reach = reach_of(from, to, filter) + 3; /* even, and at least four */
    *a = (Axis){.from = from, .to = to, .stride = to, .weight = memory};
    a->wide = domain == PIL_DOMAIN, a->single = domain == V1_DOMAIN;
    a->center = a->weight + reach * to, a->total = a->center + to;
    a->start = (int32_t *)(a->total + to), a->count = a->start + to;
    a->low = (uint32_t *)(a->count + to), a->high = a->low + reach / 2 * to;
    if (filter == CV_AREA) weigh_areas(a);
    else if (filter == CV_IPP_CUBIC) weigh_ipp_cubic(a);
    else a->single ? weigh_smooth(a, filter, true) : weigh_smooth(a, filter, false);
    a->steps = (a->taps + 1) / 2;
    if (a->taps & 1) memset(a->weight + a->taps * to, 0, sizeof(double) * to);
    round_weights(a);
    return (char *)memory + axis_bytes(from, to, filter) / PADDING * PADDING;
}

/* Keep only `count` output pixels, from `first` on, and the input pixels that they need. Returns the first of these. */
static int64_t cut(Axis *a, int64_t first, int64_t count) {
    a->start += first, a->count += first, a->low += first, a->high += first, a->weight += first, a->to = count;
    const int64_t begin = a->start[0];
    a->from = a->start[count - 1] + a->count[count - 1] - begin;
    for (int64_t i = 0; i < count; i++) a->start[i] -= (int32_t)begin;
    return begin;
}

/* One step of the pass along rows, with eight products: two taps of each of four columns, or, if pixels are far apart (`far`),
 * eight taps of one column. */
typedef struct {
    uint32_t index[4], low[4], high[4]; /* the bytes to shuffle, among 16; their weights */
    int32_t base;                       /* place of the 16 bytes in the row */
    bool fresh;                         /* the place differs from that of the step before */
} Taps;

/* Plan the steps of all columns; the last column is repeated to fill its block. Rows have `end` bytes, at least 16. False if the
 * pixels of four columns are too far apart for 16 bytes. */
static bool plan_rows(const Axis *a, Taps *step, bool far, int64_t end) {
    const int64_t n = a->to, across = far ? 1 : 4, steps = far ? (a->steps + 3) / 4 : a->steps;
    for (int64_t x = 0; x < n; x += BLOCK) {
        int64_t base = INT32_MIN;
        for (int64_t i = x; i < x + BLOCK; i += across)
            for (int64_t j = 0; j < steps; j++, step++) {
                const int64_t k = (far ? 8 : 2) * j, first = a->start[i < n ? i : n - 1] + k;
                const int64_t last = far ? first + 7 : a->start[i + 3 < n ? i + 3 : n - 1] + k + 1;
                step->fresh = first < base || last > base + 15;
                if (step->fresh) base = first < end - 16 ? first : end - 16; /* weights past the end are 0 */
                if (last > base + 15 && base < end - 16) return false;
                step->base = (int32_t)base;
                for (int64_t q = 0; q < 4; q++) {
                    const int64_t column = far ? (i < n ? i : n - 1) : i + q < n ? i + q : n - 1;
                    const int64_t pair = far ? 4 * j + q : j, at = (pair < a->steps ? pair : 0) * a->stride + column;
                    const uint32_t place = (uint32_t)(a->start[column] + 2 * pair - base) & 15;
                    step->index[q] = 0x80018000 + place * 0x10001; /* bytes place, none, place + 1, none */
                    step->low[q] = pair < a->steps ? a->low[at] : 0, step->high[q] = pair < a->steps ? a->high[at] : 0;
                }
            }
    }
    return true;
}

INLINE Vec finish(Vec low, Vec high, bool wide, int bits) {
    return wide ? (low + (Vec)((Bits)high << LOW_BITS)) >> PIL_BITS : low >> bits;
}
INLINE Vec pack(const Vec v[4]) { return X(packus_epi16, X(packs_epi32, v[0], v[1]), X(packs_epi32, v[2], v[3])); }

INLINE Vec add_across(const Vec v[4]) { /* each lane of the result has the sums of the same lane of the four vectors */
    const Vec a = X(unpacklo_epi32, v[0], v[1]) + X(unpackhi_epi32, v[0], v[1]);
    const Vec b = X(unpacklo_epi32, v[2], v[3]) + X(unpackhi_epi32, v[2], v[3]);
    return X(unpacklo_epi64, a, b) + X(unpackhi_epi64, a, b);
}

/* The pass along rows; `out` must have room for whole blocks. */
INLINE void run_rows(const Axis *a, const Taps *plan, bool far, int64_t steps, bool wide, const uint8_t *in,
                     int64_t in_row, uint8_t *out, int64_t out_row, int64_t height) {
    const Vec zero = {0}, half = zero + (1 << a->bits >> 1);
    for (int64_t top = 0; top < height; top += STRIPE) {
        const int64_t bottom = top + STRIPE < height ? top + STRIPE : height;
        const Taps *block = plan, *s = plan;
        for (int64_t x = 0; x < a->to; x += BLOCK, block = s)
            for (int64_t y = top; y < bottom; y += LANES) {
                const uint8_t *from[LANES];
                uint8_t *to[LANES];
                for (int i = 0; i < LANES; i++) {
                    const int64_t row = y + i < bottom ? y + i : bottom - 1;
                    from[i] = in + row * in_row, to[i] = out + row * out_row;
                    __builtin_prefetch(from[i] + STRIPE * in_row + block->base); /* 175 us instead of 240 */
                }
                Vec sum[4], window = zero;
                s = block;
                for (int i = 0; i < 4; i++) {
                    Vec low[4] = {zero, zero, zero, zero}, high[4] = {zero, zero, zero, zero};
                    for (int q = 0; q < (far ? 4 : 1); q++)
                        for (const Taps *end = s + steps; s < end; s++) {
                            if (s->fresh) window = gather(from, s->base);
                            const Vec pixels = X(shuffle_epi8, window, SPREAD(AT(Quad, s->index)));
                            low[q] += X(madd_epi16, pixels, SPREAD(AT(Quad, s->low)));
                            if (wide) high[q] += X(madd_epi16, pixels, SPREAD(AT(Quad, s->high)));
                        }
                    if (far) low[0] = add_across(low), high[0] = add_across(high);
                    sum[i] = finish(half + low[0], high[0], wide, a->bits);
                }
                scatter(pack(sum), to, x);
            }
    }
}

static void resize_rows(const Axis *a, const Taps *plan, bool far, const uint8_t *in, int64_t in_row, uint8_t *out,
                        int64_t out_row, int64_t height) {
#define RUN(far, steps, wide) run_rows(a, plan, far, steps, wide, in, in_row, out, out_row, height)
    if (far) RUN(true, (a->steps + 3) / 4, a->wide);
    else if (a->wide) a->steps == 1 ? RUN(false, 1, true) : RUN(false, a->steps, true);
    else a->steps == 1 ? RUN(false, 1, false) : RUN(false, a->steps, false);
#undef RUN
}

INLINE uint8_t clip(int32_t x) { return x < 0 ? 0 : x > 255 ? 255 : (uint8_t)x; }

/* The pass along columns. Rows of `in` that are narrower than PADDING must be readable up to PADDING. */
INLINE void run_columns(const Axis *a, int64_t steps, bool wide, const uint8_t *in, int64_t in_row, uint8_t *out,
                        int64_t out_row, int64_t width) {
    const Vec zero = {0}, half = zero + (1 << a->bits >> 1);
    const int64_t n = a->to, size = sizeof(Vec);
    for (int64_t i = 0; i < n; i++, out += out_row) {
        const uint8_t *from = in + a->start[i] * in_row;
        const int64_t last = a->from - 1 - a->start[i];
        for (int64_t x = 0; x < width; x += size) {
            const int64_t at = x + size > width && width >= size ? width - size : x;
            Vec low[4] = {half, half, half, half}, high[4] = {zero, zero, zero, zero};
            for (int64_t j = 0; j < steps; j++) {
                const int64_t k = 2 * j < last ? 2 * j : last, k1 = 2 * j + 1 < last ? 2 * j + 1 : last;
                const Vec weight = zero + (int32_t)a->low[j * a->stride + i];
                const Vec weight1 = zero + (int32_t)a->high[j * a->stride + i];
                const Vec even = AT(Vec, from + k * in_row + at), odd = AT(Vec, from + k1 * in_row + at);
                const Vec left = X(unpacklo_epi8, even, odd), right = X(unpackhi_epi8, even, odd);
                const Vec pixels[4] = {X(unpacklo_epi8, left, zero), X(unpackhi_epi8, left, zero),
                                       X(unpacklo_epi8, right, zero), X(unpackhi_epi8, right, zero)};
                for (int q = 0; q < 4; q++) {
                    low[q] += X(madd_epi16, pixels[q], weight);
                    if (wide) high[q] += X(madd_epi16, pixels[q], weight1);
                }
            }
            for (int q = 0; q < 4; q++) low[q] = finish(low[q], high[q], wide, a->bits);
            const Vec result = pack(low);
            if (at + size <= width) memcpy(out + at, &result, sizeof result);
            else memcpy(out + at, &result, (size_t)(width - at));
        }
    }
}

static void resize_columns(const Axis *a, const uint8_t *in, int64_t in_row, uint8_t *out, int64_t out_row,
                           int64_t width) {
#define RUN(steps, wide) run_columns(a, steps, wide, in, in_row, out, out_row, width)
    if (a->wide) a->steps == 1 ? RUN(1, true) : RUN(a->steps, true);
    else a->steps == 1 ? RUN(1, false) : RUN(a->steps, false);
#undef RUN
}

/* The pass along rows in float32; sums are in torch's order. */
static void sum_rows(const Axis *a, const Taps *plan, const uint8_t *in, int64_t in_row, float *out, int64_t out_row,
                     int64_t height) {
    for (int64_t y = 0; y < height; y += LANES) {
        const uint8_t *from[LANES];
        uint8_t *to[LANES];
        for (int i = 0; i < LANES; i++) {
            const int64_t row = y + i < height ? y + i : height - 1;
            from[i] = in + row * in_row, to[i] = (uint8_t *)(out + row * out_row);
        }
        const Taps *s = plan;
        Vec window = {0};
        for (int64_t x = 0; x < (a->to + BLOCK - 1) / BLOCK * BLOCK; x += 4) {
            Floats sum = {0};
            for (const Taps *end = s + a->steps; s < end; s++) {
                if (s->fresh) window = gather(from, s->base);
                const Bits pixels = (Bits)X(shuffle_epi8, window, SPREAD(AT(Quad, s->index)));
                sum += __builtin_convertvector((Vec)(pixels & 0xffff), Floats) * (Floats)SPREAD(AT(Quad, s->low));
                sum += __builtin_convertvector((Vec)(pixels >> 16), Floats) * (Floats)SPREAD(AT(Quad, s->high));
            }
            scatter((Vec)sum, to, 4 * x);
        }
    }
}

/* Both passes in float32, rounded once at the end, as torchvision does where torch has no kernel for uint8. `sum` has room for
 * one row of the result, and after it for H rows. `plan` is NULL if pixels are too far apart for `sum_rows`. */
static void resize_floats(const Axis *rows, const Axis *columns, const Taps *plan, const uint8_t *in, int64_t in_row,
                          float *sum, int64_t row_w, uint8_t *restrict out) {
    const int64_t w = columns->to;
    float *restrict narrow = sum + row_w;
    if (plan) sum_rows(columns, plan, in, in_row, narrow, row_w, rows->from);
    for (int64_t i = 0; !plan && i < rows->from * w; i++) {
        const int64_t x = i % w, y = i / w;
        const uint8_t *restrict from = in + y * in_row + columns->start[x];
        float total = 0;
        for (int64_t k = 0; k < columns->count[x]; k++) total += from[k] * (float)columns->weight[k * columns->stride + x];
        narrow[y * row_w + x] = total;
    }
    for (int64_t i = 0; i < rows->to; i++, out += w) {
        memset(sum, 0, sizeof(float) * w);
        for (int64_t k = 0; k < rows->count[i]; k++) {
            const float *restrict from = narrow + (rows->start[i] + k) * row_w;
            const float weight = (float)rows->weight[k * rows->stride + i];
            for (int64_t x = 0; x < w; x++) sum[x] += from[x] * weight;
        }
        for (int64_t x = 0; x < w; x++) out[x] = clip((int32_t)rintf(sum[x] < -1 ? -1 : sum[x] > 256 ? 256 : sum[x]));
    }
}

/* The input pixel of each output pixel. Pillow: ImagingScaleAffine of Geometry.c. torch: nearest_idx, HelperInterpNearestExact,
 * and for small results nearest_neighbor_exact_compute_source_index (see _use_vectorized_kernel_cond_2d). OpenCV: resizeNN of
 * resize.cpp, and before OpenCV 5 resizeNN_bitexact; the exact filter of OpenCV 5 is equal to Pillow's. */
static void index_nearest(int32_t *index, int64_t from, int64_t to, int filter, int domain, bool small) {
    const double step = (double)from / to;
    const float scale = (float)step;
    const int64_t fixed = ((from << 16) + to / 2) / to; /* in units of 1/65536 of a pixel */
    double at = step * 0.5;
    for (int64_t i = 0; i < to; i++, at += step) {
        const float fused = (float)((double)scale * (i + 0.5) - 0.5), exact = (float)((double)scale * (i + 0.5));
        const float central = small ? exact : (float)((fused < 0 ? 0 : fused) + 0.5);
        double place = domain == PIL_DOMAIN ? at : filter == NEAREST ? (float)i * scale : central;
        if (filter == CV_NEAREST) place = (double)i * cv_scale(from, to);
        if (filter == CV_NEAREST_EXACT) place = (double)((fixed * i + fixed / 2 - from % 2) >> 16);
        index[i] = place < from - 1 ? (int32_t)place : (int32_t)from - 1;
    }
}

static bool resize_nearest(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int32_t filter = op->resize.interpolation, domain = op->resize.domain;
    const int64_t whole_h = op->resize.height, whole_w = op->resize.width, h = out->height, w = out->width;
    int32_t *rows = take(scratch, SLOT_WORK, 4 * (whole_h + whole_w)), *columns = rows + whole_h;
    if (!rows) return false;
    index_nearest(rows, in->height, whole_h, filter, domain, whole_h + whole_w <= 128);
    index_nearest(columns, in->width, whole_w, filter, domain, whole_h + whole_w <= 128);
    rows += op->resize.first_row, columns += op->resize.first_column;
    for (int c = 0; c < in->channels; c++)
        for (int64_t y = 0; y < h; y++) {
            const uint8_t *from = in->data + c * in->plane + rows[y] * in->row;
            uint8_t *to = out->data + (c * h + y) * w;
            if (y && rows[y] == rows[y - 1]) {
                memcpy(to, to - w, (size_t)w);
                continue;
            }
            for (int64_t x = 0; x < w; x++) to[x] = from[columns[x]];
        }
    return true;
}

INLINE int64_t padded(int64_t x) { return (x + PADDING - 1) / PADDING * PADDING; }

/* Make as many rows and columns of the resized image as `out` has, from op->resize.first_row and first_column on; `in` is the
 * box. If one side does not change, `out` must have the whole image. Pillow: ImagingResampleInner of Resample.c, which from
 * version 13 on takes columns first if much height is lost; Image.resize multiplies images of 2 and 4 channels by their alpha
 * before that (rgbA2rgba, rgba2rgbA of Convert.c). */
bool resize(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t H = in->height, W = in->width, whole_h = op->resize.height, whole_w = op->resize.width;
    const int64_t h = out->height, w = out->width, last = in->channels - 1;
    const int32_t filter = op->resize.interpolation, domain = op->resize.domain;
    const bool is_nearest = filter == NEAREST || filter == NEAREST_EXACT;
    if (is_nearest || filter == CV_NEAREST || filter == CV_NEAREST_EXACT) return resize_nearest(op, in, out, scratch);
    if (filter >= CV_NEAREST && resizes_whole(op, in)) return resize_whole(op, in, out, scratch);
    const bool single = domain == V1_DOMAIN, alpha = domain == PIL_DOMAIN && last % 2, copied = alpha || W < PADDING;
    const bool chooses = op->resize.chooses_order && domain == PIL_DOMAIN;
    const bool columns_first = chooses && H > whole_h && H - whole_h > 2 * (W - whole_w);
    const bool along_columns = H != whole_h || single, along_rows = W != whole_w || single;
    const int64_t row_W = padded(W), row_w = padded(w), copy_bytes = copied ? H * row_W : 0;
    const int64_t plan_bytes = (w / BLOCK + 1) * (2 * reach_of(W, whole_w, filter) + 32) * (int64_t)sizeof(Taps);
    void *memory =
        take(scratch, SLOT_WORK, axis_bytes(H, whole_h, filter) + axis_bytes(W, whole_w, filter) + plan_bytes);
    const int64_t shorter_bytes = columns_first ? h * row_W : 0, narrower_bytes = (H + 1) * row_w * (single ? 4 : 1);
    uint8_t *copy = take(scratch, SLOT_WORK_2, copy_bytes + shorter_bytes + narrower_bytes);
    if (!memory || !copy) return false;
    uint8_t *shorter = copy + copy_bytes, *narrower = shorter + shorter_bytes;
    Axis rows, columns; /* the vertical and the horizontal axis */
    bool far = false, near = false;
    int64_t top = 0, left = 0, height = H; /* the part of the box that is read */
    if (along_columns) {
        memory = weigh(&rows, memory, H, whole_h, op);
        top = cut(&rows, op->resize.first_row, h), height = rows.from;
    }
    Taps *plan = memory;
    if (along_rows) {
        const int64_t end = copied || columns_first ? row_W : W;
        plan = weigh(&columns, memory, W, whole_w, op);
        left = cut(&columns, op->resize.first_column, w);
        near = plan_rows(&columns, plan, false, end - left);
        far = !near && !single && plan_rows(&columns, plan, true, end - left);
    }
    for (int64_t c = 0; c <= last; c++) {
        const uint8_t *from = in->data + c * in->plane;
        uint8_t *to = out->data + c * h * w;
        int64_t row = in->row;
        for (int64_t y = 0; copied && y < H; y++) {
            const uint8_t *alphas = from + (last - c) * in->plane + y * row;
            memcpy(copy + y * row_W, from + y * row, (size_t)W);
            for (int64_t x = 0; alpha && c < last && x < W; x++) {
                const uint32_t product = (uint32_t)from[y * row + x] * alphas[x] + 128;
                copy[y * row_W + x] = (uint8_t)(((product >> 8) + product) >> 8);
            }
        }
        if (copied) from = copy, row = row_W;
        from += top * row;
        if (columns_first) resize_columns(&rows, from, row, shorter, row_W, W), from = shorter, row = row_W;
        from += left;
        if (single) {
            resize_floats(&rows, &columns, near ? plan : NULL, from, row, (float *)narrower, row_w, to);
            continue;
        }
        if (along_rows) resize_rows(&columns, plan, far, from, row, narrower, row_w, columns_first ? h : height);
        if (along_rows) from = narrower, row = row_w;
        if (along_columns && !columns_first) resize_columns(&rows, from, row, to, w, w);
        else for (int64_t y = 0; y < h; y++) memcpy(to + y * w, from + y * row, (size_t)w);
    }
    for (int64_t i = 0; alpha && i < last * h * w; i++) {
        const uint8_t alpha_i = out->data[last * h * w + i % (h * w)];
        if (alpha_i) out->data[i] = clip(255 * out->data[i] / alpha_i);
    }
    return true;
}
