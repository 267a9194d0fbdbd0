/* Windows: pad, crop, centre crop and flips. Each is one op, together with the flips that follow it. */
#include "core.h"

#include <math.h>
#include <string.h>

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Draws */

/* Lengths of borders as int64, because sums of them may not fit into the int32 of an op. */
typedef struct {
    int64_t left, top, right, bottom;
} Margins;

static Margins margins_of(const Border *border) {
    return (Margins){border->left, border->top, border->right, border->bottom};
}
static int64_t added_height(Margins m) { return m.top + m.bottom; }
static int64_t added_width(Margins m) { return m.left + m.right; }
static int32_t bounded(int64_t length) { return (int32_t)least(length, INT32_MAX); }

/* Add a window of the image with margins around it. Sizes that torch refuses are refused, so that the user gets that error. */
static bool add_window(Drawing *d, const Step *step, int32_t mode, int32_t domain, Margins m, double top, double left,
                       int64_t height, int64_t width, int how) {
    if (mode < PAD_CONSTANT || mode > PAD_WRAP) return deny(d, step, REFUSED_TABLE);
    const int64_t bordered_h = d->height + added_height(m), bordered_w = d->width + added_width(m);
    if (!d->is_probe && (bordered_h < height || bordered_w < width)) {
        d->refusal->crop.crop_height = height, d->refusal->crop.crop_width = width;
        d->refusal->crop.height = bordered_h, d->refusal->crop.width = bordered_w;
        return deny(d, step, REFUSED_CROP);
    }
    if (domain != PIL_DOMAIN && (mode == PAD_REFLECT || mode == PAD_SYMMETRIC)) { /* for PIL images, reflections repeat */
        const int64_t reach_h = most(m.left, m.right), reach_v = most(m.top, m.bottom);
        const int64_t kept = mode == PAD_REFLECT;
        if (!d->is_probe && (reach_h > d->width - kept || reach_v > d->height - kept)) {
            d->refusal->border.left = m.left, d->refusal->border.top = m.top;
            d->refusal->border.right = m.right, d->refusal->border.bottom = m.bottom;
            d->refusal->border.height = d->height, d->refusal->border.width = d->width;
            return deny(d, step, REFUSED_BORDER);
        }
    }
    Op *op = add(d, step, OP_WINDOW);
    if (!op) return false;
    op->window.border = (Border){bounded(m.left), bounded(m.top), bounded(m.right), bounded(m.bottom), mode, domain};
    op->window.box = (Box){(int32_t)truncated(top), (int32_t)truncated(left), bounded(height), bounded(width)};
    return set_size(d, height, width, how);
}

bool add_crop(Drawing *d, const Step *step, double top, double left, int64_t height, int64_t width, int how) {
    return add_window(d, step, PAD_CONSTANT, PIL_DOMAIN, (Margins){0, 0, 0, 0}, top, left, height, width, how);
}

static bool add_border(Drawing *d, const Step *step, const Border *border) {
    const Margins m = margins_of(border);
    const int64_t height = d->height + added_height(m), width = d->width + added_width(m);
    return add_window(d, step, border->mode, border->domain, m, 0, 0, height, width, FOLLOWS);
}

bool draw_pad(Drawing *d, const Step *step) { return add_border(d, step, &step->pad.border); }

/* torchvision: RandomCrop of v1 or v2. It adds the missing length on both sides, so that the place of the image is random. */
bool draw_crop(Drawing *d, const Step *step) {
    const Border *border = &step->crop.border;
    const int64_t height = step->crop.height, width = step->crop.width;
    const bool pads = step->crop.pads_if_needed, has_border = border->left || border->top || border->right || border->bottom;
    Margins m = margins_of(border);
    if (pads && !step->crop.is_v2 && has_border) { /* v1 pads the padded image again */
        if (!add_border(d, step, border) || !leaves_pixels(d, step)) return false;
        m = (Margins){0, 0, 0, 0};
    }
    if (pads) {
        const int64_t miss_v = most(height - (d->height + added_height(m)), 0);
        const int64_t miss_h = most(width - (d->width + added_width(m)), 0);
        m.left += miss_h, m.top += miss_v, m.right += miss_h, m.bottom += miss_v;
    }
    const int64_t free_v = d->height + added_height(m) - height + 1, free_h = d->width + added_width(m) - width + 1;
    const double top = uniform(d, step->at, 0) * (double)free_v, left = uniform(d, step->at, 1) * (double)free_h;
    return add_window(d, step, border->mode, border->domain, m, top, left, height, width, FIXED);
}

/* torchvision: center_crop, which first pads an image that is too small with 0. */
bool draw_center_crop(Drawing *d, const Step *step) {
    const int64_t height = step->center_crop.height, width = step->center_crop.width;
    const int64_t miss_v = most(height - d->height, 0), miss_h = most(width - d->width, 0);
    const Margins m = {miss_h / 2, miss_v / 2, (miss_h + 1) / 2, (miss_v + 1) / 2};
    /* Halves are rounded to the even number, as by Python's round, which torchvision uses. */
    const double top = rint((double)(d->height + miss_v - height) / 2);
    const double left = rint((double)(d->width + miss_h - width) / 2);
    return add_window(d, step, PAD_CONSTANT, PIL_DOMAIN, m, top, left, height, width, FIXED);
}

/* The length to add to a side so that it is long enough, or a multiple of a divisor. */
static int64_t missing(int64_t length, int64_t least_length, int64_t divisor) {
    return divisor > 0 ? (divisor - length % divisor) % divisor : most(least_length - length, 0);
}

/* albumentations: get_padding_params and adjust_padding_by_position of augmentations/geometric/functional.py; and, with
 * is_whole_behind, Crop._compute_adjusted_padding of augmentations/crops/transforms.py. */
bool draw_pad_to(Drawing *d, const Step *step) {
    const int32_t position = step->pad_to.position;
    const int64_t miss_v = missing(d->height, step->pad_to.height, step->pad_to.height_divisor);
    const int64_t miss_h = missing(d->width, step->pad_to.width, step->pad_to.width_divisor);
    int64_t top = miss_v / 2, left = miss_h / 2;
    if (position == PLACE_TOP_LEFT || position == PLACE_TOP_RIGHT) top = 0;
    if (position == PLACE_BOTTOM_LEFT || position == PLACE_BOTTOM_RIGHT) top = miss_v;
    if (position == PLACE_TOP_LEFT || position == PLACE_BOTTOM_LEFT) left = 0;
    if (position == PLACE_TOP_RIGHT || position == PLACE_BOTTOM_RIGHT) left = miss_h;
    if (position == PLACE_RANDOM) top = integer(d, step->at, 0, miss_v + 1), left = integer(d, step->at, 1, miss_h + 1);
    const bool is_whole = step->pad_to.is_whole_behind;
    const Margins m = {left, top, is_whole ? miss_h : miss_h - left, is_whole ? miss_v : miss_v - top};
    const int64_t height = d->height + added_height(m), width = d->width + added_width(m);
    return add_window(d, step, step->pad_to.mode, PIL_DOMAIN, m, 0, 0, height, width, FOLLOWS);
}

/* albumentations: get_center_crop_coords and crop of augmentations/crops/functional.py. */
bool draw_cut(Drawing *d, const Step *step) {
    const Box *box = &step->cut.box;
    const int64_t height = box->height, width = box->width;
    int64_t top = box->top, left = box->left;
    if (step->cut.is_centered) top = (d->height - height) / 2, left = (d->width - width) / 2;
    const bool fits = top >= 0 && left >= 0 && top + height <= d->height && left + width <= d->width;
    if (!fits && !d->is_probe) {
        d->refusal->crop.crop_height = top + height, d->refusal->crop.crop_width = left + width;
        d->refusal->crop.height = d->height, d->refusal->crop.width = d->width;
        return deny(d, step, REFUSED_CROP);
    }
    const Margins none = {0, 0, 0, 0};
    return add_window(d, step, PAD_CONSTANT, PIL_DOMAIN, none, (double)top, (double)left, height, width, FIXED);
}

/* A flip mirrors the window before it. If there is none, it adds a window, even for a sample that is not mirrored: all samples
 * then have the same number of windows, which loaders/device.py needs. torchvision: RandomHorizontalFlip. */
bool draw_flip(Drawing *d, const Step *step) {
    const bool mirrors = step->flip.alternates ? d->turn & 1 : uniform(d, step->at, 0) < step->flip.p;
    Op *op = d->count > 0 ? d->ops + d->count - 1 : NULL;
    if (!op || op->code != OP_WINDOW) {
        op = add(d, step, OP_WINDOW);
        if (!op) return false;
        op->window.box.height = (int32_t)d->height, op->window.box.width = (int32_t)d->width;
    }
    if (step->flip.is_vertical) op->window.mirrors_rows ^= mirrors;
    else op->window.mirrors_columns ^= mirrors;
    return true;
}

/* Pixels: torchvision's pad, crop, hflip and vflip (transforms/functional.py), Pillow's ImageOps.expand. */

/* The place in the image for place `at` of the image with borders; -1: the fill. Reflections repeat, as in Pillow; torch
 * refuses borders that would need a second one. */
static int64_t source_place(int64_t at, int64_t length, int mode) {
    if (at >= 0 && at < length) return at;
    if (mode == PAD_CONSTANT) return -1;
    if (mode == PAD_EDGE) return at < 0 ? 0 : length - 1;
    if (mode == PAD_WRAP) return (at % length + length) % length;
    int64_t period = mode == PAD_SYMMETRIC ? 2 * length : length > 1 ? 2 * (length - 1) : 1;
    at = (at % period + period) % period;
    return at < length ? at : (mode == PAD_SYMMETRIC ? 2 * length - 1 : 2 * (length - 1)) - at;
}

/* memcpy without a function call, for the rows of small images: two or four copies of 16 bytes, which may overlap. */
INLINE void copy_bytes(const uint8_t *from, int64_t count, uint8_t *to) {
    if (count > 64 || count < 16) {
        memcpy(to, from, (size_t)count);
        return;
    }
    memcpy(to, from, 16);
    if (count > 32) memcpy(to + 16, from + 16, 16), memcpy(to + count - 32, from + count - 32, 16);
    memcpy(to + count - 16, from + count - 16, 16);
}

/* Not inlined: it is rarely used, and its loops would slow down the loops around it. */
static __attribute__((noinline)) void copy_mirrored(const uint8_t *in, int64_t pixel, int64_t count, uint8_t *out) {
    copy_row(in, pixel, count, out);
}

static void fill_window(const Op *op, const Image *in, int64_t top, int64_t left, const Image *out) {
    const int32_t mode = op->window.border.mode;
    int64_t before = left < 0 ? (-left < out->width ? -left : out->width) : 0; /* columns before the image */
    int64_t after = in->width - left < out->width ? in->width - left : out->width; /* where it ends */
    if (after < before) after = before;
    for (int32_t c = 0; c < out->channels; c++) {
        uint8_t *to = out->data + c * out->plane;
        if (mode == PAD_CONSTANT) memset(to, (uint8_t)op->fill[c < 4 ? c : 3], out->plane);
        for (int32_t y = 0; y < out->height; y++, to += out->row) {
            int64_t from_y = source_place(top + y, in->height, mode);
            if (from_y < 0) continue;
            const uint8_t *from = in->data + c * in->plane + from_y * in->row;
            if (in->pixel == 1) copy_bytes(from + left + before, after - before, to + before);
            else copy_mirrored(from + (left + before) * in->pixel, in->pixel, after - before, to + before);
            if (mode == PAD_CONSTANT) continue;
            for (int64_t x = 0; x < before; x++) to[x] = from[source_place(left + x, in->width, mode) * in->pixel];
            for (int64_t x = after; x < out->width; x++)
                to[x] = from[source_place(left + x, in->width, mode) * in->pixel];
        }
    }
}

int run_window(Sample *sample, Op *op) {
    const Border *border = &op->window.border;
    const Box *box = &op->window.box;
    Image *image = &sample->image;
    const int64_t bordered_h = (int64_t)image->height + border->top + border->bottom;
    const int64_t bordered_w = (int64_t)image->width + border->left + border->right;
    if (box->top < 0 || box->left < 0 || box->height < 1 || box->width < 1) return REFUSED_OUTSIDE;
    if (box->top + (int64_t)box->height > bordered_h || box->left + (int64_t)box->width > bordered_w) return REFUSED_OUTSIDE;
    const int64_t top = (int64_t)box->top - border->top, left = (int64_t)box->left - border->left;
    if (top >= 0 && left >= 0 && top + box->height <= image->height && left + box->width <= image->width) {
        image->data += top * image->row + left * image->pixel;
        image->height = box->height, image->width = box->width;
    } else {
        Image out; /* the pending table must not change the fill, so it is applied first */
        if (!settle(sample) || !room(sample, image->channels, box->height, box->width, &out)) return REFUSED_MEMORY;
        fill_window(op, image, top, left, &out);
        become(sample, &out);
    }
    if (op->window.mirrors_columns) {
        image->data += (image->width - 1) * image->pixel;
        image->pixel = -image->pixel;
    }
    if (op->window.mirrors_rows) {
        image->data += (image->height - 1) * image->row;
        image->row = -image->row;
    }
    return OK;
}
