/* The compiled core: what one batch goes through, sample by sample, as a program of plain records.
 *
 * A sample is a planar uint8 image (C, H, W). Its program is a row of `Op` records, drawn by Python for the whole batch;
 * `fastdata_serve` (serve.c) runs them one after the other through a few buffers that stay in the cache, and writes the
 * result to its place in the batch. Nothing here knows torch or Python.
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
    return (float)((double)a * b + c);
#endif
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

enum {
    OP_NOTHING,
    /* Geometry */
    OP_WINDOW,    /* n[0..3] borders left, top, right, bottom added first (mode n[8] >> 8, fill); n[4..7] top, left, height,
                     width of the window in the bordered image; n[8] & 1 mirrors it left to right, n[8] & 2 top to bottom */
    OP_RESIZE,    /* n[0..3] top, left, height, width of the box; n[4..5] height, width wanted; n[6] interpolation,
                     antialiased; domain in n[8] & 255, n[8] & 256: Pillow may begin with the columns */
    OP_AFFINE,    /* n[0..1] height, width wanted; n[6] interpolation NEAREST, BILINEAR or BICUBIC; domain; v[0..5] the matrix
                     from output to input: PIL_DOMAIN the six numbers given to Image.transform(AFFINE), else the theta that
                     torchvision gives to _affine_grid; fill; n[7] whether a fill was given (tensors: else zeros, unmasked) */
    OP_PERSPECTIVE, /* the same with v[0..7], the coefficients of PERSPECTIVE and of _perspective_grid */
    OP_TURN,      /* n[0] quarter turns counterclockwise: 1, 2, 3 */
    /* Values that become a table of 256 entries for each channel once the image is known */
    OP_BRIGHTNESS, /* v[0] factor; domain */
    OP_CONTRAST,   /* v[0] factor; domain: blends with the mean of the luma */
    OP_SOLARIZE,   /* v[0] threshold: values >= it are inverted */
    OP_SOLARIZE_ADD, /* n[0] added to values < n[1], clipped (timm) */
    OP_POSTERIZE,  /* n[0] bits kept */
    OP_INVERT,
    OP_AUTOCONTRAST, /* domain */
    OP_EQUALIZE,     /* domain */
    /* Values that need a pixel's channels or its neighbours */
    OP_GRAYSCALE,  /* n[0] channels wanted: 1 or 3; domain */
    OP_SATURATION, /* v[0] factor; domain */
    OP_HUE,        /* v[0] in [-0.5, 0.5]; domain */
    OP_SHARPNESS,  /* v[0] factor; domain */
    OP_BLUR,       /* n[0], n[1] odd kernel width, height; v[0], v[1] sigma in x, y: torchvision's gaussian_blur */
    OP_BOX_BLUR,   /* v[0] radius: Pillow's ImageFilter.GaussianBlur(radius), which timm and DINO use */
    OP_PERMUTE,    /* n[0..3] the channel that each channel comes from */
    OP_NOISE,      /* v[0] mean, v[1] sigma in [0, 1] units, n[0] whether clipped; n[4], n[5] low and high half of the
                      key. Times v[2..5], clipped to v[6..9] and v[2..5] more, for each channel */
    OP_ERASE,      /* n[0..3] top, left, height, width; n[6] 0: fill, 1: normal values for each pixel and channel, 2: one
                     normal value for each channel; n[4], n[5] low and high half of the key */
    /* AugMix: keeps the image, adds weighted versions of it */
    OP_MIX_BEGIN, /* v[0] weight of the image itself */
    OP_MIX_ADD,   /* v[0] weight of the current image; the kept one is current again */
    OP_MIX_END,   /* the sum, truncated, is current */
    /* Values to the batch */
    OP_CAST,      /* what follows works on the floats served: OP_ERASE with fill in their units, or with normal values */
};

/* Memory that one call holds at a time, and that grows to its largest need. */
enum { SLOT_A, SLOT_B, SLOT_WORK, SLOT_WORK_2, SLOT_KEPT, SLOT_MIX, SLOT_DECODED, SLOT_COUNT };
typedef struct {
    void *data[SLOT_COUNT];
    int64_t bytes[SLOT_COUNT];
} Scratch;

/* At least `bytes` of memory, aligned to 64, 64 bytes more than asked may be touched; NULL if there is none. What was in
 * the slot is lost where it grows. Kernels own SLOT_WORK and SLOT_WORK_2 while they run. */
void *take(Scratch *scratch, int slot, int64_t bytes);
Scratch *borrow(void); /* NULL: no memory */
void give_back(Scratch *scratch);

/* Functions of libjpeg-turbo by their names without jpeg_, and the version of its ABI. Mirrored by __init__.py. */
typedef struct {
    void (*create)(void *, int version, size_t struct_bytes);
    int (*read_header)(void *, int needs_image);
    int (*start)(void *);
    void (*crop)(void *, unsigned *left, unsigned *width);
    unsigned (*skip)(void *, unsigned rows);
    unsigned (*read)(void *, unsigned char **rows, unsigned count);
    int (*is_read)(void *); /* jpeg_input_complete */
    int (*resync)(void *, int desired);
    void (*destroy)(void *);
    int32_t version;
} Jpeg;

/* Decode the box from (top, left) on that `out` has the size of, packed or (H, W, C), of a file of height x width. False
 * where Pillow is to judge, or there is no memory. */
bool decode(const Jpeg *jpeg, const uint8_t *file, int64_t size, int32_t height, int32_t width, int32_t top, int32_t left,
            const Image *out, Scratch *scratch);

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
