/* Making a batch: each sample is decoded, if it is a file; then, for each output, its ops run one after the other in buffers
 * that stay in the cache, and the result is written to the batch. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

enum { FETCHED_BYTES = 16 << 10, LINE = 64 };
enum { MARGIN = 64 }; /* bytes before and behind a decoded image that kernels may read */

/* The samples of a call, the keys of their draws, and their outputs. */
typedef struct {
    const uint8_t *const *sources_B; /* first byte of each sample, uint8 (C, H, W), or of its file */
    const int32_t *shapes_B3;        /* channels, height, width; of a file: after it is turned */
    const int64_t *sizes_B;          /* bytes of a JPEG file, 0 for pixels; NULL: all are pixels */
    const int32_t *turns_B;          /* EXIF orientations by which files are turned; NULL: none is turned */
    const Jpeg *jpeg;
    uint64_t seed;
    const int64_t *visits_B, *indices_B;
    const int64_t *rows_B;           /* the row for each sample; NULL: sample b is written to row b */
    const Output *outputs;
    int64_t count;                   /* number of outputs */
} Batch;

/* The ops that one program has drawn for a sample, followed by OP_NOTHING. */
typedef struct {
    Op ops[MAX_OPS + 1];
    int32_t count;
} Drawn;

/* These do nothing: values.c converts, and OP_CAST only separates the ops on uint8 from those on floats. */
int run_nothing(Sample *sample, Op *op) { return (void)sample, (void)op, OK; }
int run_cast(Sample *sample, Op *op) { return (void)sample, (void)op, OK; }

static int run_op(Sample *sample, Op *op) {
    switch (op->code) {
#define OP(CODE, name, ...) case OP_##CODE: return run_##name(sample, op);
#include "records.h"
    default: return REFUSED_OP;
    }
}

/* Samples that are files */

/* The part of an image that a window reads. If its borders repeat pixels, these may be anywhere: then the whole image. */
static Box read_window(const Op *op, int32_t height, int32_t width) {
    const Border *border = &op->window.border;
    const Box *box = &op->window.box, whole = {0, 0, height, width};
    const int64_t top = (int64_t)box->top - border->top, left = (int64_t)box->left - border->left;
    const int64_t bottom = top + box->height, right = left + box->width;
    const bool is_within = top >= 0 && left >= 0 && bottom <= height && right <= width;
    const bool is_beside = bottom < 1 || right < 1 || top >= height || left >= width;
    if (box->height < 1 || box->width < 1 || is_beside) return whole;
    if (!is_within && border->mode != PAD_CONSTANT) return whole;
    Box part = {top > 0 ? (int32_t)top : 0, left > 0 ? (int32_t)left : 0, 0, 0};
    part.height = (int32_t)(bottom < height ? bottom : height) - part.top;
    part.width = (int32_t)(right < width ? right : width) - part.left;
    return part;
}

/* The part of an image (height, width) that a program reads: its first op may need only a part. */
static Box read_box(const Drawn *drawn, int32_t height, int32_t width) {
    const Op *op = drawn->ops, *next = op + 1;
    const Box whole = {0, 0, height, width};
    if (op->code == OP_WINDOW) return read_window(op, height, width);
    const Box *box = &op->resize.box;
    if (op->code != OP_RESIZE || !is_inside(box, height, width) || box->height < 1 || box->width < 1) return whole;
    if (!is_cut(op, next)) return *box;
    Box part = resize_reads(op, &next->window.box);
    part.top += box->top, part.left += box->left;
    return part;
}

static Box join(Box a, Box b) {
    const int32_t bottom = a.top + a.height > b.top + b.height ? a.top + a.height : b.top + b.height;
    const int32_t right = a.left + a.width > b.left + b.width ? a.left + a.width : b.left + b.width;
    const int32_t top = a.top < b.top ? a.top : b.top, left = a.left < b.left ? a.left : b.left;
    return (Box){top, left, bottom - top, right - left};
}

/* EXIF orientations, as in PIL.ImageOps.exif_transpose: rows or columns of the file are mirrored; then 5 to 8 transpose it. */
static bool mirrors_rows(int turn) { return turn == 3 || turn == 4 || turn == 6 || turn == 7; }
static bool mirrors_columns(int turn) { return turn == 2 || turn == 3 || turn == 7 || turn == 8; }

static void turn_upright(Image *image, int turn) {
    if (mirrors_rows(turn)) image->data += (image->height - 1) * image->row, image->row = -image->row;
    if (mirrors_columns(turn)) image->data += (image->width - 1) * image->pixel, image->pixel = -image->pixel;
    if (turn < 5) return;
    const Image before = *image;
    image->row = before.pixel, image->pixel = before.row;
    image->height = before.width, image->width = before.height;
}

/* Decode the part of a sample that the programs read. `image` then has the size and strides of the whole image, but only that
 * part is in memory, and `data` may point outside of it. So `read_box` must return all pixels that the ops of a program read. */
static bool decode_sample(const Batch *batch, int64_t b, const Drawn *drawn, Image *image, Scratch *scratch) {
    const int turn = batch->turns_B ? batch->turns_B[b] : 1;
    Box box = read_box(drawn, image->height, image->width);
    for (int64_t k = 1; k < batch->count; k++) box = join(box, read_box(drawn + k, image->height, image->width));
    Box there = turn < 5 ? box : (Box){box.left, box.top, box.width, box.height}; /* the box in the file, before it is turned */
    const int32_t height = turn < 5 ? image->height : image->width, width = turn < 5 ? image->width : image->height;
    if (mirrors_rows(turn)) there.top = height - there.top - there.height;
    if (mirrors_columns(turn)) there.left = width - there.left - there.width;

    const int64_t bytes = (int64_t)image->channels * box.height * box.width + 2 * MARGIN;
    uint8_t *memory = take(scratch, SLOT_DECODED, bytes), *other = turn == 1 ? memory : take(scratch, SLOT_KEPT, bytes);
    if (!memory || !other) return false;
    Image found = {.channels = image->channels, .height = there.height, .width = there.width}, upright = found;
    pack_image(&found, other + MARGIN);
    if (!decode(batch->jpeg, batch->sources_B[b], batch->sizes_B[b], height, width, there.top, there.left, &found, scratch))
        return false;
    if (turn != 1) {
        turn_upright(&found, turn);
        upright.height = box.height, upright.width = box.width;
        pack_image(&upright, memory + MARGIN);
        copy_image(&found, &upright);
        found = upright;
    }
    image->data = found.data - box.top * found.row - box.left;
    image->row = found.row, image->plane = found.plane, image->pixel = 1;
    return true;
}

/* Fetch the next sample into the cache while this one is made, if it is small and its pixels are in memory. The samples of a
 * shuffled batch are far apart, and a small one ends before the processor has detected a pattern to prefetch. CIFAR's recipe
 * runs 1.2 times as fast on an EPYC and 1.1 to 1.2 times on a Xeon (benchmarks/program.py). */
static void fetch(const Batch *batch, int64_t b) {
    const int32_t *shape = batch->shapes_B3 + 3 * b;
    const int64_t bytes = (int64_t)shape[0] * shape[1] * shape[2];
    if (bytes > FETCHED_BYTES || (batch->sizes_B && batch->sizes_B[b])) return;
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(batch->sources_B[b] + at);
}

static int64_t row_of(const Batch *batch, int64_t b) { return batch->rows_B ? batch->rows_B[b] : b; }

/* The place of a row in the batch, as an image. */
static Image place_of(const Output *output, int64_t row) {
    Image out = {.channels = output->channels, .height = output->height, .width = output->width};
    pack_image(&out, output->out_B + row * row_bytes(output));
    if (output->channels_last) out.plane = 1, out.pixel = out.channels, out.row = (int64_t)out.width * out.channels;
    return out;
}

static int deny_shape(const Output *output, const Image *image, bool widens, Refusal *refusal) {
    refusal->shape.channels = widens ? output->channels : image->channels;
    refusal->shape.height = image->height, refusal->shape.width = image->width;
    refusal->shape.room_channels = output->channels;
    refusal->shape.room_height = output->height, refusal->shape.room_width = output->width;
    return REFUSED_SHAPE;
}

/* Convert and write an image. If the conversion depends on the image (measure.c), it gets a copy of the table. */
static bool write_image(const Output *output, const Image *image, uint8_t *out, Scratch *scratch) {
    if (!output->table->values.statistic) return write_values(output, image, out, scratch);
    Table table = *output->table;
    Output own = *output;
    own.table = &table;
    return measure(&table.values, image, scratch) && write_values(&own, image, out, scratch);
}

/* Run the ops of a sample and write the result to its row. */
static int serve_image(const Output *output, int64_t row, Drawn *drawn, const Image *source, Scratch *scratch,
                       Refusal *refusal) {
    const Values *values = &output->table->values;
    Sample sample; /* its table of values stays uninitialised: clearing it takes a tenth of the time of a small image */
    /* Slot -1: the pixels belong to the store, which other threads and processes read, or are a decoded file, from which all
     * outputs are made. An op that writes in place copies them first (`own`). */
    sample.image = *source, sample.slot = -1, sample.has_table = false, sample.scratch = scratch;
    Op *op = drawn->ops, *end = op + drawn->count;
    for (; op < end && op->code != OP_CAST; op++) {
        const int problem = run_op(&sample, op);
        if (problem) return problem;
    }
    const Image *image = &sample.image;
    const bool widens = image->channels == 1 && values->widens, fits = image->channels == output->channels || widens;
    if (image->height != output->height || image->width != output->width || !fits)
        return deny_shape(output, image, widens, refusal);
    const Image served = place_of(output, row);
    if (is_turned(image) && !own(&sample)) return REFUSED_MEMORY;
    if (!settle(&sample) || !write_image(output, image, served.data, scratch)) return REFUSED_MEMORY;
    for (; op < end; op++) {
        const int problem = op->code == OP_CAST ? OK : rewrite(op, &served, values);
        if (problem) return problem;
    }
    return OK;
}

/* Draw the ops of a sample for all outputs before the first is made: together they decide which part of a file is decoded. */
static int draw_sample(const Batch *batch, int64_t b, Drawn *drawn, Refusal *refusal) {
    const int64_t visit = batch->visits_B[b], index = batch->indices_B[b], row = row_of(batch, b);
    const int32_t *shape = batch->shapes_B3 + 3 * b;
    Drawing d = {.key = sample_key(batch->seed, visit, index), .turn = turn_of(visit, index), .refusal = refusal};
    for (int64_t k = 0; k < batch->count; k++) {
        const Output *output = batch->outputs + k;
        refusal->program = k;
        if (row < 0 || row >= output->rows) {
            refusal->row.row = row, refusal->row.rows = output->rows;
            return REFUSED_ROW;
        }
        d.table = output->table, d.ops = drawn[k].ops;
        d.channels = shape[0], d.height = shape[1], d.width = shape[2];
        d.solved = output->solved_BS8 ? output->solved_BS8 + 8 * b * output->solved : NULL;
        d.solved_room = (int32_t)output->solved;
        if (!resolve(&d)) return (int)refusal->reason;
        drawn[k].count = d.count;
        drawn[k].ops[d.count].code = OP_NOTHING; /* run_resize and read_box look at the next op */
    }
    return OK;
}

/* True if a file can be decoded directly to its place in the batch: it has no ops, and its shape and dtype are the batch's. */
static bool is_served_whole(const Batch *batch, int64_t b, const Drawn *drawn, const Image *image) {
    const Output *output = batch->outputs;
    const bool has_size = image->height == output->height && image->width == output->width;
    const bool is_alike = has_size && image->channels == output->channels;
    const bool is_turned = batch->turns_B && batch->turns_B[b] != 1;
    return is_alike && !is_turned && batch->count == 1 && !drawn->count && output->table->values.dtype == UINT8;
}

static int serve_one(const Batch *batch, int64_t b, Scratch *scratch, Refusal *refusal) {
    const int32_t *shape = batch->shapes_B3 + 3 * b;
    const int64_t row = row_of(batch, b);
    if (shape[0] < 1 || shape[1] < 1 || shape[2] < 1) return REFUSED_OUTSIDE;
    Drawn *drawn = take(scratch, SLOT_DRAWN, batch->count * (int64_t)sizeof(Drawn));
    if (!drawn) return REFUSED_MEMORY;
    int problem = draw_sample(batch, b, drawn, refusal);
    if (problem) return problem;
    Image image = {.channels = shape[0], .height = shape[1], .width = shape[2]};
    pack_image(&image, (uint8_t *)batch->sources_B[b]);
    const bool is_file = batch->sizes_B && batch->sizes_B[b];
    if (is_file && is_served_whole(batch, b, drawn, &image)) {
        const Image out = place_of(batch->outputs, row);
        const int32_t height = image.height, width = image.width;
        const bool is_decoded = decode(batch->jpeg, image.data, batch->sizes_B[b], height, width, 0, 0, &out, scratch);
        return is_decoded ? OK : REFUSED_FILE;
    }
    refusal->program = 0;
    if (is_file && !decode_sample(batch, b, drawn, &image, scratch)) return REFUSED_FILE;
    for (int64_t k = 0; k < batch->count && !problem; k++) {
        refusal->program = k;
        problem = serve_image(batch->outputs + k, row, drawn + k, &image, scratch, refusal);
    }
    return problem;
}

/* Make samples [first, last) of a batch for all of its outputs, and write the rows that are blended from them. Returns -1, or
 * the sample that was refused; Python may then repeat the call from that sample on. */
int64_t fastdata_serve(const uint8_t *const *sources_B, const int32_t *shapes_B3, const Jpeg *jpeg, const int64_t *sizes_B,
                       const int32_t *turns_B, uint64_t seed, const int64_t *visits_B, const int64_t *indices_B,
                       const int64_t *rows_B, Output *outputs, int64_t count, int64_t first, int64_t last,
                       const Blending *blending, Refusal *refusal) {
    const Batch batch = {
        .sources_B = sources_B, .shapes_B3 = shapes_B3, .jpeg = jpeg, .sizes_B = sizes_B, .turns_B = turns_B,
        .seed = seed, .visits_B = visits_B, .indices_B = indices_B, .rows_B = rows_B, .outputs = outputs, .count = count,
    };
    for (int64_t k = 0; k < count; k++) {
        Output *output = outputs + k;
        refusal->program = k, refusal->reason = REFUSED_TABLE;
        if (!is_sound(output->table)) return first;
        output->rows = row_bytes(output) > 0 ? output->out_bytes / row_bytes(output) : 0;
    }
    refusal->reason = REFUSED_TABLE;
    if (blending && !can_blend(blending)) return first;
    Scratch *scratch = borrow();
    refusal->reason = REFUSED_MEMORY;
    if (!scratch) return first;
    int64_t refused = -1, next = 0;
    while (blending && next < blending->count && blending->rows[next].after < first) next++; /* written by an earlier call */
    for (int64_t b = first; b < last && refused < 0; b++) {
        if (b + 1 < last) fetch(&batch, b + 1);
        refusal->reason = serve_one(&batch, b, scratch, refusal);
        if (blending && refusal->reason == OK) refusal->reason = blend_after(blending, b, &next, scratch, refusal);
        if (refusal->reason != OK) refused = b;
    }
    give_back(scratch);
    return refused;
}
