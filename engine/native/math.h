// Element-wise functions of vectors, for one instruction set. An element's bits depend on the
// element alone.

typedef int32_t I __attribute__((vector_size(4 * LANES)));

INLINE F choose(I where, F yes, F no) {
    return (F)(((U)where & (U)yes) | (~(U)where & (U)no));
}
INLINE F magnitude_of(F x) { return (F)((U)x & 0x7fffffffu); }

// exp(x) for x <= 0 within 2 units in the last place; exp(0) is 1, below -87 it is 0. After Cephes.
INLINE F exp_of(F x) {
    const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const I is_tiny = x < splat(-87.0f);
    F clamped = choose(is_tiny, splat(-87.0f), x);
    F shifted = clamped * splat(1.44269504088896341f) + magic;
    F n = shifted - magic;
    F r = clamped - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    F p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    // The integer stands in the lowest bits of the mantissa; it is added to p's exponent.
    F result = (F)((U)p + ((U)shifted << 23));
    return choose(is_tiny, F{}, result);
}

// 1 / (1 + exp(-x)).
INLINE F sigmoid_of(F x) {
    F e = exp_of(-magnitude_of(x));
    return choose(x < F{}, e, splat(1.0f)) / (splat(1.0f) + e);
}

INLINE F tanh_of(F x) {
    F e = exp_of(splat(-2.0f) * magnitude_of(x));
    U sign = (U)x & 0x80000000u;
    return (F)((U)((splat(1.0f) - e) / (splat(1.0f) + e)) | sign);
}

// x with its lanes rotated by 8, 4, 2 or 1: what a reduction by halves folds.
#if LANES == 16
INLINE F by_8(F x) { return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE F by_4(F x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3); }
INLINE F by_2(F x) { return __builtin_shufflevector(x, x, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1); }
INLINE F by_1(F x) { return __builtin_shufflevector(x, x, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0); }
#elif LANES == 8
INLINE F by_4(F x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3); }
INLINE F by_2(F x) { return __builtin_shufflevector(x, x, 2, 3, 4, 5, 6, 7, 0, 1); }
INLINE F by_1(F x) { return __builtin_shufflevector(x, x, 1, 2, 3, 4, 5, 6, 7, 0); }
#else
INLINE F by_2(F x) { return __builtin_shufflevector(x, x, 2, 3, 0, 1); }
INLINE F by_1(F x) { return __builtin_shufflevector(x, x, 1, 2, 3, 0); }
#endif

INLINE F larger_of(F a, F b) { return choose(a > b, a, b); }

INLINE float sum_of(F x) {
#if LANES == 16
    x += by_8(x);
#endif
#if LANES >= 8
    x += by_4(x);
#endif
    x += by_2(x);
    x += by_1(x);
    return x[0];
}

INLINE float max_of(F x) {
#if LANES == 16
    x = larger_of(x, by_8(x));
#endif
#if LANES >= 8
    x = larger_of(x, by_4(x));
#endif
    x = larger_of(x, by_2(x));
    return larger_of(x, by_1(x))[0];
}

INLINE I lane_numbers() {
    I lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
    return lanes;
}

// Vectors of which the last may be shorter. What lies past the end reads as zero.
template <class E>
INLINE F load_some(const E* from, int64_t count) {
    if (count >= LANES) return load(from);
    E part[LANES] = {};
    __builtin_memcpy(part, from, count * sizeof(E));
    return load(part);
}
template <class E>
INLINE void store_some(E* to, F value, int64_t count) {
    if (count >= LANES) return store(to, value);
    E part[LANES];
    store(part, value);
    __builtin_memcpy(to, part, count * sizeof(E));
}
