// SELL-C-sigma (Kreutzer et al. 2014) and its blocked form, sliced BSR: chunks of `height` (block) rows, interleaved so that
// neighbouring threads, one per row, read neighbouring memory. Scalar (r, c) of the block in slot s of position p is at
// values[chunk_offsets[chunk] * size * size + ((s * size + r) * size + c) * height + p], its column at
// column_indices[chunk_offsets[chunk] + s * height + p]; -1 is padding and is never multiplied.
// Template parameters: Value, the stored type; Vector, that of x and out; size, scalars on a side of a block (1 for SELL).
// Sums are formed in double, slot after slot, so their order does not depend on the chunk or the permutation.

// Row of the matrix at a position of the storage; the natural order if it is not permuted.
__device__ __forceinline__ long long stored_row(const int permuted, const int* __restrict__ permutation, const long long position)
{
    return permuted ? (long long)permutation[position] : position;
}

// out = alpha A x + beta out, one thread per (block) row. `batch` slots are loaded before the first is used, so that enough
// bytes are in flight. Launch: one thread per row, rounded up to whole blocks.
// Reads sizeof(Value) * size * size + 4 bytes per stored block, padding included, gathers x, writes out.
template <typename Value, typename Vector, int size, int batch>
__global__ void __launch_bounds__(256) sell_spmv(
    const long long rows, const int height, const long long* __restrict__ chunk_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, const int permuted,
    const int* __restrict__ permutation, const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha, const double beta)
{
    const long long position = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (position >= rows) return;
    const long long chunk = position / height, first = chunk_offsets[chunk];
    const int width = int((chunk_offsets[chunk + 1] - first) / height), lane = int(position % height);
    const int* columns = column_indices + first + lane;
    const Value* blocks = values + first * (size * size) + lane;
    double total[size] = {};
    for (int slot = 0; slot < width; slot += batch) {
        int column[batch];
        Value value[batch][size * size];
#pragma unroll
        for (int b = 0; b < batch; ++b) {
            const bool stored = slot + b < width;
            column[b] = stored ? PENSTOCK_STREAM_LOAD(columns + (long long)b * height) : -1;
#pragma unroll
            for (int e = 0; e < size * size; ++e)
                value[b][e] = stored ? PENSTOCK_STREAM_LOAD(blocks + (long long)(b * size * size + e) * height) : Value(0);
        }
        columns += (long long)batch * height;
        blocks += (long long)batch * size * size * height;
#pragma unroll
        for (int b = 0; b < batch; ++b) {
            if (column[b] < 0) continue;
            const Vector* part_of_x = x + (long long)column[b] * size;
#pragma unroll
            for (int c = 0; c < size; ++c) {
                const double xc = double(part_of_x[c]);
#pragma unroll
                for (int r = 0; r < size; ++r) total[r] += double(value[b][r * size + c]) * xc;
            }
        }
    }
    const long long row = stored_row(permuted, permutation, position) * size;
#pragma unroll
    for (int r = 0; r < size; ++r) store_product(out + row + r, total[r], alpha, beta);
}

// Like sell_spmv with `lanes` lanes per row, for matrices with few long rows: lane t processes every lanes-th slot from t on;
// lanes are combined through shared memory in a fixed order. The lanes of a chunk stand apart by its height, so that neighbouring
// threads still read neighbouring memory. Launch: blocks of height * lanes threads, at most 1024, one per chunk.
template <typename Value, typename Vector>
__global__ void __launch_bounds__(1024) sell_spmv_lanes(
    const long long rows, const int height, const int lanes, const long long* __restrict__ chunk_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, const int permuted,
    const int* __restrict__ permutation, const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha, const double beta)
{
    __shared__ double part[1024];
    const int place = threadIdx.x % height, lane = threadIdx.x / height;
    const long long chunk = blockIdx.x, first = chunk_offsets[chunk], stop = chunk_offsets[chunk + 1];
    double total = 0.0;
#pragma unroll 4
    for (long long entry = first + (long long)lane * height + place; entry < stop; entry += (long long)lanes * height) {
        const int column = PENSTOCK_STREAM_LOAD(column_indices + entry);
        const double value = double(PENSTOCK_STREAM_LOAD(values + entry));
        if (column >= 0) total += value * double(x[column]);
    }
    part[threadIdx.x] = total;
    for (int by = lanes / 2; by > 0; by /= 2) {
        __syncthreads();
        if (lane < by) part[threadIdx.x] += part[threadIdx.x + by * height];
    }
    const long long position = chunk * height + place;
    if (lane == 0 && position < rows) store_product(out + stored_row(permuted, permutation, position), part[threadIdx.x], alpha, beta);
}

// out = alpha A x + beta out for `columns` columns, from `first_column` on, of a C-ordered block of vectors whose rows are
// `stride` apart. The matrix is read once for all of them.
//
// A lane holds `vectors` columns of `rows_per_lane` neighbouring (block) rows; columns / vectors lanes share those rows and
// together read whole lines of x. Each group of 32 lanes processes its part of a chunk independently: values and column indices
// come through shared memory by asynchronous copies, `slots` slots per stage, stages - 1 stages ahead; rows of x come through
// the first-level cache, which the values bypass. That cache limits the kernel: every load of x that touches n lines occupies
// it for n cycles, every value that it delivers for one.
// Launch: 32 threads for (32 * vectors / columns) * rows_per_lane rows, in blocks of `threads`; that many rows divide the
// height. Pointers, first_column and stride keep packs of min(vectors * sizeof(Vector), 16) bytes aligned.
// With `plain`, the height is 32 and the stride is `columns`, known to the compiler: addresses then cost half as much.
template <typename Value, typename Vector, int size, int columns, int vectors, int rows_per_lane, int slots, int stages, int threads, bool plain>
__global__ void __launch_bounds__(threads) sell_spmm(
    const long long rows, const int any_height, const long long first_column, const long long any_stride,
    const long long* __restrict__ chunk_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, const int permuted,
    const int* __restrict__ permutation, const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha, const double beta)
{
    const int height = plain ? 32 : any_height;
    const unsigned stride = plain ? columns : unsigned(any_stride), block_stride = size * stride;
    constexpr int lanes = columns / vectors, group_rows = 32 / lanes * rows_per_lane, scalars = size * size;
    constexpr int pack = vectors * sizeof(Vector) > 16 ? 16 / sizeof(Vector) : vectors, packs = vectors / pack;
    using Columns = Pack<Vector, pack>;
    // How a stage is copied: pieces of at most 16 bytes, neighbouring rows together.
    constexpr int value_piece = group_rows * sizeof(Value) < 16 ? group_rows * sizeof(Value) : 16;
    constexpr int index_piece = group_rows * sizeof(int) < 16 ? group_rows * sizeof(int) : 16;
    constexpr int values_each = value_piece / sizeof(Value), indices_each = index_piece / sizeof(int);
    constexpr int pieces = group_rows / values_each, index_pieces = group_rows / indices_each;
    // Values of neighbouring rows per load from shared memory.
    constexpr int together = rows_per_lane * sizeof(Value) > 16 ? 16 / sizeof(Value) : rows_per_lane;
    alignas(16) __shared__ Value staged_values[threads / 32][stages][slots * scalars * group_rows];
    alignas(16) __shared__ int staged_columns[threads / 32][stages][slots * group_rows];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / lanes, place = lane % lanes;
    const long long first_position = ((long long)blockIdx.x * (threads / 32) + warp) * group_rows;
    if (first_position >= rows) return;  // all 32 lanes together
    const long long chunk = first_position / height, first = chunk_offsets[chunk];
    const int width = int((chunk_offsets[chunk + 1] - first) / height), rounds = (width + slots - 1) / slots;
    const int* source_columns = column_indices + first + first_position % height;
    const Value* source_values = values + first * scalars + first_position % height;

    auto copy_stage = [&](const int round) {
        if (round < rounds) {
            const int first_slot = round * slots;
            Value* target = staged_values[warp][round % stages];
#pragma unroll
            for (int base = 0; base < slots * scalars * pieces; base += 32) {
                const int piece = base + lane, scalar = piece / pieces, at = piece % pieces * values_each;
                if (piece < slots * scalars * pieces && first_slot + scalar / scalars < width)
                    PENSTOCK_COPY_ASYNC(value_piece, target + scalar * group_rows + at,
                                        source_values + ((long long)first_slot * scalars + scalar) * height + at);
            }
#pragma unroll
            for (int base = 0; base < slots * index_pieces; base += 32) {
                const int piece = base + lane, slot = piece / index_pieces, at = piece % index_pieces * indices_each;
                if (piece < slots * index_pieces && first_slot + slot < width)
                    PENSTOCK_COPY_ASYNC(index_piece, staged_columns[warp][round % stages] + slot * group_rows + at,
                                        source_columns + (long long)(first_slot + slot) * height + at);
            }
        }
        PENSTOCK_COPY_COMMIT();
    };
#pragma unroll
    for (int round = 0; round < stages - 1; ++round) copy_stage(round);

    double total[rows_per_lane][size][vectors] = {};
    const Vector* lane_x = x + first_column + place * pack;
    for (int round = 0; round < rounds; ++round) {
        PENSTOCK_COPY_WAIT(stages - 2);
        PENSTOCK_SYNC_GROUP();
        Pack<int, rows_per_lane> column[slots];
        Columns part_of_x[slots][rows_per_lane][size][packs];
#pragma unroll
        for (int slot = 0; slot < slots; ++slot) {
            column[slot] = *(const Pack<int, rows_per_lane>*)&staged_columns[warp][round % stages]
                                                               [slot * group_rows + group * rows_per_lane];
#pragma unroll
            for (int q = 0; q < rows_per_lane; ++q) {
                if (round * slots + slot >= width) column[slot].number[q] = -1;
                if (column[slot].number[q] < 0) continue;
                const Vector* row_of_x = lane_x + (unsigned long long)unsigned(column[slot].number[q]) * block_stride;
#pragma unroll
                for (int c = 0; c < size; ++c)
#pragma unroll
                    for (int p = 0; p < packs; ++p)
                        part_of_x[slot][q][c][p] = *(const Columns*)(row_of_x + c * stride + p * lanes * pack);
            }
        }
        copy_stage(round + stages - 1);
#pragma unroll
        for (int slot = 0; slot < slots; ++slot)
#pragma unroll
            for (int r = 0; r < size; ++r)
#pragma unroll
                for (int c = 0; c < size; ++c) {
                    const Value* place_of_a = &staged_values[warp][round % stages]
                        [(slot * scalars + r * size + c) * group_rows + group * rows_per_lane];
                    Pack<Value, together> a[rows_per_lane / together];
#pragma unroll
                    for (int part = 0; part < rows_per_lane / together; ++part)
                        a[part] = *(const Pack<Value, together>*)(place_of_a + part * together);
#pragma unroll
                    for (int q = 0; q < rows_per_lane; ++q) {
                        if (column[slot].number[q] >= 0)  // `continue` here costs 40 % of the speed of scalars on an H200
#pragma unroll
                        for (int v = 0; v < vectors; ++v)
                            total[q][r][v] += double(a[q / together].number[q % together]) * double(part_of_x[slot][q][c][v / pack].number[v % pack]);
                    }
                }
    }
#pragma unroll
    for (int q = 0; q < rows_per_lane; ++q) {
        const long long position = first_position + group * rows_per_lane + q;
        if (position >= rows) continue;
        const long long row = stored_row(permuted, permutation, position) * size;
#pragma unroll
        for (int r = 0; r < size; ++r)
#pragma unroll
            for (int p = 0; p < packs; ++p) {
                Columns* target = (Columns*)(out + (row + r) * (long long)stride + first_column + place * pack + p * lanes * pack);
                Columns result;
                if (beta != 0.0) result = *target;
#pragma unroll
                for (int v = 0; v < pack; ++v)
                    store_product(result.number + v, total[q][r][p * pack + v], alpha, beta);
                *target = result;
            }
    }
}

// Like sell_spmm for any number of columns and any alignment: one thread per column of a (block) row, neighbouring threads on
// neighbouring columns. Launch: rows * columns threads rounded up to whole blocks.
template <typename Value, typename Vector, int size>
__global__ void __launch_bounds__(256) sell_spmm_any(
    const long long rows, const int height, const long long columns, const long long first_column, const long long stride,
    const long long* __restrict__ chunk_offsets, const int* __restrict__ column_indices, const Value* __restrict__ values,
    const int permuted, const int* __restrict__ permutation, const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha,
    const double beta)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long position = thread / columns, k = first_column + thread % columns;
    if (position >= rows) return;
    const long long chunk = position / height, first = chunk_offsets[chunk], stop = chunk_offsets[chunk + 1];
    double total[size] = {};
    for (long long entry = first + position % height; entry < stop; entry += height) {
        const long long column = column_indices[entry];
        if (column < 0) continue;
        const Value* block = values + (entry - position % height) * (size * size) + position % height;
#pragma unroll
        for (int c = 0; c < size; ++c) {
            const double xc = double(x[(column * size + c) * stride + k]);
#pragma unroll
            for (int r = 0; r < size; ++r) total[r] += double(block[(long long)(r * size + c) * height]) * xc;
        }
    }
    const long long row = stored_row(permuted, permutation, position) * size;
#pragma unroll
    for (int r = 0; r < size; ++r) store_product(out + (row + r) * stride + k, total[r], alpha, beta);
}
