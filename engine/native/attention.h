// Attention of a few query rows over paged keys and values, for one instruction set.
//
// Softmax goes tile by tile with a running maximum (Milakov & Gimelshein 2018, as in
// FlashAttention). Tiles are TILE positions, anchored at position 0. A query row's sums run over
// channels and positions in an order that depends on nothing else, so its bits are its own: which
// rows share a call, and how a prefill was cut, change nothing. A tile that a row cannot see adds
// exactly nothing: its weights are exp(-inf) = 0 and its decay is exp(0) = 1.
//
// W is a word of the cache: a float, or two bf16 of which the low half comes first.
//   keys    [channels / PER, BLOCK] words of a block: lanes are positions
//   values  [BLOCK / PER, channels] words of a block: lanes are channels

#if LANES == 16
#define ROWS_AT_ONCE 8
#else
#define ROWS_AT_ONCE 4
#endif

INLINE F load_word(const float* from) { return load(from); }
INLINE U load_word(const uint32_t* from) { return *(const UMem*)from; }

INLINE F multiply_add(F acc, F words, float x) { return acc + words * splat(x); }
INLINE F multiply_add(F acc, U words, uint32_t pair) {
#ifdef HAS_BF16_DOT
    return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)words, (__m512bh)_mm512_set1_epi32((int)pair));
#else
    acc += low_half(words) * splat(widen((bf16)pair));
    return acc + high_half(words) * splat(widen((bf16)(pair >> 16)));
#endif
}

// What a thread keeps of the rows that it works on.
template <class W>
struct RowState {
    static const int PER = std::is_same<W, float>::value ? 1 : 2;
    float scores[ROWS_AT_ONCE][TILE];
    W weights[ROWS_AT_ONCE][TILE / PER];
    float largest[ROWS_AT_ONCE], decay[ROWS_AT_ONCE];
    float total[ROWS_AT_ONCE][LANES];
    float sums[ROWS_AT_ONCE][MAX_CHANNELS];
};

// Blocks lie anywhere in memory, so a tile's scores fetch the keys of the next one, and its sums the
// values. Into the second-level cache: more such fetches can be under way than into the first.
INLINE void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

template <int ROWS, int BLOCKS, class W>
TARGET static void score_blocks(
    float (*scores)[TILE], const W* queries, int64_t words, const W* const* keys, const W* const* keys_after) {
    constexpr int VECS = BLOCK / LANES;
    F acc[ROWS][BLOCKS * VECS];
    clear<ROWS * BLOCKS * VECS>(&acc[0][0]);
    for (int64_t i = 0; i < words; i++) {
        decltype(load_word(queries)) word[BLOCKS * VECS];
        UNROLL for (int v = 0; v < BLOCKS * VECS; v++)
            word[v] = load_word(keys[v / VECS] + i * BLOCK + v % VECS * LANES);
        UNROLL for (int b = 0; b < BLOCKS; b++) fetch(keys_after[b] + i * BLOCK);
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < BLOCKS * VECS; v++)
                acc[r][v] = multiply_add(acc[r][v], word[v], queries[r * words + i]);
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < BLOCKS * VECS; v++) store(&scores[r][v * LANES], acc[r][v]);
}

// Scores of one row and tile become weights; `first` is the tile's first position.
template <class W>
INLINE void weigh_row(const AttendArgs& t, RowState<W>& state, int r, int64_t position, int64_t first) {
    const int64_t oldest = t.window > 0 ? position - t.window + 1 : 0;
    const bool sees_all = first >= oldest && first + TILE - 1 <= position;
    F score[TILE / LANES], highest = splat(-INFINITY);
    UNROLL for (int v = 0; v < TILE / LANES; v++) {
        score[v] = load(&state.scores[r][v * LANES]) * splat(t.scale);
        if (t.softcap > 0) score[v] = splat(t.softcap) * tanh_of(score[v] / splat(t.softcap));
        if (!sees_all) {
            const I at = lane_numbers() + (int)(first - position) + v * LANES;
            score[v] = choose((at > 0) | (at < (int)(oldest - position)), splat(-INFINITY), score[v]);
        }
        highest = larger_of(score[v], highest);
    }
    const float before = state.largest[r], highest_here = max_of(highest);
    const float after = highest_here > before ? highest_here : before;
    typedef typename std::conditional<std::is_same<W, float>::value, float, bf16>::type E;
    E* weights = (E*)state.weights[r];
    const F decay = exp_of(splat(before - after));
    F total = load(state.total[r]) * decay;
    UNROLL for (int v = 0; v < TILE / LANES; v++) {
        F weight = exp_of(score[v] - splat(after));
        total += weight;
        store(weights + v * LANES, weight);
    }
    store(state.total[r], total);
    state.decay[r] = decay[0];
    state.largest[r] = after;
}

// sums = decay * sums + weights * values, for VECS vectors of channels from `channel` on.
template <int ROWS, int VECS, class W>
INLINE void add_values(
    RowState<W>& state, const W* const* values, int num_blocks, int64_t channels, int64_t channel,
    const W* const* values_after) {
    constexpr int WORDS = BLOCK / RowState<W>::PER;
    F acc[ROWS][VECS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECS; v++)
            acc[r][v] = load(&state.sums[r][channel + v * LANES]) * splat(state.decay[r]);
    for (int block = 0; block < num_blocks; block++) {
        const W* words = values[block] + channel;
        const W* to_fetch = values_after[block] + channel;
        for (int i = 0; i < WORDS; i++, words += channels) {
            UNROLL for (int v = 0; v < VECS; v++) fetch(to_fetch + i * channels + v * LANES);
            decltype(load_word(words)) word[VECS];
            UNROLL for (int v = 0; v < VECS; v++) word[v] = load_word(words + v * LANES);
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int v = 0; v < VECS; v++)
                    acc[r][v] = multiply_add(acc[r][v], word[v], state.weights[r][block * WORDS + i]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECS; v++) store(&state.sums[r][channel + v * LANES], acc[r][v]);
}

template <int ROWS, class W>
TARGET static void attend_rows(const AttendArgs& t, int first_row) {
    typedef RowState<W> State;
    typedef typename std::conditional<std::is_same<W, float>::value, float, bf16>::type E;
    constexpr int BLOCKS = LANES == 16 ? (ROWS <= 4 ? 4 : 2) : 1;
    constexpr int VECS = LANES == 16 && ROWS <= 4 ? 4 : 2;
    const int64_t channels = t.channels, words = channels / State::PER, block_words = BLOCK * words;
    const int64_t values_from_keys = (const W*)t.values - (const W*)t.keys;
    const W* queries = (const W*)t.queries + first_row * words;
    const int64_t* positions = t.positions + first_row;

    State state;
    int64_t newest = positions[0], oldest = positions[0];
    for (int r = 0; r < ROWS; r++) {
        state.largest[r] = LOWEST;
        store(state.total[r], F{});
        for (int64_t c = 0; c < channels; c++) state.sums[r][c] = 0;
        newest = positions[r] > newest ? positions[r] : newest;
        oldest = positions[r] < oldest ? positions[r] : oldest;
    }
    const int64_t begin = t.window > 0 && oldest >= t.window ? (oldest - t.window + 1) / TILE : 0;
    for (int64_t tile = begin; tile <= newest / TILE; tile++) {
        const int64_t first = tile * TILE;
        const int64_t last_block = (newest < first + TILE ? newest : first + TILE - 1) / BLOCK;
        const int num_blocks = (int)(last_block - first / BLOCK + 1);
        const W *keys[TILE / BLOCK], *values[TILE / BLOCK];
        const W *keys_after[TILE / BLOCK], *values_after[TILE / BLOCK];
        for (int b = 0; b < TILE / BLOCK; b++) {
            // Past the end of the sequence scores are hidden, whatever was read.
            const int64_t here = first / BLOCK + (b < num_blocks ? b : 0), ahead = here + TILE / BLOCK;
            keys[b] = (const W*)t.keys + t.blocks[here] * block_words;
            values[b] = keys[b] + values_from_keys;
            if (ahead <= newest / BLOCK)
                keys_after[b] = (const W*)t.keys + t.blocks[ahead] * block_words;
            else if (tile == newest / TILE && t.keys_after != nullptr && begin * TILE / BLOCK + b <= newest / BLOCK)
                keys_after[b] = (const W*)t.keys_after + t.blocks[begin * TILE / BLOCK + b] * block_words;
            else
                keys_after[b] = keys[b];
            values_after[b] = keys_after[b] + values_from_keys;
        }
        for (int b = 0; b < TILE / BLOCK; b += BLOCKS) {
            float (*scores)[TILE] = (float (*)[TILE])(&state.scores[0][b * BLOCK]);
            score_blocks<ROWS, BLOCKS>(scores, queries, words, keys + b, keys_after + b);
        }
        for (int r = 0; r < ROWS; r++) weigh_row(t, state, r, positions[r], first);
        int64_t c = 0;
        for (; c + VECS * LANES <= channels; c += VECS * LANES)
            add_values<ROWS, VECS>(state, values, num_blocks, channels, c, values_after);
        for (; c < channels; c += LANES)
            add_values<ROWS, 1>(state, values, num_blocks, channels, c, values_after);
    }
    for (int r = 0; r < ROWS; r++) {
        E* out = (E*)t.out[first_row + r];
        const F inverse = splat(1.0f / sum_of(load(state.total[r])));
        for (int64_t c = 0; c < channels; c += LANES) store(out + c, load(&state.sums[r][c]) * inverse);
    }
}

template <int ROWS, class W>
TARGET static void attend_some(const AttendArgs& t, int first_row) {
    if constexpr (ROWS > 0) {
        if (t.num_rows - first_row < ROWS) return attend_some<ROWS - 1, W>(t, first_row);
        attend_rows<ROWS, W>(t, first_row);
        if (first_row + ROWS < t.num_rows) attend_some<ROWS, W>(t, first_row + ROWS);
    }
}

TARGET static void attend(const AttendArgs& t) {
    t.is_bf16 ? attend_some<ROWS_AT_ONCE, uint32_t>(t, 0) : attend_some<ROWS_AT_ONCE, float>(t, 0);
}

#undef ROWS_AT_ONCE
