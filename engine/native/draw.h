// A draw from a row's softmax by an exponential race, for one instruction set.
//
// Token i gets the time E(i) / w(i), E a standard exponential variate of (key, i), w its weight; the
// least time wins with probability proportional to its weight. The noise is that of
// engine/sampling/noise.py. E = -log(1 - u) is at least u, so most tokens lose without a logarithm.

typedef uint64_t L __attribute__((vector_size(8 * LANES)));

static const uint64_t GAMMA = 0x9E3779B97F4A7C15ull;

// Output number `counter` of SplitMix64's stream, as a float in (0, 1).
INLINE F uniform_of(L counter, uint64_t key) {
    L bits = (counter + 1) * GAMMA + key;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    bits ^= bits >> 31;
    F uniform = (__builtin_convertvector((bits >> 11), F) + splat(0.5f)) * splat(0x1p-53f);
    return choose(uniform < splat(1 - 0x1p-24f), uniform, splat(1 - 0x1p-24f));
}

template <class E>
TARGET static int64_t draw_from(const E* x, int64_t n, const DrawArgs& t) {
    const float highest = load_some(x + t.best, 1)[0];
    L counter;
    for (int lane = 0; lane < LANES; lane++) counter[lane] = lane;
    int64_t winner = t.best;
    float least = INFINITY;
    for (int64_t i = 0; i < n; i += LANES, counter += LANES) {
        // Past the end: a score that weighs nothing.
        E part[LANES];
        const E* from = x + i;
        if (i + LANES > n) {
            for (int lane = 0; lane < LANES; lane++) part[lane] = x[i + lane < n ? i + lane : i];
            from = part;
        }
        const F score = (load(from) - splat(highest)) / splat(t.temperature);
        const F weight = choose(score < splat(t.lowest), F{}, exp_of(score));
        const F uniform = uniform_of(counter, t.key);
        const I may_win = (uniform <= splat(least) * weight) & (weight > F{});
        int any = 0;
        for (int lane = 0; lane < LANES; lane++) any |= may_win[lane];
        if (!any) continue;
        for (int lane = 0; lane < LANES && i + lane < n; lane++) {
            if (!may_win[lane]) continue;
            const float time = -log1pf(-uniform[lane]) / weight[lane];
            if (time < least) {
                least = time;
                winner = i + lane;
            }
        }
    }
    return winner;
}

TARGET static int64_t draw(const void* x, bool is_bf16, int64_t n, const DrawArgs& t) {
    return is_bf16 ? draw_from((const bf16*)x, n, t) : draw_from((const float*)x, n, t);
}
