/* Decoding of JPEG files, or boxes of them, by the libjpeg-turbo that Pillow is linked to, so the pixels are Pillow's.
 *
 * The structures are copies of those of jpeglib.h (libjpeg-turbo 1.5 to 3), up to the last field that is used, for the ABIs 62
 * and 80; jpeg_CreateDecompress refuses another version or size. Pillow must decode all unusual JPEG files, and all files for
 * which libjpeg gives a warning: Pillow decides if that is an error, and raises it in its own words.
 */
#include "core.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSSE3__)
#include <tmmintrin.h>
#endif

enum { SOI = 0xD8, EOI, SOS, DQT, DRI = 0xDD, APP0 = 0xE0, APP1, APP2, APP13 = 0xED, APP14, APP15, COM = 0xFE };
enum { SOF0 = 0xC0, SOF2 = 0xC2, DHT = 0xC4, RST0 = 0xD0, RST7 = 0xD7 };
enum { ROWS = 16, LEAST_COLUMNS = 32 }; /* rows per call of libjpeg; fewest columns that it may decode */
enum { ALIGNED = 64, SHIFT = 8 };       /* bytes */
enum { COEFFICIENTS = 64, STRUCT_BYTES = 1024 };
enum { GREY = 1, RGB = 2 }; /* J_COLOR_SPACE */
enum { MOST_FILES = 64 };   /* files per decoder, which keeps about 1.5 KB of tables of each file until it is destroyed */

typedef struct Decoder Decoder;

struct ErrorManager { /* jpeg_error_mgr */
    void (*error_exit)(Decoder *);
    void (*emit_message)(Decoder *, int level);
    void (*output_message)(Decoder *);
    void (*format_message)(Decoder *, char *);
    void (*reset)(Decoder *);
    int code;
    char parameters[80];
    int trace_level;
    long warnings;
    const void *table;
    int last;
    const void *more;
    int more_first, more_last;
};

struct SourceManager { /* jpeg_source_mgr */
    const uint8_t *next;
    size_t bytes;
    void (*init)(Decoder *);
    int (*fill)(Decoder *);
    void (*skip)(Decoder *, long count);
    int (*resync)(void *, int desired);
    void (*end)(Decoder *);
};

typedef struct { /* jpeg_component_info */
    int id, index, across, down, rest[20];
} Component;

/* jpeg_decompress_struct up to comp_info; after that field the ABIs 62 and 80 differ. */
typedef struct {
    struct ErrorManager *errors;
    void *memory, *progress;
    void *ours;
    int is_decompressor, state;
    struct SourceManager *source;
    unsigned width, height;
    int components, file_colours, wanted_colours;
    unsigned scale, scale_by;
    double gamma;
    int buffered, raw, dct_method, fancy_upsampling, block_smoothing, quantise, dither, two_pass, colours;
    int one_pass_map, other_map, two_pass_map;
    unsigned out_width, out_height;
    int out_colours, out_components, buffer_rows, actual_colours;
    void *map;
    unsigned out_row;
    int scan;
    unsigned in_blocks;
    int out_scan;
    unsigned out_blocks;
    int (*accuracy)[COEFFICIENTS]; /* coef_bits */
    void *tables[12];
    int precision;
    const Component *component;
} Head;

struct Decoder {
    union {
        Head head;
        char whole[STRUCT_BYTES];
    };
    struct ErrorManager errors;
    struct SourceManager source;
    jmp_buf refused;
    const Jpeg *jpeg;
    int files; /* number of files so far; 0: libjpeg's part is not created yet */
};

_Static_assert(sizeof(Component) == 96 && offsetof(Head, component) == 304, "not jpeglib.h's layout");

/* libjpeg's callbacks. An error must not return to libjpeg, so it jumps back to `decode`. */
static void refuse(Decoder *decoder) { longjmp(decoder->refused, 1); }
static void refuse_warnings(Decoder *decoder, int level) {
    if (level < 0) refuse(decoder);
}
static void nothing(Decoder *decoder) { (void)decoder; }
static int refuse_the_end(Decoder *decoder) {
    refuse(decoder);
    return 0;
}
static void skip(Decoder *decoder, long count) {
    if (count <= 0) return;
    if ((size_t)count > decoder->source.bytes) refuse(decoder);
    decoder->source.next += count, decoder->source.bytes -= (size_t)count;
}

static size_t struct_bytes(int version) { return version == 62 ? 632 : 656; }

static void prepare(Decoder *decoder, const Jpeg *jpeg) {
    memset(decoder, 0, offsetof(Decoder, refused));
    decoder->jpeg = jpeg, decoder->files = 0;
    decoder->errors.error_exit = refuse, decoder->errors.emit_message = refuse_warnings;
    decoder->errors.output_message = decoder->errors.reset = nothing;
    decoder->source.init = decoder->source.end = nothing;
    decoder->source.fill = refuse_the_end, decoder->source.skip = skip, decoder->source.resync = jpeg->resync_to_restart;
    decoder->head.errors = &decoder->errors;
}

/* The ABI version that a library accepts, 62 or 80; 0: neither. `i` is volatile because it changes between setjmp and
 * longjmp. */
int32_t fastdata_jpeg_version(const Jpeg *jpeg) {
    static const int versions[] = {62, 80};
    Decoder decoder;
    for (volatile int i = 0; i < 2; i++) {
        prepare(&decoder, jpeg);
        if (setjmp(decoder.refused)) continue;
        jpeg->CreateDecompress(&decoder, versions[i], struct_bytes(versions[i]));
        jpeg->destroy_decompress(&decoder);
        return versions[i];
    }
    return 0;
}

/* Headers */

static uint32_t number(const uint8_t *at, int bytes, bool big) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | at[big ? i : bytes - 1 - i];
    return value;
}

/* An entry of a TIFF directory: 12 bytes with tag, type, count, and the value or its offset. `at` is NULL if it is missing. */
typedef struct {
    uint32_t tag;
    const uint8_t *at;
} Entry;

enum { SHORT = 3, LONG, RATIONAL, UNDEFINED = 7 }; /* types of values */

/* Size in bytes of a value of each type that Pillow reads; 0: Pillow skips such an entry. */
static const uint8_t TYPE_BYTES[] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8};

/* Find entries in the first directory of TIFF data. False if anything in it is unusual: then what Pillow finds
 * (ImageFileDirectory_v2.load of TiffImagePlugin.py) depends on the order of entries, and Pillow may warn. */
static bool find_entries(const uint8_t *tiff, int64_t size, Entry *wanted, int count, bool *is_big) {
    if (size < 8) return false;
    const bool big = tiff[0] == 'M';
    *is_big = big;
    if (tiff[1] != tiff[0] || (!big && tiff[0] != 'I') || number(tiff + 2, 2, big) != 42) return false;
    const int64_t first = number(tiff + 4, 4, big);
    if (first < 8 || first + 2 > size) return false;
    const int64_t entries = number(tiff + first, 2, big);
    if (first + 2 + 12 * entries + 4 > size) return false; /* the last 4 bytes are the offset of the next directory */
    int64_t total = 0;
    for (int64_t i = 0; i < entries; i++) {
        const uint8_t *at = tiff + first + 2 + 12 * i;
        const uint32_t tag = number(at, 2, big), type = number(at + 2, 2, big);
        const int64_t bytes = (type < sizeof TYPE_BYTES ? TYPE_BYTES[type] : 0) * (int64_t)number(at + 4, 4, big);
        if (!bytes) return false;
        if (bytes > 4) {
            total += bytes;
            if (number(at + 8, 4, big) + bytes > size || total > size) return false;
        }
        for (int k = 0; k < count; k++) {
            if (wanted[k].tag != tag) continue;
            if (wanted[k].at) return false;
            wanted[k].at = at;
        }
    }
    return true;
}

static bool is_one(const Entry *entry, uint32_t type, bool big) {
    return number(entry->at + 2, 2, big) == type && number(entry->at + 4, 4, big) == 1;
}

/* The orientation that Pillow finds in EXIF data; 1 if there is none, 0 if Pillow must open the file. The resolution is checked,
 * too: Pillow reads it from the EXIF if the file has no other (_read_dpi_from_exif of JpegImagePlugin.py), and refuses files with
 * some values of it. */
static int32_t orientation_of(const uint8_t *tiff, int64_t size) {
    Entry wanted[] = {{.tag = 0x112}, {.tag = 0x11A}, {.tag = 0x128}};
    const Entry *turn = wanted, *resolution = wanted + 1, *unit = wanted + 2;
    bool big;
    if (!find_entries(tiff, size, wanted, 3, &big)) return 0;
    if ((resolution->at && !is_one(resolution, RATIONAL, big)) || (unit->at && !is_one(unit, SHORT, big))) return 0;
    if (!turn->at) return 1;
    if (!is_one(turn, SHORT, big)) return 0;
    const int32_t found = (int32_t)number(turn->at + 8, 2, big);
    return found < 1 || found > 8 ? 1 : found;
}

/* True if the index of a file with several images is sound, so that Pillow opens the first image as that of any other JPEG:
 * _getmp of JpegImagePlugin.py. */
static bool is_plain_index(const uint8_t *tiff, int64_t size) {
    Entry wanted[] = {{.tag = 0xB001}, {.tag = 0xB002}};
    const Entry *images = wanted, *list = wanted + 1;
    bool big;
    if (!find_entries(tiff, size, wanted, 2, &big) || !images->at || !list->at || !is_one(images, LONG, big)) return false;
    const int64_t count = number(images->at + 8, 4, big), bytes = number(list->at + 4, 4, big);
    if (number(list->at + 2, 2, big) != UNDEFINED || !count || bytes != 16 * count) return false;
    const uint8_t *each = tiff + number(list->at + 8, 4, big);
    for (int64_t i = 0; i < count; i++, each += 16)
        if (number(each, 4, big) >> 24 & 7) return false; /* not a JPEG */
    return true;
}

/* True if Pillow can read Photoshop's blocks up to their end: APP of JpegImagePlugin.py. */
static bool is_plain_photoshop(const uint8_t *data, int64_t size) {
    for (int64_t at = 14; at + 4 <= size && !memcmp(data + at, "8BIM", 4);) {
        if (at + 7 > size) return false;
        at += 7 + data[at + 6]; /* the name */
        at += at & 1;
        if (at + 4 > size) return false;
        at += 4 + (int64_t)number(data + at, 4, true);
        at += at & 1;
    }
    return true;
}

/* True if Pillow's own reading of a segment (JpegImagePlugin.py) finds nothing wrong in it. */
static bool is_plain(int marker, const uint8_t *data, int64_t size) {
    if (marker == DQT) {
        for (int64_t at = 0, step; at < size; at += step) {
            step = data[at] >> 4 ? 129 : 65;
            if (at + step > size) return false;
        }
        return size > 0;
    }
    if (marker == APP0 && size >= 4 && !memcmp(data, "JFIF", 4)) return size >= 12;
    if (marker == APP14 && size >= 5 && !memcmp(data, "Adobe", 5)) return size >= 12;
    if (marker == APP2 && size >= 11 && !memcmp(data, "ICC_PROFILE", 11)) return size >= 14;
    if (marker == APP2 && size >= 4 && !memcmp(data, "MPF", 4)) return is_plain_index(data + 4, size - 4);
    if (marker == APP13 && size >= 14 && !memcmp(data, "Photoshop 3.0", 14)) return is_plain_photoshop(data, size);
    return marker == DHT || marker == DRI || marker == COM || (marker >= APP0 && marker <= APP15);
}

/* The shape of an image, and its EXIF orientation as `turn`; a turn of 0: only Pillow can find it. */
typedef struct {
    int32_t channels, height, width, turn;
} Header;

/* Channels are 0 if Pillow must open the file. */
static Header read_header(const uint8_t *file, int64_t size) {
    const Header none = {0};
    bool has_exif = false, has_other = false;
    int32_t channels = 0, height = 0, width = 0, turn = 1;
    if (size < 4 || file[0] != 0xFF || file[1] != SOI) return none;
    for (int64_t at = 2; at + 4 <= size;) {
        const int marker = file[at + 1];
        const int64_t length = number(file + at + 2, 2, true), data_size = length - 2;
        const uint8_t *data = file + at + 4;
        if (file[at] != 0xFF || length < 2 || at + 2 + length > size) return none;
        at += 2 + length;
        if (marker >= SOF0 && marker <= SOF2) {
            if (channels || data_size < 6 || data[0] != 8 || data_size != 6 + 3 * data[5]) return none;
            channels = data[5], height = (int32_t)number(data + 1, 2, true), width = (int32_t)number(data + 3, 2, true);
            if ((channels != 1 && channels != 3) || !height || !width) return none;
        } else if (marker == SOS) {
            if (has_other && turn == 1) turn = 0; /* Pillow may find an orientation in XMP data */
            return channels ? (Header){channels, height, width, turn} : none;
        } else if (!is_plain(marker, data, data_size)) {
            return none;
        } else if (marker == APP1 && data_size >= 6 && !memcmp(data, "Exif\0", 6)) {
            turn = orientation_of(data + 6, data_size - 6);
            if (has_exif || !turn) return none; /* Pillow joins the data of several segments */
            has_exif = true;
        } else if (marker == APP1) {
            has_other = true;
        }
    }
    return none;
}

/* Read the headers of files. shapes_B3: channels (1 or 3; or `channels` for all, if not 0), height and width of each image
 * after decoding, turned by its EXIF orientation if `upright`. turns_B: that orientation, 1 if not `upright`, or 0 if Pillow
 * must open the file. */
void fastdata_jpeg_headers(const uint8_t *const *files_B, const int64_t *sizes_B, int64_t count, int32_t upright,
                           int32_t channels, double most_pixels, int32_t *shapes_B3, int32_t *turns_B) {
    for (int64_t b = 0; b < count; b++) {
        const Header header = read_header(files_B[b], sizes_B[b]);
        int32_t *shape = shapes_B3 + 3 * b;
        const bool is_open = header.channels && (double)header.height * header.width <= most_pixels;
        turns_B[b] = !is_open ? 0 : upright ? header.turn : 1;
        const bool is_on_side = turns_B[b] > 4;
        shape[0] = channels && header.channels ? channels : header.channels;
        shape[1] = is_on_side ? header.width : header.height, shape[2] = is_on_side ? header.height : header.width;
    }
}

/* True if the rest of a scan is followed by the marker for the end of the image. If it is missing, because the file was cut
 * off, or if another marker follows, Pillow may raise an error. */
static bool ends_well(const uint8_t *at, const uint8_t *end) {
    while ((at = memchr(at, 0xFF, (size_t)(end - at))) && end - at > 1) {
        const int marker = at[1];
        if (marker == EOI) return true;
        if (marker != 0xFF && marker && (marker < RST0 || marker > RST7)) return false;
        at += marker == 0xFF ? 1 : 2;
    }
    return false;
}

/* True if a part of an image can be decoded alone, with the pixels that it has in the whole image. It cannot if libjpeg smooths
 * blocks with their neighbours, as it does for progressive files with missing scans, or if sampling factors are unusual. */
static bool has_parts(const Head *head) {
    for (int c = 0; c < head->components; c++) {
        const Component *each = head->component + c;
        const bool is_usual = each->across == 1 || (!c && head->components > 1 && (each->across == 2 || each->across == 4));
        if (!is_usual || (each->down != 1 && (c || head->components == 1 || each->down != 2))) return false;
        for (int k = 0; k < COEFFICIENTS && head->accuracy; k++)
            if (head->accuracy[c][k]) return false;
    }
    return true;
}

/* Three vectors of 16 bytes hold 16 RGB pixels. For each plane, vector and place in the plane: the byte of the vector that goes
 * there; 0x80 for none. */
typedef uint8_t Places[3][3][16];

static void find_places(Places places) {
    memset(places, 0x80, sizeof(Places));
    for (int i = 0; i < 48; i++) places[i % 3][i / 16][i / 3] = (uint8_t)(i % 16);
}

/* Copy a decoded row to its place, split into planes if needed. 16 pixels at a time take a third of the time of the plain
 * loop. */
static void spread(const uint8_t *restrict row, const Image *out, int64_t y, const Places places) {
    uint8_t *restrict to = out->data + y * out->row;
    if (out->pixel == out->channels || out->channels == 1) {
        memcpy(to, row, (size_t)(out->channels * (int64_t)out->width));
        return;
    }
    int64_t x = 0;
#if defined(__SSSE3__)
    for (; x + 16 <= out->width; x += 16) {
        const __m128i *from = (const __m128i *)(row + 3 * x);
        const __m128i v[] = {_mm_loadu_si128(from), _mm_loadu_si128(from + 1), _mm_loadu_si128(from + 2)};
        for (int c = 0; c < 3; c++) {
            __m128i plane = _mm_setzero_si128();
            for (int i = 0; i < 3; i++)
                plane = _mm_or_si128(plane, _mm_shuffle_epi8(v[i], _mm_loadu_si128((const __m128i *)places[c][i])));
            _mm_storeu_si128((__m128i *)(to + c * out->plane + x), plane);
        }
    }
#endif
    for (int c = 0; c < 3; c++)
        for (int64_t k = x; k < out->width; k++) to[c * out->plane + k] = row[3 * k + c];
}

static void finish(Decoder *decoder) {
    decoder->jpeg->destroy_decompress(decoder);
    decoder->files = 0;
}

void drop_decoder(Decoder *decoder) {
    if (decoder && decoder->files) finish(decoder);
    free(decoder);
}

/* Make the decoder ready for the next file. It is reused because libjpeg asks for the CPU's features whenever it creates one,
 * which takes 10 us in a virtual machine. */
static void begin(Decoder *decoder, const Jpeg *jpeg) {
    if (!decoder->files++) jpeg->CreateDecompress(decoder, jpeg->version, struct_bytes(jpeg->version));
    memset(decoder->head.tables, 0, sizeof decoder->head.tables); /* a file must not use the tables of the file before */
    decoder->head.source = &decoder->source;
}

bool decode(const Jpeg *jpeg, const uint8_t *file, int64_t size, int32_t height, int32_t width, int32_t top,
            int32_t left, const Image *out, Scratch *scratch) {
    if (!scratch->decoder) scratch->decoder = calloc(1, sizeof(Decoder));
    Decoder *const decoder = scratch->decoder;
    if (!decoder) return false;
    Head *const head = &decoder->head;
    unsigned char *rows[ROWS];
    Places places;
    find_places(places);
    if (!decoder->files) prepare(decoder, jpeg);
    /* `refuse` jumps back to here from inside libjpeg. Only `decoder` may be read then, because it does not change: other
     * locals have undefined values after longjmp. libjpeg is in the middle of a file, so its state is destroyed, not reused. */
    if (setjmp(decoder->refused)) {
        finish(decoder);
        return false;
    }
    begin(decoder, jpeg);
    decoder->source.next = file, decoder->source.bytes = (size_t)size;
    jpeg->read_header(decoder, 1);
    if (head->height != (unsigned)height || head->width != (unsigned)width) refuse(decoder);
    if (head->components > 3 || (out->channels == 1 && head->components != 1))
        refuse(decoder);
    head->wanted_colours = out->channels == 1 ? GREY : RGB;
    jpeg->start_decompress(decoder);
    unsigned first = 0, count = head->out_width;
    const bool in_parts = has_parts(head);
    if (in_parts && out->width < width) {
        /* Colours are interpolated between neighbours, so one more column is decoded on both sides: then 0 of 995 crops differ
         * from the same crops of the whole image; without it 121 do. libjpeg interpolates very narrow images in another way,
         * therefore at least LEAST_COLUMNS are decoded. */
        const int32_t right = left + out->width < width ? left + out->width + 1 : width;
        const int32_t latest = left ? left - 1 : 0, widest = right > LEAST_COLUMNS ? right - LEAST_COLUMNS : 0;
        first = (unsigned)(latest < widest ? latest : widest), count = (unsigned)right - first;
        if (count < LEAST_COLUMNS) count = width < LEAST_COLUMNS ? (unsigned)width : LEAST_COLUMNS;
        jpeg->crop_scanline(decoder, &first, &count);
    }
    const int64_t row_bytes = (int64_t)head->out_width * out->channels;
    /* libjpeg-turbo writes aligned rows directly to memory, past the caches (movntdq), but `spread` reads them right after.
     * Rows that are not aligned stay in the cache, so they begin SHIFT bytes later: decoding is 1.25 times as fast on an EPYC,
     * 1.05 to 1.3 times on a Xeon. */
    const int64_t stride = (row_bytes + ALIGNED + SHIFT) / ALIGNED * ALIGNED;
    uint8_t *memory = take(scratch, SLOT_WORK, ROWS * stride + SHIFT);
    if (!memory || head->out_components != out->channels) refuse(decoder);
    for (int y = 0; y < ROWS; y++) rows[y] = memory + y * stride + SHIFT;
    if (in_parts && top && jpeg->skip_scanlines(decoder, (unsigned)top) != (unsigned)top) refuse(decoder);
    const int64_t end = (int64_t)top + out->height, before = (left - (int64_t)first) * out->channels;
    for (int64_t y = head->out_row, read; y < end; y += read) {
        read = jpeg->read_scanlines(decoder, rows, (unsigned)(end - y < ROWS ? end - y : ROWS));
        for (int64_t k = y < top ? top - y : 0; k < read; k++) spread(rows[k] + before, out, y + k - top, places);
        if (!read) refuse(decoder);
    }
    /* libjpeg may have read the first bytes of the end marker already, so look from two bytes before its position. */
    if (!jpeg->input_complete(decoder) && !ends_well(decoder->source.next - 2, file + size)) refuse(decoder);
    jpeg->abort_decompress(decoder); /* ends the file; the decoder can be used for another one */
    if (decoder->files == MOST_FILES) finish(decoder);
    return true;
}

/* Decode a file to `out`, planar. False if Pillow must decode it, or if its header has another size or number of channels. */
int32_t fastdata_jpeg_decode(const Jpeg *jpeg, const uint8_t *file, int64_t size, int32_t channels, int32_t height,
                             int32_t width, uint8_t *out) {
    const Header header = read_header(file, size);
    if (header.channels != channels || header.height != height || header.width != width) return false;
    Scratch *scratch = borrow();
    if (!scratch) return false;
    Image image = {.channels = channels, .height = height, .width = width};
    pack_image(&image, out);
    const bool is_decoded = decode(jpeg, file, size, height, width, 0, 0, &image, scratch);
    give_back(scratch);
    return is_decoded;
}
