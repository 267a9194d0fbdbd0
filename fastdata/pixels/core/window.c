/* Windows: pad, crop, centre crop and flips, which are one op with the flips that follow. */
#include "core.h"

#include <math.h>
#include <string.h>

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Draws */

/* A window of the image with borders (left, top, right, bottom) around it, as far as torch would make it. */
static bool add_window(Drawing *d, const Step *step, const int64_t borders[4], double top, double left, int64_t height,
                       int64_t width, int how) {
    const int32_t mode = step->n[4], domain = step->n[5];
    if (mode < PAD_CONSTANT || mode > PAD_SYMMETRIC) return deny(d, step, REFUSED_TABLE, NULL, 0);
    const int64_t bordered_h = d->height + borders[1] + borders[3], bordered_w = d->width + borders[0] + borders[2];
    if (!d->is_probe && (bordered_h < height || bordered_w < width))
        return deny(d, step, REFUSED_CROP, (int64_t[]){height, width, bordered_h, bordered_w}, 4);
    if (domain != PIL_DOMAIN && (mode == PAD_REFLECT || mode == PAD_SYMMETRIC)) { /* PIL images reflect again and again */
        const int64_t reach_h = most(borders[0], borders[2]), reach_v = most(borders[1], borders[3]);
        const int64_t kept = mode == PAD_REFLECT;
        if (!d->is_probe && (reach_h > d->width - kept || reach_v > d->height - kept))
            return deny(d, step, REFUSED_BORDER,
                        (int64_t[]){borders[0], borders[1], borders[2], borders[3], d->height, d->width}, 6);
    }
    Op *op = add(d, step, OP_WINDOW, mode << 8);
    if (!op) return false;
    for (int side = 0; side < 4; side++) op->n[side] = (int32_t)least(borders[side], INT32_MAX);
    op->n[4] = (int32_t)truncated(top), op->n[5] = (int32_t)truncated(left);
    op->n[6] = (int32_t)least(height, INT32_MAX), op->n[7] = (int32_t)least(width, INT32_MAX);
    return set_size(d, height, width, how);
}

bool draw_pad(Drawing *d, const Step *step) {
    const int32_t *n = step->n;
    const int64_t borders[4] = {n[0], n[1], n[2], n[3]};
    const int64_t height = d->height + borders[1] + borders[3], width = d->width + borders[0] + borders[2];
    return add_window(d, step, borders, 0, 0, height, width, FOLLOWS);
}

/* torchvision adds the missing length on both sides, so that the place of the image stays random. */
bool draw_crop(Drawing *d, const Step *step) {
    const int32_t *n = step->n;
    const bool is_v2 = n[9];
    int64_t borders[4] = {n[0], n[is_v2 ? 2 : 1], n[is_v2 ? 1 : 2], n[3]};
    const int64_t height = n[6], width = n[7];
    if (n[8] && !is_v2 && (n[0] || n[1] || n[2] || n[3])) { /* v1 pads the padded image again */
        if (!draw_pad(d, step) || !leaves_pixels(d, step)) return false;
        memset(borders, 0, sizeof borders);
    }
    if (n[8]) {
        const int64_t miss_v = most(height - (d->height + borders[1] + borders[3]), 0);
        const int64_t miss_h = most(width - (d->width + borders[0] + borders[2]), 0);
        borders[0] += miss_h, borders[1] += miss_v, borders[2] += miss_h, borders[3] += miss_v;
    }
    const int64_t free_v = d->height + borders[1] + borders[3] - height + 1;
    const int64_t free_h = d->width + borders[0] + borders[2] - width + 1;
    const double top = uniform(d, step->at, 0) * (double)free_v, left = uniform(d, step->at, 1) * (double)free_h;
    return add_window(d, step, borders, top, left, height, width, FIXED);
}

/* The window in the middle; an image that is too small is padded with 0 first. */
bool draw_center_crop(Drawing *d, const Step *step) {
    const int64_t height = step->n[0], width = step->n[1];
    const int64_t miss_v = most(height - d->height, 0), miss_h = most(width - d->width, 0);
    const int64_t borders[4] = {miss_h / 2, miss_v / 2, (miss_h + 1) / 2, (miss_v + 1) / 2};
    /* Halves to the even number, as Python's round, which torchvision takes. */
    const double top = rint((double)(d->height + miss_v - height) / 2);
    const double left = rint((double)(d->width + miss_h - width) / 2);
    return add_window(d, step, borders, top, left, height, width, FIXED);
}

/* Mirrors the window before it, if there is one; a window of its own even where it does not mirror, so that all samples
 * have the same windows (transforms/device.py). */
bool draw_flip(Drawing *d, const Step *step) {
    const bool mirrors = step->n[1] ? d->turn & 1 : uniform(d, step->at, 0) < step->v[0];
    const int32_t bit = mirrors ? 1 + (step->n[0] != 0) : 0;
    Op *op = d->count > 0 ? d->ops + d->count - 1 : NULL;
    if (!op || op->code != OP_WINDOW) {
        op = add(d, step, OP_WINDOW, 0);
        if (!op) return false;
        op->n[6] = (int32_t)d->height, op->n[7] = (int32_t)d->width;
    }
    op->n[8] ^= bit;
    return true;
}

/* Pixels: torchvision's pad, crop, hflip and vflip (transforms/functional.py), Pillow's ImageOps.expand. */

/* The place in the image of place `at` of the image with borders; -1 where it is filled. */
static int64_t source_place(int64_t at, int64_t length, int mode) {
    if (at >= 0 && at < length) return at;
    if (mode == PAD_CONSTANT) return -1;
    if (mode == PAD_EDGE) return at < 0 ? 0 : length - 1;
    int64_t period = mode == PAD_SYMMETRIC ? 2 * length : length > 1 ? 2 * (length - 1) : 1;
    at = (at % period + period) % period;
    return at < length ? at : (mode == PAD_SYMMETRIC ? 2 * length - 1 : 2 * (length - 1)) - at;
}

/* As memcpy, without a call for the rows of small images. */
INLINE void copy_bytes(const uint8_t *from, int64_t count, uint8_t *to) {
    if (count > 64 || count < 16) {
        memcpy(to, from, (size_t)count);
        return;
    }
    memcpy(to, from, 16);
    if (count > 32) memcpy(to + 16, from + 16, 16), memcpy(to + count - 32, from + count - 32, 16);
    memcpy(to + count - 16, from + count - 16, 16);
}

static void fill_window(const Op *op, const Image *in, int64_t top, int64_t left, const Image *out) {
    int mode = op->n[8] >> 8;
    int64_t before = left < 0 ? (-left < out->width ? -left : out->width) : 0; /* columns before the image */
    int64_t after = in->width - left < out->width ? in->width - left : out->width; /* where it ends */
    if (after < before) after = before;
    for (int32_t c = 0; c < out->channels; c++) {
        uint8_t *to = out->data + c * out->plane;
        if (mode == PAD_CONSTANT) memset(to, (uint8_t)op->v[8 + (c < 4 ? c : 3)], out->plane);
        for (int32_t y = 0; y < out->height; y++, to += out->row) {
            int64_t from_y = source_place(top + y, in->height, mode);
            if (from_y < 0) continue;
            const uint8_t *from = in->data + c * in->plane + from_y * in->row;
            if (in->pixel == 1) copy_bytes(from + left + before, after - before, to + before);
            else copy_row(from + (left + before) * in->pixel, in->pixel, after - before, to + before);
            if (mode == PAD_CONSTANT) continue;
            for (int64_t x = 0; x < before; x++) to[x] = from[source_place(left + x, in->width, mode) * in->pixel];
            for (int64_t x = after; x < out->width; x++)
                to[x] = from[source_place(left + x, in->width, mode) * in->pixel];
        }
    }
}

int window(Sample *sample, const Op *op) {
    const int32_t *n = op->n;
    Image *image = &sample->image;
    int64_t bordered_h = (int64_t)image->height + n[1] + n[3], bordered_w = (int64_t)image->width + n[0] + n[2];
    if (n[4] < 0 || n[5] < 0 || n[6] < 1 || n[7] < 1 || n[4] + (int64_t)n[6] > bordered_h) return REFUSED_OUTSIDE;
    if (n[5] + (int64_t)n[7] > bordered_w) return REFUSED_OUTSIDE;
    int64_t top = (int64_t)n[4] - n[1], left = (int64_t)n[5] - n[0];
    if (top >= 0 && left >= 0 && top + n[6] <= image->height && left + n[7] <= image->width) {
        image->data += top * image->row + left * image->pixel;
        image->height = n[6], image->width = n[7];
    } else {
        Image out; /* the fill is a value after the table */
        if (!settle(sample) || !room(sample, image->channels, n[6], n[7], &out)) return NO_MEMORY;
        fill_window(op, image, top, left, &out);
        become(sample, &out);
    }
    if (n[8] & 1) {
        image->data += (image->width - 1) * image->pixel;
        image->pixel = -image->pixel;
    }
    if (n[8] & 2) {
        image->data += (image->height - 1) * image->row;
        image->row = -image->row;
    }
    return OK;
}
