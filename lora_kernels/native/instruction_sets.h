// Compiles KERNELS once for each instruction set, in a namespace of its own, with
//   LANES         floats of a vector
//   TARGET        function attribute that allows the instructions
//   HAS_BF16_DOT  defined where vdpbf16ps and vcvtneps2bf16 may be used
// and what vectors.h makes of them. Which one runs is decided on the machine at hand.

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef uint16_t bf16;

static inline float widen(bf16 value) {
    union {
        uint32_t bits;
        float value;
    } word = {(uint32_t)value << 16};
    return word.value;
}

namespace portable {
#define LANES 4
#define TARGET
#include "vectors.h"
#include KERNELS
#undef LANES
#undef TARGET
}  // namespace portable

#if defined(__x86_64__)
namespace avx2 {
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "vectors.h"
#include KERNELS
#undef LANES
#undef TARGET
}  // namespace avx2

namespace avx512 {
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#include "vectors.h"
#include KERNELS
#undef TARGET
}  // namespace avx512

namespace avx512_bf16 {
#define TARGET \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,prefer-vector-width=512")))
#define HAS_BF16_DOT
#include "vectors.h"
#include KERNELS
#undef HAS_BF16_DOT
#undef LANES
#undef TARGET
}  // namespace avx512_bf16

// From the least to the most demanding.
static const char* const instruction_sets[] = {"portable", "avx2", "avx512", "avx512_bf16"};
#define IN_EACH_SET(function) \
    {portable::function, avx2::function, avx512::function, avx512_bf16::function}
#else
static const char* const instruction_sets[] = {"portable"};
#define IN_EACH_SET(function) {portable::function}
#endif

#undef UNROLL
#undef INLINE

static inline bool is_supported(int64_t index) {
#if defined(__x86_64__)
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (index == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (index == 2) return avx512;
    if (index == 3) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return index == 0;
}

extern "C" {

int loraplex_num_instruction_sets() {
    return (int)(sizeof instruction_sets / sizeof instruction_sets[0]);
}

// The name of an instruction set, null where this machine lacks it.
const char* loraplex_instruction_set(int64_t index) {
    return is_supported(index) ? instruction_sets[index] : nullptr;
}
}
