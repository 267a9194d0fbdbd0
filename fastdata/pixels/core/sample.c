/* The image of a sample between two ops, and the scratch memory of a call. */
#include "core.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = 16 };
enum { POOLED = 32, POOLED_BYTES = 8 << 20 }; /* most scratches in the pool, and most bytes of each */

void *take(Scratch *scratch, int slot, int64_t bytes) {
    if (scratch->bytes[slot] < bytes) {
        free(scratch->data[slot]);
        int64_t size = (bytes + bytes / 4 + 191) / 64 * 64;
        char *memory = malloc(size + 64);
        scratch->data[slot] = memory;
        scratch->bytes[slot] = memory ? size - 64 : 0;
        if (!memory) return NULL;
    }
    return (void *)(((uintptr_t)scratch->data[slot] + 63) / 64 * 64);
}

/* Scratches of calls that have ended, for later calls: in a call for one sample, new pages take a tenth of the time. Each
 * place of the pool is emptied and filled by one atomic exchange, so two threads never get the same scratch, without a lock. */
static _Atomic(Scratch *) pool[POOLED];

Scratch *borrow(void) {
    for (int i = 0; i < POOLED; i++) {
        Scratch *found = atomic_exchange(&pool[i], NULL);
        if (found) return found;
    }
    return calloc(1, sizeof(Scratch));
}

void give_back(Scratch *scratch) {
    int64_t bytes = 0;
    for (int slot = 0; slot < SLOT_COUNT; slot++) bytes += scratch->bytes[slot];
    for (int i = 0; i < POOLED && bytes <= POOLED_BYTES; i++) {
        Scratch *none = NULL;
        if (atomic_compare_exchange_strong(&pool[i], &none, scratch)) return;
    }
    for (int slot = 0; slot < SLOT_COUNT; slot++) free(scratch->data[slot]);
    drop_decoder(scratch->decoder);
    free(scratch);
}

static bool is_packed(const Image *image) {
    return image->pixel == 1 && image->row == image->width && image->plane == (int64_t)image->height * image->width;
}

void pack_image(Image *image, uint8_t *data) {
    image->data = data;
    image->pixel = 1;
    image->row = image->width;
    image->plane = (int64_t)image->height * image->width;
}

/* Make an image of that size in the one of the two buffers that the sample does not use. */
bool room(Sample *sample, int32_t channels, int32_t height, int32_t width, Image *out) {
    out->channels = channels, out->height = height, out->width = width;
    int64_t planes = channels < 3 ? 3 : channels; /* a later op may turn one channel into 3 in place */
    uint8_t *data = take(sample->scratch, sample->slot == SLOT_A ? SLOT_B : SLOT_A, planes * height * width);
    if (data) pack_image(out, data);
    return data != NULL;
}

void become(Sample *sample, const Image *image) {
    sample->image = *image;
    sample->slot = sample->slot == SLOT_A ? SLOT_B : SLOT_A;
}

/* Transpose a tile: rows of `from` become columns of `to`. `step` is 1, or -1 if the rows of the image are mirrored. */
INLINE void copy_tile(const uint8_t *restrict from, int64_t pixel, int64_t step, uint8_t *restrict to, int64_t row) {
    uint8_t tile[TILE][TILE];
    for (int x = 0; x < TILE; x++)
        for (int y = 0; y < TILE; y++) tile[x][y] = from[x * pixel + y * step];
    for (int y = 0; y < TILE; y++)
        for (int x = 0; x < TILE; x++) to[y * row + x] = tile[x][y];
}

/* Copy a transposed plane, whose rows are columns in memory. It is copied in tiles, because the cache may have too little room
 * for one line of each row. */
static void copy_turned(const Image *in, const uint8_t *from, const Image *out, uint8_t *to) {
    for (int64_t y = 0; y < in->height; y += TILE)
        for (int64_t x = 0; x < in->width; x += TILE) {
            const uint8_t *first = from + x * in->pixel + y * in->row;
            uint8_t *place = to + y * out->row + x;
            const int64_t rows = in->height - y < TILE ? in->height - y : TILE;
            const int64_t columns = in->width - x < TILE ? in->width - x : TILE;
            if (rows < TILE || columns < TILE)
                for (int64_t k = 0; k < rows; k++) copy_row(first + k * in->row, in->pixel, columns, place + k * out->row);
            else if (in->row == 1) copy_tile(first, in->pixel, 1, place, out->row);
            else copy_tile(first, in->pixel, -1, place, out->row);
        }
}

void copy_image(const Image *in, const Image *out) {
    for (int32_t c = 0; c < in->channels; c++) {
        const uint8_t *from = in->data + c * in->plane;
        uint8_t *to = out->data + c * out->plane;
        if (is_turned(in)) {
            copy_turned(in, from, out, to);
            continue;
        }
        if (in->pixel == 1 && in->row == in->width) {
            memcpy(to, from, (int64_t)in->height * in->width);
            continue;
        }
        for (int32_t y = 0; y < in->height; y++) copy_row(from + y * in->row, in->pixel, in->width, to + y * out->row);
    }
}

/* Copy the image to packed memory that may be written, unless it is there already: the memory of the store must not be written,
 * and a view may be mirrored. */
bool own(Sample *sample) {
    if (sample->slot >= 0 && is_packed(&sample->image)) return true;
    Image out;
    if (!room(sample, sample->image.channels, sample->image.height, sample->image.width, &out)) return false;
    copy_image(&sample->image, &out);
    become(sample, &out);
    return true;
}

bool settle(Sample *sample) { /* apply the pending table */
    if (!sample->has_table) return true;
    if (!own(sample)) return false;
    apply_table(&sample->image, sample->table_C256);
    sample->has_table = false;
    return true;
}

/* Run a kernel that writes a new image, and make that the image of the sample. */
int remake(Sample *sample, const Op *op, int32_t height, int32_t width, Kernel *kernel) {
    Image *image = &sample->image, out;
    if (height < 1 || width < 1) return REFUSED_OUTSIDE;
    if (!settle(sample) || (image->pixel != 1 && !own(sample))) return REFUSED_MEMORY;
    if (!room(sample, image->channels, height, width, &out)) return REFUSED_MEMORY;
    if (!kernel(op, image, &out, sample->scratch)) return REFUSED_MEMORY;
    become(sample, &out);
    return OK;
}
