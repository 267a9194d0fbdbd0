/* Draws of albumentations' resizes and crops that torchvision does not have. cv_resize.c has the pixels.
 *
 * References are classes of albumentations 2.0.8: augmentations/geometric/resize.py and crops/transforms.py.
 */
#include "core.h"

#include <math.h>

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* The whole image to height x width; `how` as of set_size. */
static bool resize_all(Drawing *d, const Step *step, int32_t filter, bool shrinks_by_area, double height, double width,
                       int how) {
    const Box whole = {0, 0, (int32_t)d->height, (int32_t)d->width};
    const int64_t h = truncated(height), w = truncated(width);
    return add_resize(d, step, filter_of(filter, shrinks_by_area, whole, h, w), V1_DOMAIN, whole, h, w, how);
}

/* LongestMaxSize and SmallestMaxSize: both sides are multiplied by one number, and rounded to the nearest, halves to even. */
bool draw_max_size(Drawing *d, const Step *step) {
    const double height = (double)d->height, width = (double)d->width;
    const bool is_smallest = step->max_size.is_smallest;
    double down = step->max_size.height / height, across = step->max_size.width / width;
    int how = FOLLOWS;
    if (step->count > 0) {
        const int64_t which = step->count > 1 ? integer(d, step->at, 0, step->count) : 0;
        const double px = d->table->steps[step->first + which].length.px;
        down = px / height, across = px / width;
        how = step->count > 1 ? DRAWN : FOLLOWS;
    } else if (!step->max_size.height || !step->max_size.width) {
        down = across = step->max_size.height ? down : across;
    }
    const double scale = is_smallest ? fmax(down, across) : fmin(down, across);
    const double new_height = fmax(1, rint(height * scale)), new_width = fmax(1, rint(width * scale));
    return resize_all(d, step, step->max_size.interpolation, step->max_size.shrinks_by_area, new_height, new_width, how);
}

bool draw_scale(Drawing *d, const Step *step) {
    const double scale = between(d, step->at, 0, step->scale.low, step->scale.high) + 1;
    const double height = (double)d->height * scale, width = (double)d->width * scale;
    return resize_all(d, step, step->scale.interpolation, step->scale.shrinks_by_area, height, width, DRAWN);
}

/* Where `length` pixels of `all` begin, by a number in [0, 1): get_crop_coords of crops/functional.py. */
static int64_t begin_of(int64_t all, int64_t length, double drawn) { return truncated((double)(all - length + 1) * drawn); }

bool draw_sized_crop(Drawing *d, const Step *step) {
    const int64_t lengths = (int64_t)step->sized_crop.most - step->sized_crop.least + 1;
    if (lengths < 1) return deny(d, step, REFUSED_TABLE);
    const int64_t length = step->sized_crop.least + integer(d, step->at, 0, lengths);
    const int64_t h = least(length, d->height), w = least(truncated((double)length * step->sized_crop.ratio), d->width);
    const int64_t top = begin_of(d->height, h, uniform(d, step->at, 1));
    const int64_t left = begin_of(d->width, w, uniform(d, step->at, 2));
    const Box box = {(int32_t)top, (int32_t)left, (int32_t)h, (int32_t)w};
    const int32_t height = step->sized_crop.height, width = step->sized_crop.width;
    const int32_t filter = filter_of(step->sized_crop.interpolation, step->sized_crop.shrinks_by_area, box, height, width);
    return add_resize(d, step, filter, V1_DOMAIN, box, height, width, FIXED);
}

/* A whole number from low to high, both included. */
static int64_t whole_number(const Drawing *d, int64_t at, int64_t draw, int64_t low, int64_t high) {
    return low + integer(d, at, draw, most(high - low + 1, 1));
}

bool draw_border_crop(Drawing *d, const Step *step) {
    const double *margin = step->border_crop.margin, height = (double)d->height, width = (double)d->width;
    const int64_t left = whole_number(d, step->at, 0, 0, truncated(margin[0] * width));
    const int64_t right = whole_number(d, step->at, 1, most(left + 1, truncated((1 - margin[2]) * width)), d->width);
    const int64_t top = whole_number(d, step->at, 2, 0, truncated(margin[1] * height));
    const int64_t bottom = whole_number(d, step->at, 3, most(top + 1, truncated((1 - margin[3]) * height)), d->height);
    const Box box = {(int32_t)top, (int32_t)left, (int32_t)(bottom - top), (int32_t)(right - left)};
    if (!is_inside(&box, (int32_t)d->height, (int32_t)d->width))
        return d->is_probe ? set_size(d, 1, 1, DRAWN) : deny(d, step, REFUSED_OUTSIDE);
    Op *op = add(d, step, OP_WINDOW);
    if (!op) return false;
    op->window.box = box;
    return set_size(d, box.height, box.width, DRAWN);
}
