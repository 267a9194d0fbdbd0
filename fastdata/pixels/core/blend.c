/* Rows of a batch that are mixed from two samples, as by MixUp and CutMix, in one pass with the conversion to the batch's
 * dtype. A row is written as soon as both of its samples are complete, while these are still in the cache.
 *
 * Rounding is that of torchvision's transforms/v2/_augment.py and timm's data/mixup.py: each product is rounded to the batch's
 * dtype, then their sum. uint8 is as in timm's FastCollateMixup: a sum of floats, rounded to the nearest, halves to even. */
#include "core.h"

#include <string.h>

enum { RUN = 3072 }; /* values in a run: whole pixels of 1 to 4 channels; two runs fit into the first cache */

static void blend_floats(float *restrict own, const float *restrict other, int64_t count, float share, float other_share) {
    for (int64_t i = 0; i < count; i++) own[i] = own[i] * share + other[i] * other_share;
}

static void blend_doubles(double *restrict own, const double *restrict other, int64_t count, double share,
                          double other_share) {
    for (int64_t i = 0; i < count; i++) own[i] = own[i] * share + other[i] * other_share;
}

/* If shares add up to 1, sums are in [0, 255]; others are clipped. Adding 3 * 2^22 rounds to the nearest integer, halves to
 * even, because the last bit of a float of that size counts 1; the integer is then in the low bits. */
static void blend_bytes(uint8_t *restrict own, const uint8_t *restrict other, int64_t count, float share, float other_share) {
    for (int64_t i = 0; i < count; i++) {
        const float sum = own[i] * share + other[i] * other_share, above = sum > 0 ? sum : 0;
        const float rounded = (above < 255 ? above : 255) + 0x3p22f;
        uint32_t bits;
        memcpy(&bits, &rounded, 4);
        own[i] = (uint8_t)bits;
    }
}

/* Round floats to a dtype. */
static void round_to(int32_t dtype, float *values, int64_t count) {
    uint8_t stored[CHUNK * sizeof(float)];
    store(dtype, values, count, stored);
    load(dtype, stored, count, values);
}

/* Blend at most CHUNK half floats. */
static void blend_halves(int32_t dtype, uint8_t *own, const uint8_t *other, int64_t count, float share, float other_share) {
    float a[CHUNK], b[CHUNK];
    load(dtype, own, count, a), load(dtype, other, count, b);
    for (int64_t i = 0; i < count; i++) a[i] *= share, b[i] *= other_share;
    round_to(dtype, a, count), round_to(dtype, b, count);
    for (int64_t i = 0; i < count; i++) a[i] += b[i];
    store(dtype, a, count, own);
}

/* own = own * share + other * other_share. Values of INT32 and INT64 do not change. */
static void blend(int32_t dtype, uint8_t *own, const uint8_t *other, int64_t count, double share, double other_share) {
    const int64_t bytes = ITEM_BYTES[dtype];
    if (dtype == INT32 || dtype == INT64) return;
    if (dtype == UINT8) blend_bytes(own, other, count, (float)share, (float)other_share);
    else if (dtype == FLOAT32) blend_floats((float *)own, (const float *)other, count, (float)share, (float)other_share);
    else if (dtype == FLOAT64) blend_doubles((double *)own, (const double *)other, count, share, other_share);
    else
        for (int64_t from = 0; from < count; from += CHUNK) {
            const int64_t part = count - from < CHUNK ? count - from : CHUNK;
            blend_halves(dtype, own + from * bytes, other + from * bytes, part, (float)share, (float)other_share);
        }
}

/* Copy the own sample, with the box of its partner (CutMix). `bytes` is the size of a value. */
static void splice(const Output *output, const Blended *row, int64_t bytes, uint8_t *made) {
    const bool is_last = output->channels_last;
    const int64_t width = output->width, planes = is_last ? 1 : output->channels;
    const int64_t pixel = bytes * (is_last ? output->channels : 1), size = planes * output->height * width * pixel;
    memcpy(made, row->own, (size_t)size);
    for (int64_t c = 0; c < planes; c++)
        for (int64_t y = row->box.top; y < (int64_t)row->box.top + row->box.height; y++) {
            const int64_t at = ((c * output->height + y) * width + row->box.left) * pixel;
            memcpy(made + at, row->partner + at, (size_t)(row->box.width * pixel));
        }
}

/* Write `count` values of a sample, from value `at` on, in the batch's dtype: values of plane c, or of whole pixels. */
static void put(const Output *output, bool converts, int32_t c, const uint8_t *in, int64_t at, int64_t count, uint8_t *out) {
    const int64_t bytes = ITEM_BYTES[output->table->values.dtype];
    if (converts) write_run(output, c, in + at, count, out);
    else if (in + at * bytes != out) memcpy(out, in + at * bytes, (size_t)(count * bytes));
}

static int blend_row(const Output *output, const Blended *row, bool converts, Scratch *scratch) {
    const int32_t dtype = output->table->values.dtype;
    const int32_t planes = output->channels_last ? 1 : output->channels;
    converts = converts && dtype != UINT8;
    const int64_t bytes = ITEM_BYTES[dtype], plane = row_bytes(output) / bytes / planes;
    const int64_t run = output->channels < RUN ? RUN / output->channels * output->channels : output->channels;
    const bool has_box = row->box.height > 0 && row->box.width > 0;
    const bool is_shared = row->share != 1 || row->partner_share != 0;
    if (has_box && !is_inside(&row->box, output->height, output->width)) return REFUSED_OUTSIDE;
    uint8_t *other = take(scratch, SLOT_B, run * bytes), *out = output->out_B + row->row * row_bytes(output);
    uint8_t *spliced = converts ? take(scratch, SLOT_A, plane * planes) : out;
    if (!other || !spliced) return REFUSED_MEMORY;
    if (has_box) splice(output, row, converts ? 1 : bytes, spliced);
    const uint8_t *own = has_box ? spliced : row->own;
    for (int32_t c = 0; c < planes; c++)
        for (int64_t from = 0; from < plane; from += run) {
            const int64_t count = plane - from < run ? plane - from : run, at = c * plane + from;
            if (is_shared && converts && blend_run(output, c, own + at, row->partner + at, count, (float)row->share,
                                                   (float)row->partner_share, (float *)out + at))
                continue;
            put(output, converts, c, own, at, count, out + at * bytes);
            if (!is_shared) continue;
            if (converts) put(output, true, c, row->partner, at, count, other);
            const uint8_t *there = converts ? other : row->partner + at * bytes;
            blend(dtype, out + at * bytes, there, count, row->share, row->partner_share);
        }
    return OK;
}

bool can_blend(const Blending *blending) {
    Output *output = blending->output;
    if (!is_sound(output->table)) return false;
    const bool has_pixels = output->channels > 0 && output->height > 0 && output->width > 0;
    output->rows = has_pixels ? output->out_bytes / row_bytes(output) : 0;
    return true;
}

int blend_after(const Blending *blending, int64_t sample, int64_t *next, Scratch *scratch, Refusal *refusal) {
    for (; *next < blending->count && blending->rows[*next].after <= sample; ++*next) {
        const Blended *row = blending->rows + *next;
        refusal->row.row = row->row, refusal->row.rows = blending->output->rows;
        if (row->row < 0 || row->row >= blending->output->rows) return REFUSED_ROW;
        const int problem = blend_row(blending->output, row, blending->converts, scratch);
        if (problem) return problem;
    }
    return OK;
}

/* Write all rows. Returns -1, or the number of the row that was refused. */
int64_t fastdata_blend(const Blending *blending, Refusal *refusal) {
    int64_t next = 0;
    refusal->program = 0, refusal->reason = REFUSED_TABLE;
    if (!can_blend(blending)) return 0;
    Scratch *scratch = borrow();
    refusal->reason = REFUSED_MEMORY;
    if (!scratch) return 0;
    refusal->reason = blend_after(blending, INT64_MAX, &next, scratch, refusal);
    give_back(scratch);
    return refusal->reason == OK ? -1 : next;
}
