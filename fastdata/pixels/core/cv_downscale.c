/* albumentations: Downscale by the nearest pixels, down and up again. */
#include "core.h"

#include <math.h>

static int64_t small_side(int64_t side, double scale) { return truncated(rint((double)side * scale)); }

bool draw_downscale(Drawing *d, const Step *step) {
    const double low = step->downscale.scale[0], high = step->downscale.scale[1];
    if (!(low > 0 && low <= high && high <= 1)) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_DOWNSCALE);
    if (!op) return false;
    op->downscale.scale = between(d, step->at, 0, low, high);
    const bool has_pixels = small_side(d->height, op->downscale.scale) > 0 && small_side(d->width, op->downscale.scale) > 0;
    return has_pixels || d->is_probe || deny(d, step, REFUSED_OUTSIDE);
}

/* OpenCV: resizeNN (resize.cpp), by the factor and then to the size. */
static void find_places(int64_t side, double scale, int32_t *places) {
    const int64_t small = small_side(side, scale);
    const double up = 1 / ((double)side / (double)small), down = 1 / scale;
    for (int64_t at = 0; at < side; at++) {
        const int64_t between = truncated(floor((double)at * up)), inside = between < small ? between : small - 1;
        const int64_t from = truncated(floor((double)inside * down));
        places[at] = (int32_t)(from < side ? from : side - 1);
    }
}

static bool downscale(const Op *op, const Image *in, const Image *out, Scratch *scratch) {
    int32_t *rows = take(scratch, SLOT_WORK, ((int64_t)in->height + in->width) * (int64_t)sizeof *rows);
    if (!rows) return false;
    int32_t *restrict columns = rows + in->height;
    find_places(in->height, op->downscale.scale, rows);
    find_places(in->width, op->downscale.scale, columns);
    for (int64_t c = 0; c < in->channels; c++)
        for (int64_t y = 0; y < in->height; y++) {
            const uint8_t *restrict from = in->data + c * in->plane + rows[y] * in->row;
            uint8_t *restrict to = out->data + c * out->plane + y * out->row;
            if (y && rows[y] == rows[y - 1]) memcpy(to, to - out->row, (size_t)in->width);
            else
                for (int64_t x = 0; x < in->width; x++) to[x] = from[columns[x]];
        }
    return true;
}

int run_downscale(Sample *sample, Op *op) {
    return remake(sample, op, sample->image.height, sample->image.width, downscale);
}
