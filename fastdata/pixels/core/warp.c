/* Affine and perspective maps: for each output pixel, the place of the image that it shows, and the value there.
 *
 * Up to three planes are first interleaved as pixels of four bytes; the last byte is 1 inside the image. A row is made in
 * runs: offsets into those pixels, the pixels around each offset, their weights, the sums. The pixels are those of Pillow's
 * Image.transform (libImaging/Geometry.c) and of torchvision's affine, rotate and perspective on uint8 tensors. Both round
 * intermediate results, so the order of operations here is theirs: build with -ffp-contract=off.
 */
#include "core.h"

#include <math.h>
#include <string.h>

enum { RUN = 128, BLOCK = 16, EDGE = 2, TAPS = 4 };

typedef struct {
    double x[RUN], y[RUN];           /* Pillow's places; then the shares of the right and the lower neighbour */
    float dx[RUN], dy[RUN];          /* these shares */
    int32_t at[RUN];                 /* offset of the upper left pixel; 0: outside, where a block has the fill */
    uint32_t tap[TAPS * TAPS][RUN];  /* the pixels around the place */
    float weight[TAPS * TAPS][RUN];
    uint32_t differs[RUN];           /* bits in which the pixels with a weight differ */
} Run;

/* torch multiplies grids with at least 400 products by a library that may fuse them; smaller ones by its own loop. */
INLINE float dot(float x, float y, const float t[3], bool fuse) {
    return (fuse ? fused(y, t[1], x * t[0]) : x * t[0] + y * t[1]) + t[2];
}

/* torchvision's _gen_affine_grid, _affine_grid, _perspective_grid, then the places of torch's grid_sample. */
static void split_torch(const Op *op, const Image *in, const Image *out, int32_t base, int64_t first, int64_t row,
                        int64_t n, Run *restrict run) {
    const double *map = op->warp.map;
    const bool affine = !op->warp.is_perspective, fuse = op->warp.fuses && (int64_t)out->height * out->width * 6 >= 400;
    float w = (float)in->width, h = (float)in->height, half_w = 0.5f * w, half_h = 0.5f * h, tx[3], ty[3];
    float tz[3] = {(float)map[6], (float)map[7], 1}, x0 = 0.5f, y = (float)row + 0.5f;
    const bool nearest = op->warp.interpolation == NEAREST;
    float low = nearest ? 0 : -1, magic = nearest ? 0x1.8p23f : 0; /* adding and subtracting it rounds, halves to even */
    for (int k = 0; k < 3; k++) tx[k] = (float)map[k] / half_w, ty[k] = (float)map[3 + k] / half_h;
    if (affine) x0 -= (float)out->width * 0.5f, y -= (float)out->height * 0.5f;
    int32_t stride = in->width + 2 * EDGE;
    for (int32_t i = 0; i < n; i++) {
        float x = (float)((int32_t)first + i) + x0, gx = dot(x, y, tx, fuse), gy = dot(x, y, ty, fuse);
        if (!affine) {
            float z = dot(x, y, tz, fuse);
            gx = gx / z - 1, gy = gy / z - 1;
        }
        float px = fused(gx + 1, half_w, -0.5f) + magic - magic, py = fused(gy + 1, half_h, -0.5f) + magic - magic;
        bool ok = (px >= low) & (px < w) & (py >= low) & (py < h);
        float nowhere = px - px + (py - py); /* 0, or NaN where a perspective divides by 0 */
        px = ok ? px : 0, py = ok ? py : 0;
        float left = floorf(px), top = floorf(py);
        run->dx[i] = px - left + nowhere, run->dy[i] = py - top;
        run->at[i] = ok ? (int32_t)top * stride + (int32_t)left + base : 0;
    }
}

/* Pillow's affine_transform and perspective_transform. */
static void place(bool affine, const double a[8], int64_t first, int64_t row, int64_t n, Run *restrict run) {
    double y = (double)row + 0.5, x1 = a[1] * y, y1 = a[4] * y, z1 = a[7] * y;
    for (int32_t i = 0; i < n; i++) {
        double x = (double)((int32_t)first + i) + 0.5, px = a[0] * x + x1 + a[2], py = a[3] * x + y1 + a[5];
        double z = affine ? 1 : a[6] * x + z1 + 1;
        run->x[i] = affine ? px : px / z, run->y[i] = affine ? py : py / z;
    }
}

/* Test which places are inside the image, and split each place minus `shift` into a whole pixel and a share. Pillow: XCLIP and
 * FLOOR of Geometry.c's filters. */
static void split(const Image *in, double shift, int32_t base, int64_t n, Run *restrict run) {
    double w = in->width, h = in->height;
    int32_t stride = in->width + 2 * EDGE;
    for (int64_t i = 0; i < n; i++) {
        bool ok = (run->x[i] >= 0) & (run->x[i] < w) & (run->y[i] >= 0) & (run->y[i] < h);
        double x = ok ? run->x[i] - shift : 0, y = ok ? run->y[i] - shift : 0, left = floor(x), top = floor(y);
        run->x[i] = x - left, run->y[i] = y - top;
        run->dx[i] = (float)(x - left), run->dy[i] = (float)(y - top);
        run->at[i] = ok ? (int32_t)top * stride + (int32_t)left + base : 0;
    }
}

static uint32_t to_fixed(double v) {
    v = floor(v * 65536.0 + 0.5);
    return v >= -2147483648.0 && v < 2147483648.0 ? (uint32_t)(int32_t)v : 1u << 31;
}

/* Pillow's affine_fixed: numbers in 16.16 fixed point, which wrap around. */
static void split_fixed(const double a[6], const Image *in, int32_t base, int64_t x, int64_t y, int64_t n, Run *run) {
    uint32_t stepx = to_fixed(a[0]), stepy = to_fixed(a[3]), col = (uint32_t)x, row = (uint32_t)y;
    uint32_t px = to_fixed(a[2] + a[0] * 0.5 + a[1] * 0.5) + col * stepx + row * to_fixed(a[1]);
    uint32_t py = to_fixed(a[5] + a[3] * 0.5 + a[4] * 0.5) + col * stepy + row * to_fixed(a[4]);
    uint32_t w = (uint32_t)in->width, h = (uint32_t)in->height;
    int32_t stride = in->width + 2 * EDGE, *restrict at = run->at;
    for (uint32_t i = 0; i < (uint32_t)n; i++) {
        int32_t left = (int32_t)(px + i * stepx) >> 16, top = (int32_t)(py + i * stepy) >> 16;
        bool ok = ((uint32_t)left < w) & ((uint32_t)top < h);
        at[i] = ok ? top * stride + left + base : 0;
    }
}

/* True if Pillow's ImagingTransformAffine uses fixed point. */
static bool fits_fixed(const double a[6], double w, double h) {
    bool fits = a[1] != 0 || a[3] != 0;
    for (int k = 0; k < 4; k++) {
        double x = k & 1 ? w : 0, y = k & 2 ? h : 0;
        fits &= fabs(x * a[0] + y * a[1] + a[2]) < 32768.0 && fabs(x * a[3] + y * a[4] + a[5]) < 32768.0;
    }
    return fits;
}

/* Load the size x size pixels at each offset. */
INLINE void gather(const uint32_t *pixels, int64_t stride, int size, int64_t n, Run *restrict run) {
    uint32_t row[TAPS * RUN];
    for (int k = 0; k < size; k++) {
        for (int64_t i = 0; i < n; i++) memcpy(row + i * size, pixels + k * stride + run->at[i], 4 * (size_t)size);
        for (int j = 0; j < size; j++)
            for (int64_t i = 0; i < n; i++) run->tap[k * size + j][i] = row[i * size + j];
    }
}

/* The weighted sum of the pixels' byte at bit `shift`, in torch's order (grid_sample of GridSamplerKernel.cpp). */
INLINE void add_up(int taps, int shift, bool fuse, int64_t n, const Run *run, float *restrict out) {
    uint32_t byte = 255u << shift;
    float scale = 1.0f / (float)(1 << shift);
    for (int64_t i = 0; i < n; i++) {
        float sum = (float)(int32_t)(run->tap[0][i] & byte) * run->weight[0][i];
        for (int t = 1; t < taps; t++) {
            float level = (float)(int32_t)(run->tap[t][i] & byte), weight = run->weight[t][i];
            sum = fuse ? fused(level, weight, sum) : level * weight + sum;
        }
        out[i] = sum * scale;
    }
}

INLINE float near(float d) { return 1 + d * d * (d - 2); } /* Pillow's cubic, a = -1 */
INLINE float far(float d) { return d * d * (d - 1); }

INLINE void weigh(int size, int64_t n, Run *restrict run) {
    int centre = size == 2 ? 0 : 1;
    for (int64_t i = 0; i < n; i++) {
        float w = run->dx[i], e = 1 - w, u = run->dy[i], s = 1 - u, wx[4] = {e, w}, wy[4] = {s, u};
        if (size == 4) {
            wx[0] = far(e), wx[1] = near(w), wx[2] = near(e), wx[3] = far(w);
            wy[0] = far(s), wy[1] = near(u), wy[2] = near(s), wy[3] = far(u);
        }
        uint32_t differs = 0, same = run->tap[centre * size + centre][i];
        uint32_t columns = w != 0 ? ~0u : 0, rows = u != 0 ? ~0u : 0;
#ifdef __clang__
#pragma clang loop unroll(full) /* so that clang vectorises the outer loop: 640 us instead of 2,600 */
#endif
        for (int t = 0; t < size * size; t++) {
            int k = t / size, j = t % size;
            run->weight[t][i] = wy[k] * wx[j];
            differs |= (run->tap[t][i] ^ same) & (j == centre ? ~0u : columns) & (k == centre ? ~0u : rows);
        }
        run->differs[i] = differs;
    }
}

INLINE double cubic(double p1, double p2, double p3, double p4, double d) {
    return p1 + d * (p2 + d * (p3 + d * p4));
}

/* Pillow's BILINEAR and BICUBIC of Geometry.c, exactly, for a block of pixels. */
INLINE void exact(int size, int shift, int64_t first, const Run *run, uint8_t *restrict out) {
    double v[4][BLOCK];
    for (int k = 0; k < size; k++)
        for (int64_t i = 0; i < BLOCK; i++) {
            int32_t p[4];
            for (int j = 0; j < size; j++) p[j] = run->tap[k * size + j][first + i] >> shift & 255;
            int32_t a = p[0], b = p[1], c = p[size - 2], d = p[size - 1];
            double x = run->x[first + i];
            v[k][i] = size == 2 ? a + (b - a) * x : cubic(b, -a + c, 2 * (a - b) + c - d, -a + b - c + d, x);
        }
    for (int64_t i = 0; i < BLOCK; i++) {
        double a = v[0][i], b = v[1][i], c = v[size - 2][i], d = v[size - 1][i], y = run->y[first + i];
        double level = size == 2 ? a + (b - a) * y : cubic(b, -a + c, 2 * (a - b) + c - d, -a + b - c + d, y);
        out[first + i] = (uint8_t)(int32_t)(level < 0 ? 0 : level > 255 ? 255 : level);
    }
}

/* Pillow's levels. The error of the float32 sums is below 2,100 (bilinear) and 25,100 (bicubic) units of 2^-24, and `off` is
 * larger. If a sum plus `off` and minus `off` gives one level, that is Pillow's. A block with another pixel is computed exactly,
 * unless all pixels that have a weight are equal: then the level is theirs. */
INLINE void finish_pillow(int taps, int shift, int64_t n, const Run *run, const float *sum, uint8_t *restrict out) {
    float off = taps == 4 ? 0x1p-12f : 0x1p-9f;
    for (int64_t first = 0; first < n; first += BLOCK) {
        uint32_t doubt = 0;
        for (int64_t i = first; i < first + BLOCK; i++) {
            int32_t high = (int32_t)(sum[i] + off), low = (int32_t)(sum[i] - off);
            out[i] = (uint8_t)(high < 0 ? 0 : high > 255 ? 255 : high);
            doubt |= high != low ? run->differs[i] : 0;
        }
        if (doubt >> shift & 255) exact(taps == 4 ? 2 : 4, shift, first, run, out);
    }
}

/* torchvision: _apply_grid_transform of _functional_tensor.py (v1) and of v2's _geometry.py, which blends with the fill and
 * rounds. */
static void finish_torch(float fill, int domain, int64_t n, const float *v, const float *mask, uint8_t *restrict out) {
    for (int64_t i = 0; i < n; i++) {
        float value = v[i];
        if (mask && domain == V1_DOMAIN) value = value * mask[i] + (1 - mask[i]) * fill;
        else if (mask) value = (value - fill) * mask[i] + fill;
        value = value == value ? value : 0; /* torch converts NaN to 0 */
        out[i] = (uint8_t)(int32_t)(value + 0x1.8p23f - 0x1.8p23f);
    }
}

/* Interleave channels [c, c + count), with EDGE more pixels on each side: for Pillow the nearest pixels (`repeat`), for torch
 * zeros. A block of TAPS x TAPS pixels with the fill comes first, for places outside of the image. */
static void lay(const Image *in, int c, int count, uint32_t fill, bool repeat, uint32_t *restrict out) {
    int64_t w = in->width, h = in->height, stride = w + 2 * EDGE;
    for (int k = 0; k < TAPS * TAPS; k++) out[k / TAPS * stride + k % TAPS] = fill;
    out += TAPS * stride + EDGE;
    for (int64_t y = -EDGE; y < h + EDGE; y++, out += stride) {
        if (!repeat && (y < 0 || y >= h)) {
            memset(out - EDGE, 0, 4 * (size_t)stride);
            continue;
        }
        const uint8_t *r = in->data + c * in->plane + (y < 0 ? 0 : y < h ? y : h - 1) * in->row;
        const uint8_t *g = count > 1 ? r + in->plane : r, *b = count > 2 ? g + in->plane : r;
        for (int64_t x = 0; x < w; x++) out[x] = r[x] | (uint32_t)g[x] << 8 | (uint32_t)b[x] << 16 | 1u << 24;
        for (int k = 1; k <= EDGE; k++) out[-k] = repeat ? out[0] : 0, out[w - 1 + k] = repeat ? out[w - 1] : 0;
    }
}

static uint32_t to_level(double fill) { return (uint32_t)(int64_t)(fill + 0x1.8p52 - 0x1.8p52) & 255; }

/* Copy w pixels of row y of a plane, moved by dx columns; the fill is used outside the image. */
static void move_row(const Image *in, int64_t c, int64_t y, int64_t dx, int fill, int64_t w, uint8_t *to) {
    const int64_t left = dx < 0 ? -dx : 0, end = in->width - dx, right = end < w ? end : w;
    memset(to, fill, (size_t)w);
    if (left < right && y >= 0 && y < in->height)
        memcpy(to + left, in->data + c * in->plane + y * in->row + left + dx, (size_t)(right - left));
}

/* Moves by whole pixels: the arithmetic of both libraries gives exactly these (torch's if images are not too large). */
static bool move(const Op *op, const Image *in, const Image *out) {
    const double *a = op->warp.map;
    int64_t w = out->width, h = out->height;
    bool pillow = op->warp.domain == PIL_DOMAIN, same = w == in->width && h == in->height && w <= 1024 && h <= 1024;
    if (op->warp.is_perspective || a[0] != 1 || a[1] != 0 || a[3] != 0 || a[4] != 1 || !(pillow || same)) return false;
    if (!(fabs(a[2]) < 1e9 && fabs(a[5]) < 1e9) || a[2] != floor(a[2]) || a[5] != floor(a[5])) return false;
    for (int64_t k = 0; k < in->channels * h; k++) {
        const int64_t c = k / h;
        const int fill = pillow || op->warp.has_fill ? (int)to_level(op->fill[c]) : 0;
        move_row(in, c, k % h + (int64_t)a[5], (int64_t)a[2], fill, w, out->data + k * w);
    }
    return true;
}

/* Shears along rows: in Pillow's fixed point each row moves by whole pixels. This takes a fifth of the time. */
static bool slide(const Op *op, const Image *in, const Image *out) {
    const double *a = op->warp.map;
    const int64_t w = out->width, h = out->height;
    if (op->warp.is_perspective || op->warp.domain != PIL_DOMAIN || op->warp.interpolation != NEAREST) return false;
    if (a[0] != 1 || a[3] != 0 || !fits_fixed(a, (double)w, (double)h)) return false;
    const uint32_t x = to_fixed(a[2] + 0.5 + a[1] * 0.5), y = to_fixed(a[5] + a[4] * 0.5);
    const uint32_t step_x = to_fixed(a[1]), step_y = to_fixed(a[4]);
    for (int64_t k = 0; k < in->channels * h; k++) {
        const uint32_t row = (uint32_t)(k % h);
        const int32_t left = (int32_t)(x + row * step_x) >> 16, top = (int32_t)(y + row * step_y) >> 16;
        move_row(in, k / h, top, left, (int)to_level(op->fill[k / h]), w, out->data + k * w);
    }
    return true;
}

static bool warp(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const double *a = op->warp.map, *fill = op->fill;
    if (move(op, in, out) || slide(op, in, out)) return true;
    int64_t w = out->width, h = out->height, stride = in->width + 2 * EDGE;
    const int32_t interpolation = op->warp.interpolation;
    bool pillow = op->warp.domain == PIL_DOMAIN, nearest = interpolation == NEAREST, bicubic = interpolation == BICUBIC;
    bool affine = !op->warp.is_perspective, masked = !pillow && op->warp.has_fill, sums = pillow && nearest && affine;
    bool fixed = sums && fits_fixed(a, (double)w, (double)h);
    int32_t base = (int32_t)((TAPS + EDGE - bicubic) * stride + EDGE - bicubic);
    uint32_t *pixels = take(scratch, SLOT_WORK, 4 * stride * (in->height + TAPS + 2 * EDGE));
    if (!pixels) return false;
    Run run;
    float sum[RUN], mask[RUN];
    uint8_t level[RUN];
    for (int c = 0; c < in->channels; c += 3) {
        int count = in->channels - c < 3 ? in->channels - c : 3;
        uint32_t block = 0;
        if (pillow || (nearest && masked))
            for (int k = 0; k < count; k++) block |= to_level(fill[c + k]) << 8 * k;
        lay(in, c, count, block, pillow, pixels);
        double x0 = a[2] + a[1] * 0.5 + a[0] * 0.5, y0 = a[5] + a[4] * 0.5 + a[3] * 0.5;
        for (int64_t y = 0; y < h; y++, x0 += a[1], y0 += a[4]) {
            double px = x0, py = y0;
            for (int64_t first = 0; first < w; first += RUN) {
                int64_t wanted = w - first < RUN ? w - first : RUN, n = (wanted + BLOCK - 1) / BLOCK * BLOCK;
                if (fixed) split_fixed(a, in, base, first, y, n, &run);
                else if (pillow) {
                    if (sums) /* ImagingScaleAffine, and ImagingTransformAffine if fixed point does not fit */
                        for (int64_t i = 0; i < n; i++, px += a[0], py += a[3]) run.x[i] = px, run.y[i] = py;
                    else place(affine, a, first, y, n, &run);
                    split(in, nearest ? 0 : 0.5, base, n, &run);
                } else split_torch(op, in, out, base, first, y, n, &run);
                if (nearest) gather(pixels, stride, 1, n, &run);
                else if (bicubic) gather(pixels, stride, 4, n, &run), weigh(4, n, &run);
                else gather(pixels, stride, 2, n, &run), weigh(2, n, &run);
                if (!nearest && masked) add_up(4, 24, true, n, &run, mask);
                for (int k = 0; k < count; k++) {
                    if (nearest)
                        for (int64_t i = 0; i < n; i++) level[i] = (uint8_t)(run.tap[0][i] >> 8 * k);
                    else if (bicubic) add_up(16, 8 * k, false, n, &run, sum);
                    else add_up(4, 8 * k, !pillow, n, &run, sum);
                    if (bicubic) finish_pillow(16, 8 * k, n, &run, sum, level);
                    else if (pillow && !nearest) finish_pillow(4, 8 * k, n, &run, sum, level);
                    else if (!nearest) finish_torch((float)fill[c + k], op->warp.domain, n, sum, masked ? mask : NULL, level);
                    memcpy(out->data + ((c + k) * h + y) * w + first, level, (size_t)wanted);
                }
            }
        }
    }
    return true;
}

int run_warp(Sample *sample, Op *op) {
    if (sample->image.channels > MAX_CHANNELS) return REFUSED_OP;
    return remake(sample, op, op->warp.height, op->warp.width, warp);
}

/* Quarter turns, which only change the view. Pillow: Image.transpose(ROTATE_90, ROTATE_180, ROTATE_270). */
int run_turn(Sample *sample, Op *op) {
    Image *image = &sample->image;
    for (int32_t k = 0; k < op->turn.quarters; k++) {
        const Image before = *image;
        image->data += (before.width - 1) * before.pixel;
        image->row = -before.pixel, image->pixel = before.row;
        image->height = before.width, image->width = before.height;
    }
    return OK;
}

/* Draws. Pillow and torchvision compute these numbers in Python, whose sine and cosine are those of the C library, too. */

static const double RADIANS = 3.14159265358979323846 / 180.0;

static Op *add_warp(Drawing *d, const Step *step, const Warp *warp) {
    const int32_t interpolation = warp->interpolation, domain = warp->domain;
    const bool is_known = interpolation == NEAREST || interpolation == BILINEAR || interpolation == BICUBIC;
    if (!is_known || (interpolation == BICUBIC && domain != PIL_DOMAIN)) return deny(d, step, REFUSED_TABLE), NULL;
    if (!is_domain(d, step, domain)) return NULL;
    Op *op = add(d, step, OP_WARP);
    if (!op) return NULL;
    op->warp.height = (int32_t)d->height, op->warp.width = (int32_t)d->width;
    op->warp.interpolation = interpolation, op->warp.domain = domain, op->warp.has_fill = warp->has_fill;
    op->warp.fuses = domain != PIL_DOMAIN && d->table->fuses;
    return op;
}

bool add_map(Drawing *d, const Step *step, const Warp *warp, const double matrix[6]) {
    Op *op = add_warp(d, step, warp);
    if (!op) return false;
    memcpy(op->warp.map, matrix, 6 * sizeof *matrix);
    return true;
}

/* torchvision: _get_inverse_affine_matrix of v1 or v2, which compute the same matrix but round in another order. */
bool add_affine(Drawing *d, const Step *step, const Warp *warp, double degrees, const double moved[2], double scale,
                const double shear[2], const double *center) {
    const double middle_x = (double)d->width * 0.5, middle_y = (double)d->height * 0.5;
    double cx = center ? center[0] : middle_x, cy = center ? center[1] : middle_y;
    if (warp->domain != PIL_DOMAIN) cx -= middle_x, cy -= middle_y; /* tensors: relative to the centre of the image */
    const double turn = degrees * RADIANS, sx = shear[0] * RADIANS, sy = shear[1] * RADIANS, turned = turn - sy;
    const double cosine = cos(turned), sine = sin(turned), tangent = tan(sx), squeezed = cos(sy);
    const double a = cosine / squeezed, c = sine / squeezed, tx = moved[0], ty = moved[1];
    double b, e, x, y;
    if (warp->is_v2) {
        b = -(a * tangent + sin(turn));
        e = cos(turn) - c * tangent;
    } else {
        b = -cosine * tangent / squeezed - sin(turn);
        e = -sine * tangent / squeezed + cos(turn);
    }
    const double m[4] = {e / scale, -b / scale, -c / scale, a / scale};
    if (warp->is_v2) {
        x = cx - m[0] * (cx + tx) - m[1] * (cy + ty);
        y = cy - m[2] * (cx + tx) - m[3] * (cy + ty);
    } else {
        x = m[0] * (-cx - tx) + m[1] * (-cy - ty) + cx;
        y = m[2] * (-cx - tx) + m[3] * (-cy - ty) + cy;
    }
    return add_map(d, step, warp, (double[]){m[0], m[1], x, m[2], m[3], y});
}

static double between_two(const Drawing *d, int64_t at, int64_t draw, const double range[2]) {
    return between(d, at, draw, range[0], range[1]);
}

/* torchvision: RandomAffine.get_params. */
bool draw_affine(Drawing *d, const Step *step) {
    const double most_x = step->affine.translation[0] * (double)d->width;
    const double most_y = step->affine.translation[1] * (double)d->height;
    const double degrees = between_two(d, step->at, 0, step->affine.degrees);
    const double x = rint(between(d, step->at, 1, -most_x, most_x)), y = rint(between(d, step->at, 2, -most_y, most_y));
    const double scale = between_two(d, step->at, 3, step->affine.scale);
    const double shear_x = between_two(d, step->at, 4, step->affine.shear_x);
    const double shear_y = between_two(d, step->at, 5, step->affine.shear_y);
    const double moved[2] = {x, y}, shear[2] = {shear_x, shear_y};
    const double *center = step->affine.has_center ? step->affine.center : NULL;
    return add_affine(d, step, &step->affine.warp, degrees, moved, scale, shear, center);
}

double remainder_of(double value, double by) {
    const double rest = fmod(value, by);
    return rest != 0 && (rest < 0) != (by < 0) ? rest + by : rest;
}

/* Python's round(value, 15) of a sine or cosine, for Image.rotate: `product` + `rest` is the exact product with 10^15. */
static double round_15(double value) {
    const double product = value * 1e15, rest = fma(value, 1e15, -product);
    double nearest = rint(product);
    if (product - nearest == 0.5 && rest > 0) nearest += 1;
    if (product - nearest == -0.5 && rest < 0) nearest -= 1;
    return nearest / 1e15;
}

static bool add_turn(Drawing *d, const Step *step, int quarters, bool expands) {
    Op *op = add(d, step, OP_TURN);
    if (!op) return false;
    op->turn.quarters = quarters;
    const bool swaps = quarters != 2 && d->height != d->width;
    return !swaps || set_size(d, d->width, d->height, expands ? DRAWN : FOLLOWS);
}

bool draw_turn(Drawing *d, const Step *step) {
    const int32_t quarters = step->turn.quarters & 3;
    return !quarters || add_turn(d, step, quarters, false);
}

/* Image.rotate of Pillow's Image.py: the matrix, and the size if it expands. */
static bool add_pillow_rotation(Drawing *d, const Step *step, const Warp *warp, double degrees, bool expands,
                                const double *center) {
    const double w = (double)d->width, h = (double)d->height, radians = -(degrees * RADIANS);
    const double cosine = round_15(cos(radians)), sine = round_15(sin(radians));
    const double cx = center ? center[0] : w / 2, cy = center ? center[1] : h / 2;
    double x = cosine * -cx + sine * -cy + 0.0 + cx, y = -sine * -cx + cosine * -cy + 0.0 + cy;
    if (expands) {
        const double corner_x[4] = {0, w, w, 0}, corner_y[4] = {0, 0, h, h};
        double low_x = INFINITY, low_y = INFINITY, high_x = -INFINITY, high_y = -INFINITY;
        for (int k = 0; k < 4; k++) {
            const double to_x = cosine * corner_x[k] + sine * corner_y[k] + x;
            const double to_y = -sine * corner_x[k] + cosine * corner_y[k] + y;
            low_x = fmin(low_x, to_x), high_x = fmax(high_x, to_x), low_y = fmin(low_y, to_y), high_y = fmax(high_y, to_y);
        }
        const double wide = ceil(high_x) - floor(low_x), high = ceil(high_y) - floor(low_y);
        const double dx = -(wide - w) / 2.0, dy = -(high - h) / 2.0;
        x = cosine * dx + sine * dy + x, y = -sine * dx + cosine * dy + y;
        set_size(d, truncated(high), truncated(wide), DRAWN);
    }
    return add_map(d, step, warp, (double[]){cosine, sine, x, -sine, cosine, y});
}

bool add_rotation(Drawing *d, const Step *step, const Warp *warp, double degrees, bool expands, const double *center) {
    const double none[2] = {0, 0}, angle = remainder_of(degrees, 360);
    if (expands) d->is_known = false; /* the size depends on the angle, which a probe does not draw */
    if (warp->domain != PIL_DOMAIN)
        return angle == 0 || add_affine(d, step, warp, -degrees, none, 1, none, center);
    const bool is_half = remainder_of(angle, 180) == 0, is_quarter = remainder_of(angle, 90) == 0;
    if (center || !(is_half || (is_quarter && (d->height == d->width || expands))))
        return add_pillow_rotation(d, step, warp, angle, expands, center);
    return angle == 0 || add_turn(d, step, (int)(angle / 90), expands);
}

bool draw_rotation(Drawing *d, const Step *step) {
    const double degrees = between_two(d, step->at, 0, step->rotation.degrees);
    const double *center = step->rotation.has_center ? step->rotation.center : NULL;
    return add_rotation(d, step, &step->rotation.warp, degrees, step->rotation.expands, center);
}

/* torchvision: RandomPerspective.get_params. Its equations are solved by torch, called from Python, because the last bits of
 * the solution change pixels. */
bool draw_perspective(Drawing *d, const Step *step) {
    const double half_h = (double)(d->height / 2), half_w = (double)(d->width / 2), share = step->perspective.distortion;
    const int64_t reach_v = truncated(share * half_h) + 1, reach_h = truncated(share * half_w) + 1;
    Op *op = add_warp(d, step, &step->perspective.warp);
    if (!op) return false;
    op->warp.is_perspective = true;
    for (int corner = 0; corner < 4; corner++) {
        const bool is_right = corner == 1 || corner == 2, is_bottom = corner > 1;
        double *x = op->warp.map + 2 * corner, *y = x + 1;
        *x = (double)(integer(d, step->at, 2 * corner, reach_h) + is_right * (d->width - reach_h));
        *y = (double)(integer(d, step->at, 2 * corner + 1, reach_v) + is_bottom * (d->height - reach_v));
    }
    if (!d->solved) return true;
    const int32_t number = (int32_t)(op - d->ops);
    if (number >= d->solved_room) return deny(d, step, REFUSED_TABLE);
    memcpy(op->warp.map, d->solved + 8 * number, sizeof op->warp.map);
    return true;
}

/* torchvision: the equations of _get_perspective_coeffs (transforms/functional.py) for the drawn corners of P ops. Each corner
 * has two equations, for x and y, each with eight coefficients and a right-hand side. */
void fastdata_equations(const Op *ops_P, int64_t count, double *out_P89) {
    for (int64_t p = 0; p < count; p++, ops_P++) {
        const double right = ops_P->warp.width - 1.0, bottom = ops_P->warp.height - 1.0;
        const double ends[8] = {0, 0, right, 0, right, bottom, 0, bottom};
        for (int k = 0; k < 8; k++, out_P89 += 9) {
            const double *drawn = ops_P->warp.map + k / 2 * 2, x = drawn[0], y = drawn[1];
            double *own = out_P89 + k % 2 * 3;
            memset(out_P89, 0, 9 * sizeof *out_P89);
            own[0] = x, own[1] = y, own[2] = 1;
            out_P89[6] = -ends[k] * x, out_P89[7] = -ends[k] * y, out_P89[8] = ends[k];
        }
    }
}
