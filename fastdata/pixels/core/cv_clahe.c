/* CLAHE as albumentations 2.0.8 applies it: OpenCV's, on the lightness of L*a*b*.
 *
 * Sources: OpenCV's modules/imgproc/src/clahe.cpp and color_lab.cpp (RGB2Lab_b, Lab2RGBinteger, initLabTabs), whose integers
 * are the same on all machines; albumentations/augmentations/pixel/functional.py clahe.
 */
#include "core.h"

#include <math.h>

enum { CUBE_ROOTS = 3072, LINEARS = 4096, UNIT = 1 << 14 }; /* UNIT: 1.0 on the way back */
enum { MOST_TILES = 1 << 12 };

INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE uint8_t saturate(int32_t x) { return (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x); }

/* L*a*b* */

typedef struct {
    int32_t linear[256];            /* of sRGB, in 2040ths */
    int32_t cube_root[CUBE_ROOTS];  /* of 2040ths, in 32768ths */
    int32_t luminance[256], root[256]; /* of lightness, and its cube root, in units of UNIT */
    int32_t level[LINEARS];         /* of sRGB, by 4096ths */
} LabTables;

static double linear_of(double x) { return x <= 0.04045 ? x / 12.92 : pow((x + 0.055) / 1.055, 2.4); }
static double level_of(double x) { return x <= 0.0031308 ? x * 12.92 : pow(x, 1 / 2.4) * 1.055 - 0.055; }

/* OpenCV: cubeRoot of softfloat.cpp, which cuts off the bits that do not fit into a float. */
static float cube_root_of(float x) {
    double root = cbrt((double)x);
    uint64_t bits;
    memcpy(&bits, &root, 8);
    bits &= ~(uint64_t)0 << 29;
    memcpy(&root, &bits, 8);
    return (float)root;
}

static void fill_tables(LabTables *t) {
    const float threshold = 216.0f / 24389, scale = 841.0f / 108, bias = 16.0f / 116, step = 1.0f / 2040;
    for (int i = 0; i < 256; i++) t->linear[i] = (int32_t)rintf(2040.0f * (float)linear_of((float)i / 255.0f));
    for (int i = 0; i < LINEARS; i++) t->level[i] = (int32_t)rintf(255.0f * (float)level_of((float)i / LINEARS));
    for (int i = 0; i < CUBE_ROOTS; i++) {
        const float x = step * (float)i;
        t->cube_root[i] = (int32_t)rintf(32768.0f * (x < threshold ? fused(x, scale, bias) : cube_root_of(x)));
    }
    for (int i = 0; i < 256; i++) {
        const float low = 16.0f / 116 + (float)(i * 5) / (3 * 17 * 29); /* i * 100 / 255 is the lightness */
        const float root = (float)(i * 100 * UNIT) / (255 * 116) + (float)(16 * UNIT) / 116;
        const float cube = root * root * root / ((float)UNIT * UNIT);
        t->root[i] = (int32_t)rintf(i <= 20 ? UNIT * low : root);
        t->luminance[i] = (int32_t)rintf(i <= 20 ? (float)(i * UNIT * 20 * 9) / (17 * 29 * 29 * 29) : cube);
    }
}

/* Return the tables, which are stored in the scratch; NULL: no memory. */
static const LabTables *tables_of(Scratch *scratch) {
    const bool is_new = !scratch->bytes[SLOT_TABLES];
    LabTables *tables = take(scratch, SLOT_TABLES, sizeof(LabTables));
    if (tables && is_new) fill_tables(tables);
    return tables;
}

INLINE int32_t root_of(const LabTables *t, int32_t sum) { return t->cube_root[(sum + 2048) >> 12]; }

static void convert(const LabTables *restrict t, uint8_t *restrict red, uint8_t *restrict green, uint8_t *restrict blue,
                   int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        const int32_t r = t->linear[red[i]], g = t->linear[green[i]], b = t->linear[blue[i]];
        const int32_t x = root_of(t, 1777 * r + 1541 * g + 778 * b), y = root_of(t, 871 * r + 2929 * g + 296 * b);
        const int32_t z = root_of(t, 73 * r + 448 * g + 3575 * b), half = 16384;
        red[i] = saturate((296 * y - 1336934 + half) >> 15);
        green[i] = saturate((500 * (x - y) + 128 * 32768 + half) >> 15);
        blue[i] = saturate((200 * (y - z) + 128 * 32768 + half) >> 15);
    }
}

bool to_lab(Image *image, Scratch *scratch) {
    const LabTables *tables = tables_of(scratch);
    uint8_t *red = image->data, *green = red + image->plane, *blue = green + image->plane;
    if (tables) convert(tables, red, green, blue, image->plane);
    return tables != NULL;
}

/* The cube of a root, or the linear function that replaces it near 0. */
INLINE int32_t cube_of(int32_t root) {
    const int32_t bounded = root > 3390 ? root : 0; /* up to 30000, whose square fits */
    const int32_t line = root * 108 / 841 - UNIT * 16 / 116 * 108 / 841, cube = bounded * bounded / UNIT * bounded / UNIT;
    return root > 3390 ? cube : line;
}

INLINE uint8_t level_in(const LabTables *t, int32_t sum) {
    return (uint8_t)t->level[least(most((sum + 8192) >> 14, 0), LINEARS - 1)];
}

static void convert_back(const LabTables *restrict t, uint8_t *restrict red, uint8_t *restrict green,
                         uint8_t *restrict blue, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        const int32_t y = t->luminance[red[i]], root = t->root[red[i]];
        const int32_t a = ((5 * green[i] * 53687 + 128) >> 13) - 128 * UNIT / 500;
        const int32_t b = ((blue[i] * 41943 + 16) >> 9) - 128 * UNIT / 200 + 1;
        const int32_t x = cube_of(root + a), z = cube_of(root - b);
        red[i] = level_in(t, 12615 * x - 6296 * y - 2223 * z);
        green[i] = level_in(t, -3773 * x + 7684 * y + 185 * z);
        blue[i] = level_in(t, 217 * x - 836 * y + 4715 * z);
    }
}

static void from_lab(Image *image, Scratch *scratch) { /* after to_lab, so that there are tables */
    uint8_t *red = image->data, *green = red + image->plane, *blue = green + image->plane;
    convert_back(tables_of(scratch), red, green, blue, image->plane);
}

/* CLAHE */

/* The table of a tile. Counts of its histogram above `limit` are spread over all levels. */
static void equalize_tile(const uint8_t *tile, int64_t row, int32_t height, int32_t width, int32_t limit, uint8_t table[256]) {
    int32_t count[256] = {0}, clipped = 0, sum = 0;
    for (int32_t y = 0; y < height; y++)
        for (int32_t x = 0; x < width; x++) count[tile[y * row + x]]++;
    for (int i = 0; i < 256; i++) {
        clipped += most(count[i] - limit, 0);
        count[i] = least(count[i], limit);
    }
    const int32_t rest = clipped % 256, step = rest ? most(256 / rest, 1) : 256;
    const float scale = 255.0f / (float)((int64_t)height * width);
    for (int32_t i = 0; i < 256; i++) {
        sum += count[i] + clipped / 256 + (i % step == 0 && i / step < rest);
        table[i] = (uint8_t)(int32_t)rintf(fminf((float)sum * scale, 255));
    }
}

/* Borders of BORDER_REFLECT_101. */
static int32_t reflected(int32_t at, int32_t length) {
    const int32_t period = most(2 * (length - 1), 1);
    at %= period;
    return least(at < length ? at : period - at, length - 1);
}

/* A plane, padded to whole tiles. If only one side needs padding, OpenCV pads the other one, too, by a pixel for each tile. */
static void extend(const Image *image, uint8_t *out, int32_t height, int32_t width) {
    for (int32_t y = 0; y < height; y++) {
        const uint8_t *row = image->data + (int64_t)reflected(y, image->height) * image->width;
        uint8_t *to = out + (int64_t)y * width;
        memcpy(to, row, (size_t)image->width);
        for (int32_t x = image->width; x < width; x++) to[x] = row[reflected(x, image->width)];
    }
}

/* The two tiles next to a row or column, and its weight for the second one. */
typedef struct {
    int32_t first, second;
    float share;
} Between;

static Between between_tiles(int32_t at, int32_t length, int32_t tiles) {
    const float place = (float)at * (1.0f / (float)length) - 0.5f;
    const int32_t first = (int32_t)floorf(place);
    return (Between){most(first, 0), least(first + 1, tiles - 1), place - (float)first};
}

static void blend_tiles(const Op *op, const uint8_t *tables, Between *columns, Image *image, int32_t tile_height,
                        int32_t tile_width) {
    const int32_t tiles = op->cv_clahe.columns;
    for (int32_t x = 0; x < image->width; x++) columns[x] = between_tiles(x, tile_width, tiles);
    for (int32_t y = 0; y < image->height; y++) {
        uint8_t *restrict row = image->data + (int64_t)y * image->width;
        const Between rows = between_tiles(y, tile_height, op->cv_clahe.rows);
        const uint8_t *up = tables + (int64_t)rows.first * tiles * 256, *down = tables + (int64_t)rows.second * tiles * 256;
        for (int32_t x = 0; x < image->width; x++) {
            const int32_t left = columns[x].first * 256 + row[x], right = columns[x].second * 256 + row[x];
            const float share = columns[x].share, rest = 1.0f - share;
            const float above = up[left] * rest + up[right] * share, below = down[left] * rest + down[right] * share;
            row[x] = (uint8_t)(int32_t)rintf(above * (1.0f - rows.share) + below * rows.share);
        }
    }
}

static bool clahe(const Op *op, Image *image, Scratch *scratch) {
    const int32_t tiles_x = op->cv_clahe.columns, tiles_y = op->cv_clahe.rows, over_x = image->width % tiles_x;
    const int32_t over_y = image->height % tiles_y;
    const bool is_whole = !over_x && !over_y;
    const int32_t width = image->width + (is_whole ? 0 : tiles_x - over_x);
    const int32_t height = image->height + (is_whole ? 0 : tiles_y - over_y);
    const int32_t tile_width = width / tiles_x, tile_height = height / tiles_y;
    uint8_t *extended = take(scratch, SLOT_WORK, (int64_t)width * height);
    const int64_t table_bytes = (int64_t)tiles_x * tiles_y * 256;
    uint8_t *tables = take(scratch, SLOT_WORK_2, table_bytes + image->width * (int64_t)sizeof(Between));
    if (!extended || !tables) return false;
    extend(image, extended, height, width);
    const double pixels = (double)tile_width * tile_height, limit = op->cv_clahe.limit * pixels / 256;
    for (int32_t k = 0; k < tiles_x * tiles_y; k++) {
        const uint8_t *tile = extended + (int64_t)(k / tiles_x) * tile_height * width + (int64_t)(k % tiles_x) * tile_width;
        equalize_tile(tile, width, tile_height, tile_width, most((int32_t)truncated(limit), 1), tables + (int64_t)k * 256);
    }
    blend_tiles(op, tables, (Between *)(tables + table_bytes), image, tile_height, tile_width);
    return true;
}

int run_cv_clahe(Sample *sample, Op *op) {
    Image *image = &sample->image;
    if (image->channels != 1 && image->channels != 3) return REFUSED_OP;
    if (!settle(sample) || !own(sample)) return REFUSED_MEMORY;
    const bool is_colour = image->channels == 3;
    if (is_colour && !to_lab(image, sample->scratch)) return REFUSED_MEMORY;
    if (!clahe(op, image, sample->scratch)) return REFUSED_MEMORY;
    if (is_colour) from_lab(image, sample->scratch);
    return OK;
}

bool draw_cv_clahe(Drawing *d, const Step *step) {
    const int64_t columns = step->cv_clahe.columns, rows = step->cv_clahe.rows;
    const double limit = between(d, step->at, 0, step->cv_clahe.limit[0], step->cv_clahe.limit[1]);
    if (columns < 1 || rows < 1 || columns * rows > MOST_TILES || !(limit > 0)) return deny(d, step, REFUSED_TABLE);
    Op *op = add(d, step, OP_CV_CLAHE);
    if (!op) return false;
    op->cv_clahe.columns = (int32_t)columns, op->cv_clahe.rows = (int32_t)rows, op->cv_clahe.limit = limit;
    return true;
}
