// Shrink and expand of one tile of rows, for one instruction set (see instruction_sets.h).
//
// Weights stream from memory, so loops prefetch: a whole adapter is read once for a few rows.
//
// Invariance: a (row, rank) or (row, column) has its own accumulator, filled in an order that
// depends on the sizes of x, A and B alone. How rows are cut into tiles never changes a bit.

// Accumulators of a shrink and of an expand that fit the registers.
#if LANES == 16
#define SHRINK_ROWS 8
#define SHRINK_VECS 3
#define EXPAND_ROWS 8
#else
#define SHRINK_ROWS 4
#define SHRINK_VECS 2
#define EXPAND_ROWS 4
#endif
#define EXPAND_VECS 2

// ---- shrink: s[row, j] = scaling[j] * sum_k x[row, k] * A[j, k] over one block of ranks.

template <int ROWS, int VECS, int CHAINS>
TARGET static void shrink_float(const ShrinkArgs& t, const float* const* x, int64_t first) {
    const float* a = (const float*)t.a + first;
    F acc[CHAINS][ROWS][VECS];
    clear<CHAINS * ROWS * VECS>(&acc[0][0][0]);
    int64_t k = 0;
    for (; k + CHAINS <= t.in_features; k += CHAINS) {
        for (int c = 0; c < CHAINS; c++, a += t.width) {
            F w[VECS];
            UNROLL for (int v = 0; v < VECS; v++) {
                w[v] = load(a + v * LANES);
                prefetch(a + v * LANES);
            }
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int v = 0; v < VECS; v++) acc[c][r][v] += splat(x[r][k + c]) * w[v];
        }
    }
    for (; k < t.in_features; k++, a += t.width)
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECS; v++) acc[0][r][v] += splat(x[r][k]) * load(a + v * LANES);
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECS; v++) {
            F sum = CHAINS == 2 ? acc[0][r][v] + acc[CHAINS - 1][r][v] : acc[0][r][v];
            int64_t j = first + v * LANES;
            store(t.s + r * t.s_stride + j, sum * load(t.scaling + j));
        }
}

// Weights in pairs: word (k / 2, j) holds A[j, k] in its low and A[j, k + 1] in its high half.
template <int ROWS, int VECS, int CHAINS>
TARGET static void shrink_pairs(const ShrinkArgs& t, const float* const* x, int64_t first) {
    const uint32_t* a = (const uint32_t*)t.a + first;
    F acc[CHAINS][ROWS][VECS];
    clear<CHAINS * ROWS * VECS>(&acc[0][0][0]);
    int64_t k = 0;
    for (; k + 2 <= t.in_features; k += 2, a += t.width) {
        F even[VECS], odd[VECS];
        UNROLL for (int v = 0; v < VECS; v++) {
            U pair = *(const UMem*)(a + v * LANES);
            prefetch(a + v * LANES);
            even[v] = low_half(pair);
            odd[v] = high_half(pair);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            UNROLL for (int v = 0; v < VECS; v++) acc[0][r][v] += splat(x[r][k]) * even[v];
            UNROLL for (int v = 0; v < VECS; v++) acc[CHAINS - 1][r][v] += splat(x[r][k + 1]) * odd[v];
        }
    }
    if (k < t.in_features)
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECS; v++)
                acc[0][r][v] += splat(x[r][k]) * low_half(*(const UMem*)(a + v * LANES));
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECS; v++) {
            F sum = CHAINS == 2 ? acc[0][r][v] + acc[CHAINS - 1][r][v] : acc[0][r][v];
            int64_t j = first + v * LANES;
            store(t.s + r * t.s_stride + j, sum * load(t.scaling + j));
        }
}

#ifdef HAS_BF16_DOT
INLINE __m512i splat_pair(const bf16* x) {
    uint32_t pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return _mm512_set1_epi32((int)pair);
}

template <int ROWS, int VECS, int CHAINS>
TARGET static void shrink_dot(const ShrinkArgs& t, const bf16* const* x, int64_t first) {
    const uint32_t* a = (const uint32_t*)t.a + first;
    F acc[CHAINS][ROWS][VECS];
    clear<CHAINS * ROWS * VECS>(&acc[0][0][0]);
    const int64_t pairs = t.in_features / 2;
    int64_t k = 0;
    for (; k + CHAINS <= pairs; k += CHAINS) {
        for (int c = 0; c < CHAINS; c++, a += t.width) {
            __m512bh w[VECS];
            UNROLL for (int v = 0; v < VECS; v++) {
                w[v] = (__m512bh)_mm512_loadu_si512(a + v * LANES);
                prefetch(a + v * LANES);
            }
            UNROLL for (int r = 0; r < ROWS; r++) {
                __m512bh both = (__m512bh)splat_pair(x[r] + 2 * (k + c));
                UNROLL for (int v = 0; v < VECS; v++)
                    acc[c][r][v] = (F)_mm512_dpbf16_ps((__m512)acc[c][r][v], w[v], both);
            }
        }
    }
    for (; 2 * k < t.in_features; k++, a += t.width) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            bf16 last[2] = {x[r][2 * k], 0};
            if (2 * k + 1 < t.in_features) last[1] = x[r][2 * k + 1];
            __m512bh both = (__m512bh)splat_pair(last);
            UNROLL for (int v = 0; v < VECS; v++) {
                __m512bh w = (__m512bh)_mm512_loadu_si512(a + v * LANES);
                acc[0][r][v] = (F)_mm512_dpbf16_ps((__m512)acc[0][r][v], w, both);
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECS; v++) {
            F sum = acc[0][r][v];
            if (CHAINS == 2) sum += acc[CHAINS - 1][r][v];
            int64_t j = first + v * LANES;
            store(t.s + r * t.s_stride + j, sum * load(t.scaling + j));
        }
}
#endif

template <int ROWS, int VECS, int CHAINS>
INLINE void shrink_sized(const ShrinkArgs& t, const float* const* x, int64_t first) {
    if (t.is_bf16)
        shrink_pairs<ROWS, VECS, CHAINS>(t, x, first);
    else
        shrink_float<ROWS, VECS, CHAINS>(t, x, first);
}
#ifdef HAS_BF16_DOT
template <int ROWS, int VECS, int CHAINS>
INLINE void shrink_sized(const ShrinkArgs& t, const bf16* const* x, int64_t first) {
    shrink_dot<ROWS, VECS, CHAINS>(t, x, first);
}
#endif

template <int ROWS, class X>
TARGET static void shrink_rows(const ShrinkArgs& t, const X* const* x) {
    const int64_t vecs = (t.width + LANES - 1) / LANES;
    if (vecs == 1) return shrink_sized<ROWS, 1, 2>(t, x, 0);
    int64_t v = 0;
    for (; v + SHRINK_VECS <= vecs; v += SHRINK_VECS)
        shrink_sized<ROWS, SHRINK_VECS, 1>(t, x, v * LANES);
    if (SHRINK_VECS > 2)
        for (; v + 2 <= vecs; v += 2) shrink_sized<ROWS, 2, 1>(t, x, v * LANES);
    for (; v < vecs; v++) shrink_sized<ROWS, 1, 1>(t, x, v * LANES);
}

template <int ROWS, class X>
TARGET static void shrink_any(ShrinkArgs t, const X* const* x, int rows) {
    if constexpr (ROWS > 0) {
        if (rows < ROWS) return shrink_any<ROWS - 1>(t, x, rows);
        while (rows >= ROWS) {
            shrink_rows<ROWS>(t, x);
            rows -= ROWS;
            x += ROWS;
            t.s += ROWS * t.s_stride;
        }
        if (rows > 0) shrink_any<ROWS - 1>(t, x, rows);
    }
}

TARGET static void shrink(const ShrinkArgs& t) {
#ifdef HAS_BF16_DOT
    if (t.is_bf16) return shrink_any<SHRINK_ROWS>(t, (const bf16* const*)t.x, t.num_rows);
#endif
    if (!t.is_bf16) return shrink_any<SHRINK_ROWS>(t, (const float* const*)t.x, t.num_rows);
    const float* x[MAX_TILE_ROWS];
    for (int r = 0; r < t.num_rows; r++) {
        const bf16* from = (const bf16*)t.x[r];
        float* to = t.widened + r * t.in_features;
        x[r] = to;
        int64_t k = 0;
        for (; k + LANES <= t.in_features; k += LANES) store(to + k, load(from + k));
        for (; k < t.in_features; k++) to[k] = widen(from[k]);
    }
    shrink_any<SHRINK_ROWS>(t, x, t.num_rows);
}

// ---- expand: y[row, n] += sum_j s[row, j] * B[n, j] over the columns of some panels.

template <int ROWS, int VECS, class Y>
INLINE void add_to_y(F (&acc)[ROWS][VECS], Y* const* y, int64_t column, int64_t columns) {
    if (columns >= VECS * LANES) {
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECS; v++) {
                Y* at = y[r] + column + v * LANES;
                store(at, load(at) + acc[r][v]);
            }
    } else {
        for (int r = 0; r < ROWS; r++) {
            Y part[VECS * LANES] = {};
            __builtin_memcpy(part, y[r] + column, columns * sizeof(Y));
            UNROLL for (int v = 0; v < VECS; v++)
                store(part + v * LANES, load(part + v * LANES) + acc[r][v]);
            __builtin_memcpy(y[r] + column, part, columns * sizeof(Y));
        }
    }
}

template <int ROWS, int VECS>
TARGET static void expand_sized(
    const ExpandArgs& t, const float* s, float* const* y, const float* b, int64_t width,
    int64_t column, int64_t columns) {
    F acc[ROWS][VECS];
    clear<ROWS * VECS>(&acc[0][0]);
    for (int64_t j = 0; j < t.rank; j++, b += width) {
        F w[VECS];
        UNROLL for (int v = 0; v < VECS; v++) {
            w[v] = load(b + v * LANES);
            prefetch(b + v * LANES);
        }
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECS; v++) acc[r][v] += splat(s[r * t.s_stride + j]) * w[v];
    }
    add_to_y<ROWS, VECS>(acc, y, column, columns);
}

// Word (j / 2, n) holds B[n, j] in its low and B[n, j + 1] in its high half.
template <int ROWS, int VECS>
TARGET static void expand_sized(
    const ExpandArgs& t, const float* s, bf16* const* y, const uint32_t* b, int64_t width,
    int64_t column, int64_t columns) {
    F acc[ROWS][VECS];
    clear<ROWS * VECS>(&acc[0][0]);
    int64_t j = 0;
    for (; j + 2 <= t.rank; j += 2, b += width) {
        F even[VECS], odd[VECS];
        UNROLL for (int v = 0; v < VECS; v++) {
            U pair = *(const UMem*)(b + v * LANES);
            prefetch(b + v * LANES);
            even[v] = low_half(pair);
            odd[v] = high_half(pair);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            UNROLL for (int v = 0; v < VECS; v++) acc[r][v] += splat(s[r * t.s_stride + j]) * even[v];
            UNROLL for (int v = 0; v < VECS; v++) acc[r][v] += splat(s[r * t.s_stride + j + 1]) * odd[v];
        }
    }
    // The other half of the last word is padding, and s beyond belongs to the next slice.
    if (j < t.rank)
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECS; v++)
                acc[r][v] += splat(s[r * t.s_stride + j]) * low_half(*(const UMem*)(b + v * LANES));
    add_to_y<ROWS, VECS>(acc, y, column, columns);
}

#ifdef HAS_BF16_DOT
// The same with s rounded to pairs of bf16, as PyTorch rounds what a first linear hands a second.
template <int ROWS, int VECS>
TARGET static void expand_sized(
    const ExpandArgs& t, const uint32_t* s, bf16* const* y, const uint32_t* b, int64_t width,
    int64_t column, int64_t columns) {
    F acc[ROWS][VECS];
    clear<ROWS * VECS>(&acc[0][0]);
    for (int64_t j = 0; j < (t.rank + 1) / 2; j++, b += width) {
        __m512bh w[VECS];
        UNROLL for (int v = 0; v < VECS; v++) {
            w[v] = (__m512bh)_mm512_loadu_si512(b + v * LANES);
            prefetch(b + v * LANES);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32((int)s[r * MAX_PAIRS + j]);
            UNROLL for (int v = 0; v < VECS; v++)
                acc[r][v] = (F)_mm512_dpbf16_ps((__m512)acc[r][v], w[v], both);
        }
    }
    add_to_y<ROWS, VECS>(acc, y, column, columns);
}
#endif

INLINE int64_t stride_of(const ExpandArgs& t, const float*) { return t.s_stride; }
INLINE int64_t stride_of(const ExpandArgs&, const uint32_t*) { return MAX_PAIRS; }

template <int ROWS, class S, class Y, class W>
TARGET static void expand_panel(
    const ExpandArgs& t, const S* s, Y* const* y, const W* b, int64_t width, int64_t column,
    int64_t columns) {
    int64_t n = 0;
    // Few rows leave registers for more columns.
    constexpr int WIDE = ROWS <= EXPAND_ROWS / 2 ? 2 * EXPAND_VECS : EXPAND_VECS;
    for (; n < columns && n + WIDE * LANES <= width; n += WIDE * LANES)
        expand_sized<ROWS, WIDE>(t, s, y, b + n, width, column + n, columns - n);
    for (; n < columns; n += LANES)
        expand_sized<ROWS, 1>(t, s, y, b + n, width, column + n, columns - n);
}

template <int ROWS, class S, class Y, class W>
TARGET static void expand_any(
    const ExpandArgs& t, const S* s, Y* const* y, int rows, const W* b, int64_t width,
    int64_t column, int64_t columns) {
    if constexpr (ROWS > 0) {
        if (rows >= ROWS) {
            expand_panel<ROWS>(t, s, y, b, width, column, columns);
            rows -= ROWS;
            s += ROWS * stride_of(t, s);
            y += ROWS;
            if (rows == 0) return;
            if (rows >= ROWS) return expand_any<ROWS>(t, s, y, rows, b, width, column, columns);
        }
        expand_any<ROWS - 1>(t, s, y, rows, b, width, column, columns);
    }
}

template <class Y, class W, class S>
TARGET static void expand_typed(const ExpandArgs& t, const S* s) {
    // A panel has all ranks of PANEL_COLUMNS columns, the last one of those that are left.
    const int64_t words = sizeof(Y) == 2 ? (t.rank + 1) / 2 : t.rank;
    for (int64_t n = t.first; n < t.last; n += PANEL_COLUMNS) {
        int64_t columns = t.columns - n < PANEL_COLUMNS ? t.columns - n : PANEL_COLUMNS;
        int64_t width = (columns + PAD_COLUMNS - 1) / PAD_COLUMNS * PAD_COLUMNS;
        expand_any<EXPAND_ROWS>(
            t, s, (Y* const*)t.y, t.num_rows, (const W*)t.b + n * words, width, n, columns);
    }
}

TARGET static void expand(const ExpandArgs& t) {
    if (!t.is_bf16) return expand_typed<float, float>(t, t.s);
#ifdef HAS_BF16_DOT
    if (t.rank <= 2 * MAX_PAIRS) {
        uint32_t pairs[MAX_TILE_ROWS][MAX_PAIRS];
        for (int r = 0; r < t.num_rows; r++)
            for (int64_t j = 0; j < t.rank; j += LANES) {
                // The other half of the last pair is padding, and s beyond belongs to the next slice.
                const __mmask16 lanes = t.rank - j < LANES ? (1u << (t.rank - j)) - 1 : 0xffff;
                const __m512 part = _mm512_maskz_loadu_ps(lanes, t.s + r * t.s_stride + j);
                *(HMem*)&pairs[r][j / 2] = to_bf16((F)part);
            }
        return expand_typed<bf16, uint32_t>(t, &pairs[0][0]);
    }
#endif
    expand_typed<bf16, uint32_t>(t, t.s);
}

#undef SHRINK_ROWS
#undef SHRINK_VECS
#undef EXPAND_ROWS
#undef EXPAND_VECS
