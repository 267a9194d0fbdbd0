/* OP_RESIZE: draws the box of an image and its new size, and finds the part of the result that is made. resize.c has the
 * kernels. */
#include "core.h"

#include <math.h>

enum { LEAST_WIDTH = 64 }; /* `resize` copies narrower images as a whole */
enum { READ = 16 };        /* columns that `resize` reads at a time */

/* True if a resize makes only the rows and columns that the next window cuts out. The window must have no border, and the resize
 * must change both sides: the pass along a side that does not change copies all of it. */
bool is_cut(const Op *op, const Op *next) {
    if (next->code != OP_WINDOW) return false;
    const Border *border = &next->window.border;
    const Box *box = &op->resize.box;
    const bool has_border = border->left || border->top || border->right || border->bottom;
    const bool resizes_both = box->height != op->resize.height && box->width != op->resize.width;
    const Box *cut = &next->window.box;
    const bool has_pixels = cut->height > 0 && cut->width > 0;
    return !has_border && resizes_both && has_pixels && is_inside(cut, op->resize.height, op->resize.width);
}

/* Resize a box, which is a view of the image. If a window follows, its crop is done here too; the window then only mirrors.
 * torchvision: resized_crop of transforms/functional.py. */
int run_resize(Sample *sample, Op *op) {
    const Box *box = &op->resize.box;
    const int32_t height = op->resize.height, width = op->resize.width;
    Op *next = op + 1;
    Image *image = &sample->image;
    if (!is_inside(box, image->height, image->width) || box->height < 1 || box->width < 1) return REFUSED_OUTSIDE;
    image->data += box->top * image->row + box->left * image->pixel;
    image->height = box->height, image->width = box->width;
    if (box->height == height && box->width == width) return OK;
    if (!is_cut(op, next)) return remake(sample, op, height, width, resize);
    Box *cut = &next->window.box;
    op->resize.first_row = cut->top, op->resize.first_column = cut->left;
    cut->top = cut->left = 0; /* the window takes the whole result */
    return remake(sample, op, cut->height, cut->width, resize);
}

/* Find the pixels [begin, end) that are read if `size` pixels become `wanted`, and only `count` from `first` on are made. */
static void find_read(int64_t size, int32_t wanted, int32_t first, int32_t count, int32_t filter, int64_t *begin,
                      int64_t *end) {
    const double scale = (double)size / wanted, stretch = scale < 1 ? 1 : scale;
    const double reach = support_of(filter) * stretch + 2; /* two more, in case of rounding */
    const double low = first * scale - reach, high = ((double)first + count) * scale + reach;
    *begin = low < 0 ? 0 : (int64_t)low;
    *end = high < (double)size ? (int64_t)ceil(high) : size;
}

/* The part of the box that `resize` reads for the rows and columns that are cut out; the whole box if it is narrow, or if
 * columns come first. */
Box resize_reads(const Op *op, const Box *cut) {
    const int32_t height = op->resize.height, width = op->resize.width, filter = op->resize.interpolation;
    const Box *box = &op->resize.box;
    const bool columns_first = op->resize.chooses_order && box->height - height > 2 * (box->width - width);
    int64_t top = 0, left = 0, bottom = box->height, right = box->width;
    if (box->width >= LEAST_WIDTH && !columns_first) {
        find_read(box->height, height, cut->top, cut->height, filter, &top, &bottom);
        find_read(box->width, width, cut->left, cut->width, filter, &left, &right);
    }
    if (left > box->width - READ) left = box->width < READ ? 0 : box->width - READ;
    return (Box){(int32_t)top, (int32_t)left, (int32_t)(bottom - top), (int32_t)(right - left)};
}

/* Draws */

/* The domain chooses the arithmetic: torchvision's v2 computes in float32, as v1 does, where torch has no fast kernel for
 * uint8. OpenCV's filters that need floats are in float32, too. */
bool add_resize(Drawing *d, const Step *step, int32_t filter, int32_t domain, Box box, int64_t height, int64_t width,
                int how) {
    if (filter < NEAREST || filter > CV_AREA) return deny(d, step, REFUSED_TABLE);
    if (!is_domain(d, step, domain)) return false;
    if (domain == V2_DOMAIN && filter == BILINEAR && !d->table->resizes_fast) domain = V1_DOMAIN;
    if (filter >= CV_NEAREST) domain = V1_DOMAIN;
    Op *op = add(d, step, OP_RESIZE);
    if (!op) return false;
    op->resize.box = box;
    op->resize.height = (int32_t)truncated((double)height), op->resize.width = (int32_t)truncated((double)width);
    op->resize.interpolation = filter, op->resize.domain = domain;
    op->resize.chooses_order = d->table->chooses_order;
    return set_size(d, height, width, how);
}

/* torchvision: RandomResizedCrop.get_params, which crops the middle if no box fits; albumentations draws the same way. */
bool draw_resized_crop(Drawing *d, const Step *step) {
    const double one = step->resized_crop.ratio[0], other = step->resized_crop.ratio[1];
    const double low = fmin(one, other), high = fmax(one, other);
    Box box;
    if (!draw_box(d, step->at, 0, step->resized_crop.scale, step->resized_crop.log_ratio, 1, true, &box)) {
        const double shape = (double)d->width / (double)d->height;
        const int64_t height = shape < low ? truncated(rint((double)d->width / low)) : d->height;
        const int64_t width = shape > high ? truncated(rint((double)d->height * high)) : d->width;
        box = (Box){(int32_t)((d->height - height) / 2), (int32_t)((d->width - width) / 2), (int32_t)height, (int32_t)width};
    }
    const int32_t height = step->resized_crop.height, width = step->resized_crop.width;
    const int32_t filter = filter_of(step->resized_crop.interpolation, step->resized_crop.shrinks_by_area, box, height, width);
    return add_resize(d, step, filter, step->resized_crop.domain, box, height, width, FIXED);
}

/* Find both sides if the shorter one must get the length `wanted`: _compute_resized_output_size of torchvision's
 * transforms/functional.py, and RandomShortestSize of v2/_geometry.py. */
static void find_sides(const Drawing *d, const Step *step, int64_t wanted, int64_t *height, int64_t *width) {
    const int32_t bound = step->resize.bound;
    const double small = (double)(d->height < d->width ? d->height : d->width);
    const double large = (double)(d->height < d->width ? d->width : d->height);
    const double most = step->resize.longest ? step->resize.longest : 0x1p40;
    if (bound == MULTIPLIED_SIZE) {
        const double factor = fmin((double)wanted / small, most / large);
        *height = truncated((double)d->height * factor), *width = truncated((double)d->width * factor);
        return;
    }
    double shorter = (double)wanted;
    if (bound == LONG_BOUND) shorter = fmax(1, trunc(shorter * small / large));
    if (bound) shorter = fmin(shorter, small);
    double longer = trunc(shorter * large / small);
    if (longer > most) shorter = trunc(most * shorter / longer), longer = most;
    if (bound == LONG_BOUND) longer = fmin((double)wanted, large);
    *height = truncated(d->width > d->height ? shorter : longer);
    *width = truncated(d->width > d->height ? longer : shorter);
}

bool draw_resize(Drawing *d, const Step *step) {
    int64_t height = step->resize.height, width = step->resize.width;
    int how = FIXED;
    if (!height) {
        if (step->count < 1) return deny(d, step, REFUSED_TABLE);
        const int64_t which = step->count > 1 ? integer(d, step->at, 0, step->count) : 0;
        find_sides(d, step, d->table->steps[step->first + which].length.px, &height, &width);
        how = step->count > 1 ? DRAWN : FOLLOWS;
    }
    const Box whole = {0, 0, (int32_t)d->height, (int32_t)d->width};
    const int32_t filter = filter_of(step->resize.interpolation, step->resize.shrinks_by_area, whole, height, width);
    return add_resize(d, step, filter, step->resize.domain, whole, height, width, how);
}
