/* Vectors of 16 to 64 bytes for kernels that shuffle pixels: each lane of 128 bits holds 16 bytes of a different row.
 *
 * X(name, a, b) is the x86 operation of this name, on as many lanes as the compiler's target has. For NEON the same names
 * are defined here.
 */
#ifndef FASTDATA_LANES_H
#define FASTDATA_LANES_H

#include "core.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#define LANES 4
#define SPREAD(quad) ((Vec)_mm512_broadcast_i32x4((__m128i)(quad)))
#define INSERT(v, quad, lane) ((Vec)_mm512_inserti32x4((__m512i)(v), (__m128i)(quad), lane))
#define X(name, a, b) ((Vec)_mm512_##name((__m512i)(a), (__m512i)(b)))
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 2
#define SPREAD(quad) ((Vec)_mm256_broadcastsi128_si256((__m128i)(quad)))
#define INSERT(v, quad, lane) ((Vec)_mm256_inserti128_si256((__m256i)(v), (__m128i)(quad), lane))
#define X(name, a, b) ((Vec)_mm256_##name((__m256i)(a), (__m256i)(b)))
#elif defined(__SSSE3__)
#include <tmmintrin.h>
#define LANES 1
#define SPREAD(quad) (quad)
#define X(name, a, b) ((Vec)_mm_##name((__m128i)(a), (__m128i)(b)))
#elif defined(__aarch64__)
#include <arm_neon.h>
#define LANES 1
#define SPREAD(quad) (quad)
#define X(name, a, b) ((Vec)name(a, b)) /* the macros below */
#define shuffle_epi8(a, b) vqtbl1q_u8((uint8x16_t)(a), (uint8x16_t)(b))
#define madd_epi16(a, b)                                                                                               \
    vpaddq_s32(vmull_s16(vget_low_s16((int16x8_t)(a)), vget_low_s16((int16x8_t)(b))),                                  \
               vmull_high_s16((int16x8_t)(a), (int16x8_t)(b)))
#define packs_epi32(a, b) vcombine_s16(vqmovn_s32((int32x4_t)(a)), vqmovn_s32((int32x4_t)(b)))
#define packus_epi16(a, b) vcombine_u8(vqmovun_s16((int16x8_t)(a)), vqmovun_s16((int16x8_t)(b)))
#define unpacklo_epi8(a, b) vzip1q_u8((uint8x16_t)(a), (uint8x16_t)(b))
#define unpackhi_epi8(a, b) vzip2q_u8((uint8x16_t)(a), (uint8x16_t)(b))
#define unpacklo_epi32(a, b) vzip1q_s32((int32x4_t)(a), (int32x4_t)(b))
#define unpackhi_epi32(a, b) vzip2q_s32((int32x4_t)(a), (int32x4_t)(b))
#define unpacklo_epi64(a, b) vzip1q_s64((int64x2_t)(a), (int64x2_t)(b))
#define unpackhi_epi64(a, b) vzip2q_s64((int64x2_t)(a), (int64x2_t)(b))
#else
#error "lanes.h needs SSSE3 or NEON"
#endif
typedef int32_t Quad __attribute__((vector_size(16)));
typedef int32_t Vec __attribute__((vector_size(16 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(16 * LANES)));
typedef float Floats __attribute__((vector_size(16 * LANES)));

#define AT(type, p) (((const struct { type v; } __attribute__((packed, may_alias)) *)(p))->v)

/* Load 16 bytes of each row, from x on, into one lane per row; and store them. */
INLINE Vec gather(const uint8_t *const *rows, int64_t x) {
    Vec v = SPREAD(AT(Quad, rows[0] + x));
#if LANES > 1
    v = INSERT(v, AT(Quad, rows[1] + x), 1);
#endif
#if LANES > 2
    v = INSERT(v, AT(Quad, rows[2] + x), 2), v = INSERT(v, AT(Quad, rows[3] + x), 3);
#endif
    return v;
}
INLINE void scatter(Vec v, uint8_t *const *rows, int64_t x) {
    for (int i = 0; i < LANES; i++) memcpy(rows[i] + x, (char *)&v + 16 * i, 16);
}

#endif
