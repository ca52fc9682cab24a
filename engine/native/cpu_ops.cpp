// The decoder's operations on CPUs, beside LoRA's: attention over paged keys and values, norms,
// rotation, activation, linears in bfloat16, and the choice of tokens.
//
// Plain C++ without Python or PyTorch: built once at install, loaded by engine/ops/native_library.py. Its OpenMP
// symbols are left to the process: PyTorch's own pool of threads does the work. Callers have
// checked everything. Strides are in elements.

#include <math.h>
#include <omp.h>
#include <stdint.h>

#include <atomic>
#include <type_traits>

static const int64_t BLOCK = 16;  // positions of a KV block
static const int64_t TILE = 64;   // positions between two updates of a row's softmax
static const int64_t MAX_CHANNELS = 256;
static const int MAX_ROWS = 8;  // query rows of an item of attention
static const float LOWEST = -1e30f;  // a maximum over nothing: finite, so that differences are

static const int64_t PANEL = 32;          // columns of a linear's panel
static const int LINEAR_ROWS = 12;        // rows whose sums fit the registers beside a panel
static const int64_t ROW_BYTES = 384 << 10;  // of x that a pass over the panels keeps in cache

struct NormArgs {
    void *x, *out;
    const void *weight, *delta;
    int64_t size, x_stride, out_stride;
    float eps;
    bool weight_is_float, is_bf16;
};

struct ActivateArgs {
    const void* gate_up;
    void* out;
    int64_t size;
    bool is_gelu, is_bf16;
};

struct RotateArgs {
    void* x;
    const int64_t* positions;
    const float *cosines, *sines;  // [positions, half]
    int64_t num_heads, channels, half, x_stride;
    bool is_bf16;
};

struct AttendArgs {
    const void* queries;  // [num_rows, channels]
    const int64_t* positions;
    void* const* out;
    const void *keys, *values;  // of one KV head
    const void* keys_after;     // of the head that comes next, to be fetched ahead; or null
    const int64_t* blocks;      // of the sequence
    int64_t channels, window;   // 0: no window
    float scale, softcap;       // 0: no cap
    int num_rows;
    bool is_bf16;
};

struct DrawArgs {
    int64_t best;  // index of the largest logit
    uint64_t key;
    float temperature;
    float lowest;  // scaled logit below the best's that still takes part
};

struct LinearArgs {
    const uint16_t* x;
    uint16_t* y;
    const uint32_t* weight;
    const float* bias;  // padded to whole panels
    int64_t x_stride, pairs, out_features;
};

#define KERNELS "../../engine/native/kernels.h"
#include "../../lora_kernels/native/instruction_sets.h"

static void (*const norm_of[])(const NormArgs&, int64_t) = IN_EACH_SET(norm);
static void (*const activate_of[])(const ActivateArgs&, int64_t) = IN_EACH_SET(activate);
static void (*const rotate_of[])(const RotateArgs&, int64_t) = IN_EACH_SET(rotate);
static int64_t (*const largest_of[])(const void*, bool, int64_t) = IN_EACH_SET(largest);
static int64_t (*const draw_of[])(const void*, bool, int64_t, const DrawArgs&) = IN_EACH_SET(draw);
static void (*const attend_of[])(const AttendArgs&) = IN_EACH_SET(attend);

static const int64_t MIN_SHARED_ELEMENTS = 60000;  // below, waking another thread costs more than it does

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Call `work` with each of `count` items; threads take the next one when they are free. The team has
// always the same size, though some find nothing to do: libgomp ends threads that a team leaves out.
template <class Work>
static void share(int64_t count, int64_t threads, Work work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) work(i);
        return;
    }
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
}

// Like `share`, a run of rows for each thread; by one thread where the rows are little work.
template <class Work>
static void share_rows(int64_t rows, int64_t elements, int64_t threads, Work work) {
    if (rows * elements < MIN_SHARED_ELEMENTS) threads = 1;
    const int64_t runs = min(rows, threads);
    share(runs, threads, [&](int64_t run) {
        for (int64_t row = rows * run / runs; row < rows * (run + 1) / runs; row++) work(row);
    });
}

extern "C" {

// Changes with the signatures and layouts here, and in engine/ops/native_library.py.
int loraplex_abi_version() { return 1; }

// out[row] = norm(x[row]) * weight; with a delta [rows, size], x += delta first. A row has `groups`
// that are normed each for itself, `size` apart.
void loraplex_norm(
    int64_t isa, int64_t is_bf16, int64_t threads, int64_t rows, int64_t groups, int64_t size, void* x,
    int64_t x_stride, const void* delta, const void* weight, int64_t weight_is_float, double eps, void* out,
    int64_t out_stride) {
    const NormArgs args{x,        out,        weight,     delta, size,
                        x_stride, out_stride, (float)eps, weight_is_float != 0, is_bf16 != 0};
    share_rows(rows, groups * size, threads, [&](int64_t row) {
        if (groups == 1) return norm_of[isa](args, row);
        for (int64_t group = 0; group < groups; group++) {
            NormArgs part = args;
            const int64_t offset = group * size * (is_bf16 ? 2 : 4);
            part.x = (char*)x + offset;
            part.out = (char*)out + offset;
            norm_of[isa](part, row);
        }
    });
}

// out [rows, size] = activation(gate) * up of gate_up [rows, 2 * size]; SiLU, or GELU by tanh.
void loraplex_activate(
    int64_t isa, int64_t is_bf16, int64_t threads, int64_t rows, int64_t size, const void* gate_up,
    int64_t is_gelu, void* out) {
    const ActivateArgs args{gate_up, out, size, is_gelu != 0, is_bf16 != 0};
    share_rows(rows, 4 * size, threads, [&](int64_t row) { activate_of[isa](args, row); });
}

// Rotate the heads of x [rows, num_heads * channels] in place, by positions' rows of the tables.
void loraplex_rotate(
    int64_t isa, int64_t is_bf16, int64_t threads, int64_t rows, int64_t num_heads, int64_t channels,
    int64_t half, void* x, int64_t x_stride, const int64_t* positions, const float* cosines,
    const float* sines) {
    const RotateArgs args{x, positions, cosines, sines, num_heads, channels, half, x_stride, is_bf16 != 0};
    share_rows(rows, num_heads * channels, threads, [&](int64_t row) { rotate_of[isa](args, row); });
}

// Index of the largest element of each row, -1 where an element is not finite.
void loraplex_argmax(
    int64_t isa, int64_t is_bf16, int64_t threads, int64_t rows, int64_t size, const void* x,
    int64_t x_stride, int64_t* out) {
    share_rows(rows, size, threads, [&](int64_t row) {
        out[row] = largest_of[isa]((const char*)x + row * x_stride * (is_bf16 ? 2 : 4), is_bf16 != 0, size);
    });
}

// Draw tokens; draw i is from row rows[i] of x, see draw.h.
void loraplex_draw(
    int64_t isa, int64_t is_bf16, int64_t threads, int64_t draws, int64_t size, const void* x,
    int64_t x_stride, const int64_t* rows, const int64_t* best, const uint64_t* keys,
    const float* temperatures, const float* lowest, int64_t* out) {
    share_rows(draws, size, threads, [&](int64_t i) {
        const DrawArgs args{best[i], keys[i], temperatures[i], lowest[i]};
        const char* row = (const char*)x + rows[i] * x_stride * (is_bf16 ? 2 : 4);
        out[i] = draw_of[isa](row, is_bf16 != 0, size, args);
    });
}

// Put keys and values, each [tokens, heads, channels], where slot_mapping says; the layout of a
// block is told in attention.h. `head_stride` is in elements of the cache.
void loraplex_store_kv(
    int64_t is_bf16, int64_t threads, int64_t tokens, int64_t heads, int64_t channels, const void* key, int64_t key_stride,
    const void* value, int64_t value_stride, const int64_t* slot_mapping, void* keys, void* values,
    int64_t head_stride) {
    // A token writes a word to nearly as many cache lines as it has channels.
    share_rows(tokens, 16 * heads * channels, threads, [&](int64_t token) {
        const int64_t block = slot_mapping[token] / BLOCK, offset = slot_mapping[token] % BLOCK;
        for (int64_t head = 0; head < heads; head++) {
            const int64_t at = head * head_stride + block * BLOCK * channels;
            if (is_bf16) {
                const bf16* k = (const bf16*)key + token * key_stride + head * channels;
                const bf16* v = (const bf16*)value + token * value_stride + head * channels;
                bf16 *to_k = (bf16*)keys + at, *to_v = (bf16*)values + at + offset / 2 * 2 * channels;
                for (int64_t c = 0; c < channels; c++) {
                    to_k[(c / 2 * BLOCK + offset) * 2 + c % 2] = k[c];
                    to_v[c * 2 + offset % 2] = v[c];
                }
            } else {
                const float* k = (const float*)key + token * key_stride + head * channels;
                const float* v = (const float*)value + token * value_stride + head * channels;
                float *to_k = (float*)keys + at, *to_v = (float*)values + at + offset * channels;
                for (int64_t c = 0; c < channels; c++) {
                    to_k[c * BLOCK + offset] = k[c];
                    to_v[c] = v[c];
                }
            }
        }
    });
}

// Causal attention of all tokens of a step. `sequences`: their tokens are starts[i] to starts[i + 1]
// of the step, at positions from first_position[i]; block_tables [sequences, table_width].
void loraplex_attend(
    int64_t isa, int64_t is_bf16, int64_t threads, int64_t sequences, const int64_t* starts,
    const int64_t* first_position, const int64_t* block_tables, int64_t table_width, int64_t kv_heads,
    int64_t group, int64_t channels, int64_t window, double scale, double softcap, const void* query,
    int64_t query_stride, const void* keys, const void* values, int64_t head_stride, void* out) {
    const int64_t size = is_bf16 ? 2 : 4;
    // An item is some tokens of a sequence: of all KV heads in turn where there are items enough.
    const int64_t tokens_at_once = group >= MAX_ROWS ? 1 : MAX_ROWS / group;
    int64_t items = 0;
    for (int64_t i = 0; i < sequences; i++) items += div_up(starts[i + 1] - starts[i], tokens_at_once);
    const int64_t cuts_of_heads = items < 4 * threads ? kv_heads : 1, heads = kv_heads / cuts_of_heads;
    items *= cuts_of_heads;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads) if (threads > 1 && items > 1)
    {
        // Items are taken in order, so a thread goes on from the sequence where it was.
        int64_t sequence = 0, before = 0;
        alignas(64) char queries[MAX_ROWS * MAX_CHANNELS * 4];
        int64_t positions[MAX_ROWS];
        void* outs[MAX_ROWS];
        AttendArgs args;
        args.queries = queries;
        args.positions = positions;
        args.out = outs;
        args.channels = channels;
        args.window = window;
        args.scale = (float)scale;
        args.softcap = (float)softcap;
        args.is_bf16 = is_bf16 != 0;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
            const int64_t item = i / cuts_of_heads;
            int64_t cuts;
            while (item >= before + (cuts = div_up(starts[sequence + 1] - starts[sequence], tokens_at_once))) {
                before += cuts;
                sequence++;
            }
            const int64_t first = starts[sequence] + (item - before) * tokens_at_once;
            const int64_t tokens = min(tokens_at_once, starts[sequence + 1] - first);
            args.blocks = block_tables + sequence * table_width;
            for (int64_t h = 0; h < heads; h++) {
                const int64_t kv_head = i % cuts_of_heads + h;
                args.keys = (const char*)keys + kv_head * head_stride * size;
                args.values = (const char*)values + kv_head * head_stride * size;
                args.keys_after = h + 1 < heads ? (const char*)args.keys + head_stride * size : nullptr;
                int rows = 0;
                for (int64_t at = 0; at < tokens * group; at++) {
                    const int64_t token = first + at / group, head = kv_head * group + at % group;
                    __builtin_memcpy(
                        queries + rows * channels * size,
                        (const char*)query + (token * query_stride + head * channels) * size, channels * size);
                    positions[rows] = first_position[sequence] + token - starts[sequence];
                    outs[rows++] = (char*)out + (token * kv_heads * group + head) * channels * size;
                    if (rows == MAX_ROWS || at == tokens * group - 1) {
                        args.num_rows = rows;
                        attend_of[isa](args);
                        rows = 0;
                    }
                }
            }
        }
    }
}

// y [rows, out_features] = x [rows, in_features] W^T + bias, bf16; see linear.h.
void loraplex_linear(
    int64_t threads, int64_t rows, const bf16* x, int64_t x_stride, int64_t in_features, const uint32_t* weight,
    const float* bias, int64_t out_features, bf16* y) {
#if defined(__x86_64__)
    const LinearArgs args{x, y, weight, bias, x_stride, in_features / 2, out_features};
    const int64_t fitting = ROW_BYTES / (2 * in_features) / LINEAR_ROWS * LINEAR_ROWS;
    const int64_t rows_at_once = fitting < LINEAR_ROWS ? LINEAR_ROWS : fitting;
    const int64_t panels = div_up(out_features, PANEL), passes = div_up(rows, rows_at_once);
    share(passes * panels, threads, [&](int64_t i) {
        const int64_t first = i / panels * rows_at_once;
        avx512_bf16::linear(args, first, min(rows_at_once, rows - first), i % panels);
    });
#endif
}

// y[i] = row `rows[i]` of a weight in panels: the embedding of a token in a tied head.
void loraplex_gather_rows(
    int64_t num_rows, const int64_t* rows, int64_t in_features, const uint32_t* weight, bf16* y) {
    const int64_t pairs = in_features / 2;
    for (int64_t i = 0; i < num_rows; i++) {
        const uint32_t* w = weight + rows[i] / PANEL * PANEL * pairs + rows[i] % PANEL;
        for (int64_t k = 0; k < pairs; k++) __builtin_memcpy(y + i * in_features + 2 * k, w + k * PANEL, 4);
    }
}
}
