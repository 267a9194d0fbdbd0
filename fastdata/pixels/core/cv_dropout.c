/* Holes of albumentations: CoarseDropout and GridDropout. All holes of a grid are one op, because there may be thousands. */
#include "core.h"

/* Draws */

enum { MOST_CELLS = 1 << 10 };

static bool deny_hole(Drawing *d, const Step *step) {
    d->refusal->hole.height = d->height, d->refusal->hole.width = d->width;
    return deny(d, step, REFUSED_HOLE);
}

/* Draw the length of one side of a hole, and its begin. False: no hole of that range fits. */
static bool draw_side(const Drawing *d, int64_t at, int64_t draw, const double range[2], bool in_px, int64_t length,
                      int32_t *first, int32_t *side) {
    int64_t drawn;
    if (in_px) {
        const double most = range[1] < (double)length ? range[1] : (double)length;
        const int64_t low = truncated(range[0]), end = truncated(most + 1);
        if (low < 0 || low >= end) return false;
        drawn = low + integer(d, at, draw, end - low);
    } else
        drawn = truncated((double)length * between(d, at, draw, range[0], range[1]));
    if (drawn < 0 || drawn > length) return false;
    *side = (int32_t)drawn;
    *first = (int32_t)integer(d, at, draw + 1, length - drawn + 1);
    return true;
}

/* albumentations: CoarseDropout.get_params_dependent_on_data (augmentations/dropout/coarse_dropout.py). */
bool draw_coarse_dropout(Drawing *d, const Step *step) {
    const int64_t fewest = step->coarse_dropout.fewest, most = step->coarse_dropout.most;
    const bool in_px = step->coarse_dropout.in_px;
    if (fewest < 0 || fewest > most || most > MAX_OPS) return deny(d, step, REFUSED_TABLE);
    if (d->is_probe) return add(d, step, OP_ERASE) != NULL;
    const int64_t count = fewest + integer(d, step->at, 0, most - fewest + 1);
    for (int64_t number = 0; number < count; number++) {
        const int64_t at = child(step->at, number);
        Box box;
        const bool fits =
            draw_side(d, at, 0, step->coarse_dropout.height, in_px, d->height, &box.top, &box.height) &&
            draw_side(d, at, 2, step->coarse_dropout.width, in_px, d->width, &box.left, &box.width);
        if (!fits) return deny_hole(d, step);
        Op *op = add(d, step, OP_ERASE);
        if (!op) return false;
        op->erase.box = box;
        op->erase.mode = step->coarse_dropout.mode;
        op->erase.is_normalized = step->coarse_dropout.is_normalized;
        op->erase.key = noise_key(d, at);
    }
    return true;
}

/* albumentations: GridDropout.get_params_dependent_on_data and calculate_grid_dimensions (augmentations/dropout). */
bool draw_grid_dropout(Drawing *d, const Step *step) {
    const int64_t smallest = step->grid_dropout.smallest, end = step->grid_dropout.end;
    int64_t rows = step->grid_dropout.rows, columns = step->grid_dropout.columns;
    const bool is_grid = rows >= 0 && rows <= MOST_CELLS && columns >= 0 && columns <= MOST_CELLS;
    const bool is_range = (!smallest && !end) || (smallest > 1 && smallest < end);
    const double ratio = step->grid_dropout.ratio;
    if (!is_grid || !is_range || !(ratio >= 0 && ratio <= 1)) return deny(d, step, REFUSED_TABLE);
    if (!d->is_probe && (!rows || !columns)) {
        if (end > d->height || end > d->width) return deny_hole(d, step);
        const int64_t drawn = smallest + integer(d, step->at, 0, end - smallest);
        const int64_t tall = d->height / 10 < 2 ? 2 : d->height / 10, wide = d->width / 10 < 2 ? 2 : d->width / 10;
        rows = d->height / (end ? drawn : tall), columns = d->width / (end ? drawn : wide);
        if (!rows || !columns) return deny_hole(d, step);
    }
    Op *op = add(d, step, OP_GRID);
    if (!op) return false;
    op->grid.rows = (int32_t)rows, op->grid.columns = (int32_t)columns;
    op->grid.is_random = step->grid_dropout.is_random;
    op->grid.shift_x = step->grid_dropout.shift_x, op->grid.shift_y = step->grid_dropout.shift_y;
    op->grid.mode = step->grid_dropout.mode, op->grid.is_normalized = step->grid_dropout.is_normalized;
    op->grid.ratio = ratio;
    op->grid.key = noise_key(d, step->at);
    return true;
}

/* Pixels */

static double number_of(uint64_t key, int64_t number) {
    return (double)(int64_t)(scramble(key + (uint64_t)number * GAMMA) >> 11) * 0x1p-53;
}

/* The cells of a side, one after the other. `longer` of the `left` cells to come are one pixel longer than `least`. Each of the
 * cells to come is one of them with the same probability. */
typedef struct {
    uint64_t key;
    int64_t least, longer, left, first, length;
} Cells;

static Cells cells_of(uint64_t key, int64_t side, int64_t count) {
    return (Cells){.key = key, .least = side / count, .longer = side % count, .left = count};
}

static void next_cell(Cells *cells) {
    const bool is_longer = number_of(cells->key, cells->left) * (double)cells->left < (double)cells->longer;
    cells->first += cells->length;
    cells->length = cells->least + is_longer;
    cells->longer -= is_longer, cells->left--;
}

/* The hole in a cell along one side. If there are more cells than pixels, some cells have length 0 and holes of length -1. The
 * end of such a hole may be negative, and counts from the end of the side, as in slices of NumPy. */
static void place_hole(const Cells *cell, int64_t side, const Op *op, int64_t shift, double drawn, int32_t *first,
                       int32_t *length) {
    const double wanted = (double)cell->length * op->grid.ratio, most = (double)(cell->length - 1);
    const double bounded = wanted < 1 ? 1 : wanted;
    const int64_t hole = truncated(bounded < most ? bounded : most), room = side - hole;
    int64_t begin = cell->first + (op->grid.is_random ? (int64_t)(drawn * (double)(cell->length - hole + 1)) : shift);
    begin = begin < 0 ? 0 : begin;
    begin = begin < room ? begin : room;
    int64_t end = begin + hole < side ? begin + hole : side;
    if (end < 0) end += side;
    *first = (int32_t)begin, *length = (int32_t)(end > begin ? end - begin : 0);
}

/* albumentations: generate_grid_holes (augmentations/dropout/functional.py), generate_shuffled_splits
 * (augmentations/geometric/functional.py). */
int rewrite_grid(const Op *op, const Image *image, const Values *served) {
    const uint64_t key = op->grid.key;
    const int64_t rows = op->grid.rows, columns = op->grid.columns;
    if (rows < 1 || columns < 1) return REFUSED_OP;
    Op hole = {.code = OP_ERASE};
    memcpy(hole.fill, op->fill, sizeof op->fill);
    hole.erase.mode = op->grid.mode, hole.erase.is_normalized = op->grid.is_normalized;
    Cells down = cells_of(scramble(key + 1), image->height, rows);
    for (int64_t i = 0; i < rows; i++) {
        Cells right = cells_of(scramble(key + 2), image->width, columns);
        next_cell(&down);
        for (int64_t j = 0; j < columns; j++) {
            const int64_t number = 3 * (i * columns + j) + 3;
            Box *box = &hole.erase.box;
            next_cell(&right);
            hole.erase.key = scramble(key + (uint64_t)number * GAMMA);
            place_hole(&down, image->height, op, op->grid.shift_y, number_of(key, number + 1), &box->top, &box->height);
            place_hole(&right, image->width, op, op->grid.shift_x, number_of(key, number + 2), &box->left, &box->width);
            const int problem = box->height && box->width ? rewrite(&hole, image, served) : OK;
            if (problem) return problem;
        }
    }
    return OK;
}

int run_grid(Sample *sample, Op *op) {
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    return rewrite_grid(op, &sample->image, NULL);
}
