// The CPU path's kernel: y[row] += scaling * (x[row] A^T) B^T, another A, B for each segment of rows.
//
// One call does all segments and slices of a projection. Plain C++ without Python or PyTorch: built
// once at install, loaded by native_library.py, which also says what `table` and `batch` hold. Its
// OpenMP symbols are left to the process: PyTorch's own pool of threads does the work.

#include <omp.h>
#include <stdint.h>
#include <stdlib.h>

#include <atomic>

static const int MAX_TILE_ROWS = 8;
static const int64_t PANEL_COLUMNS = 64;  // of B's layout
static const int64_t PAD_COLUMNS = 16;
static const int64_t BLOCK_RANKS = 48;  // of A's layout
static const int64_t PAD_RANKS = 8;
static const int64_t MAX_PAIRS = 128;  // of ranks that an expand rounds; more stay as they are
static const int64_t CHUNK_COLUMNS = 512;  // an item of expand work
static const int64_t ROWS_OF_A_READ = 4;   // reading a rank row once costs about as much as this many rows
static const int64_t MIN_SHARED_WORK = 400000;  // below, waking another thread costs more than it does

struct ShrinkArgs {
    const void* const* x;  // a pointer for each row
    int num_rows;
    bool is_bf16;
    int64_t in_features;
    const void* a;  // the block: [in_features, width], in pairs for bf16
    int64_t width;
    const float* scaling;  // of the block's ranks
    float* s;
    int64_t s_stride;
    float* widened;  // room for [num_rows, in_features]
};

struct ExpandArgs {
    const float* s;  // from the slice's first rank
    int64_t s_stride;
    int num_rows;
    bool is_bf16;
    int64_t rank;
    const void* b;
    int64_t columns;      // of the slice
    int64_t first, last;  // columns of the slice to do, on panels
    void* const* y;       // each row's first column of the slice
};

#define KERNELS "kernels.h"
#include "instruction_sets.h"

static void (*const shrink_of[])(const ShrinkArgs&) = IN_EACH_SET(shrink);
static void (*const expand_of[])(const ExpandArgs&) = IN_EACH_SET(expand);

// `table`, int64: in_features, num_slices, is_bf16, first column of each slice and the end, then a
// record for each slot: address of A (0: no weights), address of the scalings, total rank, and for
// each slice its first rank, its rank and the address of B.
struct Table {
    const int64_t* at;
    int64_t in_features() const { return at[0]; }
    int64_t num_slices() const { return at[1]; }
    bool is_bf16() const { return at[2] != 0; }
    int64_t column(int64_t slice) const { return at[3 + slice]; }
    const int64_t* record(int64_t slot) const {
        return at + 4 + num_slices() + slot * (3 + 3 * num_slices());
    }
};

struct Tile {
    const int64_t* record;
    const int64_t* rows;
    int num_rows;
};

// Memory that a thread keeps from call to call.
struct Scratch {
    char* data = nullptr;
    size_t size = 0;
    ~Scratch() { free(data); }
    bool reserve(size_t bytes) {
        if (bytes <= size) return true;
        free(data);
        size = (bytes + 4095) / 4096 * 4096;
        data = (char*)aligned_alloc(64, size);
        if (data == nullptr) size = 0;
        return data != nullptr;
    }
};

static int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }
static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

struct Job {
    int64_t isa;
    Table table;
    char* y;
    int64_t y_stride;
    const char* x;
    int64_t x_stride;
    int64_t element_size;

    // Blocks have equal numbers of 16 ranks as far as possible; only the last has a part of 16.
    int64_t num_blocks(const Tile& tile) const { return div_up(tile.record[2], BLOCK_RANKS); }

    int64_t num_chunks(int64_t slice) const {
        return div_up(table.column(slice + 1) - table.column(slice), CHUNK_COLUMNS);
    }

    void shrink(const Tile& tile, int64_t block, float* s, int64_t s_stride, float* widened) const {
        const int64_t rank = tile.record[2], in_features = table.in_features();
        const int64_t units = div_up(rank, 16), blocks = num_blocks(tile);
        const int64_t first = units * block / blocks * 16;
        const int64_t last = min(units * (block + 1) / blocks * 16, round_up(rank, PAD_RANKS));
        const int64_t stored = table.is_bf16() ? round_up(in_features, 2) : in_features;
        const void* rows[MAX_TILE_ROWS];
        for (int r = 0; r < tile.num_rows; r++) rows[r] = x + tile.rows[r] * x_stride * element_size;
        ShrinkArgs args;
        args.x = rows;
        args.num_rows = tile.num_rows;
        args.is_bf16 = table.is_bf16();
        args.in_features = in_features;
        args.a = (const char*)tile.record[0] + first * stored * element_size;
        args.width = last - first;
        args.scaling = (const float*)tile.record[1] + first;
        args.s = s + first;
        args.s_stride = s_stride;
        args.widened = widened;
        shrink_of[isa](args);
    }

    void expand(const Tile& tile, int64_t slice, int64_t chunk, const float* s, int64_t s_stride) const {
        const int64_t* part = tile.record + 3 + 3 * slice;
        if (part[1] == 0) return;
        const int64_t column = table.column(slice), columns = table.column(slice + 1) - column;
        void* rows[MAX_TILE_ROWS];
        for (int r = 0; r < tile.num_rows; r++)
            rows[r] = y + (tile.rows[r] * y_stride + column) * element_size;
        ExpandArgs args;
        args.s = s + part[0];
        args.s_stride = s_stride;
        args.num_rows = tile.num_rows;
        args.is_bf16 = table.is_bf16();
        args.rank = part[1];
        args.b = (const void*)part[2];
        args.columns = columns;
        args.first = chunk * CHUNK_COLUMNS;
        args.last = min(args.first + CHUNK_COLUMNS, columns);
        args.y = rows;
        expand_of[isa](args);
    }
};

extern "C" {

// Changes with the layouts and signatures here, and in native_library.py.
int loraplex_abi_version() { return 1; }

// `batch`, int64: number of segments, its indptr (one more), their slots, rows of all segments.
// Strides are in elements. The caller has checked everything. Returns 0, or 1: out of memory.
int64_t loraplex_add_lora(
    int64_t isa, void* y, int64_t y_stride, const void* x, int64_t x_stride, const int64_t* table_words,
    const int64_t* batch, int64_t max_threads) {
    const Table table{table_words};
    const bool is_bf16 = table.is_bf16();
    const Job job{isa, table, (char*)y, y_stride, (const char*)x, x_stride, is_bf16 ? 2 : 4};
    const int64_t num_segments = batch[0];
    const int64_t *indptr = batch + 1, *slots = indptr + num_segments + 1, *rows = slots + num_segments;

    int64_t num_tiles = 0, largest_rank = 0, work = 0;
    for (int64_t i = 0; i < num_segments; i++) {
        const int64_t* record = table.record(slots[i]);
        const int64_t count = indptr[i + 1] - indptr[i];
        if (record[0] == 0 || count == 0) continue;
        num_tiles += div_up(count, MAX_TILE_ROWS);
        if (record[2] > largest_rank) largest_rank = record[2];
        work += record[2] * (count + ROWS_OF_A_READ);
    }
    if (num_tiles == 0) return 0;
    work *= table.in_features() + table.column(table.num_slices()) / table.num_slices();
    const int64_t threads = work < MIN_SHARED_WORK ? 1 : max_threads;

    const int64_t s_stride = round_up(largest_rank, 16), s_size = MAX_TILE_ROWS * s_stride;
    const int64_t widened_size = is_bf16 ? MAX_TILE_ROWS * round_up(table.in_features(), 16) : 0;
    const int64_t tiles_bytes = round_up(num_tiles * sizeof(Tile), 64);
    // With enough tiles each is done whole by one thread: no barrier, and it reads A and B in one go.
    const bool whole_tiles = threads == 1 || num_tiles >= 2 * threads;
    const int64_t num_s = whole_tiles ? threads : num_tiles;
    static thread_local Scratch scratch;
    if (!scratch.reserve(tiles_bytes + (num_s * s_size + threads * widened_size) * sizeof(float))) return 1;
    Tile* const tiles = (Tile*)scratch.data;
    float* const all_s = (float*)(scratch.data + tiles_bytes);
    float* const all_widened = all_s + num_s * s_size;

    const int64_t max_blocks = div_up(largest_rank, BLOCK_RANKS);
    int64_t filled = 0, max_chunks = 0;
    for (int64_t i = 0; i < num_segments; i++) {
        const int64_t* record = table.record(slots[i]);
        const int64_t count = indptr[i + 1] - indptr[i], cuts = div_up(count, MAX_TILE_ROWS);
        if (record[0] == 0) continue;
        for (int64_t cut = 0; cut < cuts; cut++) {
            const int64_t first = count * cut / cuts, last = count * (cut + 1) / cuts;
            tiles[filled++] = Tile{record, rows + indptr[i] + first, (int)(last - first)};
        }
    }
    for (int64_t slice = 0; slice < table.num_slices(); slice++)
        if (job.num_chunks(slice) > max_chunks) max_chunks = job.num_chunks(slice);

    if (whole_tiles) {
        std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            const int64_t thread = omp_get_thread_num();
            float *s = all_s + thread * s_size, *widened = all_widened + thread * widened_size;
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tiles;) {
                for (int64_t block = 0; block < job.num_blocks(tiles[i]); block++)
                    job.shrink(tiles[i], block, s, s_stride, widened);
                for (int64_t slice = 0; slice < table.num_slices(); slice++)
                    for (int64_t chunk = 0; chunk < job.num_chunks(slice); chunk++)
                        job.expand(tiles[i], slice, chunk, s, s_stride);
            }
        }
        return 0;
    }

    const int64_t num_shrinks = num_tiles * max_blocks;
    const int64_t chunks_of_tile = table.num_slices() * max_chunks, num_expands = num_tiles * chunks_of_tile;
    std::atomic<int64_t> next_shrink{0}, next_expand{0};
#pragma omp parallel num_threads(threads)
    {
        float* widened = all_widened + omp_get_thread_num() * widened_size;
        for (int64_t i; (i = next_shrink.fetch_add(1, std::memory_order_relaxed)) < num_shrinks;) {
            const int64_t tile = i / max_blocks, block = i % max_blocks;
            if (block < job.num_blocks(tiles[tile]))
                job.shrink(tiles[tile], block, all_s + tile * s_size, s_stride, widened);
        }
#pragma omp barrier
        for (int64_t i; (i = next_expand.fetch_add(1, std::memory_order_relaxed)) < num_expands;) {
            const int64_t tile = i / chunks_of_tile;
            const int64_t slice = i % chunks_of_tile / max_chunks, chunk = i % max_chunks;
            if (chunk < job.num_chunks(slice))
                job.expand(tiles[tile], slice, chunk, all_s + tile * s_size, s_stride);
        }
    }
    return 0;
}
}
