/* OpenCV's warpAffine, warpPerspective and remap on uint8: the place in the image for each pixel, and the value there.
 *
 * OpenCV has two programs. The older one rounds places to 1/32 of a pixel (modules/imgproc/src/imgwarp.cpp). The newer one
 * computes in floats (warp_kernels.simd.hpp), as many pixels at a time as a vector of the processor holds (`lanes`). It uses
 * another formula for the pixels at the end of a row. Here the image is first copied to pixels of four bytes, with EDGE more on
 * each side as the border mode asks, so that the loops over a row check no border. Rows are processed in runs of pixels.
 */
#include "core.h"

#include <math.h>
#include <string.h>

enum { RUN = 128, BLOCK = 16, EDGE = 2, TAPS = 4, SHARES = 32 };

typedef struct {
    int32_t x[RUN], y[RUN];         /* the pixel at each place, or the one to the left and above */
    int32_t right[RUN], below[RUN]; /* shares of the next pixels, in units of 1 / SHARES */
    float dx[RUN], dy[RUN];         /* places in floats; then the same shares in floats */
    int32_t at[RUN];                /* offset of the upper left pixel */
    uint32_t tap[TAPS][RUN];
} Run;

typedef struct {
    const CvWarp *how;
    const Op *op;
    FindPlaces *places;             /* NULL: the op is OP_CV_WARP, whose map gives them */
    const void *map_of_places;
    int64_t height, width, stride;  /* of the image that is read */
    int64_t wanted;                 /* columns that are made */
    uint32_t *pixels;               /* pixel (0, 0), with EDGE around all */
    const int32_t *along_x, *along_y; /* how far each column moves a place, in 1/1024 of a pixel */
    float map[9];
} Work;

INLINE int32_t clamp(int32_t value, int32_t low, int32_t high) {
    return value < low ? low : value > high ? high : value;
}

/* To the nearest, halves to the even number. */
INLINE int32_t round_double(double value) {
    const double bounded = value > -2147483648.0 ? (value < 2147483647.0 ? value : 2147483647.0) : -2147483648.0;
    return (int32_t)rint(bounded);
}

/* borderInterpolate of modules/core/src/copy.cpp: the pixel of a side of n that stands for p; -1: the fill. */
static int32_t fold(int32_t p, int32_t n, int32_t border) {
    if (p >= 0 && p < n) return p;
    if (border == CV_REPLICATE) return p < 0 ? 0 : n - 1;
    if (border != CV_REFLECT && border != CV_REFLECT_101 && border != CV_WRAP) return -1;
    const int64_t kept = border == CV_REFLECT_101, period = border == CV_WRAP ? n : n > kept ? 2 * ((int64_t)n - kept) : 1;
    const int64_t rest = (p % period + period) % period;
    return (int32_t)(rest < n ? rest : 2 * (int64_t)n - kept - 1 - rest);
}

/* Places of n pixels */

/* The older program holds places in 16 bits. */
INLINE int32_t short_of(int32_t place) { return clamp(place, INT16_MIN, INT16_MAX); }

/* WarpAffineInvoker: in 1/1024 of a pixel, then rounded. */
static void place_fixed(const Work *work, int64_t first, int64_t row, int64_t n, Run *restrict run) {
    const double *map = work->op->cv_warp.map, y = (double)row;
    const bool nearest = work->how->interpolation == NEAREST;
    const uint32_t half = nearest ? 512 : 16;
    const uint32_t x0 = (uint32_t)round_double((map[1] * y + map[2]) * 1024) + half;
    const uint32_t y0 = (uint32_t)round_double((map[4] * y + map[5]) * 1024) + half;
    const int32_t *restrict along_x = work->along_x + first, *restrict along_y = work->along_y + first;
    for (int64_t i = 0; i < n; i++) {
        const int32_t x = (int32_t)(x0 + (uint32_t)along_x[i]), y1 = (int32_t)(y0 + (uint32_t)along_y[i]);
        run->x[i] = short_of(x >> 10), run->y[i] = short_of(y1 >> 10);
        run->right[i] = x >> 5 & (SHARES - 1), run->below[i] = y1 >> 5 & (SHARES - 1);
    }
}

/* WarpPerspectiveInvoker, which works in blocks of columns and adds to the place where a block begins. */
static void place_fixed_perspective(const Work *work, const Image *out, int64_t first, int64_t row, int64_t n,
                                    Run *restrict run) {
    const double *map = work->op->cv_warp.map, y = (double)row;
    const bool nearest = work->how->interpolation == NEAREST;
    const double unit = nearest ? 1 : SHARES;
    const int64_t rows = out->height < 16 ? out->height : 16, columns = 1024 / rows;
    for (int64_t i = 0; i < n; i++) {
        const double start = (double)((first + i) / columns * columns), x = (double)((first + i) % columns);
        const double z = map[6] * start + map[7] * y + map[8] + map[6] * x, w = z != 0 ? unit / z : 0;
        const int32_t px = round_double((map[0] * start + map[1] * y + map[2] + map[0] * x) * w);
        const int32_t py = round_double((map[3] * start + map[4] * y + map[5] + map[3] * x) * w);
        run->x[i] = short_of(nearest ? px : px >> 5), run->y[i] = short_of(nearest ? py : py >> 5);
        run->right[i] = px & (SHARES - 1), run->below[i] = py & (SHARES - 1);
    }
}

INLINE float product(float a, float b, float c, bool fuses) { return fuses ? fused(a, b, c) : a * b + c; }

/* One row of a matrix at a column: in whole vectors the terms of the image row are added first, after them last. */
INLINE float dot(const float *m, float x, float y, bool is_whole, bool fuses) {
    return is_whole ? product(x, m[0], y * m[1] + m[2], fuses) : product(x, m[0], y * m[1], fuses) + m[2];
}

INLINE void place_floats(const Work *work, int64_t column, float y, int64_t begin, int64_t end, bool is_whole, bool fuses,
                         Run *restrict run) {
    const float *m = work->map;
    for (int64_t i = begin; i < end; i++) {
        const float x = (float)((int32_t)column + (int32_t)i);
        run->dx[i] = dot(m, x, y, is_whole, fuses), run->dy[i] = dot(m + 3, x, y, is_whole, fuses);
    }
    if (!work->op->cv_warp.is_perspective) return;
    for (int64_t i = begin; i < end; i++) {
        const float w = dot(m + 6, (float)((int32_t)column + (int32_t)i), y, is_whole, fuses);
        run->dx[i] /= w, run->dy[i] /= w;
    }
}

/* Floats split into whole pixels and shares; NaN becomes a place far outside. */
static void split(bool nearest, int64_t n, Run *restrict run) {
    const float most = 1e9f, magic = 0x1.8p23f; /* rounds to even */
    for (int64_t i = 0; i < n; i++) {
        float x = run->dx[i], y = run->dy[i];
        x = x > -most ? x : -most, y = y > -most ? y : -most;
        x = x < most ? x : most, y = y < most ? y : most;
        const float left = nearest ? x + magic - magic : floorf(x), top = nearest ? y + magic - magic : floorf(y);
        run->x[i] = (int32_t)left, run->y[i] = (int32_t)top;
        run->dx[i] = x - left, run->dy[i] = y - top;
    }
}

/* RemapInvoker of the older program: floats rounded to whole pixels, or to shares. */
static void round_places(bool nearest, int64_t n, Run *restrict run) {
    const float unit = nearest ? 1 : SHARES, most = 1e9f;
    for (int64_t i = 0; i < n; i++) {
        float x = run->dx[i] * unit, y = run->dy[i] * unit;
        x = x > -most ? x : -most, y = y > -most ? y : -most;
        const int32_t px = (int32_t)rintf(x < most ? x : most), py = (int32_t)rintf(y < most ? y : most);
        run->x[i] = short_of(nearest ? px : px >> 5), run->y[i] = short_of(nearest ? py : py >> 5);
        run->right[i] = px & (SHARES - 1), run->below[i] = py & (SHARES - 1);
    }
}

static void place(const Work *work, const Image *out, int64_t first, int64_t row, int64_t n, Run *run) {
    const bool nearest = work->how->interpolation == NEAREST;
    const int64_t lanes = work->how->lanes;
    if (work->places) {
        work->places(work->map_of_places, row, first, n, run->dx, run->dy);
        if (lanes < 1) round_places(nearest, n, run);
        else split(nearest, n, run);
        return;
    }
    if (lanes < 1) {
        if (work->op->cv_warp.is_perspective) place_fixed_perspective(work, out, first, row, n, run);
        else place_fixed(work, first, row, n, run);
        return;
    }
    const int64_t left = work->wanted - work->wanted % lanes - first, whole = left < 0 ? 0 : left < n ? left : n;
    const float y = (float)(int32_t)row;
    if (work->how->fuses) place_floats(work, first, y, 0, whole, true, true, run);
    else place_floats(work, first, y, 0, whole, true, false, run);
    if (work->how->fuses) place_floats(work, first, y, whole, n, false, true, run);
    else place_floats(work, first, y, whole, n, false, false, run);
    split(nearest, n, run);
}

/* Pixels at places */

/* Offsets of places. True if all of them are in the copy with its edges; otherwise `gather_folded` must be used. */
static bool aim(const Work *work, int64_t n, Run *restrict run) {
    const int32_t border = work->how->border, stride = (int32_t)work->stride;
    const int32_t right = (int32_t)work->width, bottom = (int32_t)work->height;
    uint32_t outside = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t x = clamp(run->x[i], -EDGE, right), y = clamp(run->y[i], -EDGE, bottom);
        outside |= (uint32_t)(x ^ run->x[i]) | (uint32_t)(y ^ run->y[i]);
        run->at[i] = y * stride + x;
    }
    return !outside || border == CV_REPLICATE || !(border == CV_REFLECT || border == CV_REFLECT_101 || border == CV_WRAP);
}

INLINE void gather(const Work *work, int size, int64_t n, Run *restrict run) {
    uint32_t row[2 * RUN];
    for (int k = 0; k < size; k++) {
        const uint32_t *pixels = work->pixels + k * work->stride;
        for (int64_t i = 0; i < n; i++) memcpy(row + i * size, pixels + run->at[i], 4 * (size_t)size);
        for (int j = 0; j < size; j++)
            for (int64_t i = 0; i < n; i++) run->tap[k * size + j][i] = row[i * size + j];
    }
}

/* Move places by whole periods of the border, if some are further outside than fold_near allows. */
static void come_near(int32_t side, int32_t border, int64_t n, int32_t *restrict places) {
    const int64_t period = border == CV_WRAP ? side : 2 * (int64_t)side - (border == CV_REFLECT_101 ? 2 : 0);
    int32_t low = 0, high = 0;
    for (int64_t i = 0; i < n; i++) {
        low = places[i] < low ? places[i] : low;
        high = places[i] > high ? places[i] : high;
    }
    if (low > -side && high < 2 * (int64_t)side - 2) return;
    for (int64_t i = 0; i < n; i++) places[i] = (int32_t)(period ? (places[i] % period + period) % period : 0);
}

/* `fold` for a pixel at most one image length outside, without a division. */
INLINE int32_t fold_near(int32_t place, int32_t next, int32_t side, int32_t border) {
    const int32_t p = place + next, kept = border == CV_REFLECT_101, far = 2 * (side - 1) + 1 - kept;
    const int32_t before = border == CV_WRAP ? p + side : kept - 1 - p, behind = border == CV_WRAP ? p - side : far - p;
    return clamp(p < 0 ? before : p < side ? p : behind, 0, side - 1);
}

/* As `gather`, for places outside of the image if the border reflects or repeats it. */
static void gather_folded(const Work *work, int size, int64_t n, Run *restrict run) {
    const int32_t border = work->how->border, stride = (int32_t)work->stride;
    const int32_t height = (int32_t)work->height, width = (int32_t)work->width;
    come_near(height, border, n, run->y), come_near(width, border, n, run->x);
    for (int k = 0; k < size * size; k++) {
        for (int64_t i = 0; i < n; i++)
            run->at[i] = fold_near(run->y[i], k / size, height, border) * stride + fold_near(run->x[i], k % size, width, border);
        for (int64_t i = 0; i < n; i++) run->tap[k][i] = work->pixels[run->at[i]];
    }
}

/* FixedPtCast of imgwarp.cpp, whose weights are the products of the shares. */
static void blend_fixed(int shift, int64_t n, const Run *restrict run, uint8_t *restrict out) {
    for (int64_t i = 0; i < n; i++) {
        const int32_t a = run->tap[0][i] >> shift & 255, b = run->tap[1][i] >> shift & 255;
        const int32_t c = run->tap[2][i] >> shift & 255, d = run->tap[3][i] >> shift & 255;
        const int32_t top = SHARES * a + run->right[i] * (b - a), bottom = SHARES * c + run->right[i] * (d - c);
        out[i] = (uint8_t)((SHARES * top + run->below[i] * (bottom - top) + 512) >> 10);
    }
}

INLINE void blend_floats(int shift, bool fuses, int64_t n, const Run *restrict run, uint8_t *restrict out) {
    for (int64_t i = 0; i < n; i++) {
        const int32_t a = run->tap[0][i] >> shift & 255, b = run->tap[1][i] >> shift & 255;
        const int32_t c = run->tap[2][i] >> shift & 255, d = run->tap[3][i] >> shift & 255;
        const float top = product(run->dx[i], (float)(b - a), (float)a, fuses);
        const float bottom = product(run->dx[i], (float)(d - c), (float)c, fuses);
        out[i] = (uint8_t)(int32_t)(product(run->dy[i], bottom - top, top, fuses) + 0x1.8p23f - 0x1.8p23f);
    }
}

static void finish(const CvWarp *how, int channel, int64_t n, const Run *run, uint8_t *restrict out) {
    const int shift = 8 * channel;
    if (how->interpolation == NEAREST)
        for (int64_t i = 0; i < n; i++) out[i] = (uint8_t)(run->tap[0][i] >> shift);
    else if (how->lanes < 1) blend_fixed(shift, n, run, out);
    else if (how->fuses) blend_floats(shift, true, n, run, out);
    else blend_floats(shift, false, n, run, out);
}

static uint32_t fill_of(const Work *work, int32_t channels) {
    uint32_t fill = 0;
    for (int32_t c = 0; c < channels; c++) {
        const double value = work->op->fill[c], level = value > 0 ? (value < 255 ? value : 255) : 0;
        if (c == 0 || !work->how->fills_first) fill |= (uint32_t)rint(level) << 8 * c;
    }
    return fill;
}

/* Copy the image to pixels of four bytes, one for each of at most four channels, with EDGE more pixels on each side. */
static void lay(Work *work, const Image *in) {
    const int64_t w = in->width, h = in->height, stride = work->stride;
    const int32_t border = work->how->border;
    const uint32_t fill = fill_of(work, in->channels);
    const int64_t plane[3] = {in->channels > 1 ? in->plane : 0, in->channels > 2 ? 2 * in->plane : 0,
                              in->channels > 3 ? 3 * in->plane : 0};
    for (int64_t y = 0; y < h; y++) {
        const uint8_t *restrict p = in->data + y * in->row;
        uint32_t *restrict out = work->pixels + y * stride;
        for (int64_t x = 0; x < w; x++)
            out[x] = p[x] | (uint32_t)p[plane[0] + x] << 8 | (uint32_t)p[plane[1] + x] << 16 | (uint32_t)p[plane[2] + x] << 24;
        for (int32_t k = 1; k <= EDGE; k++) {
            const int32_t left = fold(-k, (int32_t)w, border), right = fold((int32_t)w - 1 + k, (int32_t)w, border);
            out[-k] = left < 0 ? fill : out[left], out[w - 1 + k] = right < 0 ? fill : out[right];
        }
    }
    for (int32_t k = 1; k <= EDGE; k++)
        for (int side = 0; side < 2; side++) {
            const int32_t y = side ? (int32_t)h - 1 + k : -k, from = fold(y, (int32_t)h, border);
            uint32_t *out = work->pixels + y * stride - EDGE;
            if (from >= 0) memcpy(out, work->pixels + from * stride - EDGE, 4 * (size_t)stride);
            else
                for (int64_t x = 0; x < stride; x++) out[x] = fill;
        }
}

/* Make all pixels of an image by the op, the border and the places of `work`. */
static bool take_pixels(Work *work, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t h = out->height, w = out->width, stride = in->width + 2 * EDGE;
    uint32_t *pixels = take(scratch, SLOT_WORK, 4 * stride * (in->height + 2 * EDGE));
    if (!pixels) return false;
    work->height = in->height, work->width = in->width, work->stride = stride, work->wanted = w;
    work->pixels = pixels + EDGE * stride + EDGE;
    lay(work, in);
    Run run;
    uint8_t level[RUN];
    for (int64_t y = 0; y < h; y++)
        for (int64_t first = 0; first < w; first += RUN) {
            const int64_t wanted = w - first < RUN ? w - first : RUN, n = (wanted + BLOCK - 1) / BLOCK * BLOCK;
            const bool nearest = work->how->interpolation == NEAREST;
            place(work, out, first, y, n, &run);
            if (!aim(work, n, &run)) gather_folded(work, nearest ? 1 : 2, n, &run);
            else if (nearest) gather(work, 1, n, &run);
            else gather(work, 2, n, &run);
            for (int c = 0; c < in->channels; c++) {
                finish(work->how, c, n, &run, level);
                memcpy(out->data + c * out->plane + y * out->row + first, level, (size_t)wanted);
            }
        }
    return true;
}

static bool warp(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t padded = (out->width + RUN - 1) / RUN * RUN;
    int32_t *along = take(scratch, SLOT_WORK_2, 8 * padded);
    if (!along) return false;
    Work work = {.how = &op->cv_warp.warp, .op = op, .along_x = along, .along_y = along + padded};
    for (int k = 0; k < 9; k++) work.map[k] = (float)op->cv_warp.map[k];
    for (int64_t x = 0; x < padded; x++) {
        along[x] = round_double(op->cv_warp.map[0] * (double)x * 1024);
        along[padded + x] = round_double(op->cv_warp.map[3] * (double)x * 1024);
    }
    return take_pixels(&work, in, out, scratch);
}

bool take_places(const Op *op, const CvWarp *how, FindPlaces *places, const void *map, const Image *in, const Image *out,
                 Scratch *scratch) {
    Work work = {.how = how, .op = op, .places = places, .map_of_places = map};
    return take_pixels(&work, in, out, scratch);
}

int remake_by_places(Sample *sample, Op *op, int32_t height, int32_t width, Kernel *kernel) {
    const Image *image = &sample->image;
    const int64_t padded = ((int64_t)image->width + 2 * EDGE) * ((int64_t)image->height + 2 * EDGE);
    if (image->channels > MAX_CHANNELS || padded > INT32_MAX) return REFUSED_OP; /* offsets are 32 bits */
    return remake(sample, op, height, width, kernel);
}

int run_cv_warp(Sample *sample, Op *op) {
    return remake_by_places(sample, op, op->cv_warp.height, op->cv_warp.width, warp);
}
