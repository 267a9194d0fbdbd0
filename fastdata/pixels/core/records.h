/* Everything that Python and the core share, defined once.
 *
 * This file is included several times, and its macros have another meaning each time: enumerators, structs, unions and
 * prototypes in core.h; the function that draws a step in draw.c; the function that runs an op in serve.c; and text in
 * layout.c, from which Python makes its own records when it opens the library. A macro that is not defined expands to
 * nothing. The fields of a record are plain C: numbers, arrays of them, pointers, and records that are defined before it.
 * So a new op is an entry here, a C file with its draw and its pixels, and a reader in one of Python's rooms of readers
 * (geometry.py, colours.py, policies.py, conversions.py, albumentations_*.py).
 *
 * ENUM(names)                      numbers from 0 on
 * RECORD(Name, fields)             a struct
 * STEP(CODE, name, fields)         a step of a transform, for all samples: step->name, drawn by draw_name
 * CHILD(CODE, name, fields)        the same for a step that only its parent draws
 * OP(CODE, name, fields)           an op, drawn from a step for one sample: op->name, run by run_name
 * REFUSAL(CODE, name, fields)      why a sample is refused: refusal->name holds the numbers for the message
 * FUNCTION(result, name, arguments)
 *
 * Lengths are in pixels. The code that draws or runs a record must accept any value of its fields, because only
 * `is_sound` of draw.c checks a table before it is used.
 */
#ifndef ENUM
#define ENUM(...)
#endif
#ifndef RECORD
#define RECORD(...)
#endif
#ifndef STEP
#define STEP(...)
#endif
#ifndef CHILD
#define CHILD(...)
#endif
#ifndef OP
#define OP(...)
#endif
#ifndef REFUSAL
#define REFUSAL(...)
#endif
#ifndef FUNCTION
#define FUNCTION(...)
#endif

/* The library whose pixels are wanted: Pillow, or torchvision's v1 or v2 functions on uint8 tensors. */
ENUM(PIL_DOMAIN, V1_DOMAIN, V2_DOMAIN)
/* Filters of Pillow and torch, then of OpenCV; CV_IPP_CUBIC: in builds of OpenCV with Intel's IPP. */
ENUM(
    NEAREST, BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS, NEAREST_EXACT,
    CV_NEAREST, CV_NEAREST_EXACT, CV_LINEAR, CV_LINEAR_EXACT, CV_LANCZOS, CV_CUBIC, CV_IPP_CUBIC,
    CV_AREA)
ENUM(PAD_CONSTANT, PAD_EDGE, PAD_REFLECT, PAD_SYMMETRIC, PAD_WRAP)
ENUM(UINT8, FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT32, INT64)
/* How 255 becomes 1: not at all, by a division by 255, or by a multiplication with 1 / 255. SCALE_AFTER: not at all, and the
 * difference from the mean is multiplied by `std`, not divided. */
ENUM(SCALE_NONE, SCALE_DIVIDE, SCALE_MULTIPLY, SCALE_AFTER)
ENUM(PLACE_CENTER, PLACE_TOP_LEFT, PLACE_TOP_RIGHT, PLACE_BOTTOM_LEFT, PLACE_BOTTOM_RIGHT, PLACE_RANDOM)
/* What an image is normalised by, if its own values decide: nothing; their mean and deviation; or their range. */
ENUM(NO_STATISTIC, OF_IMAGE, OF_CHANNELS, RANGE_OF_IMAGE, RANGE_OF_CHANNELS)
ENUM(FREE_SIZE, MULTIPLIED_SIZE, SHORT_BOUND, LONG_BOUND)
ENUM(FILLED, NORMAL_PIXELS, NORMAL_CHANNELS, UNIFORM_PIXELS, UNIFORM_CHANNELS) /* contents of an erased rectangle */
ENUM(MIX_BEGIN, MIX_ADD, MIX_END)
/* albumentations. For CV_LINEAR: what is added to an image that was multiplied by alpha. For CV_CHANNELS: what a channel's number
 * does. For CV_GREY: how grey is computed. For CV_HISTOGRAM: which table is made from the histogram. */
ENUM(SHARE_OF_255, SHARE_OF_MEAN, GREY_THAT_STAYS)
ENUM(CHANNEL_ADD, CHANNEL_MULTIPLY, CHANNEL_POSTERIZE, CHANNEL_GAMMA)
ENUM(GREY_WEIGHTED, GREY_DESATURATION, GREY_AVERAGE, GREY_LARGEST, GREY_LIGHTNESS)
ENUM(EQUALIZE_CV, EQUALIZE_PIL, STRETCH_CDF, STRETCH_PIL)
ENUM(CV_CONSTANT, CV_REPLICATE, CV_REFLECT, CV_WRAP, CV_REFLECT_101) /* OpenCV's borders, as it numbers them */
/* What happens if a rotated image does not fit into its frame: corners are lost, the frame grows, the frame is cut to a box that
 * the image fills, or the image shrinks. */
ENUM(KEEPS_FRAME, EXPANDS_FRAME, CROPS_BORDER, SHRINKS_IMAGE)

/* The kind of a value step, or of an op of a policy. Kinds up to EQUALIZE become a table of 256 entries for each channel, once
 * the image is known. Kinds from SHEAR_X on move pixels, and are for policies only. */
ENUM(
    NO_KIND,
    BRIGHTNESS, CONTRAST, SOLARIZE, SOLARIZE_ADD, POSTERIZE, INVERT, AUTOCONTRAST, EQUALIZE,
    SATURATION, HUE, SHARPNESS, BOX_BLUR,
    SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE)

RECORD(Box, int32_t top, left, height, width;)
RECORD(Border, int32_t left, top, right, bottom, mode, domain;)
/* How a map reads the pixels at its places. is_v2: the matrix is computed by v2's formula. has_fill: places outside the image get
 * `fill`; otherwise tensors have zeros there. */
RECORD(Warp, int32_t interpolation, domain, is_v2, has_fill;)
/* The fields of all policies of torchvision. has_shares: thresholds of Solarize are shares of 255, as in v2. */
RECORD(Policy, Warp warp; int32_t bins, has_shares;)

/* How OpenCV reads pixels at places. lanes: 0 for its older program, otherwise how many floats the newer one computes at a time.
 * fuses: products are not rounded before they are added. fills_first: only the first channel of the border has the fill. */
RECORD(CvWarp, int32_t interpolation, border, lanes, fuses, fills_first;)

/* Steps of a transform. `end` of a sequence that is a child of a choice: the end of its share of [0, 1). */
STEP(SEQUENCE, sequence, double end;)
STEP(CHOICE, choice, ) /* one of its children, or none */
STEP(ORDER, order, )   /* its children, in random order */
/* albumentations: SomeOf, RandomOrder. `count` of its children, none twice, in their own order or in random order. */
STEP(SOME, some, int32_t count, keeps_order;)

/* torchvision: Pad, RandomCrop, CenterCrop, RandomHorizontalFlip, RandomVerticalFlip; ours: AlternatingFlip. */
STEP(PAD, pad, Border border;)
/* pads_if_needed: borders are added if the image is too small; is_v2: in one step with the other borders, not after them. */
STEP(CROP, crop, Border border; int32_t height, width, pads_if_needed, is_v2;)
STEP(CENTER_CROP, center_crop, int32_t height, width;)
/* alternates: mirrors in every second epoch, and p is not used. */
STEP(FLIP, flip, int32_t is_vertical, alternates; double p;)

/* albumentations: TURN with FLIP is RandomRotate90 and D4; PAD_TO is PadIfNeeded, and the padding before a crop; CUT is
 * CenterCrop and Crop. PAD_TO pads to height x width at least, or to a multiple of a divisor that is not 0. `position` is the
 * place of the image in the result. is_whole_behind: all missing rows and columns are added at the bottom and the right, and in
 * addition those that `position` puts at the top and the left. is_centered: the box is in the middle; its top and left are not
 * used. */
STEP(TURN, turn, int32_t quarters;) /* counterclockwise */
STEP(PAD_TO, pad_to, int32_t height, width, height_divisor, width_divisor, position, mode, is_whole_behind;)
STEP(CUT, cut, Box box; int32_t is_centered;)

/* torchvision: Resize, RandomResize, RandomShortestSize, RandomResizedCrop. The new size is height x width. If these are 0, the
 * shorter side gets the length of one of the children, and the longer side at most `longest` (0: any).
 * bound: MULTIPLIED_SIZE multiplies both sides and truncates, as RandomShortestSize does; SHORT_BOUND and LONG_BOUND limit the
 * shorter or the longer side, and enlarge nothing. */
STEP(RESIZE, resize, int32_t height, width, longest, bound, interpolation, domain, shrinks_by_area;)
CHILD(LENGTH, length, int32_t px;)
/* ours: ResizeToBucket. It chooses the child (bucket) that crops the least of an image. COVER_BUCKET resizes the image so that
 * one side is the bucket's and the other one is at least as long. BUCKET_CROP then crops the longer side. */
STEP(COVER_BUCKET, cover_bucket, int32_t interpolation, domain;)
STEP(BUCKET_CROP, bucket_crop, int32_t is_random;)
CHILD(BUCKET, bucket, int32_t height, width;)
STEP(RESIZED_CROP, resized_crop,
    int32_t height, width, interpolation, domain, shrinks_by_area;
    double scale[2], ratio[2], log_ratio[2];)

/* albumentations: MAX_SIZE is SmallestMaxSize and LongestMaxSize, to height and width (0: any), or to the length of one of the
 * children; then RandomScale, RandomSizedCrop, RandomCropFromBorders. shrinks_by_area, here and above: the filter is CV_AREA if
 * a side gets shorter. margin: the most that is cut off at the left, top, right and bottom, as a share of the side. */
STEP(MAX_SIZE, max_size, int32_t height, width, is_smallest, interpolation, shrinks_by_area;)
STEP(SCALE, scale, int32_t interpolation, shrinks_by_area; double low, high;)
STEP(SIZED_CROP, sized_crop,
    int32_t height, width, least, most, interpolation, shrinks_by_area;
    double ratio;) /* the height of the crop is from `least` to `most`; ratio: of width to height */
STEP(BORDER_CROP, border_crop, double margin[4];)

/* torchvision: RandomAffine, RandomRotation, RandomPerspective. Angles in degrees; translation: the most, as a share of
 * width and height; shear: ranges along x and along y; distortion: share of half a side that corners move by. */
STEP(AFFINE, affine,
    Warp warp;
    int32_t has_center;
    double center[2], degrees[2], translation[2], scale[2], shear_x[2], shear_y[2];)
STEP(ROTATION, rotation, Warp warp; int32_t expands, has_center; double center[2], degrees[2];)
STEP(PERSPECTIVE, perspective, Warp warp; double distortion;)

/* albumentations: Affine, ShiftScaleRotate, Rotate, SafeRotate; Perspective. Angles in degrees; moves in whole pixels, or
 * shares of the side if is_relative; scale: deviation of the corners, as a share of the side. */
STEP(CV_AFFINE, cv_affine,
    CvWarp warp;
    int32_t frame, is_relative, keeps_ratio, is_balanced;
    double degrees[2], scale_x[2], scale_y[2], move_x[2], move_y[2], shear_x[2], shear_y[2];)
STEP(CV_PERSPECTIVE, cv_perspective, CvWarp warp; int32_t keeps_size, expands; double scale[2];)
/* albumentations: GridDistortion, whose cells are narrower or wider by a share drawn from `limit`; OpticalDistortion, whose lens
 * is distorted by an amount drawn from `limit`; ElasticTransform, whose noise is uniform or normal, is the same along x and y
 * (is_shared), and is blurred by a kernel of `size` pixels (0: the size follows from sigma). */
STEP(CV_GRID, cv_grid, CvWarp warp; int32_t cells, is_normalized; double limit[2];)
STEP(CV_LENS, cv_lens, CvWarp warp; int32_t is_fisheye; double limit[2];)
STEP(CV_ELASTIC, cv_elastic, CvWarp warp; int32_t size, is_shared, is_uniform; double alpha, sigma;)

/* One number for each sample, uniform in its range. torchvision: ColorJitter, RandomInvert, RandomPosterize, ...; Pillow:
 * ImageFilter.GaussianBlur, with a radius (BOX_BLUR). */
STEP(VALUE, value, int32_t kind, domain; double low, high;)
STEP(GRAYSCALE, grayscale, int32_t channels, domain;) /* 0 channels: the number does not change */
STEP(BLUR, blur, int32_t width, height; double low, high;) /* torchvision: GaussianBlur; size of the kernel, range of sigma */
STEP(PERMUTE, permute, )
STEP(PHOTOMETRIC, photometric, double p;) /* torchvision: RandomPhotometricDistort; p is that of each of its five children */

/* albumentations: RandomBrightnessContrast, ColorJitter. x becomes x * alpha + beta; is_safe: without leaving [0, 255]. */
STEP(CV_LINEAR, cv_linear, int32_t added, is_safe; double alpha[2], beta[2];)
/* RGBShift, MultiplicativeNoise, Posterize, RandomGamma: a number for each channel, or one for all. Bits are whole numbers,
 * gamma is in hundredths. */
STEP(CV_CHANNELS, cv_channels, int32_t kind, is_shared; double low[4], high[4];)
STEP(CV_DROP, cv_drop, int32_t fewest, most;)                            /* ChannelDropout; filled with `fill` */
STEP(CV_HISTOGRAM, cv_histogram, int32_t kind, is_of_luma; double cutoff;) /* Equalize, AutoContrast; cutoff in percent */
STEP(CV_GREY, cv_grey, int32_t method, channels;)                        /* ToGray */
/* HueSaturationValue: shifts in OpenCV's units, hue in units of two degrees. OpenCV rounds down in the whole vectors of a row
 * (`vector` pixels each), and to the nearest in the pixels after them. fuses: a product and the difference from it are rounded
 * once. */
STEP(CV_HSV, cv_hsv, int32_t vector, fuses; double hue[2], saturation[2], value[2];)
STEP(CV_SATURATION, cv_saturation, int32_t fuses; double factor[2];)     /* ColorJitter */
STEP(CV_CLAHE, cv_clahe, int32_t columns, rows; double limit[2];)        /* CLAHE; columns and rows of tiles */
/* GaussNoise, which adds normal numbers, and MultiplicativeNoise with elementwise=True, which multiplies by uniform numbers: a
 * number for each value, or for each pixel (is_shared). */
STEP(CV_NOISE, cv_noise, int32_t multiplies, is_shared; double mean[2], sigma[2], range[2];)
STEP(CV_ISO, cv_iso, double colour[2], intensity[2];) /* ISONoise */

/* torchvision: GaussianNoise, RandomErasing; timm: RandomErasing, which divides the area among its rectangles. */
STEP(NOISE, noise, int32_t clips; double mean, sigma;) /* for values in [0, 1] */
STEP(ERASE, erase, int32_t fewest, most, mode, is_normalized; double p, scale[2], log_ratio[2];)

/* albumentations: Blur and MedianBlur, GaussianBlur, MotionBlur, whose kernels have a side of `smallest` to `largest` pixels. The
 * side is odd; that of a Gaussian follows from sigma if 0 is drawn. Angles in degrees. */
STEP(CV_BLUR, cv_blur, int32_t is_median, smallest, largest;)
STEP(GAUSSIAN, gaussian, int32_t smallest, largest; double sigma[2];)
STEP(MOTION, motion, int32_t smallest, largest, shifts; double angle[2], direction[2];)
/* albumentations: Sharpen, whose size is 0 for the method "kernel"; UnsharpMask; Downscale by the nearest pixels. */
STEP(SHARPEN, sharpen, int32_t size; double sigma, alpha[2], lightness[2];)
STEP(UNSHARP_MASK, unsharp_mask, int32_t smallest, largest, threshold; double sigma[2], alpha[2];)
STEP(DOWNSCALE, downscale, double scale[2];)
STEP(COMPRESS, compress, int32_t lowest, highest;) /* albumentations: ImageCompression as JPEG, of these qualities */

/* albumentations: CoarseDropout, whose ranges are in pixels or shares of the sides. GridDropout: a grid of rows and columns; if
 * these are 0, cells with a side in [smallest, end); if these are 0, too, a tenth of the image's sides. */
STEP(COARSE_DROPOUT, coarse_dropout, int32_t fewest, most, in_px, mode, is_normalized; double height[2], width[2];)
STEP(GRID_DROPOUT, grid_dropout,
    int32_t rows, columns, smallest, end, is_random, shift_x, shift_y, mode, is_normalized;
    double ratio;)

/* torchvision: ToTensor, ToDtype, ConvertImageDtype, then Normalize (means = 0: none). widens: one channel becomes as many
 * channels as there are means. */
STEP(CAST, cast, int32_t dtype, scaling, means, widens, statistic; double mean[6], std[6];)

/* torchvision: RandAugment and TrivialAugmentWide (bin -1: drawn), AutoAugment (children are pairs), AugMix (depth 0 or less:
 * drawn). They choose among their children. */
STEP(AUGMENT, augment, Policy policy; int32_t count, bin;)
STEP(POLICIES, policies, Policy policy;)
STEP(AUG_MIX, aug_mix, Policy policy; int32_t chains, severity, depth; double alpha;)
CHILD(MAGNITUDE, magnitude, int32_t kind, is_signed, bin, row; double p;) /* row: its row in the levels */

/* timm: RandAugment, AutoAugment of data/auto_augment.py: as CHOICE, of sequences of TIMM_OP. The flags come from
 * an op's name; one of the interpolations is drawn. An infinite deviation means uniform from 0 to the magnitude.
 * translation: the most, in pixels or, if is_relative, as a share of the side. */
STEP(TIMM, timm, )
CHILD(TIMM_OP, timm_op,
    int32_t kind, increases, is_original, is_relative, desaturates, draws_radius;
    int32_t interpolations, interpolation[4];
    double p, magnitude, deviation, most, translation;)

/* Ops: steps as they were drawn for a sample. */
OP(NOTHING, nothing, )
/* The box of the image with borders around it, then mirrored left to right, top to bottom. */
OP(WINDOW, window, Border border; Box box; int32_t mirrors_columns, mirrors_rows;)
/* The box is resized to height x width. Only rows from first_row on and columns from first_column on are made. */
OP(RESIZE, resize,
    Box box;
    int32_t height, width, first_row, first_column, interpolation, domain, chooses_order;)
/* map: from output to input. In PIL_DOMAIN the numbers for Image.transform(AFFINE or PERSPECTIVE); otherwise the theta that
 * torchvision passes to _affine_grid, or the coefficients of _perspective_grid. Python solves the equations of a perspective;
 * before that: x and y of the corners at the top left, top right, bottom right, bottom left. */
OP(WARP, warp,
    int32_t is_perspective, height, width, interpolation, domain, has_fill, fuses;
    double map[8];)
/* map: from output to input, as OpenCV inverts what it is given. */
OP(CV_WARP, cv_warp,
    CvWarp warp;
    int32_t is_perspective, height, width;
    double map[9];)
OP(CV_GRID, cv_grid, CvWarp warp; int32_t cells, is_normalized; double limit[2]; uint64_t key;)
OP(CV_LENS, cv_lens, CvWarp warp; int32_t is_fisheye; double amount;)
OP(CV_ELASTIC, cv_elastic, CvWarp warp; int32_t size, is_shared, is_uniform; double alpha, sigma; uint64_t key;)
OP(TURN, turn, int32_t quarters;) /* counterclockwise */
/* amount: factor, threshold, radius or hue; whole: the number of bits kept (POSTERIZE), or the number added (SOLARIZE_ADD). */
OP(VALUE, value, int32_t kind, domain, whole; double amount;)
OP(GRAYSCALE, grayscale, int32_t channels, domain;)
OP(BLUR, blur, int32_t width, height; double sigma;)
OP(CV_BLUR, cv_blur, int32_t is_median, size;)
OP(GAUSSIAN, gaussian, int32_t size; double sigma;)
OP(MOTION, motion, int32_t size; double angle, direction, shift_x, shift_y;)
OP(SHARPEN, sharpen, int32_t size; double sigma, alpha, lightness;)
OP(UNSHARP_MASK, unsharp_mask, int32_t size, threshold; double sigma, alpha;)
OP(DOWNSCALE, downscale, double scale;)
OP(COMPRESS, compress, int32_t quality;)
OP(PERMUTE, permute, int32_t from[4];) /* the channel that each channel comes from */
OP(CV_LINEAR, cv_linear, int32_t added, is_safe; double alpha, beta;)
OP(CV_CHANNELS, cv_channels, int32_t kind; double amount[4];)
OP(CV_DROP, cv_drop, int32_t is_dropped[4];)
OP(CV_HISTOGRAM, cv_histogram, int32_t kind, is_of_luma; double cutoff;)
OP(CV_GREY, cv_grey, int32_t method, channels;)
OP(CV_HSV, cv_hsv, int32_t vector, fuses; double hue, saturation, value;)
OP(CV_SATURATION, cv_saturation, int32_t fuses; double factor;)
OP(CV_CLAHE, cv_clahe, int32_t columns, rows; double limit;)
OP(CV_NOISE, cv_noise, int32_t multiplies, is_shared; double mean, sigma, range[2]; uint64_t key;)
OP(CV_ISO, cv_iso, double colour, intensity; uint64_t key, grain_key;)
OP(NOISE, noise, int32_t clips; double mean, sigma; uint64_t key;)
OP(ERASE, erase, Box box; int32_t mode, is_normalized; uint64_t key;)
OP(GRID, grid, /* a hole in each cell */
    int32_t rows, columns, is_random, shift_x, shift_y, mode, is_normalized;
    double ratio;
    uint64_t key;)
/* AugMix. MIX_BEGIN stores the image, and begins a sum with the image times `weight`. MIX_ADD adds the current image times
 * `weight`, and makes the stored image the current one again. MIX_END makes the sum, truncated, the current image. */
OP(MIX, mix, int32_t part; double weight;)
OP(CAST, cast, ) /* the following ops work on the values of the batch, normalised or not */

REFUSAL(MEMORY, memory, )
REFUSAL(TABLE, table, )     /* the table itself is not sound, or needs more than MAX_OPS ops */
REFUSAL(OUTSIDE, outside, ) /* the sample has no pixels, or none would be left */
REFUSAL(OP, op, )           /* an op does not support this number of channels */
REFUSAL(SHAPE, shape, int64_t channels, height, width, room_channels, room_height, room_width;)
REFUSAL(FILE, file, ) /* Pillow must decode the file */
REFUSAL(CHANNELS, channels, int64_t channels;)
REFUSAL(CROP, crop, int64_t crop_height, crop_width, height, width;)
REFUSAL(BORDER, border, int64_t left, top, right, bottom, height, width;)
REFUSAL(BLUR, blur, int64_t height, width;)
REFUSAL(CELLS, cells, int64_t cells, height, width;)
REFUSAL(HOLE, hole, int64_t height, width;)     /* no hole of a dropout of albumentations fits into the image */
REFUSAL(LEVELS, levels, int64_t height, width;) /* there are no levels for this size yet: Python computes them */
REFUSAL(ROW, row, int64_t row, rows;)           /* the output has fewer rows */

/* The magnitudes of a policy for images of one size: `count` levels, a row of bins for each op. */
RECORD(Levels, int32_t step, height, width, count; const double *levels;)
/* The conversion of uint8 to the values of a batch; fastdata_values makes it from the CAST step. Channel c uses entry
 * c % channels. by_formula: floats are computed as (x / factor - mean) / std, or with x * factor, which gives exactly the values
 * of the table and is faster; otherwise the table is used. */
RECORD(Values,
    int32_t dtype, scaling, normalizes, widens, channels, by_formula, statistic;
    float factor;
    double mean[6], std[6], table_C256[1536];)
/* A transform: its steps, whose first is the parent of all others, and facts of this machine: torch fuses products and sums,
 * its v2 has fast bilinear kernels for uint8, Pillow chooses which side to resize first. */
RECORD(Table,
    const struct Step *steps;
    const Levels *levels;
    int32_t count, levels_count, fuses, resizes_fast, chooses_order;
    Values values;)
/* The memory of a batch: rows (C, h, w), or (h, w, C) if channels_last. Nothing is written beyond out_bytes. solved_BS8:
 * coefficients for all ops of each sample, which perspectives need. rows: the number of rows that fit, computed by the core. */
RECORD(Output,
    const Table *table;
    uint8_t *out_B;
    int64_t out_bytes, rows;
    int32_t channels, height, width, channels_last;
    const double *solved_BS8;
    int64_t solved;)

/* A row of a batch that is made from two samples, once sample `after` of the call is complete: a sum with the shares of both,
 * or the own sample with the box of its partner. */
RECORD(Blended,
    const uint8_t *own;
    const uint8_t *partner;
    int64_t row, after;
    double share, partner_share;
    Box box;)
/* Rows to blend, in the order of `after`, and their output. The samples have the memory format of a row of the output; they are
 * uint8 that the output's table converts (converts), or values in the output's dtype. */
RECORD(Blending,
    Output *output;
    const Blended *rows;
    int64_t count;
    int32_t converts;)

/* Functions of libjpeg-turbo, by their names without jpeg_, and the version of its ABI. */
RECORD(Jpeg,
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
    int32_t version;)

FUNCTION(void, fastdata_values, Table *table)
FUNCTION(int64_t, fastdata_draw, const Table *table, uint64_t seed, const int64_t *visits_B, const int64_t *indices_B,
    int32_t *shapes_B3, int64_t samples, Op *ops_BS, int64_t room, int32_t is_probe, Refusal *refusal)
FUNCTION(void, fastdata_equations, const Op *ops_P, int64_t count, double *out_P89)
FUNCTION(int64_t, fastdata_serve, const uint8_t *const *sources_B, const int32_t *shapes_B3, const Jpeg *jpeg,
    const int64_t *sizes_B, const int32_t *turns_B, uint64_t seed, const int64_t *visits_B, const int64_t *indices_B,
    const int64_t *rows_B, Output *outputs, int64_t count, int64_t first, int64_t last, const Blending *blending,
    Refusal *refusal)
FUNCTION(int64_t, fastdata_blend, const Blending *blending, Refusal *refusal)
FUNCTION(int32_t, fastdata_jpeg_version, const Jpeg *jpeg)
FUNCTION(void, fastdata_jpeg_headers, const uint8_t *const *files_B, const int64_t *sizes_B, int64_t count, int32_t upright,
    int32_t channels, double most_pixels, int32_t *shapes_B3, int32_t *turns_B)
FUNCTION(int32_t, fastdata_jpeg_decode, const Jpeg *jpeg, const uint8_t *file, int64_t size, int32_t channels, int32_t height,
    int32_t width, uint8_t *out)

#undef ENUM
#undef RECORD
#undef STEP
#undef CHILD
#undef OP
#undef REFUSAL
#undef FUNCTION
