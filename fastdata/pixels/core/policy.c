/* Policies: RandAugment, TrivialAugment, AutoAugment and AugMix of torchvision, and those of timm.
 *
 * Torchvision's magnitudes depend on the size of an image. They are those of the user's own step, asked by Python for each
 * size; none is repeated here.
 */
#include "core.h"

#include <math.h>
#include <string.h>

enum { GAMMA_TRIES = 8 };

/* Torchvision */

static const Levels *find_levels(Drawing *d, const Step *step) {
    const int64_t number = step - d->table->steps;
    for (int32_t k = 0; k < d->table->levels_count; k++) {
        const Levels *levels = d->table->levels + k;
        if (levels->step == number && levels->height == d->height && levels->width == d->width) return levels;
    }
    deny(d, step, NEEDS_LEVELS, (int64_t[]){d->height, d->width}, 2);
    return NULL;
}

static bool is_move(int32_t code) { return code >= STEP_SHEAR_X && code <= STEP_TRANSLATE_Y; }

/* One op, by its magnitude; a shear's or a translation's as of _apply_op. */
static bool add_magnitude(Drawing *d, const Step *step, const Step *op, int64_t bin, bool is_negative) {
    const int64_t bins = step->n[7], place = op->n[3] * bins + bin;
    const Levels *levels = find_levels(d, step);
    if (!levels) return false;
    if (op->n[3] < 0 || bin < 0 || bin >= bins || place >= levels->count) return deny(d, step, REFUSED_TABLE, NULL, 0);
    double level = levels->levels[place];
    if (op->n[1] && is_negative) level = -level;
    const int32_t code = op->n[0], domain = step->n[2];
    if (code == OP_NOTHING) return true;
    if (code == STEP_ROTATE) return add_rotation(d, step, level, step->n[1], false, NULL);
    if (is_move(code)) {
        const bool is_x = code == STEP_SHEAR_X || code == STEP_TRANSLATE_X;
        const bool shears = code == STEP_SHEAR_X || code == STEP_SHEAR_Y;
        const double amount = shears ? atan(level) * (180.0 / 3.14159265358979323846) : trunc(level);
        const double along[2] = {is_x ? amount : 0, is_x ? 0 : amount}, none[2] = {0, 0};
        /* A translation is the same about any centre. */
        return add_affine(d, step, 0, shears ? none : along, 1, shears ? along : none, none);
    }
    const bool is_value = code >= OP_BRIGHTNESS && code <= OP_EQUALIZE;
    if (!is_value && code != OP_SATURATION && code != OP_SHARPNESS) return deny(d, step, REFUSED_TABLE, NULL, 0);
    Op *added = add(d, step, code, domain);
    if (!added) return false;
    double threshold = level * (step->n[9] ? 255.0 : 1.0);
    if (domain != PIL_DOMAIN) threshold = (float)threshold; /* as torch compares it with uint8 */
    added->n[0] = (int32_t)truncated(level);
    added->v[0] = code == OP_SOLARIZE ? threshold : 1.0 + level;
    return true;
}

static bool draw_one(Drawing *d, const Step *step, int64_t at, int64_t first, int64_t bin) {
    const Step *op = d->table->steps + step->first + integer(d, at, first, step->count);
    return add_magnitude(d, step, op, bin, uniform(d, at, first + 2) < 0.5);
}

/* Whether there is something to choose from; a probe learns that the fill is for other channels. */
static bool begin(Drawing *d, const Step *step) {
    if (step->count < 1 || step->n[7] < 1 || step->n[6] > MAX_OPS || step->n[10] > MAX_OPS) return deny(d, step, REFUSED_TABLE, NULL, 0);
    return !d->is_probe || add(d, step, OP_AFFINE, 0);
}

bool draw_augment(Drawing *d, const Step *step) {
    if (!begin(d, step)) return false;
    for (int64_t number = 0; number < step->n[6] && !d->is_probe; number++) {
        const int64_t bin = step->n[8] < 0 ? integer(d, step->at, 4 * number + 1, step->n[7]) : step->n[8];
        if (!draw_one(d, step, step->at, 4 * number, bin)) return false;
    }
    return true;
}

bool draw_policies(Drawing *d, const Step *step) {
    if (!begin(d, step)) return false;
    if (step->count % 2) return deny(d, step, REFUSED_TABLE, NULL, 0);
    if (d->is_probe) return true;
    const Step *pair = d->table->steps + step->first + 2 * integer(d, step->at, 0, step->count / 2);
    for (int k = 0; k < 2; k++) {
        if (uniform(d, step->at, 1 + 2 * k) >= pair[k].v[0]) continue;
        if (!add_magnitude(d, step, pair + k, pair[k].n[2], uniform(d, step->at, 2 + 2 * k) < 0.5)) return false;
    }
    return true;
}

/* Gamma(alpha) by G. Marsaglia and W. Tsang, "A simple method for generating gamma variables", 2000. */
static double draw_gamma(const Drawing *d, int64_t at, int64_t first, double alpha) {
    const double shape = (alpha < 1 ? alpha + 1 : alpha) - 1.0 / 3.0;
    double drawn = shape;
    for (int64_t draw = first; draw < first + 4 * GAMMA_TRIES - 4; draw += 4) {
        const double normal = normal_number(d, at, draw), root = fmax(1 + normal / sqrt(9 * shape), 0.0);
        const double cube = pow(root, 3), bound = normal * normal / 2 + shape - shape * cube + shape * log(cube);
        if (!(cube > 0 && log(1 - uniform(d, at, draw + 2)) < bound)) continue;
        drawn = shape * cube;
        break;
    }
    if (alpha < 1) drawn *= pow(1 - uniform(d, at, first + 4 * GAMMA_TRIES - 4), 1 / alpha);
    return drawn;
}

/* Number k of `count` shares that have a Dirichlet distribution. */
static double draw_share(const Drawing *d, int64_t at, int64_t first, int64_t count, double alpha, int64_t k) {
    double sum = 0, own = 0;
    for (int64_t other = 0; other < count; other++) {
        const double drawn = draw_gamma(d, at, first + 4 * GAMMA_TRIES * other, alpha);
        sum += drawn;
        if (other == k) own = drawn;
    }
    return own / sum;
}

/* A weighted sum of the image and of chains of ops over it. */
bool draw_aug_mix(Drawing *d, const Step *step) {
    const int32_t *n = step->n;
    const int64_t at = step->at, depth = n[10] > 0 ? n[10] : 3;
    const double alpha = step->v[0];
    if (!(alpha > 0)) return deny(d, step, REFUSED_TABLE, NULL, 0);
    if (!begin(d, step)) return false;
    if (d->is_probe) return true;
    Op *op = add(d, step, OP_MIX_BEGIN, 0);
    if (!op) return false;
    op->v[0] = draw_share(d, at, 0, 2, alpha, 0);
    const double mixed = draw_share(d, at, 0, 2, alpha, 1);
    for (int64_t chain = 0; chain < n[6]; chain++) {
        const int64_t here = child(at, chain), drawn_depth = n[10] > 0 ? depth : integer(d, here, 0, 3) + 1;
        for (int64_t k = 0; k < drawn_depth; k++) {
            const int64_t bin = integer(d, here, 4 * k + 5, n[8]);
            if (!draw_one(d, step, here, 4 * k + 4, bin)) return false;
        }
        op = add(d, step, OP_MIX_ADD, 0);
        if (!op) return false;
        op->v[0] = draw_share(d, at, 100, n[6], alpha, chain) * mixed;
    }
    return add(d, step, OP_MIX_END, 0) != NULL;
}

/* AugMix: _sample_dirichlet and forward in torchvision's transforms/autoaugment.py. */
int mix(Sample *sample, const Op *op) {
    if (!settle(sample) || !own(sample)) return NO_MEMORY;
    Image *image = &sample->image;
    int64_t size = (int64_t)image->channels * image->height * image->width;
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
        for (int64_t i = 0; i < size; i++) data[i] = sum[i] < 0 ? 0 : sum[i] > 255 ? 255 : (uint8_t)sum[i];
    }
    return OK;
}

/* timm: LEVEL_TO_ARG and NAME_TO_OP of data/auto_augment.py. `level` and `signed_level` are shares of 10. */

static double bounded(double value, double low, double high) { return fmin(fmax(value, low), high); }

static bool add_timm_warp(Drawing *d, const Step *op, int64_t at, int64_t first, double level) {
    const int32_t code = op->n[0], several = op->n[7];
    if (several < 1 || several > 4 || !(is_move(code) || code == STEP_ROTATE)) return deny(d, op, REFUSED_TABLE, NULL, 0);
    const int32_t interpolation = op->n[8 + integer(d, at, first + 6, several)];
    const bool is_x = code == STEP_SHEAR_X || code == STEP_TRANSLATE_X;
    const double side = is_x ? (double)d->width : (double)d->height;
    double matrix[6] = {1, 0, 0, 0, 1, 0};
    if (code == STEP_ROTATE) return add_rotation(d, op, level * 30.0, interpolation, false, NULL);
    if (code == STEP_SHEAR_X || code == STEP_SHEAR_Y) matrix[is_x ? 1 : 3] = level * 0.3;
    else matrix[is_x ? 2 : 5] = level * op->v[4] * (op->n[6] & TIMM_Rel ? side : 1);
    return add_map(d, op, interpolation, matrix);
}

static bool add_timm(Drawing *d, const Step *op, int64_t at, int64_t first, double level, double signed_level) {
    const int32_t code = op->n[0], bits = op->n[6];
    const bool increases = bits & TIMM_Increasing;
    double number = 0, value = 0;
    switch (code) {
    case OP_SATURATION:
        if (bits & TIMM_Desaturate) {
            value = 1.0 - bounded(0.5 + 0.5 * level, 0.5, 1.0);
            break;
        } /* fall through */
    case OP_BRIGHTNESS: case OP_CONTRAST: case OP_SHARPNESS:
        value = increases ? fmax(0.1, 1.0 + signed_level * 0.9) : level * 1.8 + 0.1;
        break;
    case OP_POSTERIZE:
        number = trunc(level * 4);
        number = fmin(8, increases ? 4 - number : number + (bits & TIMM_Original ? 4 : 0));
        break;
    case OP_SOLARIZE:
        value = fmin(256, trunc(level * 256));
        if (increases) value = 256 - value;
        break;
    case OP_SOLARIZE_ADD: number = fmin(128, level * 110); break;
    case OP_BOX_BLUR:
        value = bits & TIMM_GaussianBlurRand ? between(d, at, first + 5, 0.1, 2.0 * bounded(level, 0, 1))
                                  : bounded(0.1 + 1.9 * level, 0.1, 2.0);
        break;
    case OP_INVERT: case OP_AUTOCONTRAST: case OP_EQUALIZE: break;
    default: return add_timm_warp(d, op, at, first, signed_level);
    }
    Op *added = add(d, op, code, PIL_DOMAIN);
    if (!added) return false;
    added->n[0] = (int32_t)truncated(number), added->n[1] = 128, added->v[0] = value;
    return true;
}

bool draw_timm(Drawing *d, const Step *step) {
    const Step *steps = d->table->steps, *policy = steps + step->first, *end = policy + step->count;
    const double drawn = uniform(d, step->at, 0);
    for (int32_t k = 0; d->is_probe && k < step->count; k++) /* learns that a fill is for other channels */
        for (int32_t place = 0; place < policy[k].count; place++)
            if (!add(d, steps + policy[k].first + place, OP_AFFINE, 0)) return false;
    while (policy < end && drawn >= policy->v[0]) policy++;
    for (int32_t place = 0; policy < end && place < policy->count && !d->is_probe; place++) {
        const Step *op = steps + policy->first + place;
        const double *v = op->v;
        const int64_t first = 1 + 8 * place;
        if (uniform(d, step->at, first) >= v[0]) continue;
        double level = v[1];
        if (isinf(v[2])) level = between(d, step->at, first + 3, 0, v[1]);
        else if (v[2] != 0) level += v[2] * normal_number(d, step->at, first + 1);
        level = bounded(level, 0, v[3]) / 10.0;
        const double signed_level = uniform(d, step->at, first + 4) > 0.5 ? -level : level;
        if (!add_timm(d, op, step->at, first, level, signed_level)) return false;
    }
    return true;
}
