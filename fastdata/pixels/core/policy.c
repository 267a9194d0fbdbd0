/* Policies: RandAugment, TrivialAugment, AutoAugment and AugMix of torchvision, and the policies of timm.
 *
 * The magnitudes of torchvision depend on the size of an image. Python gets them from the user's own transform for each size,
 * so there is no copy of them here.
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
    d->refusal->levels.height = d->height, d->refusal->levels.width = d->width;
    deny(d, step, REFUSED_LEVELS);
    return NULL;
}

static bool is_shear(int32_t kind) { return kind == SHEAR_X || kind == SHEAR_Y; }
static bool is_move(int32_t kind) { return is_shear(kind) || kind == TRANSLATE_X || kind == TRANSLATE_Y; }
static bool is_along_x(int32_t kind) { return kind == SHEAR_X || kind == TRANSLATE_X; }

/* Add the op for a magnitude: _apply_op of torchvision's transforms/autoaugment.py. */
static bool add_magnitude(Drawing *d, const Step *step, const Policy *policy, const Step *chosen, int64_t bin,
                          bool is_negative) {
    const int32_t row = chosen->magnitude.row, kind = chosen->magnitude.kind;
    const int64_t bins = policy->bins, place = row * bins + bin;
    const Levels *levels = find_levels(d, step);
    if (!levels) return false;
    if (row < 0 || bin < 0 || bin >= bins || place >= levels->count) return deny(d, step, REFUSED_TABLE);
    double level = levels->levels[place];
    if (chosen->magnitude.is_signed && is_negative) level = -level;
    if (kind == NO_KIND) return true;
    if (kind == ROTATE) return add_rotation(d, step, &policy->warp, level, false, NULL);
    if (is_move(kind)) {
        const double amount = is_shear(kind) ? atan(level) * (180.0 / 3.14159265358979323846) : trunc(level);
        const double along[2] = {is_along_x(kind) ? amount : 0, is_along_x(kind) ? 0 : amount}, none[2] = {0, 0};
        const bool shears = is_shear(kind);
        /* The centre does not matter for a translation. */
        return add_affine(d, step, &policy->warp, 0, shears ? none : along, 1, shears ? along : none, none);
    }
    const int32_t domain = policy->warp.domain;
    const bool is_value = kind >= BRIGHTNESS && kind <= EQUALIZE;
    if (!is_value && kind != SATURATION && kind != SHARPNESS) return deny(d, step, REFUSED_TABLE);
    if (!is_domain(d, step, domain)) return false;
    Op *op = add(d, step, OP_VALUE);
    if (!op) return false;
    double threshold = level * (policy->has_shares ? 255.0 : 1.0);
    if (domain != PIL_DOMAIN) threshold = (float)threshold; /* as torch compares it with uint8 */
    op->value.kind = kind, op->value.domain = domain;
    op->value.whole = (int32_t)truncated(level);
    op->value.amount = kind == SOLARIZE ? threshold : 1.0 + level;
    return true;
}

static bool draw_one(Drawing *d, const Step *step, const Policy *policy, int64_t at, int64_t first, int64_t bin) {
    const Step *chosen = d->table->steps + step->first + integer(d, at, first, step->count);
    return add_magnitude(d, step, policy, chosen, bin, uniform(d, at, first + 2) < 0.5);
}

/* True if there is something to choose from. A probe adds an op only to check if the fill has the right number of channels. */
static bool begin(Drawing *d, const Step *step, const Policy *policy) {
    if (step->count < 1 || policy->bins < 1) return deny(d, step, REFUSED_TABLE);
    return !d->is_probe || add(d, step, OP_WARP);
}

bool draw_augment(Drawing *d, const Step *step) {
    const Policy *policy = &step->augment.policy;
    if (step->augment.count > MAX_OPS) return deny(d, step, REFUSED_TABLE);
    if (!begin(d, step, policy)) return false;
    for (int64_t number = 0; number < step->augment.count && !d->is_probe; number++) {
        const bool is_drawn = step->augment.bin < 0;
        const int64_t bin = is_drawn ? integer(d, step->at, 4 * number + 1, policy->bins) : step->augment.bin;
        if (!draw_one(d, step, policy, step->at, 4 * number, bin)) return false;
    }
    return true;
}

bool draw_policies(Drawing *d, const Step *step) {
    const Policy *policy = &step->policies.policy;
    if (!begin(d, step, policy)) return false;
    if (step->count % 2) return deny(d, step, REFUSED_TABLE);
    if (d->is_probe) return true;
    const Step *pair = d->table->steps + step->first + 2 * integer(d, step->at, 0, step->count / 2);
    for (int k = 0; k < 2; k++) {
        if (uniform(d, step->at, 1 + 2 * k) >= pair[k].magnitude.p) continue;
        const bool is_negative = uniform(d, step->at, 2 + 2 * k) < 0.5;
        if (!add_magnitude(d, step, policy, pair + k, pair[k].magnitude.bin, is_negative)) return false;
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

/* Share k of `count` shares with a Dirichlet distribution: gamma variables divided by their sum. */
static double draw_share(const Drawing *d, int64_t at, int64_t first, int64_t count, double alpha, int64_t k) {
    double sum = 0, own = 0;
    for (int64_t other = 0; other < count; other++) {
        const double drawn = draw_gamma(d, at, first + 4 * GAMMA_TRIES * other, alpha);
        sum += drawn;
        if (other == k) own = drawn;
    }
    return own / sum;
}

/* AugMix: a weighted sum of the image and of chains of ops on it. */
bool draw_aug_mix(Drawing *d, const Step *step) {
    const Policy *policy = &step->aug_mix.policy;
    const int64_t at = step->at, chains = step->aug_mix.chains, depth = step->aug_mix.depth;
    const double alpha = step->aug_mix.alpha;
    if (!(alpha > 0) || chains > MAX_OPS || depth > MAX_OPS) return deny(d, step, REFUSED_TABLE);
    if (!begin(d, step, policy)) return false;
    if (d->is_probe) return true;
    Op *op = add(d, step, OP_MIX);
    if (!op) return false;
    op->mix.part = MIX_BEGIN;
    op->mix.weight = draw_share(d, at, 0, 2, alpha, 0);
    const double mixed = draw_share(d, at, 0, 2, alpha, 1);
    for (int64_t chain = 0; chain < chains; chain++) {
        const int64_t here = child(at, chain), drawn_depth = depth > 0 ? depth : integer(d, here, 0, 3) + 1;
        for (int64_t k = 0; k < drawn_depth; k++) {
            const int64_t bin = integer(d, here, 4 * k + 5, step->aug_mix.severity);
            if (!draw_one(d, step, policy, here, 4 * k + 4, bin)) return false;
        }
        op = add(d, step, OP_MIX);
        if (!op) return false;
        op->mix.part = MIX_ADD;
        op->mix.weight = draw_share(d, at, 100, chains, alpha, chain) * mixed;
    }
    op = add(d, step, OP_MIX);
    if (!op) return false;
    op->mix.part = MIX_END;
    return true;
}

/* AugMix: _sample_dirichlet and forward in torchvision's transforms/autoaugment.py. */
int run_mix(Sample *sample, Op *op) {
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    Image *image = &sample->image;
    int64_t size = (int64_t)image->channels * image->height * image->width;
    uint8_t *kept = take(sample->scratch, SLOT_KEPT, size);
    float *restrict sum = take(sample->scratch, SLOT_MIX, size * (int64_t)sizeof(float)), weight = (float)op->mix.weight;
    if (!kept || !sum) return REFUSED_MEMORY;
    uint8_t *restrict data = image->data;
    if (op->mix.part == MIX_BEGIN) {
        memcpy(kept, data, size);
        for (int64_t i = 0; i < size; i++) sum[i] = weight * data[i];
    } else if (op->mix.part == MIX_ADD) {
        for (int64_t i = 0; i < size; i++) sum[i] += weight * data[i];
        memcpy(data, kept, size);
    } else {
        for (int64_t i = 0; i < size; i++) data[i] = (uint8_t)(sum[i] > 0 ? sum[i] < 255 ? sum[i] : 255 : 0); /* NaN: 0 */
    }
    return OK;
}

/* timm: LEVEL_TO_ARG and NAME_TO_OP of data/auto_augment.py. `level` and `signed_level` are shares of 10. */

static double bounded(double value, double low, double high) { return fmin(fmax(value, low), high); }

static bool add_timm_warp(Drawing *d, const Step *step, int64_t at, int64_t first, double level) {
    const int32_t kind = step->timm_op.kind, several = step->timm_op.interpolations;
    if (several < 1 || several > 4 || !(is_move(kind) || kind == ROTATE)) return deny(d, step, REFUSED_TABLE);
    const Warp warp = {
        .interpolation = step->timm_op.interpolation[integer(d, at, first + 6, several)],
        .domain = PIL_DOMAIN,
        .has_fill = true,
    };
    const double side = is_along_x(kind) ? (double)d->width : (double)d->height;
    double matrix[6] = {1, 0, 0, 0, 1, 0};
    if (kind == ROTATE) return add_rotation(d, step, &warp, level * 30.0, false, NULL);
    if (is_shear(kind)) matrix[is_along_x(kind) ? 1 : 3] = level * 0.3;
    else matrix[is_along_x(kind) ? 2 : 5] = level * step->timm_op.translation * (step->timm_op.is_relative ? side : 1);
    return add_map(d, step, &warp, matrix);
}

static bool add_timm(Drawing *d, const Step *step, int64_t at, int64_t first, double level, double signed_level) {
    const int32_t kind = step->timm_op.kind;
    const bool increases = step->timm_op.increases;
    double whole = 0, amount = 0;
    switch (kind) {
    case SATURATION:
        if (step->timm_op.desaturates) {
            amount = 1.0 - bounded(0.5 + 0.5 * level, 0.5, 1.0);
            break;
        } /* fall through */
    case BRIGHTNESS: case CONTRAST: case SHARPNESS:
        amount = increases ? fmax(0.1, 1.0 + signed_level * 0.9) : level * 1.8 + 0.1;
        break;
    case POSTERIZE:
        whole = trunc(level * 4);
        whole = fmin(8, increases ? 4 - whole : whole + (step->timm_op.is_original ? 4 : 0));
        break;
    case SOLARIZE:
        amount = fmin(256, trunc(level * 256));
        if (increases) amount = 256 - amount;
        break;
    case SOLARIZE_ADD: whole = fmin(128, level * 110); break;
    case BOX_BLUR:
        if (step->timm_op.draws_radius) amount = between(d, at, first + 5, 0.1, 2.0 * bounded(level, 0, 1));
        else amount = bounded(0.1 + 1.9 * level, 0.1, 2.0);
        break;
    case INVERT: case AUTOCONTRAST: case EQUALIZE: break;
    default: return add_timm_warp(d, step, at, first, signed_level);
    }
    Op *op = add(d, step, OP_VALUE);
    if (!op) return false;
    op->value.kind = kind, op->value.domain = PIL_DOMAIN;
    op->value.whole = (int32_t)truncated(whole), op->value.amount = amount;
    return true;
}

bool draw_timm(Drawing *d, const Step *step) {
    const Step *steps = d->table->steps, *policy = steps + step->first, *end = policy + step->count;
    const double drawn = uniform(d, step->at, 0);
    for (int32_t k = 0; d->is_probe && k < step->count; k++) /* a probe checks the number of channels of each fill */
        for (int32_t place = 0; place < policy[k].count; place++)
            if (!add(d, steps + policy[k].first + place, OP_WARP)) return false;
    while (policy < end && drawn >= policy->sequence.end) policy++;
    for (int32_t place = 0; policy < end && place < policy->count && !d->is_probe; place++) {
        const Step *op = steps + policy->first + place;
        const int64_t first = 1 + 8 * place;
        const double magnitude = op->timm_op.magnitude, deviation = op->timm_op.deviation;
        if (uniform(d, step->at, first) >= op->timm_op.p) continue;
        double level = magnitude;
        if (isinf(deviation)) level = between(d, step->at, first + 3, 0, magnitude);
        else if (deviation != 0) level += deviation * normal_number(d, step->at, first + 1);
        level = bounded(level, 0, op->timm_op.most) / 10.0;
        const double signed_level = uniform(d, step->at, first + 4) > 0.5 ? -level : level;
        if (!add_timm(d, op, step->at, first, level, signed_level)) return false;
    }
    return true;
}
