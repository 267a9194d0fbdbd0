/* Distortions of albumentations 2.0.8: GridDistortion and OpticalDistortion (augmentations/geometric/distortion.py).
 *
 * Places of pixels are computed with the operations of albumentations, in the same order: if the last bit of a place differs,
 * it may round to another fraction of a pixel.
 */
#include "core.h"

#include <math.h>

enum { MOST_CELLS = 127, ROOM = 16 }; /* ROOM: columns behind the last one that `take_places` may ask for */

/* Grids */

bool draw_cv_grid(Drawing *d, const Step *step) {
    const int64_t cells = step->cv_grid.cells;
    if (cells < 1 || cells > MOST_CELLS) return deny(d, step, REFUSED_TABLE);
    const bool is_small = d->height < cells || d->width < cells;
    if (is_small && step->cv_grid.is_normalized && !d->is_probe) {
        d->refusal->cells.cells = cells, d->refusal->cells.height = d->height, d->refusal->cells.width = d->width;
        return deny(d, step, REFUSED_CELLS);
    }
    Op *op = add_by_places(d, step, &step->cv_grid.warp, OP_CV_GRID);
    if (!op) return false;
    op->cv_grid.warp = step->cv_grid.warp;
    op->cv_grid.cells = (int32_t)cells, op->cv_grid.is_normalized = step->cv_grid.is_normalized;
    op->cv_grid.limit[0] = step->cv_grid.limit[0], op->cv_grid.limit[1] = step->cv_grid.limit[1];
    op->cv_grid.key = noise_key(d, step->at);
    return true;
}

/* np.sum of fewer than 129 numbers: from 8 on in eight sums. */
static double sum_of(const double *values, int64_t count) {
    double sums[8], sum = 0;
    int64_t i = 0;
    if (count >= 8) {
        for (int k = 0; k < 8; k++) sums[k] = values[k];
        for (i = 8; i < count - count % 8; i++) sums[i % 8] += values[i];
        sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    }
    for (; i < count; i++) sum += values[i];
    return sum;
}

/* Widths of the cells of one side, and of the rest after them, as factors. `first` is the number of the first draw.
 * normalize_grid_distortion_steps: together they are as long as the side. */
static void draw_widths(const Op *op, int64_t first, int64_t side, double widths[MOST_CELLS + 1]) {
    const int64_t cells = op->cv_grid.cells, step = side / cells;
    const double low = op->cv_grid.limit[0], high = op->cv_grid.limit[1];
    for (int64_t i = 0; i <= cells; i++) {
        const uint64_t bits = scramble(op->cv_grid.key + (uint64_t)(first + i + 1) * GAMMA);
        widths[i] = 1 + (low + (double)(int64_t)(bits >> 11) * 0x1p-53 * (high - low));
    }
    if (!op->cv_grid.is_normalized || !step) return;
    const int64_t end = (cells + 1) * step, last = (side < end ? side : end) - cells * step;
    widths[cells] *= (double)last / (double)step;
    const double scale = (double)side / (double)step / sum_of(widths, cells + 1);
    for (int64_t i = 0; i <= cells; i++) widths[i] *= scale;
}

/* generate_grid: np.linspace within each cell. After the last cell places are 0, as in albumentations. */
static void place_cells(const Op *op, int64_t first, int64_t side, float *places) {
    const int64_t cells = op->cv_grid.cells, step = side / cells;
    double widths[MOST_CELLS + 1], from = 0;
    draw_widths(op, first, side, widths);
    for (int64_t i = 0; i < side + ROOM; i++) places[i] = 0;
    for (int64_t cell = 0; cell <= cells; cell++) {
        const int64_t start = cell * step, count = side - start < step ? side - start : step;
        const double to = from + (double)step * widths[cell], by = (to - from) / (double)(count - 1);
        for (int64_t i = 0; i < count; i++) places[start + i] = (float)((i ? (double)i * by : 0) + from);
        if (count > 1) places[start + count - 1] = (float)to;
        from = to;
    }
}

typedef struct {
    const float *x, *y; /* of each column, of each row */
} Grid;

static void grid_places(const void *map, int64_t row, int64_t first, int64_t n, float *restrict x, float *restrict y) {
    const Grid *grid = map;
    const float *restrict along = grid->x + first, down = grid->y[row];
    for (int64_t i = 0; i < n; i++) x[i] = along[i], y[i] = down;
}

static bool distort_grid(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t h = out->height, w = out->width;
    float *x = take(scratch, SLOT_MAP, (h + w + 2 * ROOM) * (int64_t)sizeof *x);
    if (!x) return false;
    const Grid grid = {x, x + w + ROOM};
    place_cells(op, 0, w, x);
    place_cells(op, op->cv_grid.cells + 1, h, x + w + ROOM);
    return take_places(op, &op->cv_grid.warp, grid_places, &grid, in, out, scratch);
}

int run_cv_grid(Sample *sample, Op *op) {
    return remake_by_places(sample, op, sample->image.height, sample->image.width, distort_grid);
}

/* Lenses */

bool draw_cv_lens(Drawing *d, const Step *step) {
    Op *op = add_by_places(d, step, &step->cv_lens.warp, OP_CV_LENS);
    if (!op) return false;
    op->cv_lens.warp = step->cv_lens.warp, op->cv_lens.is_fisheye = step->cv_lens.is_fisheye;
    op->cv_lens.amount = between(d, step->at, 0, step->cv_lens.limit[0], step->cv_lens.limit[1]);
    return true;
}

typedef struct {
    double height, width, amount;
} Lens;

/* get_camera_matrix_distortion_maps: OpenCV's initUndistortRectifyMap (undistort.simd.hpp) with k1 = k2. The centre of its new
 * camera is half a pixel from that of the old one. */
static void camera_places(const void *map, int64_t row, int64_t first, int64_t n, float *restrict x, float *restrict y) {
    const Lens *lens = map;
    const double w = lens->width, h = lens->height, k = (float)lens->amount, left = (w - 1) * 0.5;
    const double v = ((double)row - (h - 1) * 0.5) / h;
    for (int64_t i = 0; i < n; i++) {
        const double u = ((double)(int32_t)(first + i) - left) / w, r2 = u * u + v * v, by = (k * r2 + k) * r2 + 1;
        x[i] = (float)(w * (u * by) + w / 2), y[i] = (float)(h * (v * by) + h / 2);
    }
}

/* get_fisheye_distortion_maps, with the cosine of an angle as the quotient of two lengths. */
static void fisheye_places(const void *map, int64_t row, int64_t first, int64_t n, float *restrict x, float *restrict y) {
    const Lens *lens = map;
    const double middle_x = lens->width / 2, middle_y = lens->height / 2;
    const float k = (float)lens->amount, far = (float)sqrt(middle_x * middle_x + middle_y * middle_y);
    const float left = (float)middle_x, top = (float)middle_y, b = (float)(int32_t)row - top;
    for (int64_t i = 0; i < n; i++) {
        const float a = (float)(int32_t)(first + i) - left, r = sqrtf(a * a + b * b), share = r / far;
        const float moved = r * (1 + k * share * share), by = r > 0 ? 1 / r : 0;
        x[i] = moved * (a * by) + left, y[i] = moved * (b * by) + top;
    }
}

static bool distort_lens(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const Lens lens = {out->height, out->width, op->cv_lens.amount};
    FindPlaces *places = op->cv_lens.is_fisheye ? fisheye_places : camera_places;
    return take_places(op, &op->cv_lens.warp, places, &lens, in, out, scratch);
}

int run_cv_lens(Sample *sample, Op *op) {
    return remake_by_places(sample, op, sample->image.height, sample->image.width, distort_lens);
}
