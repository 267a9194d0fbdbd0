/* Buckets: an image of any size is resized and cropped to one of a few sizes, the one that crops the least. pixels/buckets.py
 * does the same for single images. */
#include "core.h"

#include <math.h>

/* The share of an image that is kept when it covers a bucket and the longer side is cropped. Products of sides are exact. */
static double kept_share(const Drawing *d, const Step *bucket) {
    const double across = (double)d->width * bucket->bucket.height, down = (double)d->height * bucket->bucket.width;
    return fmin(across, down) / fmax(across, down);
}

/* True if an image just covers this bucket: one side is equal, and the other at least as long. */
static bool covers(const Drawing *d, const Step *bucket) {
    const int64_t height = bucket->bucket.height, width = bucket->bucket.width;
    return (d->height == height && d->width >= width) || (d->width == width && d->height >= height);
}

/* The bucket that crops the least, among all or among those that the image just covers; NULL if there is none. */
static const Step *find_bucket(const Drawing *d, const Step *step, bool is_covered) {
    const Step *children = d->table->steps + step->first, *best = NULL;
    for (int32_t k = 0; k < step->count; k++) {
        if (is_covered && !covers(d, children + k)) continue;
        if (!best || kept_share(d, children + k) > kept_share(d, best)) best = children + k;
    }
    return best;
}

bool draw_cover_bucket(Drawing *d, const Step *step) {
    const Step *bucket = find_bucket(d, step, false);
    if (!bucket) return deny(d, step, REFUSED_TABLE);
    double height = bucket->bucket.height, width = bucket->bucket.width;
    const double across = (double)d->width * height, down = (double)d->height * width;
    if (across > down) width = floor(across / (double)d->height + 0.5);
    else height = floor(down / (double)d->width + 0.5);
    const Box whole = {0, 0, (int32_t)d->height, (int32_t)d->width};
    return add_resize(d, step, step->cover_bucket.interpolation, step->cover_bucket.domain, whole, truncated(height),
                      truncated(width), FOLLOWS);
}

/* A crop in the middle, as torchvision's center_crop, or at a random place, as its RandomCrop. */
bool draw_bucket_crop(Drawing *d, const Step *step) {
    const Step *bucket = find_bucket(d, step, true);
    if (!bucket) bucket = find_bucket(d, step, false);
    if (!bucket) return deny(d, step, REFUSED_TABLE);
    const int64_t height = bucket->bucket.height, width = bucket->bucket.width;
    const double free_v = (double)(d->height - height), free_h = (double)(d->width - width);
    const bool is_random = step->bucket_crop.is_random;
    const double top = is_random ? uniform(d, step->at, 0) * (free_v + 1) : rint(free_v / 2);
    const double left = is_random ? uniform(d, step->at, 1) * (free_h + 1) : rint(free_h / 2);
    return add_crop(d, step, top, left, height, width, step->count > 1 ? FOLLOWS : FIXED);
}
