/* Facts that library.py checks before it uses a library: the sources it was built from, and the level of the CPU. */
#include "core.h"

#ifndef FASTDATA_SOURCES
#define FASTDATA_SOURCES 0u
#endif

/* The CRC-32 of all C files, in the order of their names. */
EXPORT uint32_t fastdata_sources(void) { return FASTDATA_SOURCES; }

#if defined(__x86_64__)
#include <cpuid.h>

enum {
    V2_ECX1 = 1 << 0 | 1 << 9 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 23,  /* SSE3 SSSE3 CX16 SSE4.1 SSE4.2 POPCNT */
    V3_ECX1 = 1 << 12 | 1 << 22 | 1 << 27 | 1 << 28 | 1 << 29,          /* FMA MOVBE OSXSAVE AVX F16C */
    V4_ECX7 = 1 << 1,                                                   /* AVX512 VBMI */
    V3_EBX7 = 1 << 3 | 1 << 5 | 1 << 8,                                 /* BMI1 AVX2 BMI2 */
    V4_EBX7 = 1 << 16 | 1 << 17 | 1 << 28 | 1 << 30,                    /* AVX512 F DQ CD BW */
    LAHF = 1 << 0, LZCNT = 1 << 5,                                      /* ECX of leaf 0x80000001 */
    YMM_STATE = 0x06, ZMM_STATE = 0xE6,                                 /* XCR0: registers that the system saves */
};
static const unsigned V4_EBX7_VL = 1u << 31;

/* The level of an x86-64 CPU, 1 to 4, as its psABI defines them; level 4 also needs VBMI here. Other CPUs have level 1. */
EXPORT int32_t fastdata_cpu_level(void) {
    unsigned eax, ebx, ecx, edx, ebx7 = 0, ecx7 = 0, ecx1 = 0, more = 0, state = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) ecx1 = ecx;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) ebx7 = ebx, ecx7 = ecx;
    if (__get_cpuid(0x80000001u, &eax, &ebx, &ecx, &edx)) more = ecx;
    if ((ecx1 & V2_ECX1) != V2_ECX1 || !(more & LAHF)) return 1;
    if ((ecx1 & V3_ECX1) != V3_ECX1 || (ebx7 & V3_EBX7) != V3_EBX7 || !(more & LZCNT)) return 2;
    __asm__("xgetbv" : "=a"(state), "=d"(edx) : "c"(0));
    if ((state & YMM_STATE) != YMM_STATE) return 2;
    bool has_v4 = (ebx7 & V4_EBX7) == V4_EBX7 && ebx7 & V4_EBX7_VL && ecx7 & V4_ECX7;
    return has_v4 && (state & ZMM_STATE) == ZMM_STATE ? 4 : 3;
}
#else
EXPORT int32_t fastdata_cpu_level(void) { return 1; }
#endif
