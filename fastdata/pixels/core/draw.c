/* Draws: from the steps of a table, draw the few ops of one sample.
 *
 * Each draw is a pure function of the sample's key, the number of the step, and a number within the step. The function is
 * SplitMix64, as in random_numbers.py, which names its source. So a sample is the same in any batch, and a call can be
 * repeated.
 */
#include "core.h"

#include <limits.h>
#include <math.h>
#include <string.h>

enum { DRAWS_PER_STEP = 1 << 10, CHILDREN = 1 << 10, MAX_DEPTH = 64, ANY_PX = 1 << 10, TRIES = 10 };
static const uint64_t NUMBERS = ((uint64_t)1 << 54) - 33; /* a prime; steps.py has the reason */

uint64_t sample_key(uint64_t seed, int64_t visit, int64_t index) {
    const uint64_t start = scramble(seed + GAMMA), epoch = scramble((uint64_t)visit * GAMMA + start);
    return scramble((uint64_t)index * GAMMA + epoch);
}

uint64_t turn_of(int64_t visit, int64_t index) { return sample_key(0, 0, index) + (uint64_t)visit; }

int64_t child(int64_t at, int64_t number) {
    return (int64_t)((((uint64_t)at + 1) * CHILDREN + (uint64_t)number) % NUMBERS);
}

double uniform(const Drawing *d, int64_t at, int64_t draw) {
    const uint64_t bits = scramble(d->key + ((uint64_t)at * DRAWS_PER_STEP + (uint64_t)draw + 1) * GAMMA);
    return (double)(int64_t)(bits >> 11) * 0x1p-53;
}

double between(const Drawing *d, int64_t at, int64_t draw, double low, double high) {
    return low + uniform(d, at, draw) * (high - low);
}

double normal_number(const Drawing *d, int64_t at, int64_t draw) {
    const double radius = sqrt(-2.0 * log(1.0 - uniform(d, at, draw)));
    return radius * cos(2.0 * 3.14159265358979323846 * uniform(d, at, draw + 1));
}

int64_t integer(const Drawing *d, int64_t at, int64_t draw, int64_t count) {
    return (int64_t)(uniform(d, at, draw) * (double)count);
}

int64_t truncated(double value) {
    if (!(value > INT32_MIN)) return INT32_MIN;
    return value < INT32_MAX ? (int64_t)value : INT32_MAX;
}

bool deny(Drawing *d, const Step *step, int32_t reason) {
    d->refusal->reason = reason;
    d->refusal->step = step - d->table->steps;
    return false;
}

static bool deny_channels(Drawing *d, const Step *step) {
    d->refusal->channels.channels = d->channels;
    return deny(d, step, REFUSED_CHANNELS);
}

bool is_domain(Drawing *d, const Step *step, int32_t domain) {
    return (domain >= PIL_DOMAIN && domain <= V2_DOMAIN) || deny(d, step, REFUSED_TABLE);
}

Op *add(Drawing *d, const Step *step, int32_t code) {
    if (step->fills != 1 && step->fills != d->channels) return deny_channels(d, step), NULL;
    for (int k = 0; k < 4; k++)
        if (!d->is_cast && !(step->fill[k] >= 0 && step->fill[k] <= 255)) return deny(d, step, REFUSED_TABLE), NULL;
    if (d->count == MAX_OPS) return deny(d, step, REFUSED_TABLE), NULL;
    Op *op = d->ops + d->count;
    if (!d->is_probe) d->count++; /* the ops of a probe overwrite each other */
    memset(op, 0, sizeof *op); /* not an initialiser, which may leave bytes of a union unset */
    op->code = code;
    memcpy(op->fill, step->fill, sizeof step->fill);
    return op;
}

bool leaves_pixels(Drawing *d, const Step *step) {
    const bool is_image = (d->height > 0 && d->width > 0) || d->is_probe;
    const bool fits = is_image && d->height <= INT32_MAX && d->width <= INT32_MAX && d->height * d->width < INT64_MAX >> 6;
    return fits || deny(d, step, REFUSED_OUTSIDE);
}

bool set_size(Drawing *d, int64_t height, int64_t width, int how) {
    d->height = height, d->width = width;
    d->is_known = how == FIXED || (how == FOLLOWS && d->is_known);
    return true;
}

bool draw_box(const Drawing *d, int64_t at, int64_t first, const double scale[2], const double log_ratio[2], double share,
              bool is_crop, Box *box) {
    const double area = (double)(d->height * d->width) / share;
    for (int64_t draw = first; draw < first + 4 * TRIES; draw += 4) {
        const double wanted = area * between(d, at, draw, scale[0], scale[1]);
        const double stretch = exp(between(d, at, draw + 1, log_ratio[0], log_ratio[1]));
        const int64_t one = truncated(rint(sqrt(wanted * stretch))), other = truncated(rint(sqrt(wanted / stretch)));
        const int64_t h = is_crop ? other : one, w = is_crop ? one : other;
        const bool fits = is_crop ? w > 0 && w <= d->width && h > 0 && h <= d->height
                                  : w >= 0 && w < d->width && h >= 0 && h < d->height;
        if (!fits) continue;
        box->top = (int32_t)truncated(uniform(d, at, draw + 2) * (double)(d->height - h + 1));
        box->left = (int32_t)truncated(uniform(d, at, draw + 3) * (double)(d->width - w + 1));
        box->height = (int32_t)h, box->width = (int32_t)w;
        return true;
    }
    return false;
}

/* Steps of steps */

/* Join two branches of a probe: the size is known only if it is known and equal in both. */
static void meet(Drawing *after, const Drawing *other) {
    const bool same = after->height == other->height && after->width == other->width;
    after->is_known = after->is_known && other->is_known && same;
}

/* Probe all children. A sample runs one of them, or, unless `is_whole`, none. The size is known if it is the same after each. */
static bool probe_each(Drawing *d, const Step *step, bool is_whole) {
    const Step *children = d->table->steps + step->first;
    Drawing seen = *d;
    bool has_seen = !is_whole;
    for (int32_t k = 0; k < step->count; k++) {
        Drawing way = *d;
        if (!draw_steps(&way, d->table, children[k].first, children[k].count)) return false;
        if (has_seen) meet(&seen, &way);
        else seen = way, has_seen = true;
    }
    return set_size(d, seen.height, seen.width, seen.is_known ? FIXED : DRAWN);
}

bool draw_sequence(Drawing *d, const Step *step) { return draw_steps(d, d->table, step->first, step->count); }

bool draw_choice(Drawing *d, const Step *step) {
    const Step *children = d->table->steps + step->first;
    if (d->is_probe) return probe_each(d, step, step->count > 0 && children[step->count - 1].sequence.end >= 1);
    const double drawn = uniform(d, step->at, 0);
    for (int32_t k = 0; k < step->count; k++)
        if (drawn < children[k].sequence.end) return draw_steps(d, d->table, children[k].first, children[k].count);
    return true;
}

bool draw_order(Drawing *d, const Step *step) {
    const Step *children = d->table->steps + step->first;
    double last = -1;
    for (int32_t place = 0; place < step->count; place++) {
        if (d->is_probe) {
            if (!probe_each(d, step, false)) return false;
            continue;
        }
        int32_t next = 0;
        double least = 2;
        for (int32_t k = 0; k < step->count; k++) {
            const double drawn = uniform(d, step->at, k);
            if (drawn > last && drawn < least) least = drawn, next = k;
        }
        last = least;
        if (!draw_steps(d, d->table, children[next].first, children[next].count)) return false;
    }
    return true;
}

/* albumentations' SomeOf and RandomOrder (core/composition.py). A number is drawn for each child, and the children with the
 * smallest numbers are chosen. */
bool draw_some(Drawing *d, const Step *step) {
    const Step *children = d->table->steps + step->first;
    const bool keeps_order = step->some.keeps_order;
    double last = -1;
    for (int32_t place = 0; place < (keeps_order ? step->count : step->some.count) && place < step->count; place++) {
        if (d->is_probe) {
            if (!probe_each(d, step, false)) return false;
            continue;
        }
        int32_t next = place, before = 0; /* children whose number is less than that of `place` */
        double least = 2;
        for (int32_t k = 0; k < step->count; k++) {
            const double drawn = uniform(d, step->at, k);
            before += drawn < uniform(d, step->at, place);
            if (!keeps_order && drawn > last && drawn < least) least = drawn, next = k;
        }
        last = least;
        if (keeps_order && before >= step->some.count) continue;
        if (!draw_steps(d, d->table, children[next].first, children[next].count)) return false;
    }
    return true;
}

/* torchvision: RandomPhotometricDistort of v2/_color.py, whose contrast comes second or fourth. The draws 10 to 13 and 22
 * decide which children are applied, draw 20 decides the order. */
bool draw_photometric(Drawing *d, const Step *step) {
    static const int orders[2][5] = {{0, 1, 2, 3, 4}, {0, 2, 3, 1, 4}};
    if (step->count != 5) return deny(d, step, REFUSED_TABLE);
    const bool is_late = uniform(d, child(step->at, 20), 0) >= 0.5;
    for (int place = 0; place < 5; place++) {
        const int k = orders[is_late][place];
        const bool is_drawn = uniform(d, child(step->at, k < 4 ? 10 + k : 22), 0) < step->photometric.p;
        if ((is_drawn || d->is_probe) && !draw_steps(d, d->table, step->first + k, 1)) return false;
    }
    return true;
}

bool draw_cast(Drawing *d, const Step *step) {
    const int32_t means = step->cast.means;
    const bool widens = d->channels == 1 && step->cast.widens;
    d->is_cast = true;
    if (means > 1 && means != d->channels && !widens) return deny_channels(d, step);
    if (means > 1) d->channels = means;
    return add(d, step, OP_CAST) != NULL;
}

static bool draw_step(Drawing *d, const Step *step) {
    switch (step->code) {
#define STEP(CODE, name, ...) case STEP_##CODE: return draw_##name(d, step);
#include "records.h"
    default: return deny(d, step, REFUSED_TABLE); /* a CHILD, which only its parent draws, or no step */
    }
}

bool draw_steps(Drawing *d, const Table *table, int64_t first, int64_t count) {
    const Step *step = table->steps + first;
    if (d->depth == MAX_DEPTH) return deny(d, step, REFUSED_TABLE);
    d->depth++;
    bool is_drawn = true;
    for (int64_t k = 0; k < count && is_drawn; k++) {
        is_drawn = draw_step(d, step + k);
        if (d->is_probe) d->height = d->height < 0 ? 0 : d->height, d->width = d->width < 0 ? 0 : d->width;
        is_drawn = is_drawn && leaves_pixels(d, step + k);
    }
    d->depth--;
    return is_drawn;
}

/* True if the steps are one tree: the children of all steps follow each other without a gap. Then no step is its own child or
 * has two parents, so drawing always ends. */
static bool is_tree(const Table *table) {
    int64_t next = 1;
    for (int32_t k = 0; k < table->count; k++) {
        const Step *step = table->steps + k;
        if (!step->count) continue;
        if (step->count < 0 || step->first != next || next <= k) return false;
        next += step->count;
        if (next > table->count) return false;
    }
    return table->count > 0 && next == table->count;
}

static bool is_between(int32_t value, int32_t low, int32_t high) { return value >= low && value <= high; }

static bool is_sound_cast(const Step *step) {
    const bool is_dtype = is_between(step->cast.dtype, UINT8, INT64);
    const bool is_scaling = is_between(step->cast.scaling, SCALE_NONE, SCALE_AFTER);
    if (!is_between(step->cast.statistic, NO_STATISTIC, RANGE_OF_CHANNELS)) return false;
    if (!is_dtype || !is_scaling || !is_between(step->cast.means, 0, MAX_MEANS)) return false;
    for (int32_t c = 0; c < step->cast.means; c++)
        if (!isfinite(step->cast.mean[c]) || !isfinite(step->cast.std[c])) return false;
    return true;
}

bool is_sound(const Table *table) {
    if (!is_tree(table)) return false;
    for (int32_t k = 0; k < table->count; k++) {
        const Step *step = table->steps + k;
        const bool is_numbered = step->at > -CHILDREN && step->at < (int64_t)NUMBERS; /* below 0: before the user's steps */
        if (!is_between(step->fills, 1, 4) || !is_numbered) return false;
        if (step->code == STEP_CAST && !is_sound_cast(step)) return false;
    }
    return true;
}

bool resolve(Drawing *d) {
    d->count = d->depth = 0;
    d->is_cast = false;
    return draw_step(d, d->table->steps) && leaves_pixels(d, d->table->steps);
}

/* Draw the samples of a batch. ops_BS has room for `room` ops of each sample; the rest of a row is OP_NOTHING. shapes_B3
 * (channels, height, width) is replaced by the shapes after all steps. A probe draws nothing; a height of 0 means that the size
 * is not known. Returns the largest number of ops of one sample, or -1 - b if sample b was refused. */
int64_t fastdata_draw(const Table *table, uint64_t seed, const int64_t *visits_B, const int64_t *indices_B,
                      int32_t *shapes_B3, int64_t samples, Op *ops_BS, int64_t room, int32_t is_probe, Refusal *refusal) {
    int64_t most = 0;
    Op ops[MAX_OPS];
    const bool can_draw = is_sound(table); /* once per batch, because it reads the whole table */
    for (int64_t b = 0; b < samples; b++) {
        int32_t *shape = shapes_B3 + 3 * b;
        const bool is_known = shape[1] > 0;
        Drawing d = {.table = table, .channels = shape[0], .ops = ops, .refusal = refusal};
        d.key = sample_key(seed, visits_B[b], indices_B[b]), d.turn = turn_of(visits_B[b], indices_B[b]);
        d.height = is_known ? shape[1] : ANY_PX, d.width = is_known ? shape[2] : ANY_PX, d.is_known = is_known;
        d.is_probe = is_probe;
        if (!can_draw) deny(&d, table->steps, REFUSED_TABLE);
        if (!can_draw || !resolve(&d)) return -1 - b;
        if (d.count > most) most = d.count;
        for (int64_t k = 0; k < room; k++) {
            if (k < d.count) ops_BS[b * room + k] = ops[k];
            else memset(ops_BS + b * room + k, 0, sizeof(Op)); /* OP_NOTHING */
        }
        shape[0] = d.channels;
        shape[1] = is_probe && !d.is_known ? 0 : (int32_t)d.height;
        shape[2] = is_probe && !d.is_known ? 0 : (int32_t)d.width;
    }
    return most;
}
