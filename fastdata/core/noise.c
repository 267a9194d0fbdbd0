/* Normal numbers that follow from a key, in the streams of draws.py. */
#include "core.h"

#include <math.h>
#include <string.h>
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF /* the same numbers on every machine; for gcc -ffp-contract=off */
#endif

enum { BLOCK = 256 };

/* Number n of a stream: SplitMix64, as _mix in draws.py. */
static uint64_t mix(uint64_t key, int64_t n) {
    uint64_t bits = key + (uint64_t)(n + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

/* The inverse of the normal distribution at p = (2 * bits + 1) / 2^33 below and, mirrored, above the middle: a polynomial
 * in sqrt(5 - log(4 p (1 - p))), after the form of M. Giles, "Approximating the erfinv function", 2011, fitted so that no
 * number is off by more than 4e-5; the largest is 6.3. */
static float normal(uint32_t bits) {
    const float p = ((float)(int32_t)(bits & 0x7FFFFFFF) + 0.5f) * 0x1p-32f, y = 4.0f * p * (1.0f - p);
    int32_t exponent, mantissa;
    memcpy(&mantissa, &y, 4);
    exponent = (mantissa - 0x3F2AAAAB) & (int32_t)0xFF800000; /* y = 2^exponent * (1 + f), f in [-1/3, 1/3] */
    mantissa -= exponent;
    float f, log_y, u, z;
    memcpy(&f, &mantissa, 4);
    f -= 1.0f;
    log_y = ((((-0.201713483f * f + 0.230738461f) * f - 0.247217585f) * f + 0.331607216f) * f - 0.50006475f) * f;
    log_y = (log_y + 1.00002285f) * f + (float)exponent * (0.693147181f * 0x1p-23f);
    u = sqrtf(5.0f - log_y) - 3.7f;
    z = (((0.00130432012f * u - 0.00333003918f) * u - 0.00354536808f) * u + 0.0186475359f) * u - 0.0198215155f;
    z = ((((z * u + 0.0015663323f) * u + 0.0319934818f) * u - 0.113794969f) * u + 1.77593848f) * u + 3.93262777f;
    z *= 1.0f - 2.0f * p;
    return bits >> 31 ? z : -z;
}

void draw_normal(uint64_t key, int64_t first, int64_t count, float *out) {
    uint32_t bits[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t size = count - start < BLOCK ? count - start : BLOCK;
        for (int64_t i = 0; i < size; i++) bits[i] = (uint32_t)(mix(key, first + start + i) >> 32);
        for (int64_t i = 0; i < size; i++) out[start + i] = normal(bits[i]);
    }
}
