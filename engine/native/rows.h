// The decoder's small operations on one row, for one instruction set.
//
// E is the element of activations: float, or bf16 that is widened to float and rounded where
// transformers rounds.

template <class E>
INLINE F rounded(F value) {
    return std::is_same<E, bf16>::value ? to_float(to_bf16(value)) : value;
}

// out = norm(x) * weight; with `delta` x += delta before that. A weight of x's type multiplies what
// is already rounded to it, as Llama's; a float one is applied before the only rounding, as Gemma's.
template <class E>
TARGET static void norm_row(const NormArgs& t, int64_t row) {
    const int64_t n = t.size;
    E* x = (E*)t.x + row * t.x_stride;
    E* out = (E*)t.out + row * t.out_stride;
    F squares = F{};
    if (t.delta != nullptr) {
        const E* delta = (const E*)t.delta + row * n;
        for (int64_t i = 0; i < n; i += LANES) {
            F sum = load_some(x + i, n - i) + load_some(delta + i, n - i);
            store_some(x + i, sum, n - i);
        }
    }
    for (int64_t i = 0; i < n; i += LANES) {
        F value = load_some(x + i, n - i);
        squares += value * value;
    }
    const F inverse = splat(1.0f / __builtin_sqrtf(sum_of(squares) / (float)n + t.eps));
    for (int64_t i = 0; i < n; i += LANES) {
        F value = load_some(x + i, n - i) * inverse;
        if (t.weight_is_float)
            value = value * load_some((const float*)t.weight + i, n - i);
        else
            value = rounded<E>(value) * load_some((const E*)t.weight + i, n - i);
        store_some(out + i, value, n - i);
    }
}

// out = activation(gate) * up, the activation rounded first.
template <class E>
TARGET static void activate_row(const ActivateArgs& t, int64_t row) {
    const int64_t n = t.size;
    const E *gate = (const E*)t.gate_up + row * 2 * n, *up = gate + n;
    E* out = (E*)t.out + row * n;
    for (int64_t i = 0; i < n; i += LANES) {
        F g = load_some(gate + i, n - i), activated;
        if (t.is_gelu) {
            F inner = splat(0.7978845608028654f) * (g + splat(0.044715f) * (g * g * g));
            activated = splat(0.5f) * g * (splat(1.0f) + tanh_of(inner));
        } else {
            activated = g * sigmoid_of(g);
        }
        store_some(out + i, rounded<E>(activated) * load_some(up + i, n - i), n - i);
    }
}

// Rotate the first `2 * half` channels of each head, in place: halves are the pairs' members.
template <class E>
TARGET static void rotate_row(const RotateArgs& t, int64_t row) {
    const float *cosines = t.cosines + t.positions[row] * t.half, *sines = t.sines + t.positions[row] * t.half;
    for (int64_t head = 0; head < t.num_heads; head++) {
        E* first = (E*)t.x + row * t.x_stride + head * t.channels;
        E* second = first + t.half;
        for (int64_t i = 0; i < t.half; i += LANES) {
            const int64_t left = t.half - i;
            F a = load_some(first + i, left), b = load_some(second + i, left);
            F c = load_some(cosines + i, left), s = load_some(sines + i, left);
            store_some(first + i, a * c - b * s, left);
            store_some(second + i, b * c + a * s, left);
        }
    }
}

// The index of the largest element, the first of equals; -1 if one is not finite.
template <class E>
TARGET static int64_t largest_in_row(const E* x, int64_t n) {
    F largest = splat(-3.4028234663852886e38f), not_finite = F{};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        F value = load(x + i);
        not_finite += value - value;
        largest = choose(value > largest, value, largest);
    }
    float best = max_of(largest), doubt = sum_of(not_finite);
    for (; i < n; i++) {
        float value = load_some(x + i, 1)[0];
        doubt += value - value;
        best = value > best ? value : best;
    }
    if (!(doubt == 0.0f)) return -1;
    for (i = 0; i + LANES <= n; i += LANES) {
        I is_best = load(x + i) == splat(best);
        for (int lane = 0; lane < LANES; lane++)
            if (is_best[lane]) return i + lane;
    }
    for (; i < n; i++)
        if (load_some(x + i, 1)[0] == best) return i;
    return -1;
}

// ---- for both elements

TARGET static void norm(const NormArgs& t, int64_t row) {
    t.is_bf16 ? norm_row<bf16>(t, row) : norm_row<float>(t, row);
}
TARGET static void activate(const ActivateArgs& t, int64_t row) {
    t.is_bf16 ? activate_row<bf16>(t, row) : activate_row<float>(t, row);
}
TARGET static void rotate(const RotateArgs& t, int64_t row) {
    t.is_bf16 ? rotate_row<bf16>(t, row) : rotate_row<float>(t, row);
}
TARGET static int64_t largest(const void* x, bool is_bf16, int64_t n) {
    return is_bf16 ? largest_in_row((const bf16*)x, n) : largest_in_row((const float*)x, n);
}
