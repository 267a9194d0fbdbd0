/* The compiled core: makes a batch, one sample after the other.
 *
 * A sample is a planar uint8 image (C, H, W). A transform is a table of `Step` records, made once, with all that does not
 * depend on a sample: probabilities, ranges, sizes. For each sample, draw.c draws a few `Op` records from these steps. The
 * ops run one after the other through buffers that stay in the cache, and serve.c writes the result to its place in the
 * batch. The core does not use torch or Python. Python reads the enums and records of records.h, which consist of plain
 * numbers, arrays of these, pointers, and records that are defined before them.
 *
 * A "domain" names the library whose pixels are wanted: PIL_DOMAIN is Pillow, V1_DOMAIN and V2_DOMAIN are torchvision's v1
 * and v2 functions on uint8 tensors.
 */
#ifndef FASTDATA_CORE_H
#define FASTDATA_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default"))) /* all other names are hidden */
#endif

/* Always inlined, so that the compiler makes a separate loop for each set of constant arguments. */
#define INLINE static inline __attribute__((always_inline))

/* a * b + c, rounded only once: torch is compiled with such instructions. */
INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    const double product = (double)a * b, sum = product + c, back = sum - product; /* the product is exact */
    const double lost = (product - (sum - back)) + (c - back);
    if (lost == 0 || sum - sum != 0) return (float)sum;
    uint64_t bits; /* the sum rounded to odd, so that rounding it to a float gives the result of one rounding */
    __builtin_memcpy(&bits, &sum, 8);
    if (!(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1;
    double odd;
    __builtin_memcpy(&odd, &bits, 8);
    return (float)odd;
#endif
}

/* SplitMix64's mixing function, as _mix in random_numbers.py. */
static const uint64_t GAMMA = 0x9E3779B97F4A7C15u;
INLINE uint64_t scramble(uint64_t bits) {
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

enum { MAX_CHANNELS = 4 };
enum { MAX_OPS = 256 };  /* per sample */
enum { MAX_MEANS = 6 };

/* A view of an image: column x of row y of plane c is value c * plane + y * row + x * pixel of `data`. Values are uint8, except
 * those of a batch in `rewrite`. Negative strides mirror a view. "Packed" means pixel == 1, row == width and
 * plane == height * width. */
typedef struct {
    uint8_t *data;
    int64_t plane, row, pixel;
    int32_t channels, height, width;
} Image;

#define ENUM(...) enum { __VA_ARGS__ };
#define RECORD(Name, ...) typedef struct { __VA_ARGS__ } Name;
#include "records.h"

/* One step of a transform, for all samples. `fill` has a value for each channel; the user gave `fills` of them. Its children
 * are the `count` steps from `first` on, right after the children of the step before. `at` is the number of its draws. */
#define STEP_FIELDS int32_t code, first, count, fills; int64_t at; double fill[4];
enum {
#define STEP(CODE, name, ...) STEP_##CODE,
#define CHILD(CODE, name, ...) STEP_##CODE,
#include "records.h"
};
typedef struct Step {
    STEP_FIELDS
    union {
#define STEP(CODE, name, ...) struct { __VA_ARGS__ } name;
#define CHILD(CODE, name, ...) struct { __VA_ARGS__ } name;
#include "records.h"
    };
} Step;

/* An op: a step as it was drawn for one sample, with the `fill` of the step. */
#define OP_FIELDS int64_t code; double fill[4];
enum {
#define OP(CODE, name, ...) OP_##CODE,
#include "records.h"
};
typedef struct {
    OP_FIELDS
    union {
#define OP(CODE, name, ...) struct { __VA_ARGS__ } name;
#include "records.h"
    };
} Op;

/* Why a sample was refused: the reason, the program of the batch, and the step in its table. */
#define REFUSAL_FIELDS int64_t reason, program, step;
enum {
    OK,
#define REFUSAL(CODE, name, ...) REFUSED_##CODE,
#include "records.h"
};
typedef struct {
    REFUSAL_FIELDS
    union {
#define REFUSAL(CODE, name, ...) struct { __VA_ARGS__ } name;
#include "records.h"
    };
} Refusal;

#define FUNCTION(result, name, ...) EXPORT result name(__VA_ARGS__);
#include "records.h"

/* A sample while its steps are drawn. A probe draws nothing: it follows every choice and refuses no size, to find the size that
 * samples will have. is_known: all samples of the stored size have this size, whatever is drawn. */
typedef struct {
    const Table *table;
    uint64_t key, turn;   /* from sample_key and turn_of */
    int64_t height, width;
    int32_t channels, count, depth;
    bool is_probe, is_known, is_cast;
    Op *ops;              /* `count` so far, with room for MAX_OPS */
    const double *solved; /* 8 numbers for each op, which perspectives use; NULL: ops keep their corners instead */
    int32_t solved_room;  /* number of ops in `solved` */
    Refusal *refusal;
} Drawing;

enum { FIXED, FOLLOWS, DRAWN }; /* a new size is constant, depends on the old size, or is drawn at random */

bool is_sound(const Table *table); /* checks a table; only a sound one may be drawn from */
bool resolve(Drawing *d);          /* draws all steps; false: refused */
bool draw_steps(Drawing *d, const Table *table, int64_t first, int64_t count);
uint64_t sample_key(uint64_t seed, int64_t visit, int64_t index);
uint64_t turn_of(int64_t visit, int64_t index); /* odd in each second epoch, whatever the seed */
int64_t child(int64_t at, int64_t number);
double uniform(const Drawing *d, int64_t at, int64_t draw);
double between(const Drawing *d, int64_t at, int64_t draw, double low, double high);
double normal_number(const Drawing *d, int64_t at, int64_t draw); /* also uses number draw + 1 */
int64_t integer(const Drawing *d, int64_t at, int64_t draw, int64_t count); /* in [0, count) */
bool deny(Drawing *d, const Step *step, int32_t reason); /* notes a refusal; returns false, for the caller to return */
bool is_domain(Drawing *d, const Step *step, int32_t domain); /* false: no such domain, refused */
Op *add(Drawing *d, const Step *step, int32_t code); /* a new op with a record of zeros; NULL: refused */
bool set_size(Drawing *d, int64_t height, int64_t width, int how); /* always true, for the caller to return */
bool leaves_pixels(Drawing *d, const Step *step); /* false: no pixel is left, or too many to be counted; refused */
int64_t truncated(double value); /* rounded towards 0, and limited to the range of int32 */
double remainder_of(double value, double by); /* with the sign of `by`, as in Python */
/* A box as torchvision's RandomResizedCrop and RandomErasing draw it, in at most ten tries; false if none fits. */
bool draw_box(const Drawing *d, int64_t at, int64_t first, const double scale[2], const double log_ratio[2], double share,
              bool is_crop, Box *box);

/* draw_NAME draws the ops of the step of that name; false: refused. */
#define STEP(CODE, name, ...) bool draw_##name(Drawing *d, const Step *step);
#include "records.h"

/* window.c: add a window inside the image, which several steps draw; `how` as in `set_size`. */
bool add_crop(Drawing *d, const Step *step, double top, double left, int64_t height, int64_t width, int how);

/* warp.c: maps that policies also use, with a number that they draw. */
bool add_map(Drawing *d, const Step *step, const Warp *warp, const double matrix[6]);
bool add_affine(Drawing *d, const Step *step, const Warp *warp, double degrees, const double moved[2], double scale,
                const double shear[2], const double *center);
bool add_rotation(Drawing *d, const Step *step, const Warp *warp, double degrees, bool expands, const double *center);

/* Memory that is used by one call at a time, and that grows to its largest need. */
enum { SLOT_A, SLOT_B, SLOT_WORK, SLOT_WORK_2, SLOT_KEPT, SLOT_MIX, SLOT_DECODED, SLOT_DRAWN, SLOT_TABLES, SLOT_MAP,
       SLOT_COUNT };
typedef struct {
    void *data[SLOT_COUNT];
    int64_t bytes[SLOT_COUNT];
    struct Decoder *decoder; /* of jpeg.c */
} Scratch;

/* At least `bytes` of memory, aligned to 64. Vectors may read and write up to 64 bytes behind it. NULL: no memory. If the slot
 * has to grow, its contents are lost. Kernels own SLOT_WORK and SLOT_WORK_2 while they run. */
void *take(Scratch *scratch, int slot, int64_t bytes);
Scratch *borrow(void); /* NULL: no memory */
void give_back(Scratch *scratch);

/* A sample between two ops: its image is a view of the store, or of packed memory in `slot`. Ops that map each value by a
 * table only compose `table_C256`; it is applied when another op needs the pixels. So several such ops pass over the pixels
 * only once. */
typedef struct {
    Image image;
    int slot; /* SLOT_A or SLOT_B; -1: the store's memory, which must not be written */
    bool has_table;
    uint8_t table_C256[MAX_CHANNELS][256];
    Scratch *scratch;
} Sample;

/* run_NAME applies the op of that name to a sample, and returns OK or the reason of a refusal. An op may change the next op, to
 * share its work with it. OP_NOTHING follows the last op of a sample, so there always is a next op. */
#define OP(CODE, name, ...) int run_##name(Sample *sample, Op *op);
#include "records.h"

INLINE bool is_inside(const Box *box, int32_t height, int32_t width) {
    return box->top >= 0 && box->left >= 0 && box->height >= 0 && box->width >= 0 &&
           box->top + (int64_t)box->height <= height && box->left + (int64_t)box->width <= width;
}

/* True if the image is a transposed view: neighbours in a row of the image are in different rows of its memory. */
INLINE bool is_turned(const Image *image) {
    return (image->row == 1 || image->row == -1) && image->pixel != 1 && image->pixel != -1;
}

/* Inline: rows of small images are so short that a function call for each takes a tenth of the time of a batch. */
static inline void copy_row(const uint8_t *restrict in, int64_t pixel, int64_t count, uint8_t *restrict out) {
    if (pixel == 1)
        memcpy(out, in, count);
    else if (pixel == -1)
        for (int64_t x = 0; x < count; x++) out[count - 1 - x] = in[x - (count - 1)];
    else if (pixel == 3)
        for (int64_t x = 0; x < count; x++) out[x] = in[3 * x];
    else
        for (int64_t x = 0; x < count; x++) out[x] = in[x * pixel];
}

/* sample.c, for ops. `room` makes an empty image of that size in the buffer that the sample does not use; `become` makes it the
 * sample's image. `own` copies the sample's image to packed memory that may be written, if it is not there. `settle` applies
 * the pending table. False: no memory. */
void pack_image(Image *image, uint8_t *data);
void copy_image(const Image *in, const Image *out);
bool room(Sample *sample, int32_t channels, int32_t height, int32_t width, Image *out);
void become(Sample *sample, const Image *image);
bool own(Sample *sample);
bool settle(Sample *sample);

/* A kernel writes a new image. `in` has pixel == 1 and any row and plane stride. `out` is packed, with data, channels, height
 * and width already set, and never overlaps `in`. False: no memory. */
typedef bool Kernel(const Op *op, const Image *in, const Image *out, Scratch *scratch);
int remake(Sample *sample, const Op *op, int32_t height, int32_t width, Kernel *kernel);

/* resize.c */
Kernel resize; /* `in` is the box of the op */
double support_of(int filter);

/* The number of input pixels for one output pixel, rounded as OpenCV's resize computes it. */
INLINE double cv_scale(int64_t from, int64_t to) { return 1 / ((double)to / (double)from); }

/* cv_resize.c: OpenCV's filters that sum integers; resizes_whole: true if an op uses one of them. */
Kernel resize_whole;
bool resizes_whole(const Op *op, const Image *in);

/* sizes.c: draw a resize of a box. The filter may be another one if a side gets shorter (albumentations'
 * area_for_downscale). */
bool add_resize(Drawing *d, const Step *step, int32_t filter, int32_t domain, Box box, int64_t height, int64_t width, int how);
INLINE int32_t filter_of(int32_t filter, bool shrinks_by_area, Box box, int64_t height, int64_t width) {
    return shrinks_by_area && (height < box.height || width < box.width) ? CV_AREA : filter;
}

/* sizes.c. is_cut: true if a resize makes only the part of its result that the next window cuts out. resize_reads: the part of
 * the box that is read for it. */
bool is_cut(const Op *op, const Op *next);
Box resize_reads(const Op *op, const Box *cut);

/* cv_warp.c: ops that read each pixel at a place of the image that is given in floats. `places` computes the places of n pixels
 * of a row from column `first` on, among them up to 15 columns behind the last one; `map` is its data. Such an op is drawn by
 * `add_by_places` (cv_maps.c), and its kernel is run by `remake_by_places`. */
typedef void FindPlaces(const void *map, int64_t row, int64_t first, int64_t n, float *restrict x, float *restrict y);
bool take_places(const Op *op, const CvWarp *how, FindPlaces *places, const void *map, const Image *in, const Image *out,
                 Scratch *scratch);
int remake_by_places(Sample *sample, Op *op, int32_t height, int32_t width, Kernel *kernel);
Op *add_by_places(Drawing *d, const Step *step, const CvWarp *how, int32_t code); /* NULL: refused */

/* noise.c */
extern const int64_t ITEM_BYTES[];
enum { CHUNK = 512 }; /* number of values that stay in the first cache between two passes over them */
uint64_t noise_key(const Drawing *d, int64_t at); /* the key of a step's random numbers */
/* Standard normal numbers from number `first` on, at most CHUNK; whole vectors of 16 are written. */
void draw_normal(uint64_t key, int64_t first, int64_t count, float out[CHUNK]);
/* Convert floats to values of an image or a batch, and back. */
void store(int32_t dtype, const float *restrict in, int64_t count, uint8_t *out);
void load(int32_t dtype, const uint8_t *in, int64_t count, float *restrict out);
/* OP_ERASE, OP_NOISE and OP_GRID on an image of a batch's floats, or of uint8 if `served` is NULL; OK, or the reason. */
int rewrite(const Op *op, const Image *image, const Values *served);

/* cv_dropout.c: OP_GRID, as `rewrite` */
int rewrite_grid(const Op *op, const Image *image, const Values *served);

/* cv_filter.c: sums in the order of OpenCV. A tap adds weight * (one[x] + other[x]) to value x, or weight * one[x] if `other`
 * is NULL. LANE values at a time are read. */
enum { LANE = 32, MOST_TAPS = 256 };
typedef struct {
    const float *one, *other;
    float weight;
} Tap;
int64_t mirror(int64_t at, int64_t length);
int64_t whole_lanes(int64_t width);
void widen_row(const uint8_t *restrict row, int64_t width, int64_t radius, float *restrict out);
void widen_floats(float *line, int64_t width, int64_t radius);
int64_t row_taps(const float *line, const float *half, int64_t radius, bool is_symmetric, Tap *taps);
int64_t column_taps(const float *plane, int64_t wide, int64_t y, int64_t height, const float *half, int64_t radius,
                    Tap *taps);
int64_t fused_columns(int64_t width, int64_t channels, int64_t channel, int64_t block);
void add_taps(const Tap *taps, int64_t count, int64_t width, int64_t fused_until, float *restrict out);
void round_levels(const float *restrict in, int64_t width, uint8_t *restrict out);
bool filter_image(const Image *in, const Image *out, const float *kernel, int64_t radius, Scratch *scratch);
void cv_gaussian(int64_t radius, double sigma, double *half);

/* blur.c: also used for OP_VALUE */
Kernel blur_box;

/* colour.c: map values by a table; apply tables to a packed image; compose tables with the pending ones. */
void look_up(uint8_t *values, int64_t size, const uint8_t table[256]);
void apply_table(const Image *image, uint8_t table_C256[MAX_CHANNELS][256]);
void compose_table(Sample *sample, uint8_t table_C256[MAX_CHANNELS][256]);

/* cv_values.c: a histogram */
void count_values(const uint8_t *plane, int64_t size, uint32_t count[256]);

/* cv_colour.c: OpenCV's grey of three planes; a packed image to luma and two chromas (Y Cr Cb), and back. */
void grey_row(const uint8_t *red, const uint8_t *green, const uint8_t *blue, int64_t size, uint8_t *out);
void to_ycc(Image *image);
void from_ycc(Image *image);

/* cv_clahe.c: a packed image to OpenCV's L*a*b*; false: no memory. */
bool to_lab(Image *image, Scratch *scratch);

/* measure.c: fill the table of values that depend on their image; false: no memory. */
bool measure(Values *v, const Image *image, Scratch *scratch);

/* values.c: write an image in the dtype and memory format of an output; false: no memory. */
bool write_values(const Output *output, const Image *image, uint8_t *out, Scratch *scratch);
/* Convert a run of uint8 to the output's dtype: values of plane c, or whole pixels if the output is channels_last. */
void write_run(const Output *output, int32_t c, const uint8_t *in, int64_t count, uint8_t *out);
/* Convert such runs of two samples and mix them, in one pass. False, and nothing written, if that would not be faster. */
bool blend_run(const Output *output, int32_t c, const uint8_t *own, const uint8_t *other, int64_t count, float share,
               float other_share, float *out);

INLINE int64_t row_bytes(const Output *output) {
    return (int64_t)output->channels * output->height * output->width * ITEM_BYTES[output->table->values.dtype];
}

/* blend.c: check the output and count its rows. False: its table is not sound. */
bool can_blend(const Blending *blending);
/* Write the rows, from *next on, whose samples are complete once `sample` is made; OK, or the reason of a refusal. */
int blend_after(const Blending *blending, int64_t sample, int64_t *next, Scratch *scratch, Refusal *refusal);

/* jpeg.c: decode a box of a file whose image has height x width: from (top, left) on, with the size of `out`, which is packed
 * or (H, W, C). False: Pillow must open the file, or there is no memory. */
bool decode(const Jpeg *jpeg, const uint8_t *file, int64_t size, int32_t height, int32_t width, int32_t top, int32_t left,
            const Image *out, Scratch *scratch);
void drop_decoder(struct Decoder *decoder); /* NULL: there is none */

#endif
