// Complete rows of blocks of a symmetric matrix whose upper half is stored as in symmetric_bsr.cu: row i gets the transpose of
// every block (j, i) with j < i, before its own blocks. Rows `start` to `stop` are completed at a time. Blocks that mirror those
// of earlier rows wait in lists of rows, columns and blocks, in any order.
//
// The kernels run one after another: the first ones count the blocks of each row, then columns are listed and sorted, and last
// every block goes where its column is. So results do not depend on the order in which threads run.

// upper[row - start] = the stored blocks of a row, lower[column - start] += 1 for each one right of the diagonal whose mirror image
// is in the rows that are completed; the others are counted by `later`. One thread per block row of a slab, which begins at `first`.
__global__ void __launch_bounds__(256) count_mirrored(
    const long long block_rows, const long long first, const long long start, const long long stop,
    const long long* __restrict__ chunk_offsets, const int* __restrict__ column_indices, int* upper, int* lower, int* later)
{
    constexpr int height = 32;
    const long long position = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (position >= block_rows) return;
    const long long row = first + position, end = chunk_offsets[position / height + 1];
    int own = 0, waiting = 0;
    for (long long slot = chunk_offsets[position / height] + position % height; slot < end; slot += height) {
        const int column = column_indices[slot];
        if (column < 0) continue;
        ++own;
        if (column <= row) continue;
        if (column < stop)
            atomicAdd(lower + (column - start), 1);
        else
            ++waiting;
    }
    upper[row - start] = own;
    if (waiting) atomicAdd(later, waiting);
}

// The same for blocks that wait. Those of rows from `stop` on are left out: they go on waiting. One thread per block.
__global__ void __launch_bounds__(256) count_waiting(
    const long long count, const long long start, const long long stop, const int* __restrict__ rows, int* lower)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && rows[i] < stop) atomicAdd(lower + (rows[i] - start), 1);
}

// Lists the columns of a slab's blocks, and of their mirror images in the rows that are completed; `placed`, zero before, counts the
// latter. One thread per block row.
__global__ void __launch_bounds__(256) list_mirrored(
    const long long block_rows, const long long first, const long long start, const long long stop,
    const long long* __restrict__ chunk_offsets, const int* __restrict__ column_indices, const long long* __restrict__ offsets,
    const int* __restrict__ lower, int* placed, int* __restrict__ columns)
{
    constexpr int height = 32;
    const long long position = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (position >= block_rows) return;
    const long long row = first + position, end = chunk_offsets[position / height + 1];
    int* own = columns + offsets[row - start] + lower[row - start];
    for (long long slot = chunk_offsets[position / height] + position % height; slot < end; slot += height) {
        const int column = column_indices[slot];
        if (column < 0) continue;
        *own++ = column;
        if (column > row && column < stop)
            columns[offsets[column - start] + atomicAdd(placed + (column - start), 1)] = int(row);
    }
}

// Lists the columns of the blocks that have waited for the rows that are completed. One thread per block.
__global__ void __launch_bounds__(256) list_waiting(
    const long long count, const long long start, const long long stop, const int* __restrict__ rows,
    const int* __restrict__ of_column, const long long* __restrict__ offsets, int* placed, int* __restrict__ columns)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && rows[i] < stop)
        columns[offsets[rows[i] - start] + atomicAdd(placed + (rows[i] - start), 1)] = of_column[i];
}

// Sorts the columns left of the diagonal, by Shell's method with the gaps of Knuth (1973). One thread per row: there are a dozen in
// the rows of meshes, and a row of 100,000 takes some tens of milliseconds.
__global__ void __launch_bounds__(256) sort_mirrored(
    const long long rows, const long long* __restrict__ offsets, const int* __restrict__ lower, int* columns)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    int *own = columns + offsets[row], count = lower[row], gap = 1;
    while (gap < count / 9) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (int i = gap; i < count; ++i) {
            const int column = own[i];
            int place = i;
            for (; place >= gap && own[place - gap] > column; place -= gap) own[place] = own[place - gap];
            own[place] = column;
        }
}

// Copies the blocks of a slab to their rows, and transposed to those that they mirror, or to the end of the list of those that
// wait; `listed`, zero before, counts these. Value, exponents and corrections are those of symmetric_bsr.cu. One thread per block
// row; the 32 blocks of a slot are exchanged in shared memory, so that neighbouring lanes write neighbouring scalars.
template <typename Value, int size>
__global__ void __launch_bounds__(64) copy_mirrored(
    const long long block_rows, const long long first, const long long start, const long long stop,
    const long long* __restrict__ chunk_offsets, const int* __restrict__ column_indices, const Value* __restrict__ values,
    const unsigned char* __restrict__ exponents, const float* __restrict__ corrections, const int corrected,
    const long long* __restrict__ offsets, const int* __restrict__ lower, const int* __restrict__ columns,
    double* __restrict__ blocks, int* listed, int* __restrict__ waiting_rows, int* __restrict__ waiting_columns,
    double* __restrict__ waiting_blocks)
{
    constexpr int height = 32, area = size * size;
    __shared__ double all_scalars[2][height][area + 1 - area % 2];  // of an odd length, so that lanes use different banks
    __shared__ double* all_targets[2][2][height];  // of the blocks, and of their mirror images
    const long long position = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const int warp = threadIdx.x / height, lane = threadIdx.x % height;
    if (position - lane >= block_rows) return;  // all 32 lanes together
    const long long row = first + position, end = chunk_offsets[position / height + 1];
    double* own = position < block_rows ? blocks + (offsets[row - start] + lower[row - start]) * area : nullptr;
    for (long long slot = chunk_offsets[position / height] + lane; slot < end; slot += height) {
        const int column = position < block_rows ? column_indices[slot] : -1;
        double* mirrored = nullptr;
        if (column > row && column < stop) {
            const long long from = offsets[column - start];
            mirrored = blocks + place_of(int(row), columns, from, from + lower[column - start]) * area;
        } else if (column > row) {
            const int place = atomicAdd(listed, 1);
            waiting_rows[place] = column;
            waiting_columns[place] = int(row);
            mirrored = waiting_blocks + (long long)place * area;
        }
        all_targets[warp][0][lane] = column < 0 ? nullptr : own;
        all_targets[warp][1][lane] = mirrored;
        const Value* stored = values + (slot - lane) * area + lane;
        const double scale = scale_of_block<Value>(exponents + slot);
#pragma unroll
        for (int e = 0; e < area; ++e) {
            const double more = corrected && column == row ? double(corrections[position * area + e]) : 0.0;
            all_scalars[warp][lane][e] = scale * double(PENSTOCK_STREAM_LOAD(stored + (long long)e * height)) + more;
        }
        PENSTOCK_SYNC_GROUP();
#pragma unroll
        for (int k = 0; k < area; ++k) {
            const int block = (k * height + lane) / area, e = (k * height + lane) % area;
            double *to = all_targets[warp][0][block], *transposed = all_targets[warp][1][block];
            if (to) to[e] = all_scalars[warp][block][e];
            if (transposed) transposed[e] = all_scalars[warp][block][e % size * size + e / size];
        }
        PENSTOCK_SYNC_GROUP();
        if (column >= 0) own += area;
    }
}

// Copies blocks that have waited to the rows that are completed. One thread per block.
template <int size>
__global__ void __launch_bounds__(256) copy_waiting(
    const long long count, const long long start, const long long stop, const int* __restrict__ rows,
    const int* __restrict__ of_column, const double* __restrict__ waiting, const long long* __restrict__ offsets,
    const int* __restrict__ lower, const int* __restrict__ columns, double* __restrict__ blocks)
{
    constexpr int area = size * size;
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count || rows[i] >= stop) return;
    const long long from = offsets[rows[i] - start];
    double* target = blocks + place_of(of_column[i], columns, from, from + lower[rows[i] - start]) * area;
    for (int e = 0; e < area; ++e) target[e] = waiting[i * area + e];
}
