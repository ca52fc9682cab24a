# pyright: basic, reportArgumentType=false, reportOperatorIssue=false
"""Draws a token for each row of logits on the device, as `engine.sampling` defines it.

Four launches. `score_kernel`, a program a row and chunk of the vocabulary: are the logits finite,
what are their sum and their best; bias, penalties and masks. `limit_kernel`, a program a row: the
distance from the best score up to which top-k, top-p and min-p let a token be drawn. `race_kernel`:
the exponential race of a draw within a chunk. `finish_kernel`: the winner over chunks, and what is
told of it. Where log-probabilities are wanted, `best_kernel` finds a chunk's most likely tokens.

A row's record, 12 int32 (floats by their bits): flags, 1 / temperature, top_k, top_p, -log(min_p),
first and last entry, repetition, frequency and presence penalty, row of masks, row of best tokens.
An entry adjusts one token id: id, bias, and ``4 * times in the output + 2 * is banned + is seen``.
A draw's record, 4 int32: row, whether it is the row's first, low and high half of its noise key.
"""

import triton
import triton.language as tl

from engine.triton.noise import exponential_noise

ROW_FIELDS = tl.constexpr(12)
# Flags of a row.
IS_GREEDY = tl.constexpr(1)
HAS_SCORES = tl.constexpr(2)  # scores differ from logits, or are read more than once
HAS_NUCLEUS = tl.constexpr(4)
HAS_LOGPROBS = tl.constexpr(8)
# What `limit_kernel` says of a row.
IS_GOOD = tl.constexpr(0)
NOT_FINITE = tl.constexpr(-1)
NOTHING_LEFT = tl.constexpr(-2)

NO_ID = tl.constexpr(0x7FFFFFFF)
LARGEST_KEY = tl.constexpr(0x7F800000)  # of an infinite distance


@triton.jit
def float_field(record_ptr, field: tl.constexpr):
    """A float of a record, from its bits."""
    return tl.load(record_ptr + field).to(tl.float32, bitcast=True)


@triton.jit
def score_kernel(
    scores_ptr,  # [rows, vocab] float32, out: rows with HAS_SCORES
    stats_ptr,  # [rows, chunks, 3] float32, out: largest logit, sum of exp, best score; NaN: bad
    ids_ptr,  # [rows, chunks] int32, out: lowest id with the best score
    logits_ptr,  # [rows, vocab]
    rows_ptr,  # [rows, ROW_FIELDS] int32
    entries_ptr,  # [entries, 3] int32
    masks_ptr,  # [masks, words] int32: bit i of a row: token i may be drawn
    vocab,
    words,
    stride_logits,
    stride_scores,
    BLOCK: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
):
    """Grid: rows, chunks of BLOCK token ids."""
    row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    record_ptr = rows_ptr + row * ROW_FIELDS
    flags = tl.load(record_ptr)
    begin = i_chunk * BLOCK
    o = begin + tl.arange(0, BLOCK)
    m = o < vocab
    p_logits = logits_ptr + row * stride_logits + o
    b_x = tl.load(p_logits, mask=m, other=0.0).to(tl.float32)
    is_bad = tl.max((m & ((b_x != b_x) | (tl.abs(b_x) == float("inf")))).to(tl.int32), axis=0)
    b_x = tl.where(m, b_x, -float("inf"))
    largest = tl.max(b_x, axis=0)
    total = 0.0
    if (flags & HAS_LOGPROBS) != 0:
        total = tl.sum(tl.exp(b_x - largest), axis=0)

    if (flags & HAS_SCORES) != 0:
        i_mask = tl.load(record_ptr + 10)
        if i_mask >= 0:
            word_ptr = masks_ptr + i_mask.to(tl.int64) * words + o // 32
            b_word = tl.load(word_ptr, mask=m, other=0)
            b_x = tl.where(((b_word >> (o % 32)) & 1) != 0, b_x, -float("inf"))
        p_scores = scores_ptr + row * stride_scores + o
        tl.store(p_scores, b_x, mask=m)
        first = tl.load(record_ptr + 5)
        last = tl.load(record_ptr + 6)
        if first < last:
            repetition = float_field(record_ptr, 7)
            frequency = float_field(record_ptr, 8)
            presence = float_field(record_ptr, 9)
            tl.debug_barrier()  # other threads' scores are read, then written
            for i in range(first, last, BLOCK_ENTRIES):
                o_e = i + tl.arange(0, BLOCK_ENTRIES)
                m_e = o_e < last
                token_ids = tl.load(entries_ptr + o_e * 3, mask=m_e, other=-1)
                m_e &= (token_ids >= begin) & (token_ids < begin + BLOCK)
                bias = tl.load(entries_ptr + o_e * 3 + 1, mask=m_e, other=0)
                uses = tl.load(entries_ptr + o_e * 3 + 2, mask=m_e, other=0)
                score_ptr = scores_ptr + row * stride_scores + token_ids
                b_s = tl.load(score_ptr, mask=m_e, other=0.0)
                b_s += bias.to(tl.float32, bitcast=True)
                b_seen = tl.where(b_s < 0.0, b_s * repetition, b_s / repetition)
                b_s = tl.where((uses & 1) != 0, b_seen, b_s)
                count = uses >> 2
                b_s -= count.to(tl.float32) * frequency + tl.where(count > 0, presence, 0.0)
                b_s = tl.where((uses & 2) != 0, -float("inf"), b_s)
                tl.store(score_ptr, b_s, mask=m_e)
            tl.debug_barrier()
            b_x = tl.load(p_scores, mask=m, other=-float("inf"))
    is_lost = tl.max(((b_x != b_x) | (b_x == float("inf"))).to(tl.int32), axis=0)
    best = tl.max(b_x, axis=0)
    best_id = tl.min(tl.where(b_x == best, o, NO_ID), axis=0)
    place = row * tl.num_programs(1) + i_chunk
    stat_ptr = stats_ptr + place * 3
    tl.store(stat_ptr, tl.where(is_bad != 0, float("nan"), largest))
    tl.store(stat_ptr + 1, total)
    tl.store(stat_ptr + 2, tl.where(is_lost != 0, float("nan"), best))
    tl.store(ids_ptr + place, best_id)


@triton.jit
def limit_kernel(
    found_ptr,  # [rows, 3] float32, out: best score, limit of the distance, log of the sum of exp
    states_ptr,  # [rows, 2] int32, out: state, id of the best
    stats_ptr,
    ids_ptr,
    rows_ptr,
    scores_ptr,
    vocab,
    chunks,
    stride_scores,
    BLOCK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Grid: rows. A token's distance is (best - score) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    record_ptr = rows_ptr + row * ROW_FIELDS
    flags = tl.load(record_ptr)
    o_c = tl.arange(0, BLOCK_CHUNKS)
    m_c = o_c < chunks
    stat_ptr = stats_ptr + (row * chunks + o_c) * 3
    b_largest = tl.load(stat_ptr, mask=m_c, other=-float("inf"))
    b_total = tl.load(stat_ptr + 1, mask=m_c, other=0.0)
    b_best = tl.load(stat_ptr + 2, mask=m_c, other=-float("inf"))
    b_id = tl.load(ids_ptr + row * chunks + o_c, mask=m_c, other=NO_ID)
    is_bad = tl.max((b_largest != b_largest).to(tl.int32), axis=0) != 0
    is_lost = tl.max((b_best != b_best).to(tl.int32), axis=0) != 0
    best = tl.max(b_best, axis=0)
    best_id = tl.min(tl.where(b_best == best, b_id, NO_ID), axis=0)
    is_lost |= best == -float("inf")
    state = tl.where(is_bad, NOT_FINITE, tl.where(is_lost, NOTHING_LEFT, IS_GOOD))
    largest = tl.max(b_largest, axis=0)
    log_sum = 0.0
    if ((flags & HAS_LOGPROBS) != 0) & (state == IS_GOOD):
        log_sum = largest + tl.log(tl.sum(b_total * tl.exp(b_largest - largest), axis=0))

    limit = float_field(record_ptr, 4)
    if ((flags & HAS_NUCLEUS) != 0) & (state == IS_GOOD):
        inverse = float_field(record_ptr, 1)
        top_k = tl.load(record_ptr + 2)
        top_p = float_field(record_ptr, 3)
        row_ptr = scores_ptr + row * stride_scores
        key = tl.full([], LARGEST_KEY, tl.int32)
        if (top_k > 0) & (top_k < vocab):
            key = _smallest_key(row_ptr, vocab, best, inverse, top_k.to(tl.float32), key, 0, BLOCK)
        if top_p < 1.0:
            total = _up_to(row_ptr, vocab, best, inverse, key, 1, BLOCK)
            target = tl.maximum(top_p * total, 1e-30)  # the best is kept, whatever top_p is
            key = _smallest_key(row_ptr, vocab, best, inverse, target, key, 1, BLOCK)
        limit = tl.minimum(limit, key.to(tl.float32, bitcast=True))
    found = found_ptr + row * 3
    tl.store(found, best)
    tl.store(found + 1, limit)
    tl.store(found + 2, log_sum)
    tl.store(states_ptr + row * 2, state)
    tl.store(states_ptr + row * 2 + 1, best_id)


@triton.jit
def _distances(row_ptr, o, vocab, best, inverse):
    """Of tokens o, not negative; infinite for those that are masked or none."""
    p_scores = row_ptr + o
    b_s = tl.load(p_scores, mask=o < vocab, other=-float("inf"))
    return (best - b_s) * inverse


@triton.jit
def _weights(b_distance, IS_MASS: tl.constexpr):
    if IS_MASS:
        return tl.exp(-b_distance)
    else:
        return tl.where(b_distance < float("inf"), 1.0, 0.0)


@triton.jit
def _up_to(row_ptr, vocab, best, inverse, key, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Weight of all tokens whose distance has bits of `key` at most."""
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(0, vocab, BLOCK):
        b_distance = _distances(row_ptr, i + tl.arange(0, BLOCK), vocab, best, inverse)
        b_in = b_distance.to(tl.int32, bitcast=True) <= key
        b_sum += tl.where(b_in, _weights(b_distance, IS_MASS), 0.0)
    return tl.sum(b_sum, axis=0)


@triton.jit
def _smallest_key(
    row_ptr, vocab, best, inverse, target, high, IS_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """A key up to which tokens weigh `target` at least, and without whose last ones they do not.

    Distances are not negative, so that their bits are ordered as they are. Each pass weighs four
    keys between the bounds, and draws the bounds in to where there are tokens. It ends when all
    tokens between them are equally far: they are kept or dropped together. A sum of the same terms
    in the same order never falls when terms that are not negative join it, so that bounds hold in
    floating point too.
    """
    low = tl.full([], -1, tl.int32)
    goes_on = low < high
    while goes_on:
        span = high - low
        key_1 = low + span // 5 + (span % 5) // 5
        key_2 = low + span // 5 * 2 + (span % 5) * 2 // 5
        key_3 = low + span // 5 * 3 + (span % 5) * 3 // 5
        key_4 = low + span // 5 * 4 + (span % 5) * 4 // 5
        b_1 = tl.zeros([BLOCK], dtype=tl.float32)
        b_2 = tl.zeros([BLOCK], dtype=tl.float32)
        b_3 = tl.zeros([BLOCK], dtype=tl.float32)
        b_4 = tl.zeros([BLOCK], dtype=tl.float32)
        b_first = tl.full([BLOCK], LARGEST_KEY, dtype=tl.int32)
        b_last = tl.full([BLOCK], -1, dtype=tl.int32)
        for i in range(0, vocab, BLOCK):
            b_distance = _distances(row_ptr, i + tl.arange(0, BLOCK), vocab, best, inverse)
            b_key = b_distance.to(tl.int32, bitcast=True)
            b_w = _weights(b_distance, IS_MASS)
            b_1 += tl.where(b_key <= key_1, b_w, 0.0)
            b_2 += tl.where(b_key <= key_2, b_w, 0.0)
            b_3 += tl.where(b_key <= key_3, b_w, 0.0)
            b_4 += tl.where(b_key <= key_4, b_w, 0.0)
            b_first = tl.where(b_key > low, tl.minimum(b_first, b_key), b_first)
            b_last = tl.where(b_key <= high, tl.maximum(b_last, b_key), b_last)
        first, last = tl.min(b_first, axis=0), tl.max(b_last, axis=0)
        is_1, is_2 = tl.sum(b_1, axis=0) >= target, tl.sum(b_2, axis=0) >= target
        is_3, is_4 = tl.sum(b_3, axis=0) >= target, tl.sum(b_4, axis=0) >= target
        goes_on = first < last
        below = tl.where(is_4, low, key_4)
        below = tl.where(is_4 & ~is_3, key_3, below)
        below = tl.where(is_3 & ~is_2, key_2, below)
        below = tl.where(is_2 & ~is_1, key_1, below)
        above = tl.where(is_4, key_4, high)
        above = tl.where(is_3, key_3, above)
        above = tl.where(is_2, key_2, above)
        above = tl.where(is_1, key_1, above)
        # Between a bound and the nearest token there is nothing to find.
        low = tl.where(goes_on, tl.maximum(below, first - 1), low)
        high = tl.where(goes_on, tl.minimum(above, last), high)
        goes_on &= high - low > 1
    return high


@triton.jit
def race_kernel(
    times_ptr,  # [draws, chunks] float32, out
    ids_ptr,  # [draws, chunks] int32, out
    draws_ptr,  # [draws, 4] int32
    found_ptr,
    states_ptr,
    rows_ptr,
    logits_ptr,
    scores_ptr,
    vocab,
    stride_logits,
    stride_scores,
    BLOCK: tl.constexpr,
):
    """The token that comes first in a chunk: the least noise / weight. Grid: draws, chunks."""
    i_draw = tl.program_id(0)
    i_chunk = tl.program_id(1)
    draw_ptr = draws_ptr + i_draw * 4
    row = tl.load(draw_ptr).to(tl.int64)
    record_ptr = rows_ptr + row * ROW_FIELDS
    flags = tl.load(record_ptr)
    if ((flags & IS_GREEDY) != 0) | (tl.load(states_ptr + row * 2) != IS_GOOD):
        return
    low = tl.load(draw_ptr + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(draw_ptr + 3).to(tl.uint32, bitcast=True).to(tl.uint64)
    key = (high << 32) | low
    o = i_chunk * BLOCK + tl.arange(0, BLOCK)
    m = o < vocab
    if (flags & HAS_SCORES) != 0:
        p_scores = scores_ptr + row * stride_scores + o
        b_x = tl.load(p_scores, mask=m, other=-float("inf"))
    else:
        p_logits = logits_ptr + row * stride_logits + o
        b_x = tl.load(p_logits, mask=m, other=-float("inf")).to(tl.float32)
    b_distance = (tl.load(found_ptr + row * 3) - b_x) * float_field(record_ptr, 1)
    b_w = tl.exp(-b_distance)
    may_win = (b_distance <= tl.load(found_ptr + row * 3 + 1)) & (b_w > 0.0)
    b_noise = exponential_noise(key, o.to(tl.uint64))
    b_time = tl.where(may_win, b_noise / tl.where(may_win, b_w, 1.0), float("inf"))
    least = tl.min(b_time, axis=0)
    place = i_draw.to(tl.int64) * tl.num_programs(1) + i_chunk
    tl.store(times_ptr + place, least)
    tl.store(ids_ptr + place, tl.min(tl.where(b_time == least, o, NO_ID), axis=0))


@triton.jit
def best_kernel(
    values_ptr,  # [listed rows, chunks, TOP] float32, out
    ids_ptr,  # [listed rows, chunks, TOP] int32, out
    listed_ptr,  # [listed rows] int32: rows of logits
    logits_ptr,
    vocab,
    stride_logits,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A chunk's TOP largest logits, the lowest ids first where they are equal."""
    i_listed = tl.program_id(0)
    i_chunk = tl.program_id(1)
    row = tl.load(listed_ptr + i_listed).to(tl.int64)
    o = i_chunk * BLOCK + tl.arange(0, BLOCK)
    p_logits = logits_ptr + row * stride_logits + o
    b_x = tl.load(p_logits, mask=o < vocab, other=-float("inf")).to(tl.float32)
    place = (i_listed.to(tl.int64) * tl.num_programs(1) + i_chunk) * TOP
    for i in range(TOP):
        value = tl.max(b_x, axis=0)
        token_id = tl.min(tl.where(b_x == value, o, NO_ID), axis=0)
        tl.store(values_ptr + place + i, value)
        tl.store(ids_ptr + place + i, token_id)
        b_x = tl.where(o == token_id, -float("inf"), b_x)


@triton.jit
def finish_kernel(
    out_ptr,  # [draws, 2 + 2 * TOP] int32, out: token, log-probability's bits, then the best
    token_ids_ptr,  # [rows] int64, out: each row's first draw; 0 where there is none
    draws_ptr,
    times_ptr,
    ids_ptr,
    found_ptr,
    states_ptr,
    rows_ptr,
    logits_ptr,
    values_ptr,
    best_ids_ptr,
    chunks,
    stride_logits,
    TOP: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """A draw's token: a negative one is the row's state. Grid: draws."""
    i_draw = tl.program_id(0).to(tl.int64)
    row = tl.load(draws_ptr + i_draw * 4).to(tl.int64)
    is_first = tl.load(draws_ptr + i_draw * 4 + 1) != 0
    record_ptr = rows_ptr + row * ROW_FIELDS
    flags = tl.load(record_ptr)
    state = tl.load(states_ptr + row * 2)
    out_row_ptr = out_ptr + i_draw * (2 + 2 * TOP)
    token = state
    if state == IS_GOOD:
        token = tl.load(states_ptr + row * 2 + 1)
        o_c = tl.arange(0, BLOCK_CHUNKS)
        m_c = o_c < chunks
        if (flags & IS_GREEDY) == 0:
            b_time = tl.load(times_ptr + i_draw * chunks + o_c, mask=m_c, other=float("inf"))
            b_id = tl.load(ids_ptr + i_draw * chunks + o_c, mask=m_c, other=NO_ID)
            least = tl.min(b_time, axis=0)
            token = tl.min(tl.where(m_c & (b_time == least), b_id, NO_ID), axis=0)
        if (flags & HAS_LOGPROBS) != 0:
            log_sum = tl.load(found_ptr + row * 3 + 2)
            logit = tl.load(logits_ptr + row * stride_logits + token).to(tl.float32)
            tl.store(out_row_ptr + 1, (logit - log_sum).to(tl.int32, bitcast=True))
            i_listed = tl.load(record_ptr + 11).to(tl.int64)
            if TOP > 0:  # noqa: SIM102 (known when it is compiled)
                if i_listed >= 0:
                    o_t = tl.arange(0, BLOCK_CHUNKS * TOP)
                    m_t = o_t < chunks * TOP
                    place = i_listed * chunks * TOP + o_t
                    b_x = tl.load(values_ptr + place, mask=m_t, other=-float("inf"))
                    b_id = tl.load(best_ids_ptr + place, mask=m_t, other=NO_ID)
                    for i in range(TOP):
                        value = tl.max(b_x, axis=0)
                        token_id = tl.min(tl.where(b_x == value, b_id, NO_ID), axis=0)
                        tl.store(out_row_ptr + 2 + i, token_id)
                        bits = (value - log_sum).to(tl.int32, bitcast=True)
                        tl.store(out_row_ptr + 2 + TOP + i, bits)
                        b_x = tl.where(b_id == token_id, -float("inf"), b_x)
    tl.store(out_row_ptr, token)
    if is_first:
        tl.store(token_ids_ptr + row, tl.maximum(token, 0).to(tl.int64))
