// Compressed sparse rows. Template parameters: Value, the stored type; Vector, that of x and out; Offset, of the row
// offsets. Sums are formed in double.

// The sum of one lane over its part of a row: every `lanes`-th entry. Four are loaded before the first is used, so that
// enough bytes are in flight; the first product is formed while the rest still loads, and each lane sums sequentially
// before lanes are combined (first add during load and algorithm cascading, Zhang, Li and Jiang 2019).
template <int lanes, typename Value, typename Vector, typename Offset>
__device__ __forceinline__ double lane_sum(
    const long long row, const int lane, const Offset* __restrict__ row_offsets, const int* __restrict__ column_indices,
    const Value* __restrict__ values, const Vector* __restrict__ x)
{
    constexpr int batch = 4;
    const long long stop = row_offsets[row + 1];
    double total = 0.0;
    for (long long entry = row_offsets[row] + lane; entry < stop; entry += lanes * batch) {
        int column[batch];
        Value value[batch];
#pragma unroll
        for (int b = 0; b < batch; ++b) {
            const bool stored = entry + b * lanes < stop;
            column[b] = stored ? PENSTOCK_STREAM_LOAD(column_indices + entry + b * lanes) : -1;
            value[b] = stored ? PENSTOCK_STREAM_LOAD(values + entry + b * lanes) : Value(0);
        }
#pragma unroll
        for (int b = 0; b < batch; ++b)
            if (column[b] >= 0) total += double(value[b]) * double(x[column[b]]);
    }
    return total;
}

// out = alpha A x + beta out, with `lanes` neighbouring lanes on one row (Bell and Garland 2008, the vector kernel; one
// lane is their scalar kernel). Launch: one thread per lane, rows * lanes threads rounded up to whole blocks.
// Reads (sizeof(Value) + 4) bytes per entry and sizeof(Offset) per row, gathers x, writes out.
template <typename Value, typename Vector, typename Offset, int lanes>
__global__ void __launch_bounds__(512) csr_spmv(
    const long long rows, const Offset* __restrict__ row_offsets, const int* __restrict__ column_indices,
    const Value* __restrict__ values, const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha,
    const double beta)
{
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    const int lane = threadIdx.x % lanes;
    double total = 0.0;  // no early return: every lane must reach the shuffles
    if (row < rows) total = lane_sum<lanes>(row, lane, row_offsets, column_indices, values, x);
    total = sum_over_lanes<lanes>(total);
    if (row < rows && lane == 0) store_product(out + row, total, alpha, beta);
}

// Like csr_spmv, with lanes combined through shared memory instead of shuffles, for comparison as in hypre. The order of
// summation is that of csr_spmv, so the bits agree. Blocks of 256 threads.
template <typename Value, typename Vector, typename Offset, int lanes>
__global__ void __launch_bounds__(256) csr_spmv_shared(
    const long long rows, const Offset* __restrict__ row_offsets, const int* __restrict__ column_indices,
    const Value* __restrict__ values, const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha,
    const double beta)
{
    __shared__ double part[256];
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    const int lane = threadIdx.x % lanes;
    part[threadIdx.x] = row < rows ? lane_sum<lanes>(row, lane, row_offsets, column_indices, values, x) : 0.0;
#pragma unroll
    for (int by = lanes / 2; by > 0; by /= 2) {
        __syncthreads();
        if (lane < by) part[threadIdx.x] += part[threadIdx.x + by];
    }
    if (row < rows && lane == 0) store_product(out + row, part[threadIdx.x], alpha, beta);
}

// out = alpha A x + beta out, load-balanced: a block of 256 threads processes `csr_tile` steps of the merge of row ends
// with entries (Merrill and Garland 2016), so neither one very long row nor many empty ones delay it. tile_rows[] counts the
// rows that have ended before each tile; the other steps before it were entries. Products go through shared memory; a thread
// sums a short row, a warp a long one. For a row that began in an earlier block, or continues in the next, the partial sum is
// left in head[] or tail[] for csr_join_tiles. Launch: ceil((rows + entries) / csr_tile) blocks.
constexpr int csr_tile = 2048, csr_short_row = 48;

template <typename Value, typename Vector, typename Offset>
__global__ void __launch_bounds__(256) csr_spmv_balanced(
    const long long rows, const long long entries, const Offset* __restrict__ row_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, const Vector* __restrict__ x,
    Vector* __restrict__ out, const long long* __restrict__ tile_rows, double* __restrict__ tail,
    double* __restrict__ head, const double alpha, const double beta)
{
    __shared__ double product[csr_tile];
    __shared__ int long_rows[csr_tile / csr_short_row + 2], long_count;
    const long long steps = rows + entries, begin = (long long)blockIdx.x * csr_tile;
    const long long end = begin + csr_tile < steps ? begin + csr_tile : steps;
    if (threadIdx.x == 0) long_count = 0;
    const long long first_row = tile_rows[blockIdx.x], last_row = tile_rows[blockIdx.x + 1];
    const long long first = begin - first_row, last = end - last_row;

    constexpr int batch = csr_tile / 256;
    int column[batch];
    Value value[batch];
#pragma unroll
    for (int b = 0; b < batch; ++b) {
        const long long entry = first + b * 256 + (int)threadIdx.x;
        column[b] = entry < last ? PENSTOCK_STREAM_LOAD(column_indices + entry) : -1;
        value[b] = entry < last ? PENSTOCK_STREAM_LOAD(values + entry) : Value(0);
    }
#pragma unroll
    for (int b = 0; b < batch; ++b)
        if (column[b] >= 0) product[b * 256 + threadIdx.x] = double(value[b]) * double(x[column[b]]);
    __syncthreads();

    // Rows first_row to last_row - 1 end here; last_row, if some of its entries are here, continues in the next block.
    const int count = int(last_row - first_row) + (last_row < rows ? 1 : 0);
    for (int k = threadIdx.x; k < count; k += 256) {
        const long long row = first_row + k, row_start = row_offsets[row], row_stop = row_offsets[row + 1];
        const int start = int((row_start > first ? row_start : first) - first);
        const int stop = int((row_stop < last ? row_stop : last) - first);
        if (stop - start > csr_short_row) {
            long_rows[atomicAdd(&long_count, 1)] = k;
            continue;
        }
        double total = 0.0;
        for (int i = start; i < stop; ++i) total += product[i];
        if (row == last_row) tail[blockIdx.x] = total;
        else if (row_start < first) head[blockIdx.x] = total;
        else store_product(out + row, total, alpha, beta);
    }
    __syncthreads();
    for (int k = threadIdx.x / 32; k < long_count; k += 8) {
        const long long row = first_row + long_rows[k], row_start = row_offsets[row], row_stop = row_offsets[row + 1];
        const int start = int((row_start > first ? row_start : first) - first);
        const int stop = int((row_stop < last ? row_stop : last) - first);
        double total = 0.0;
        for (int i = start + int(threadIdx.x % 32); i < stop; i += 32) total += product[i];
        total = sum_over_lanes<32>(total);
        if (threadIdx.x % 32 == 0) {
            if (row == last_row) tail[blockIdx.x] = total;
            else if (row_start < first) head[blockIdx.x] = total;
            else store_product(out + row, total, alpha, beta);
        }
    }
}

// Completes the rows that csr_spmv_balanced cut, given by the numbers of the tiles in which they begin: a warp sums the parts
// of each, in an order that depends only on the matrix. Launch: 32 threads per row, rounded up to whole blocks.
template <typename Vector, typename Offset>
__global__ void __launch_bounds__(256) csr_join_tiles(
    const long long cut_rows, const Offset* __restrict__ row_offsets, const long long* __restrict__ tile_rows,
    const long long* __restrict__ first_tiles, const double* __restrict__ tail, const double* __restrict__ head,
    Vector* __restrict__ out, const double alpha, const double beta)
{
    const long long number = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (number >= cut_rows) return;  // all 32 lanes together
    const int lane = threadIdx.x % 32;
    const long long tile = first_tiles[number], row = tile_rows[tile + 1];
    const long long last_tile = ((long long)row_offsets[row + 1] + row) / csr_tile;  // in which the row ends
    double total = 0.0;
    for (long long t = tile + lane; t < last_tile; t += 32) total += tail[t];
    total = sum_over_lanes<32>(total);
    if (lane == 0) store_product(out + row, total + head[last_tile], alpha, beta);
}

// out = alpha A x + beta out for a C-ordered block of vectors: one thread per entry of out, so that neighbouring
// threads read neighbouring columns of the same row of x. Launch: rows * columns threads rounded up to whole blocks.
template <typename Value, typename Vector, typename Offset>
__global__ void __launch_bounds__(256) csr_spmm(
    const long long rows, const long long columns, const Offset* __restrict__ row_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, const Vector* __restrict__ x,
    Vector* __restrict__ out, const double alpha, const double beta)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = thread / columns, column = thread % columns;
    if (row >= rows) return;
    double total = 0.0;
    for (long long entry = row_offsets[row]; entry < row_offsets[row + 1]; ++entry)
        total += double(values[entry]) * double(x[column_indices[entry] * columns + column]);
    store_product(out + thread, total, alpha, beta);
}

// Copies the dense blocks on the diagonal into blocks[][size][size], zeroed before. One thread per row of the slab, whose
// row 0 is row `first_row` of the whole matrix.
template <typename Value, typename Vector, typename Offset>
__global__ void __launch_bounds__(256) csr_diagonal_blocks(
    const long long rows, const long long first_row, const long long size, const Offset* __restrict__ row_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, Vector* __restrict__ blocks)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const long long block = (first_row + row) / size, r = (first_row + row) % size;
    for (long long entry = row_offsets[row]; entry < row_offsets[row + 1]; ++entry) {
        const long long c = column_indices[entry] - block * size;
        if (c >= 0 && c < size) blocks[(block * size + r) * size + c] = Vector(values[entry]);
    }
}
