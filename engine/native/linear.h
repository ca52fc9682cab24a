// y = x W^T + bias in bfloat16, for the instruction set that multiplies its pairs.
//
// W lies in panels of PANEL columns, [in_features / 2, PANEL] words each: word (k / 2, n) holds
// W[n, k] in its low and W[n, k + 1] in its high half. An element of y is one sum over k in order,
// whatever the number of rows.

#ifdef HAS_BF16_DOT
template <int ROWS>
TARGET static void linear_rows(const LinearArgs& t, const bf16* x, bf16* y, int64_t panel) {
    constexpr int VECS = PANEL / LANES;
    const uint32_t* w = t.weight + panel * PANEL * t.pairs;
    const float* bias = t.bias + panel * PANEL;
    F acc[ROWS][VECS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECS; v++) acc[r][v] = load(bias + v * LANES);
    for (int64_t k = 0; k < t.pairs; k++, w += PANEL) {
        __m512bh word[VECS];
        UNROLL for (int v = 0; v < VECS; v++) {
            word[v] = (__m512bh)_mm512_load_si512(w + v * LANES);
            prefetch(w + v * LANES);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            uint32_t pair;
            __builtin_memcpy(&pair, x + r * t.x_stride + 2 * k, sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32((int)pair);
            UNROLL for (int v = 0; v < VECS; v++)
                acc[r][v] = (F)_mm512_dpbf16_ps((__m512)acc[r][v], word[v], both);
        }
    }
    const int64_t columns = t.out_features - panel * PANEL;
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECS; v++)
            if (columns > v * LANES)
                store_some(y + r * t.out_features + v * LANES, acc[r][v], columns - v * LANES);
}

template <int ROWS>
TARGET static void linear_some(const LinearArgs& t, const bf16* x, bf16* y, int64_t rows, int64_t panel) {
    if constexpr (ROWS > 0) {
        for (; rows >= ROWS; rows -= ROWS, x += ROWS * t.x_stride, y += ROWS * t.out_features)
            linear_rows<ROWS>(t, x, y, panel);
        if (rows > 0) linear_some<ROWS - 1>(t, x, y, rows, panel);
    }
}

TARGET static void linear(const LinearArgs& t, int64_t first_row, int64_t rows, int64_t panel) {
    const bf16* x = t.x + first_row * t.x_stride;
    linear_some<LINEAR_ROWS>(t, x, t.y + first_row * t.out_features + panel * PANEL, rows, panel);
}
#endif
