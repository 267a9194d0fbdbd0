/* ElasticTransform of albumentations 2.0.8 (augmentations/geometric/distortion.py): each pixel is moved by blurred noise. */
#include "core.h"

#include <math.h>

enum { MOST_RADIUS = 512 }; /* of the kernel, which has 4 sigma on each side */

/* OpenCV: GaussianBlur of smooth.dispatch.cpp, for floats. */
static int64_t radius_of(int32_t size, double sigma) { return size ? size / 2 : ((int64_t)rint(sigma * 4 * 2 + 1) | 1) / 2; }

bool draw_cv_elastic(Drawing *d, const Step *step) {
    const int32_t size = step->cv_elastic.size;
    const double sigma = step->cv_elastic.sigma;
    const bool is_bounded = sigma >= 1 && sigma < 2 * MOST_RADIUS && size >= 0 && (size % 2 || !size);
    if (!is_bounded || radius_of(size, sigma) > MOST_RADIUS) return deny(d, step, REFUSED_TABLE);
    Op *op = add_by_places(d, step, &step->cv_elastic.warp, OP_CV_ELASTIC);
    if (!op) return false;
    op->cv_elastic.warp = step->cv_elastic.warp, op->cv_elastic.size = size, op->cv_elastic.sigma = sigma;
    op->cv_elastic.is_shared = step->cv_elastic.is_shared, op->cv_elastic.is_uniform = step->cv_elastic.is_uniform;
    op->cv_elastic.alpha = step->cv_elastic.alpha;
    op->cv_elastic.key = noise_key(d, step->at);
    return true;
}

/* One field of floats: the moves of all pixels along x, and, unless both are the same, below them those along y. */
typedef struct {
    int64_t height, width, wide; /* of both; rows are `wide` apart */
    int64_t below;               /* rows from a move along x to that along y */
    float *moves, *blurred, *line;
} Field;

static float draw_row(const Op *op, const Field *field, int64_t row) {
    const uint64_t key = op->cv_elastic.key;
    float *out = field->moves + row * field->wide, most = 0;
    for (int64_t start = 0; start < field->width; start += CHUNK) {
        const int64_t count = field->width - start < CHUNK ? field->width - start : CHUNK, first = row * field->width + start;
        float *restrict part = out + start;
        if (!op->cv_elastic.is_uniform) draw_normal(key, first, count, part);
        else
            for (int64_t i = 0; i < count; i++)
                part[i] = (float)(int32_t)(scramble(key + (uint64_t)(first + i + 1) * GAMMA) >> 40) * 0x1p-23f - 1;
        for (int64_t i = 0; i < count; i++) most = fabsf(part[i]) > most ? fabsf(part[i]) : most;
    }
    return most;
}

/* OpenCV: RowFilter and SymmColumnVec_32f of filter.simd.hpp, in vectors of 4 and of 8 floats; the last values of a row are
 * computed one by one. Borders repeat the last value. */
static void blur_field(const Field *field, const float *half, int64_t radius, float most, float alpha) {
    const int64_t h = field->height, w = field->width, wide = field->wide;
    Tap taps[2 * MOST_RADIUS + 1];
    float *restrict line = field->line + radius;
    for (int64_t y = 0; y < h; y++) {
        const float *restrict row = field->moves + y * wide;
        for (int64_t x = 0; x < w; x++) line[x] = row[x] / most;
        for (int64_t x = 1; x <= radius; x++) line[-x] = line[0], line[w - 1 + x] = line[w - 1];
        add_taps(taps, row_taps(field->line, half, radius, false, taps), w, w / 4 * 4, field->blurred + y * wide);
    }
    for (int64_t y = 0; y < h; y++) {
        float *restrict out = field->moves + y * wide;
        taps[0] = (Tap){field->blurred + y * wide, NULL, half[0]};
        for (int64_t j = 1; j <= radius; j++) {
            const int64_t above = y > j ? y - j : 0, below = y + j < h ? y + j : h - 1;
            taps[j] = (Tap){field->blurred + above * wide, field->blurred + below * wide, half[j]};
        }
        add_taps(taps, radius + 1, w, w / 8 * 8, out);
        for (int64_t x = 0; x < w; x++) out[x] *= alpha;
        for (int64_t x = w; x < wide; x++) out[x] = 0;
    }
}

static void elastic_places(const void *map, int64_t row, int64_t first, int64_t n, float *restrict x, float *restrict y) {
    const Field *field = map;
    const float *restrict along = field->moves + row * field->wide + first, *restrict down = along + field->below * field->wide;
    for (int64_t i = 0; i < n; i++) x[i] = (float)((double)(int32_t)(first + i) + along[i]);
    for (int64_t i = 0; i < n; i++) y[i] = (float)((double)(int32_t)row + down[i]);
}

/* generate_displacement_fields of functional.py, which blurs both fields as one image, one below the other. */
static bool distort_elastic(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    const int64_t fields = op->cv_elastic.is_shared ? 1 : 2, radius = radius_of(op->cv_elastic.size, op->cv_elastic.sigma);
    Field field = {.height = fields * out->height, .width = out->width, .wide = whole_lanes(out->width)};
    double half[MOST_RADIUS + 1];
    float rounded[MOST_RADIUS + 1], most = 0;
    const int64_t plane = field.height * field.wide;
    field.moves = take(scratch, SLOT_MAP, (2 * plane + field.wide + 2 * radius + LANE) * (int64_t)sizeof(float));
    if (!field.moves || radius > MOST_RADIUS) return false;
    field.blurred = field.moves + plane, field.line = field.blurred + plane;
    field.below = (fields - 1) * out->height;
    cv_gaussian(radius, op->cv_elastic.sigma, half);
    for (int64_t i = 0; i <= radius; i++) rounded[i] = (float)half[i];
    for (int64_t y = 0; y < field.height; y++) most = fmaxf(most, draw_row(op, &field, y));
    const bool is_scaled = !op->cv_elastic.is_uniform && most > 1e-6f;
    blur_field(&field, rounded, radius, is_scaled ? most : 1, (float)op->cv_elastic.alpha);
    return take_places(op, &op->cv_elastic.warp, elastic_places, &field, in, out, scratch);
}

int run_cv_elastic(Sample *sample, Op *op) {
    return remake_by_places(sample, op, sample->image.height, sample->image.width, distort_elastic);
}
