/* Draws of albumentations' affine and perspective transforms (augmentations/geometric of version 2.0.8).
 *
 * Matrices are multiplied as by NumPy, with fused products, and inverted as by OpenCV: if the last bit differs, a place may
 * move by 1/32 of a pixel.
 */
#include "core.h"

#include <math.h>
#include <string.h>

static const double RADIANS = 3.14159265358979323846 / 180.0;

/* The numbers of a step's draws. */
enum { DRAW_SCALE_X, DRAW_SCALE_Y = 2, DRAW_MOVE_X = 4, DRAW_MOVE_Y, DRAW_SHEAR_X, DRAW_SHEAR_Y, DRAW_ANGLE, DRAW_POINTS };

static double dot(double a0, double b0, double a1, double b1, double a2, double b2) {
    return fma(a2, b2, fma(a1, b1, a0 * b0));
}

static void multiply(const double a[9], const double b[9], double out[9]) {
    double to[9];
    for (int k = 0; k < 9; k++) {
        const double *row = a + k / 3 * 3, *column = b + k % 3;
        to[k] = dot(row[0], column[0], row[1], column[3], row[2], column[6]);
    }
    memcpy(out, to, sizeof to);
}

/* is_identity_matrix: np.allclose of a matrix whose last row is that of the identity. */
static bool is_identity(const double m[9]) {
    for (int k = 0; k < 6; k++) {
        const double wanted = k == 0 || k == 4;
        if (!(fabs(m[k] - wanted) <= 1e-8 + 1e-5 * wanted)) return false;
    }
    return true;
}

/* warpAffine of imgwarp.cpp. */
static void invert_affine(const double m[9], double out[9]) {
    const double determinant = m[0] * m[4] - m[1] * m[3], d = determinant != 0 ? 1.0 / determinant : 0;
    const double a = m[4] * d, b = -d * m[1], c = -d * m[3], e = m[0] * d;
    const double to[9] = {a, b, -a * m[2] - b * m[5], c, e, -c * m[2] - e * m[5], 0, 0, 1};
    memcpy(out, to, sizeof to);
}

Op *add_by_places(Drawing *d, const Step *step, const CvWarp *how, int32_t code) {
    const bool is_known = how->interpolation == NEAREST || how->interpolation == BILINEAR;
    if (!is_known) return deny(d, step, REFUSED_TABLE), NULL;
    return leaves_pixels(d, step) ? add(d, step, code) : NULL;
}

static Op *add_cv_warp(Drawing *d, const Step *step, const CvWarp *how) {
    Op *op = add_by_places(d, step, how, OP_CV_WARP);
    if (!op) return NULL;
    op->cv_warp.warp = *how;
    op->cv_warp.height = (int32_t)d->height, op->cv_warp.width = (int32_t)d->width;
    return op;
}

/* Affine._get_scale. is_balanced: sizes below and above 1 are equally likely. */
static double scale_by(const Drawing *d, int64_t at, int64_t draw, const double range[2], bool is_balanced) {
    const bool shrinks = range[0] < 1, enlarges = range[1] > 1;
    if (!is_balanced) return between(d, at, draw, range[0], range[1]);
    if (!shrinks && !enlarges) return 1;
    const bool takes_lower = shrinks && (!enlarges || uniform(d, at, draw + 1) < 0.5);
    return takes_lower ? between(d, at, draw, range[0], 1) : between(d, at, draw, 1, range[1]);
}

/* Affine._get_translate_params: whole pixels. */
static double move_by(const Drawing *d, int64_t at, int64_t draw, const double range[2], bool is_relative, double side) {
    if (is_relative) return (double)truncated(between(d, at, draw, range[0], range[1]) * side);
    const int64_t least = truncated(range[0]), most = truncated(range[1]);
    return (double)(least + integer(d, at, draw, most - least + 1));
}

/* create_affine_transformation_matrix of functional.py, around the middle of the image. */
static void compose(const Drawing *d, const Step *step, double angle, double m[9]) {
    const int64_t at = step->at;
    const double w = (double)d->width, h = (double)d->height, cx = w / 2 - 0.5, cy = h / 2 - 0.5;
    const bool is_balanced = step->cv_affine.is_balanced, is_relative = step->cv_affine.is_relative;
    const double sx = scale_by(d, at, DRAW_SCALE_X, step->cv_affine.scale_x, is_balanced);
    const double free_y = scale_by(d, at, DRAW_SCALE_Y, step->cv_affine.scale_y, is_balanced);
    const double sy = step->cv_affine.keeps_ratio ? sx : free_y;
    const double tx = move_by(d, at, DRAW_MOVE_X, step->cv_affine.move_x, is_relative, w);
    const double ty = move_by(d, at, DRAW_MOVE_Y, step->cv_affine.move_y, is_relative, h);
    const double *shear_x = step->cv_affine.shear_x, *shear_y = step->cv_affine.shear_y;
    const double leans_x = tan(-between(d, at, DRAW_SHEAR_X, shear_x[0], shear_x[1]) * RADIANS);
    const double leans_y = tan(-between(d, at, DRAW_SHEAR_Y, shear_y[0], shear_y[1]) * RADIANS);
    const double turn = remainder_of(angle, 360) * RADIANS, cosine = cos(turn), sine = sin(turn);
    multiply((double[]){1, 0, cx, 0, 1, cy, 0, 0, 1}, (double[]){1, 0, tx, 0, 1, ty, 0, 0, 1}, m);
    multiply(m, (double[]){1, leans_x, 0, leans_y, 1, 0, 0, 0, 1}, m);
    multiply(m, (double[]){cosine, sine, 0, -sine, cosine, 0, 0, 0, 1}, m);
    multiply(m, (double[]){sx, 0, 0, 0, sy, 0, 0, 0, 1}, m);
    multiply(m, (double[]){1, 0, -cx, 0, 1, -cy, 0, 0, 1}, m);
    m[6] = m[7] = 0, m[8] = 1;
}

/* compute_affine_warp_output_shape of functional.py: the frame becomes as large as the image that is turned. */
static void expand(Drawing *d, double m[9]) {
    const double w = (double)d->width, h = (double)d->height, x[4] = {0, w, w, 0}, y[4] = {0, 0, h, h};
    double low[2] = {INFINITY, INFINITY}, high[2] = {-INFINITY, -INFINITY};
    for (int k = 0; k < 8; k++) {
        const double *row = m + k / 4 * 3, to = dot(x[k % 4], row[0], y[k % 4], row[1], 1, row[2]);
        low[k / 4] = fmin(low[k / 4], to), high[k / 4] = fmax(high[k / 4], to);
    }
    const int64_t left = truncated(floor(low[0])), top = truncated(floor(low[1]));
    multiply((double[]){1, 0, (double)-left, 0, 1, (double)-top, 0, 0, 1}, m, m);
    const int64_t height = truncated(ceil(high[1])) - top + 1, width = truncated(ceil(high[0])) - left + 1;
    set_size(d, height > 0 ? height : 0, width > 0 ? width : 0, DRAWN); /* 0: m is not finite */
}

/* SafeRotate._create_safe_rotate_matrix: shrunk until the turned image fits into its frame. */
static void shrink(const Drawing *d, double angle, double m[9]) {
    const double w = (double)d->width, h = (double)d->height, cx = w / 2 - 0.5, cy = h / 2 - 0.5;
    const double cosine = cos(angle * RADIANS), sine = sin(angle * RADIANS); /* cv2.getRotationMatrix2D */
    const double wide = (double)truncated(h * fabs(sine) + w * fabs(cosine));
    const double high = (double)truncated(h * fabs(cosine) + w * fabs(sine));
    const double x = (1 - cosine) * cx - sine * cy + (wide / 2 - cx), y = sine * cx + (1 - cosine) * cy + (high / 2 - cy);
    const double turned[9] = {cosine, sine, x, -sine, cosine, y, 0, 0, 1};
    multiply((double[]){w / wide, 0, 0, 0, h / high, 0, 0, 0, 1}, turned, m);
}

/* Rotate._rotated_rect_with_max_area: the largest box within the turned image. */
static bool crop(Drawing *d, const Step *step, double angle) {
    const double w = (double)d->width, h = (double)d->height, sine = fabs(sin(angle * RADIANS));
    const double cosine = fabs(cos(angle * RADIANS)), longer = w >= h ? w : h, shorter = w >= h ? h : w;
    double wide, high;
    if (shorter <= 2.0 * sine * cosine * longer || fabs(sine - cosine) < 1e-10) {
        const double half = 0.5 * shorter;
        wide = w >= h ? half / sine : half / cosine, high = w >= h ? half / cosine : half / sine;
    } else {
        const double twice = cosine * cosine - sine * sine;
        wide = (w * cosine - h * sine) / twice, high = (h * cosine - w * sine) / twice;
    }
    const int64_t left = truncated(fmax(0, w / 2 - wide / 2)), right = truncated(fmin(w, w / 2 + wide / 2));
    const int64_t top = truncated(fmax(0, h / 2 - high / 2)), bottom = truncated(fmin(h, h / 2 + high / 2));
    Op *op = add(d, step, OP_WINDOW);
    if (!op) return false;
    op->window.box = (Box){(int32_t)top, (int32_t)left, (int32_t)(bottom - top), (int32_t)(right - left)};
    return set_size(d, bottom - top, right - left, DRAWN);
}

/* Affine, ShiftScaleRotate, Rotate, SafeRotate: one matrix, in a frame of four kinds. */
bool draw_cv_affine(Drawing *d, const Step *step) {
    const int32_t frame = step->cv_affine.frame;
    const double angle = between(d, step->at, DRAW_ANGLE, step->cv_affine.degrees[0], step->cv_affine.degrees[1]);
    double m[9];
    if (frame == SHRINKS_IMAGE) shrink(d, angle, m);
    else compose(d, step, angle, m);
    const int64_t height = d->height, width = d->width;
    if (frame == EXPANDS_FRAME) expand(d, m);
    if (!is_identity(m)) {
        Op *op = add_cv_warp(d, step, &step->cv_affine.warp);
        if (!op) return false;
        invert_affine(m, op->cv_warp.map);
    } else if (frame == EXPANDS_FRAME) set_size(d, height, width, DRAWN);
    return frame != CROPS_BORDER || crop(d, step, angle);
}

/* Perspective */

/* compute_perspective_params: the length of a side, of at least 2 pixels, to which its ends are moved apart. */
static float side_length(float *a, float *b) {
    const float x = a[0] - b[0], y = a[1] - b[1], length = sqrtf(x * x + y * y);
    if (!(length < 2)) return length;
    const float apart = (2 - length) / 2;
    for (int k = 0; k < 2; k++) { /* as albumentations does: it compares again after each move */
        if (a[k] > b[k]) a[k] += apart;
        if (a[k] > b[k]) b[k] -= apart;
        if (a[k] <= b[k]) a[k] -= apart;
        if (a[k] <= b[k]) b[k] += apart;
    }
    return 2;
}

/* getPerspectiveTransform of imgwarp.cpp, solved as LUImpl of modules/core/src/matrix_decomp.cpp does; false: no solution. */
static bool solve_corners(const float from[8], const float to[8], double m[9]) {
    double a[8][9];
    for (int k = 0; k < 4; k++) {
        const float x = from[2 * k], y = from[2 * k + 1], u = to[2 * k], v = to[2 * k + 1];
        const double across[9] = {x, y, 1, 0, 0, 0, -x * u, -y * u, u}, down[9] = {0, 0, 0, x, y, 1, -x * v, -y * v, v};
        memcpy(a[k], across, sizeof across), memcpy(a[k + 4], down, sizeof down);
    }
    for (int i = 0; i < 8; i++) {
        int pivot = i;
        for (int j = i + 1; j < 8; j++)
            if (fabs(a[j][i]) > fabs(a[pivot][i])) pivot = j;
        if (!(fabs(a[pivot][i]) >= 2.220446049250313e-14)) return false; /* 100 * DBL_EPSILON */
        for (int k = 0; k < 9; k++) {
            const double kept = a[i][k];
            a[i][k] = a[pivot][k], a[pivot][k] = kept;
        }
        const double by = -1 / a[i][i];
        for (int j = i + 1; j < 8; j++) {
            const double share = a[j][i] * by;
            for (int k = i + 1; k < 9; k++) a[j][k] += share * a[i][k];
        }
    }
    for (int i = 7; i >= 0; i--) {
        double sum = a[i][8];
        for (int k = i + 1; k < 8; k++) sum -= a[i][k] * m[k];
        m[i] = sum / a[i][i];
    }
    m[8] = 1;
    return true;
}

/* invert of modules/core/src/lapack.cpp for 3 x 3. */
static void invert(const double m[9], double out[9]) {
    const double determinant = m[0] * (m[4] * m[8] - m[5] * m[7]) - m[1] * (m[3] * m[8] - m[5] * m[6]) +
                               m[2] * (m[3] * m[7] - m[4] * m[6]);
    const double d = determinant != 0 ? 1.0 / determinant : 0;
    const double to[9] = {
        (m[4] * m[8] - m[5] * m[7]) * d, (m[2] * m[7] - m[1] * m[8]) * d, (m[1] * m[5] - m[2] * m[4]) * d,
        (m[5] * m[6] - m[3] * m[8]) * d, (m[0] * m[8] - m[2] * m[6]) * d, (m[2] * m[3] - m[0] * m[5]) * d,
        (m[3] * m[7] - m[4] * m[6]) * d, (m[1] * m[6] - m[0] * m[7]) * d, (m[0] * m[4] - m[1] * m[3]) * d,
    };
    memcpy(out, to, sizeof to);
}

/* expand_transform of functional.py: the image becomes the box around the moved corners. */
static bool expand_perspective(const float ends[8], double m[9], int64_t *height, int64_t *width) {
    float to[8], low[2] = {INFINITY, INFINITY}, high[2] = {0, 0};
    for (int k = 0; k < 4; k++) { /* cv2.perspectiveTransform */
        const double x = ends[2 * k], y = ends[2 * k + 1], z = x * m[6] + y * m[7] + m[8], w = z != 0 ? 1.0 / z : 0;
        to[2 * k] = (float)((x * m[0] + y * m[1] + m[2]) * w), to[2 * k + 1] = (float)((x * m[3] + y * m[4] + m[5]) * w);
        for (int side = 0; side < 2; side++) low[side] = fminf(low[side], to[2 * k + side]);
    }
    for (int k = 0; k < 8; k++) {
        to[k] = rintf(to[k] - low[k % 2]);
        high[k % 2] = fmaxf(high[k % 2], to[k]);
    }
    *width = truncated(high[0]), *height = truncated(high[1]);
    return solve_corners(ends, to, m);
}

/* Perspective.get_params_dependent_on_data. The corners move inwards by less than a third of a side, so that they stay in
 * their order. */
bool draw_cv_perspective(Drawing *d, const Step *step) {
    const double *scale = step->cv_perspective.scale, sigma = between(d, step->at, 0, scale[0], scale[1]);
    const float w = (float)d->width, h = (float)d->height, ends[8] = {0, 0, w, 0, w, h, 0, h};
    float from[8];
    for (int k = 0; k < 8; k++) {
        const double moved = fmod(fabs(sigma * normal_number(d, step->at, DRAW_POINTS + 2 * k)), 0.32);
        const bool is_far = k % 2 ? k / 2 > 1 : k / 2 == 1 || k / 2 == 2;
        from[k] = (float)((is_far ? 1.0 - moved : moved) * (double)(k % 2 ? d->height : d->width));
    }
    const float above = side_length(from + 2, from), under = side_length(from + 4, from + 6);
    const float right = side_length(from + 4, from + 2), left = side_length(from + 6, from);
    int64_t width = truncated(above > under ? above : under), height = truncated(right > left ? right : left);
    double m[9];
    bool is_solved = solve_corners(from, ends, m);
    if (is_solved && step->cv_perspective.expands) is_solved = expand_perspective(ends, m, &height, &width);
    if (!is_solved || height < 1 || width < 1) return deny(d, step, REFUSED_OUTSIDE);
    if (step->cv_perspective.keeps_size) {
        const double sx = (double)d->width / (double)width, sy = (double)d->height / (double)height;
        multiply((double[]){sx, 0, 0, 0, sy, 0, 0, 0, 1}, m, m);
    } else set_size(d, height, width, DRAWN);
    Op *op = add_cv_warp(d, step, &step->cv_perspective.warp);
    if (!op) return false;
    op->cv_warp.is_perspective = true;
    invert(m, op->cv_warp.map);
    return true;
}
