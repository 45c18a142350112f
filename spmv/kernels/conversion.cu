// Converts compressed sparse rows to other formats. Template parameters: Value, the type stored; Source, that of the CSR
// values; Offset, that of the CSR row offsets.

// Copies each row of a CSR matrix into slots: entry s of the row at position p goes to
// chunk_offsets[p / height] + p % height + s * height.
// Eight lanes per row read neighbouring entries, and four rows of a warp write neighbouring slots. Slots past the row's end
// were filled with column -1 and value 0 before; entries past the width are left out. Launch: 8 threads per row, rounded up.
template <typename Value, typename Source, typename Offset>
__global__ void __launch_bounds__(256) fill_slots(
    const long long rows, const long long height, const Offset* __restrict__ row_offsets,
    const int* __restrict__ source_columns, const Source* __restrict__ source_values, const int permuted,
    const int* __restrict__ permutation, const long long* __restrict__ chunk_offsets, int* __restrict__ column_indices, Value* __restrict__ values)
{
    const long long position = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 8;
    if (position >= rows) return;
    const long long row = permuted ? (long long)permutation[position] : position, chunk = position / height;
    const long long base = chunk_offsets[chunk] + position % height, stop = chunk_offsets[chunk + 1];
    const long long start = row_offsets[row], length = (long long)row_offsets[row + 1] - start;
    for (long long slot = threadIdx.x % 8; slot < length && base + slot * height < stop; slot += 8) {
        column_indices[base + slot * height] = source_columns[start + slot];
        values[base + slot * height] = Value(source_values[start + slot]);
    }
}

// The blocks of one block row, in ascending order of their columns, by eight lanes that merge its scalar rows:
// lane r < size walks along row r. `visit(slot, column, lane's first entry, its end)` is called by all lanes for each block
// whose column is not below `lowest`. Returns the number of blocks.
template <int size, typename Offset, typename Visit>
__device__ __forceinline__ int merge_rows(
    const bool exists, const long long block_row, const long long lowest, const Offset* __restrict__ row_offsets,
    const int* __restrict__ source_columns, Visit visit)
{
    const int r = threadIdx.x % 8;
    const bool walks = exists && r < size;
    long long entry = walks ? (long long)row_offsets[block_row * size + r] : 0;
    const long long stop = walks ? (long long)row_offsets[block_row * size + r + 1] : 0;
    constexpr int none = 2147483647;
    int blocks = 0;
    while (true) {
        const int mine = entry < stop ? source_columns[entry] / size : none;
        int column = mine;
        for (int by = 4; by > 0; by /= 2) {
            const int other = PENSTOCK_SHUFFLE(column, r ^ by, 8);
            column = other < column ? other : column;
        }
        // The four groups of a warp continue together, since all its lanes must reach the shuffles.
        int busy = column != none;
        for (int by = 16; by > 7; by /= 2) busy |= PENSTOCK_SHUFFLE(busy, (threadIdx.x % 32) ^ by, 32);
        if (!busy) return blocks;
        long long end = entry;
        if (mine == column && column != none)
            while (end < stop && source_columns[end] / size == column) ++end;
        if (column != none && column >= lowest) visit(blocks++, column, entry, end);
        entry = end;
    }
}

// Counts the blocks of each block row; with `upper`, not those left of the diagonal. Launch: 8 threads per block row.
template <typename Offset, int size>
__global__ void __launch_bounds__(256) count_blocks(
    const long long block_rows, const int upper, const Offset* __restrict__ row_offsets,
    const int* __restrict__ source_columns, long long* __restrict__ counts)
{
    const long long block_row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const int blocks = merge_rows<size>(block_row < block_rows, block_row, upper ? block_row : 0, row_offsets, source_columns,
                                        [](int, int, long long, long long) {});
    if (block_row < block_rows && threadIdx.x % 8 == 0) counts[block_row] = blocks;
}

// Copies the blocks of each block row into chunks of `height` interleaved block rows, as sell.cu reads them; a height of 1
// is BSR. column_indices were filled with -1 and values with 0 before. Launch: 8 threads per block row.
template <typename Value, typename Source, typename Offset, int size>
__global__ void __launch_bounds__(256) fill_blocks(
    const long long block_rows, const int upper, const long long height, const Offset* __restrict__ row_offsets,
    const int* __restrict__ source_columns, const Source* __restrict__ source_values, const int permuted,
    const int* __restrict__ permutation, const long long* __restrict__ chunk_offsets, int* __restrict__ column_indices, Value* __restrict__ values)
{
    const long long position = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const bool exists = position < block_rows;
    const int r = threadIdx.x % 8;
    const long long block_row = exists && permuted ? (long long)permutation[position] : position;
    const long long first = exists ? chunk_offsets[position / height] : 0, place = position % height;
    merge_rows<size>(exists, block_row, upper ? block_row : 0, row_offsets, source_columns,
        [&](const int slot, const int column, const long long start, const long long end) {
            if (r == 0) column_indices[first + slot * height + place] = column;
            for (long long entry = start; entry < end; ++entry) {
                const int c = source_columns[entry] - column * size;
                values[first * (size * size) + ((slot * size + r) * (long long)size + c) * height + place] =
                    Value(source_values[entry]);
            }
        });
}

// Adds to *count the entries whose mirror image is missing or differs. Launch: one thread per row, rounded up.
template <typename Source, typename Offset>
__global__ void __launch_bounds__(256) count_asymmetric(
    const long long rows, const Offset* __restrict__ row_offsets, const int* __restrict__ source_columns,
    const Source* __restrict__ source_values, int* __restrict__ count)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    int found = 0;
    for (long long entry = row_offsets[row]; entry < row_offsets[row + 1]; ++entry) {
        long long low = row_offsets[source_columns[entry]];
        const long long stop = row_offsets[source_columns[entry] + 1];
        for (long long high = stop; low < high;) {
            const long long middle = (low + high) / 2;
            if (source_columns[middle] < row) low = middle + 1;
            else high = middle;
        }
        found += low == stop || source_columns[low] != row || source_values[low] != source_values[entry];
    }
    if (found) atomicAdd(count, found);
}
