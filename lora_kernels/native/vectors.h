// Vectors of one instruction set; included within its namespace, see instruction_sets.h.

typedef float F __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));
typedef float FMem __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t UMem __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t HMem __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

// Accumulators live in registers only if no loop over them is left.
#define UNROLL _Pragma("GCC unroll 64")
#define INLINE TARGET static inline __attribute__((always_inline))

template <int COUNT>
INLINE void clear(F* acc) {
    UNROLL for (int i = 0; i < COUNT; i++) acc[i] = F{};
}
// Weights are read front to back; 4 KiB ahead and into the second-level cache hides a DRAM access
// (measured: 2 KiB are worse, 8 KiB are no better).
INLINE void prefetch(const void* at) { __builtin_prefetch((const char*)at + 4096, 0, 2); }
INLINE F splat(float value) { return value - F{}; }
INLINE F low_half(U pair) { return (F)(pair << 16); }
INLINE F high_half(U pair) { return (F)(pair & 0xffff0000u); }

INLINE F load(const float* from) { return *(const FMem*)from; }
INLINE F to_float(H value) { return (F)(__builtin_convertvector(value, U) << 16); }
INLINE H to_bf16(F value) {
#ifdef HAS_BF16_DOT
    return (H)_mm512_cvtneps_pbh((__m512)value);
#else
    // Round to nearest even, as PyTorch does; a NaN must not round to infinity.
    U bits = (U)value;
    U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    U is_nan = (U)(value != value);
    rounded = (rounded & ~is_nan) | (0x7fc0u & is_nan);
    return __builtin_convertvector(rounded, H);
#endif
}
INLINE F load(const bf16* from) { return to_float(*(const HMem*)from); }
INLINE void store(float* to, F value) { *(FMem*)to = value; }
INLINE void store(bf16* to, F value) { *(HMem*)to = to_bf16(value); }
