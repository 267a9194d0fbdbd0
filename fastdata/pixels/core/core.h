/* The compiled core: what one batch goes through, sample by sample.
 *
 * A sample is a planar uint8 image (C, H, W). A transform is a table of `Step` records, made once, that hold what does not
 * depend on a sample: probabilities, ranges, sizes. For each sample its steps are drawn (draw.c), which gives a few `Op`
 * records; these run one after the other through buffers that stay in the cache, and the result is written to its place
 * in the batch (serve.c). Nothing here knows torch or Python. Python reads the enums and the records of this file, which
 * are made of plain numbers, arrays of these, pointers, and records that stand before them.
 *
 * "Domain" says whose pixels are wanted: PIL_DOMAIN those of Pillow, V1_DOMAIN and V2_DOMAIN those of torchvision's
 * functions on uint8 tensors.
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
#define EXPORT __attribute__((visibility("default"))) /* all else is hidden */
#endif

/* Copied into each call, so that its constants make loops of their own. */
#define INLINE static inline __attribute__((always_inline))

/* a * b + c rounded once, as torch is compiled. */
INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    const double product = (double)a * b, sum = product + c, back = sum - product; /* the product is exact */
    const double lost = (product - (sum - back)) + (c - back);
    if (lost == 0 || sum - sum != 0) return (float)sum;
    uint64_t bits; /* rounded to odd, so that to round to a float rounds once */
    __builtin_memcpy(&bits, &sum, 8);
    if (!(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1;
    double odd;
    __builtin_memcpy(&odd, &bits, 8);
    return (float)odd;
#endif
}

/* SplitMix64, as _mix in random_numbers.py. */
static const uint64_t GAMMA = 0x9E3779B97F4A7C15u;
INLINE uint64_t scramble(uint64_t bits) {
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

enum { MAX_CHANNELS = 4 };
enum { MAX_OPS = 256 };  /* of one sample */
enum { MAX_MEANS = 6 };

/* A view of an image: column x of row y of plane c is at data[c * plane + y * row + x * pixel]. Negative strides mirror
 * it. "Packed" means pixel == 1, row == width and plane == height * width. */
typedef struct {
    uint8_t *data;
    int64_t plane, row, pixel;
    int32_t channels, height, width;
} Image;

#define ENUM(...) enum { __VA_ARGS__ };
#define RECORD(Name, ...) typedef struct { __VA_ARGS__ } Name;
#include "records.h"

/* One step for all samples. `fill` has a value for each channel, of which the user gave `fills`. Its children are the `count`
 * steps from `first` on: each step's come after those of the step before. `at` numbers its draws. */
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

/* What is done to one sample; `fill` as of its step. */
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

/* Why a sample was refused, by which program of a batch and by which step in its table. */
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

/* A sample while its steps are drawn. A probe refuses no size and follows every choice, to find which size samples have that
 * are not known yet; is_known: all samples have this size, whatever is drawn. */
typedef struct {
    const Table *table;
    uint64_t key, turn;   /* of sample_key and turn_of */
    int64_t height, width;
    int32_t channels, count, depth;
    bool is_probe, is_known, is_cast;
    Op *ops;              /* `count` so far, of MAX_OPS */
    const double *solved; /* 8 for each op, of which perspectives take theirs; NULL: their corners stay */
    int32_t solved_room;  /* of how many ops */
    Refusal *refusal;
} Drawing;

enum { FIXED, FOLLOWS, DRAWN }; /* whether a new size is one number, follows from the old one, or is drawn */

bool is_sound(const Table *table); /* only such a table is drawn */
bool resolve(Drawing *d);          /* false: refused */
bool draw_steps(Drawing *d, const Table *table, int64_t first, int64_t count);
uint64_t sample_key(uint64_t seed, int64_t visit, int64_t index);
uint64_t turn_of(int64_t visit, int64_t index); /* odd in each second epoch, whatever the seed */
int64_t child(int64_t at, int64_t number);
double uniform(const Drawing *d, int64_t at, int64_t draw);
double between(const Drawing *d, int64_t at, int64_t draw, double low, double high);
double normal_number(const Drawing *d, int64_t at, int64_t draw); /* takes draw + 1, too */
int64_t integer(const Drawing *d, int64_t at, int64_t draw, int64_t count); /* in [0, count) */
bool deny(Drawing *d, const Step *step, int32_t reason); /* gives false, for the caller to return */
bool is_domain(Drawing *d, const Step *step, int32_t domain); /* else false: refused */
Op *add(Drawing *d, const Step *step, int32_t code); /* an op whose record is 0; NULL: refused */
bool set_size(Drawing *d, int64_t height, int64_t width, int how);
bool leaves_pixels(Drawing *d, const Step *step); /* and not too many to be counted; else false: refused */
int64_t truncated(double value); /* towards 0, and the nearest int32 for larger numbers */
double remainder_of(double value, double by); /* with the sign of `by`, as Python's */
/* A box as torchvision's RandomResizedCrop and RandomErasing draw them, in ten tries; false where none fits. */
bool draw_box(const Drawing *d, int64_t at, int64_t first, const double scale[2], const double log_ratio[2], double share,
              bool is_crop, Box *box);

/* draw_name of each step: draws its ops. False: refused. */
#define STEP(CODE, name, ...) bool draw_##name(Drawing *d, const Step *step);
#include "records.h"

/* window.c: a window inside the image, as several steps draw it; `how` as for `set_size`. */
bool add_crop(Drawing *d, const Step *step, double top, double left, int64_t height, int64_t width, int how);

/* Maps that policies take as well, by a number that was drawn. */
bool add_map(Drawing *d, const Step *step, const Warp *warp, const double matrix[6]);
bool add_affine(Drawing *d, const Step *step, const Warp *warp, double degrees, const double moved[2], double scale,
                const double shear[2], const double *center);
bool add_rotation(Drawing *d, const Step *step, const Warp *warp, double degrees, bool expands, const double *center);

/* Memory that one call holds at a time, and that grows to its largest need. */
enum { SLOT_A, SLOT_B, SLOT_WORK, SLOT_WORK_2, SLOT_KEPT, SLOT_MIX, SLOT_DECODED, SLOT_DRAWN, SLOT_TABLES, SLOT_MAP,
       SLOT_COUNT };
typedef struct {
    void *data[SLOT_COUNT];
    int64_t bytes[SLOT_COUNT];
    struct Decoder *decoder; /* of jpeg.c */
} Scratch;

/* At least `bytes` of memory, aligned to 64, 64 bytes more than asked may be touched; NULL if there is none. What was in
 * the slot is lost where it grows. Kernels own SLOT_WORK and SLOT_WORK_2 while they run. */
void *take(Scratch *scratch, int slot, int64_t bytes);
Scratch *borrow(void); /* NULL: no memory */
void give_back(Scratch *scratch);

/* The image that a sample is at present: a view of the store, or of packed memory in `slot`. Tables of values wait in
 * `table_C256` until an op needs the pixels, so that several ops in a row pass over the pixels once. */
typedef struct {
    Image image;
    int slot; /* SLOT_A or SLOT_B; -1: not ours to write to */
    bool has_table;
    uint8_t table_C256[MAX_CHANNELS][256];
    Scratch *scratch;
} Sample;

/* run_name of each op: does it to a sample. Gives OK, or why not. An op may have the next one do a part of it: behind the
 * last op of a sample is OP_NOTHING. */
#define OP(CODE, name, ...) int run_##name(Sample *sample, Op *op);
#include "records.h"

INLINE bool is_inside(const Box *box, int32_t height, int32_t width) {
    return box->top >= 0 && box->left >= 0 && box->height >= 0 && box->width >= 0 &&
           box->top + (int64_t)box->height <= height && box->left + (int64_t)box->width <= width;
}

/* Neighbours in a row of the image are in different rows of its memory. */
INLINE bool is_turned(const Image *image) {
    return (image->row == 1 || image->row == -1) && image->pixel != 1 && image->pixel != -1;
}

/* Here, as rows of small images are so short that a call for each costs a tenth of a batch. */
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

/* sample.c, for ops. `room`: an image of that size in the buffer that the sample does not use, which it may `become`.
 * `own`: the image is packed memory of our own; `settle`: no table is pending. False: no memory. */
void pack_image(Image *image, uint8_t *data);
void copy_image(const Image *in, const Image *out);
bool room(Sample *sample, int32_t channels, int32_t height, int32_t width, Image *out);
void become(Sample *sample, const Image *image);
bool own(Sample *sample);
bool settle(Sample *sample);

/* Kernels that write another image of that size. `in` has pixel == 1, any row and plane stride; `out` is packed, its data,
 * channels, height and width are set, and it never overlaps `in`. False: no memory. */
typedef bool Kernel(const Op *op, const Image *in, const Image *out, Scratch *scratch);
int remake(Sample *sample, const Op *op, int32_t height, int32_t width, Kernel *kernel);

/* resize.c */
Kernel resize; /* `in` is the box; see there */
double support_of(int filter);

/* How many pixels one of OpenCV's resize stands for, as it calculates that. */
INLINE double cv_scale(int64_t from, int64_t to) { return 1 / ((double)to / (double)from); }

/* cv_resize.c: OpenCV's filters that sum whole numbers, and whether an op is one of these. */
Kernel resize_whole;
bool resizes_whole(const Op *op, const Image *in);

/* sizes.c: draw a resize of a box, by a filter that may depend on whether a side gets shorter (albumentations'
 * area_for_downscale). */
bool add_resize(Drawing *d, const Step *step, int32_t filter, int32_t domain, Box box, int64_t height, int64_t width, int how);
INLINE int32_t filter_of(int32_t filter, bool shrinks_by_area, Box box, int64_t height, int64_t width) {
    return shrinks_by_area && (height < box.height || width < box.width) ? CV_AREA : filter;
}

/* sizes.c: whether of a resize only what the window behind it cuts out is made; and what of the box is read for that. */
bool is_cut(const Op *op, const Op *next);
Box resize_reads(const Op *op, const Box *cut);

/* cv_warp.c: ops whose pixels are taken at places of floats. `places` gives those of n pixels of a row from column `first` on,
 * with up to 15 behind the last column; `map` is what it finds them by. Such an op is drawn by `add_by_places` (cv_maps.c),
 * and its kernel is run by `remake_by_places`. */
typedef void FindPlaces(const void *map, int64_t row, int64_t first, int64_t n, float *restrict x, float *restrict y);
bool take_places(const Op *op, const CvWarp *how, FindPlaces *places, const void *map, const Image *in, const Image *out,
                 Scratch *scratch);
int remake_by_places(Sample *sample, Op *op, int32_t height, int32_t width, Kernel *kernel);
Op *add_by_places(Drawing *d, const Step *step, const CvWarp *how, int32_t code); /* NULL: refused */

/* noise.c */
extern const int64_t ITEM_BYTES[];
enum { CHUNK = 512 }; /* values between two passes */
uint64_t noise_key(const Drawing *d, int64_t at); /* that a step's numbers are made from */
/* Standard normal numbers, from number `first` on; of CHUNK at most, whole vectors. */
void draw_normal(uint64_t key, int64_t first, int64_t count, float out[CHUNK]);
/* Floats to values of an image or of a batch, and back. */
void store(int32_t dtype, const float *restrict in, int64_t count, uint8_t *out);
void load(int32_t dtype, const uint8_t *in, int64_t count, float *restrict out);
/* OP_ERASE, OP_NOISE and OP_GRID on a packed image of the floats served, of uint8 if that is NULL; gives OK, or why not. */
int rewrite(const Op *op, const Image *image, const Values *served);

/* cv_dropout.c: OP_GRID, as `rewrite` */
int rewrite_grid(const Op *op, const Image *image, const Values *served);

/* cv_filter.c: sums in the order of OpenCV. A tap adds weight * (one[x] + other[x]), or, if that is NULL, of one alone;
 * whole LANEs are read. */
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

/* blur.c: for values, too */
Kernel blur_box;

/* colour.c: look values up in a table; apply tables to a packed image; compose tables with those that are pending. */
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

/* values.c: write an image as an output has it; false: no memory. */
bool write_values(const Output *output, const Image *image, uint8_t *out, Scratch *scratch);
/* Floats, or numbers of several bytes, from uint8 in the order of the output's memory: of plane c, or of whole pixels. */
void write_run(const Output *output, int32_t c, const uint8_t *in, int64_t count, uint8_t *out);
/* Such runs of two samples, mixed, in one pass; false where that is not faster, and nothing is written. */
bool blend_run(const Output *output, int32_t c, const uint8_t *own, const uint8_t *other, int64_t count, float share,
               float other_share, float *out);

INLINE int64_t row_bytes(const Output *output) {
    return (int64_t)output->channels * output->height * output->width * ITEM_BYTES[output->table->values.dtype];
}

/* blend.c. False: the table is not in order. */
bool can_blend(const Blending *blending);
/* Write the rows from *next on that can be made once a sample is served; gives OK, or why not. */
int blend_after(const Blending *blending, int64_t sample, int64_t *next, Scratch *scratch, Refusal *refusal);

/* Decode a box of a file of height x width: from (top, left) on, of the size of `out`, which is packed or (H, W, C). False
 * if Pillow must open the file, or memory is short. */
bool decode(const Jpeg *jpeg, const uint8_t *file, int64_t size, int32_t height, int32_t width, int32_t top, int32_t left,
            const Image *out, Scratch *scratch);
void drop_decoder(struct Decoder *decoder); /* NULL: there is none */

#endif
