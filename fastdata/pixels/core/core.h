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

/* SplitMix64, as _mix in __init__.py. */
static const uint64_t GAMMA = 0x9E3779B97F4A7C15u;
INLINE uint64_t scramble(uint64_t bits) {
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

enum { MAX_CHANNELS = 4 };
enum { PIL_DOMAIN, V1_DOMAIN, V2_DOMAIN };
enum { NEAREST, BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS, NEAREST_EXACT }; /* interpolation */
enum { PAD_CONSTANT, PAD_EDGE, PAD_REFLECT, PAD_SYMMETRIC };

/* A view of an image: column x of row y of plane c lies at data[c * plane + y * row + x * pixel]. Negative strides mirror
 * it. "Packed" means pixel == 1, row == width and plane == height * width. */
typedef struct {
    uint8_t *data;
    int64_t plane, row, pixel;
    int32_t channels, height, width;
} Image;

typedef struct {
    int32_t top, left, height, width;
} Box;

/* One step for one sample. What n and v hold stands behind each code; what is not named is not read.
 * fill: v[8..11], one value for each channel. domain: n[8]. */
typedef struct {
    int32_t code;
    int32_t n[9];
    double v[12];
} Op;

enum { MAX_OPS = 256 }; /* of one sample */

/* One step for all samples. What n and v hold stands behind each code, at "table"; `fill` is for each channel, and given
 * as so many values. Its children are steps further down: each step's behind those of the step before. */
typedef struct {
    int32_t code, first, count, fills;
    int64_t at; /* numbers its draws */
    int32_t n[12];
    double v[12], fill[4];
} Step;

/* "warp": n[1] interpolation, n[2] domain, n[3] whether v2's formula, n[4] whether a fill was given, n[5] a centre. */
enum {
    OP_NOTHING,
    /* Geometry */
    OP_WINDOW,    /* n[0..3] borders left, top, right, bottom added first (mode n[8] >> 8, fill); n[4..7] top, left, height,
                     width of the window in the bordered image; n[8] & 1 mirrors it left to right, n[8] & 2 top to bottom */
    OP_RESIZE,    /* n[0..3] top, left, height, width of the box; n[4..5] height, width wanted; n[6] interpolation,
                     antialiased; domain in n[8] & 255, n[8] & 256: Pillow may begin with the columns
                     table: n[0..1] height, width wanted; or 0, 0 and of each child n[0] a length of the shorter side, one of
                     which is drawn; n[2] most of the longer one; n[3] 1: sides are multiplied and cut, 2: the shorter, 3:
                     the longer one is bound, and nothing enlarged; n[4] interpolation, n[5] domain */
    OP_AFFINE,    /* n[0..1] height, width wanted; n[6] interpolation NEAREST, BILINEAR or BICUBIC; domain; v[0..5] the matrix
                     from output to input: PIL_DOMAIN the six numbers given to Image.transform(AFFINE), else the theta that
                     torchvision gives to _affine_grid; fill; n[7] whether a fill was given (tensors: else zeros, unmasked)
                     table: warp; v[0..1] centre x, y, v[2..3] degrees, v[4..5] most translation as a share of width,
                     height, v[6..7] scale, v[8..11] shear in degrees along x, y */
    OP_PERSPECTIVE, /* the same with v[0..7], the coefficients of PERSPECTIVE and of _perspective_grid. Before these are
                     solved, which Python does: the x and y of the corners at the top left, top right, bottom right, bottom
                     left.
                     table: warp; v[2] share of half a side that corners move by */
    OP_TURN,      /* n[0] quarter turns counterclockwise: 1, 2, 3 */
    /* Values that become a table of 256 entries for each channel once the image is known.
     * table, for all with v[0] alone, and POSTERIZE: v[0..1] its range, n[1] domain */
    OP_BRIGHTNESS, /* v[0] factor; domain */
    OP_CONTRAST,   /* v[0] factor; domain: blends with the mean of the luma */
    OP_SOLARIZE,   /* v[0] threshold: values >= it are inverted */
    OP_SOLARIZE_ADD, /* n[0] added to values < n[1], clipped (timm) */
    OP_POSTERIZE,  /* n[0] bits kept */
    OP_INVERT,
    OP_AUTOCONTRAST, /* domain */
    OP_EQUALIZE,     /* domain */
    /* Values that need a pixel's channels or its neighbours */
    OP_GRAYSCALE,  /* n[0] channels wanted: 1 or 3; domain. table: n[0] 1, 3 or 0: as many as there are; n[1] domain */
    OP_SATURATION, /* v[0] factor; domain */
    OP_HUE,        /* v[0] in [-0.5, 0.5]; domain */
    OP_SHARPNESS,  /* v[0] factor; domain */
    OP_BLUR,       /* n[0], n[1] odd kernel width, height; v[0], v[1] sigma in x, y: torchvision's gaussian_blur
                      table: v[0..1] the range of both */
    OP_BOX_BLUR,   /* v[0] radius: Pillow's ImageFilter.GaussianBlur(radius), which timm and DINO use */
    OP_PERMUTE,    /* n[0..3] the channel that each channel comes from */
    OP_NOISE,      /* v[0] mean, v[1] sigma in [0, 1] units, n[0] whether clipped; n[4], n[5] low and high half of the
                      key. table: the same, no key */
    OP_ERASE,      /* n[0..3] top, left, height, width; n[6] 0: fill, 1: normal values for each pixel and channel, 2: one
                      normal value for each channel; n[4], n[5] low and high half of the key; n[7] whether
                      values are normalised before
                      table: n[0..1] fewest and most rectangles, which share the area, n[6..7]; v[0] probability,
                      v[1..2] scale, v[3..4] logarithm of height / width */
    /* AugMix: keeps the image, adds weighted versions of it */
    OP_MIX_BEGIN, /* v[0] weight of the image itself */
    OP_MIX_ADD,   /* v[0] weight of the current image; the kept one is current again */
    OP_MIX_END,   /* the sum, truncated, is current */
    /* Values to the batch */
    OP_CAST,      /* what follows works on the values served, normalised or not
                     table: n[0] dtype, n[1] scaling; n[2] how many means there are, n[3] whether one channel becomes as
                     many; v: of each mean and standard deviation */
    LAST_OP = OP_CAST,
    /* In tables only */
    STEP_PAD,         /* n[0..3] borders left, top, right, bottom; n[4] mode, n[5] domain */
    STEP_CROP,        /* the same; n[6..7] height, width; n[8] whether borders are added where the image is too small, n[9] in
                         v2's way: in one with the others, which stand as left, right, top, bottom */
    STEP_CENTER_CROP, /* n[0..1] height, width */
    STEP_FLIP,        /* n[0] whether top to bottom; v[0] probability, or n[1]: each second epoch, by d->turn */
    STEP_RESIZED_CROP, /* n[0..1] height, width, n[4] interpolation, n[5] domain; v[0..1] scale, v[2..3] width / height,
                         v[4..5] logarithm of that */
    STEP_ROTATION,    /* warp; n[0] whether it expands; v[0..1] centre x, y, v[2..3] degrees */
    STEP_SEQUENCE,    /* its children, one after the other */
    STEP_CHOICE,      /* one of its children, or none; of each v[0]: where in [0, 1) its probability ends */
    STEP_ORDER,       /* its children, in random order */
    STEP_PHOTOMETRIC, /* RandomPhotometricDistort. v[0] probability of each child: brightness, contrast, saturation, hue and
                         permutation, or contrast behind hue */
    STEP_AUGMENT,     /* RandAugment, TrivialAugmentWide. warp; n[6] how many in a row, n[7] bins, n[8] the bin, -1: drawn;
                         n[9] whether thresholds are shares of 255. Children are what it chooses from */
    STEP_POLICIES,    /* AutoAugment. warp, n[7], n[9]; children are pairs, of each v[0] probability, n[2] bin */
    STEP_AUG_MIX,     /* warp; n[6] chains, n[7], n[8] severity, n[9], n[10] depth, 0: drawn; v[0] alpha */
    STEP_MAGNITUDE,   /* a child of these: n[0] its op, or one of STEP_SHEAR_X to STEP_ROTATE, or OP_NOTHING; n[1] whether it
                         takes a sign; n[3] its row among the levels */
    STEP_SHEAR_X, STEP_SHEAR_Y, STEP_TRANSLATE_X, STEP_TRANSLATE_Y, STEP_ROTATE,
    STEP_TIMM,        /* as STEP_CHOICE, of sequences of: */
    STEP_TIMM_OP,     /* warp; n[0] as of STEP_MAGNITUDE; n[6] bits of TIMM_...; n[7] how many interpolations there are, one of
                         which is drawn: n[8..11]; v[0] probability, v[1] magnitude, v[2] its deviation, infinite: it is
                         uniform up to v[1], v[3] most; v[4] most translation, in pixels or as a share of the side */
    STEP_LENGTH,      /* a child of OP_RESIZE */
};

/* Ops as torchvision's and timm's policies name them, and what is special about timm's, by its name or that name's ending. */
enum {
    POLICY_Identity = OP_NOTHING, POLICY_AutoContrast = OP_AUTOCONTRAST, POLICY_Brightness = OP_BRIGHTNESS,
    POLICY_Color = OP_SATURATION, POLICY_Contrast = OP_CONTRAST, POLICY_Desaturate = OP_SATURATION,
    POLICY_Equalize = OP_EQUALIZE, POLICY_GaussianBlur = OP_BOX_BLUR, POLICY_GaussianBlurRand = OP_BOX_BLUR,
    POLICY_Invert = OP_INVERT, POLICY_Posterize = OP_POSTERIZE, POLICY_Rotate = STEP_ROTATE, POLICY_Sharpness = OP_SHARPNESS,
    POLICY_ShearX = STEP_SHEAR_X, POLICY_ShearY = STEP_SHEAR_Y, POLICY_Solarize = OP_SOLARIZE,
    POLICY_SolarizeAdd = OP_SOLARIZE_ADD, POLICY_TranslateX = STEP_TRANSLATE_X, POLICY_TranslateY = STEP_TRANSLATE_Y,
};
enum { TIMM_Increasing = 1, TIMM_Original = 2, TIMM_Rel = 4, TIMM_Desaturate = 8, TIMM_GaussianBlurRand = 16 };

/* What STEP_AUGMENT, STEP_POLICIES or STEP_AUG_MIX may do to images of one size: `count` levels, bins of each row. */
typedef struct {
    int32_t step, height, width, count;
    const double *levels;
} Levels;

enum { UINT8, FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT32, INT64 };
enum { SCALE_NONE, SCALE_DIVIDE, SCALE_MULTIPLY }; /* how 255 becomes 1 */
enum { MAX_MEANS = 6 };

/* How uint8 becomes what is served: by fastdata_values from OP_CAST. Channel c is that of c % channels. */
typedef struct {
    int32_t dtype, scaling, normalizes, widens, channels;
    int32_t by_formula; /* floats are (x / factor - mean) / std, or with x * factor, where that gives the very values of the
                           table; else these */
    float factor;
    double mean[6], std[6];
    double table_C256[1536]; /* what 0 to 255 become */
} Values;

/* A transform. Steps begin with the one that all others are children of. */
typedef struct {
    const Step *steps;
    const Levels *levels;
    int32_t count, levels_count;
    int32_t fuses, resizes_fast, chooses_order; /* torch fuses products; its v2 has fast bilinear kernels; so does Pillow
                                                   choose which side to resize first */
    Values values;
} Table;

/* Why a sample was refused, by which program of a batch and which step in its table; numbers stand beside each reason. */
typedef struct {
    int64_t reason, program, step, n[6];
} Refusal;

enum {
    OK,
    NO_MEMORY,
    REFUSED_TABLE,    /* the table itself is not in order, or asks for more than MAX_OPS */
    REFUSED_OUTSIDE,  /* no pixel would be left */
    REFUSED_OP,       /* an op is not for so many channels */
    REFUSED_SHAPE,    /* n[0..2] channels, height, width that it has; n[3..5] that there is room for */
    REFUSED_FILE,     /* the decoder leaves it to Pillow */
    REFUSED_CHANNELS, /* n[0] channels that it has */
    REFUSED_CROP,     /* n[0..1] height, width of the window; n[2..3] of the image */
    REFUSED_BORDER,   /* n[0..3] borders; n[4..5] height, width of the image */
    REFUSED_BLUR,     /* n[0..1] height, width of the image */
    NEEDS_LEVELS,     /* n[0..1] height, width: there are none for them */
    REFUSED_ROW,      /* n[0] the row that it is to be written to; n[1] how many rows there are */
};

/* A sample while its steps are drawn. A probe refuses no size and follows every choice; is_known: whether all samples have
 * this size, whatever is drawn. */
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

bool is_sound(const Table *table); /* nothing is drawn of another */
bool resolve(Drawing *d);          /* false: refused */
bool draw_steps(Drawing *d, const Table *table, int64_t first, int64_t count);
uint64_t sample_key(uint64_t seed, int64_t visit, int64_t index);
uint64_t turn_of(int64_t visit, int64_t index); /* odd in each second epoch, whatever the seed */
int64_t child(int64_t at, int64_t number);
double uniform(const Drawing *d, int64_t at, int64_t draw);
double between(const Drawing *d, int64_t at, int64_t draw, double low, double high);
double normal_number(const Drawing *d, int64_t at, int64_t draw); /* takes draw + 1, too */
int64_t integer(const Drawing *d, int64_t at, int64_t draw, int64_t count); /* in [0, count) */
bool deny(Drawing *d, const Step *step, int32_t reason, const int64_t *n, int count);
Op *add(Drawing *d, const Step *step, int32_t code, int32_t domain); /* NULL: refused */
bool set_size(Drawing *d, int64_t height, int64_t width, int how);
bool leaves_pixels(Drawing *d, const Step *step); /* and not more than can be counted; else false: refused */
int64_t truncated(double value); /* truncated, and of the range of what is no int32 the end */
/* A box as torchvision's RandomResizedCrop and RandomErasing draw them, in ten tries; false where none fits. */
bool draw_box(const Drawing *d, int64_t at, int64_t first, const double scale[2], const double log_ratio[2], double share,
              bool is_crop, int64_t box[4]);

/* Each stands beside the pixels of its op. */
bool draw_pad(Drawing *d, const Step *step);
bool draw_crop(Drawing *d, const Step *step);
bool draw_center_crop(Drawing *d, const Step *step);
bool draw_flip(Drawing *d, const Step *step);
bool draw_resize(Drawing *d, const Step *step);
bool draw_resized_crop(Drawing *d, const Step *step);
bool draw_affine(Drawing *d, const Step *step);
bool draw_rotation(Drawing *d, const Step *step);
bool draw_perspective(Drawing *d, const Step *step);
bool draw_value(Drawing *d, const Step *step);
bool draw_grayscale(Drawing *d, const Step *step);
bool draw_blur(Drawing *d, const Step *step);
bool draw_permute(Drawing *d, const Step *step);
bool draw_noise(Drawing *d, const Step *step);
bool draw_erase(Drawing *d, const Step *step);
bool draw_augment(Drawing *d, const Step *step);
bool draw_policies(Drawing *d, const Step *step);
bool draw_aug_mix(Drawing *d, const Step *step);
bool draw_timm(Drawing *d, const Step *step);

/* Maps that policies take as well, by a number that was drawn. */
bool add_map(Drawing *d, const Step *step, int32_t interpolation, const double matrix[6]);
bool add_affine(Drawing *d, const Step *step, double degrees, const double moved[2], double scale, const double shear[2],
                const double *center);
bool add_rotation(Drawing *d, const Step *step, double degrees, int32_t interpolation, bool expands, const double *center);

/* Memory that one call holds at a time, and that grows to its largest need. */
enum { SLOT_A, SLOT_B, SLOT_WORK, SLOT_WORK_2, SLOT_KEPT, SLOT_MIX, SLOT_DECODED, SLOT_DRAWN, SLOT_COUNT };
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

/* The image that a sample is at present. It lies in the store, or packed or as a view of that in `slot`. */
typedef struct {
    Image image;
    int slot; /* SLOT_A or SLOT_B; -1: not ours to write to */
    bool has_table;
    uint8_t table_C256[MAX_CHANNELS][256];
    Scratch *scratch;
} Sample;

/* Whether n[0..3], top, left, height and width, lie in an image. */
INLINE bool is_inside(const Op *op, int32_t height, int32_t width) {
    const int32_t *n = op->n;
    return n[0] >= 0 && n[1] >= 0 && n[2] >= 0 && n[3] >= 0 && n[0] + (int64_t)n[2] <= height &&
           n[1] + (int64_t)n[3] <= width;
}

extern const int64_t ITEM_BYTES[]; /* noise.c */
enum { CHUNK = 512 };              /* values between two passes */
void store(int32_t dtype, const float *restrict in, int64_t count, uint8_t *out); /* floats to values of a batch */

/* OP_MIX_...; gives OK, or why not. */
int mix(Sample *sample, const Op *op);

/* Of serve.c, for ops. `room`: an image of that size in the buffer that the sample does not use, which it may `become`.
 * `own`: the image is packed memory of our own; `settle`: no table is pending. False: no memory. */
bool room(Sample *sample, int32_t channels, int32_t height, int32_t width, Image *out);
void become(Sample *sample, const Image *image);
bool own(Sample *sample);
bool settle(Sample *sample);
void copy_row(const uint8_t *restrict in, int64_t pixel, int64_t count, uint8_t *restrict out);
int window(Sample *sample, const Op *op); /* gives OK, or why not */

/* Functions of libjpeg-turbo by their names without jpeg_, and the version of its ABI. */
typedef struct {
    void (*CreateDecompress)(void *, int version, size_t struct_bytes);
    int (*read_header)(void *, int needs_image);
    int (*start_decompress)(void *);
    void (*crop_scanline)(void *, unsigned *left, unsigned *width);
    unsigned (*skip_scanlines)(void *, unsigned rows);
    unsigned (*read_scanlines)(void *, unsigned char **rows, unsigned count);
    int (*input_complete)(void *);
    int (*resync_to_restart)(void *, int desired);
    void (*abort_decompress)(void *);
    void (*destroy_decompress)(void *);
    int32_t version;
} Jpeg;

/* OP_ERASE and OP_NOISE on a packed image of the floats served, of uint8 if that is NULL; gives OK, or why not. */
int rewrite(const Op *op, const Image *image, const Values *served);

/* What samples are served as: table, perspectives, out, its size and layout; and where they lie, which fastdata_serve fills
 * in: of the first of several, as far as that is the same for all. */
typedef struct Batch {
    const Table *table;
    uint8_t *out_B;           /* (rows, C, h, w); (rows, h, w, C) in memory if `channels_last` */
    int64_t out_bytes;        /* of that memory: nothing is written beyond it */
    int32_t channels, height, width, channels_last;
    const double *solved_BS8; /* of perspectives, for `solved` ops of each sample; NULL: there are none */
    int32_t solved;
    int64_t rows;             /* how many samples `out_bytes` has room for: found when the batch is served */
    const int64_t *rows_B;    /* the row that each sample is written to; NULL: its own number */
    const uint8_t *const *sources_B; /* first byte of each sample, uint8 (C, H, W) */
    const int32_t *shapes_B3; /* channels, height, width of each */
    const int64_t *sizes_B;   /* bytes of those that are JPEG files, 0 of pixels; NULL: all are pixels */
    const int32_t *turns_B;   /* EXIF orientations that files are turned by, which their shapes follow; NULL: none is */
    const Jpeg *jpeg;
    uint64_t seed;            /* with the next two what is drawn from */
    const int64_t *visits_B, *indices_B;
    struct Batch *next;       /* what else the same samples are served as */
} Batch;

/* Decode the box from (top, left) on that `out` has the size of, packed or (H, W, C), of a file of height x width. False
 * where Pillow is to judge, or there is no memory. */
bool decode(const Jpeg *jpeg, const uint8_t *file, int64_t size, int32_t height, int32_t width, int32_t top, int32_t left,
            const Image *out, Scratch *scratch);
void drop_decoder(struct Decoder *decoder); /* NULL: there is none */

/* Kernels. `in` has pixel == 1, any row and plane stride; `out` is packed, its data, channels, height and width are set by
 * the caller, and it never overlaps `in`. False: no memory. */
bool resize(const Op *op, const Image *in, const Image *out, Scratch *scratch); /* `in` is the box; see there */
void resize_reads(const Op *op, const int32_t size[2], const int32_t wanted[2], Box *box);
bool warp(const Op *op, const Image *in, const Image *out, Scratch *scratch); /* OP_AFFINE, OP_PERSPECTIVE */
bool sharpen(const Op *op, const Image *in, const Image *out, Scratch *scratch);
bool blur(const Op *op, const Image *in, const Image *out, Scratch *scratch); /* OP_BLUR, OP_BOX_BLUR */

/* In place, on packed images. */
void make_table(const Op *op, const Image *image, uint8_t table_C256[MAX_CHANNELS][256]); /* OP_BRIGHTNESS .. OP_EQUALIZE */
void apply_table(const Image *image, uint8_t table_C256[MAX_CHANNELS][256]);
void grayscale(const Op *op, Image *image); /* 3 -> 1 shrinks image->channels; 1 -> 3 has room for 3 */
void saturate(const Op *op, Image *image);
void shift_hue(const Op *op, Image *image);

#endif
