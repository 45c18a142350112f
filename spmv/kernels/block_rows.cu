// Rows of sparse matrices of blocks: what belongs to which row, transposes, and the halves of symmetric matrices.

// numbers[entry] = the row of an entry, from 0. One thread per entry.
__global__ void __launch_bounds__(256) number_rows(
    const long long entries, const long long rows, const long long* __restrict__ offsets, long long* __restrict__ numbers)
{
    const long long entry = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (entry >= entries) return;
    long long low = 0, high = rows;  // the row is at least low, and less than high
    while (high - low > 1) {
        const long long middle = low + (high - low) / 2;
        if (offsets[middle] <= entry) low = middle; else high = middle;
    }
    numbers[entry] = low;
}

// offsets[key] = the first place of a key or a larger one among sorted keys, keys[order[place]]. One thread per key from 0 to
// `groups`, whose place is the end.
__global__ void __launch_bounds__(256) begin_groups(
    const long long entries, const long long groups, const int* __restrict__ keys, const long long* __restrict__ order,
    long long* __restrict__ offsets)
{
    const long long key = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (key > groups) return;
    long long low = 0, high = entries;
    while (low < high) {
        const long long middle = low + (high - low) / 2;
        if (keys[order[middle]] < key) low = middle + 1; else high = middle;
    }
    offsets[key] = low;
}

// out[place] = rows[order[place]]. One thread per place.
__global__ void __launch_bounds__(256) order_rows(
    const long long entries, const long long* __restrict__ order, const long long* __restrict__ rows, int* __restrict__ out)
{
    const long long place = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (place < entries) out[place] = int(rows[order[place]]);
}

// The transposes (wide, tall) of blocks (tall, wide) in an order. One thread per scalar.
template <typename Value>
__global__ void __launch_bounds__(256) transpose_blocks(
    const long long scalars, const int tall, const int wide, const long long* __restrict__ order,
    const Value* __restrict__ blocks, Value* __restrict__ out)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= scalars) return;
    const int area = tall * wide, e = int(i % area);
    out[i] = blocks[order[i / area] * area + e % tall * wide + e / tall];
}

// counts[row] = the blocks of a complete row: those left of the diagonal of `lower`, whose columns end at it, and all of `upper`.
// One thread per row.
__global__ void __launch_bounds__(256) count_halves(
    const long long rows, const long long* __restrict__ lower_offsets, const int* __restrict__ lower_columns,
    const long long* __restrict__ upper_offsets, long long* __restrict__ counts)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const long long first = lower_offsets[row], stop = lower_offsets[row + 1];
    counts[row] = stop - first - (first < stop && lower_columns[stop - 1] == row) + upper_offsets[row + 1] - upper_offsets[row];
}

// Joins the halves; 32 lanes a row.
__global__ void __launch_bounds__(256) join_halves(
    const long long rows, const int area, const long long* __restrict__ lower_offsets, const int* __restrict__ lower_columns,
    const double* __restrict__ lower, const long long* __restrict__ upper_offsets, const int* __restrict__ upper_columns,
    const double* __restrict__ upper, const long long* __restrict__ offsets, int* __restrict__ columns,
    double* __restrict__ blocks)
{
    const int lane = threadIdx.x % 32;
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const long long first = offsets[row], from_upper = upper_offsets[row], of_upper = upper_offsets[row + 1] - from_upper;
    const long long from_lower = lower_offsets[row], of_lower = offsets[row + 1] - first - of_upper;
    for (long long i = lane; i < of_lower; i += 32) columns[first + i] = lower_columns[from_lower + i];
    for (long long i = lane; i < of_upper; i += 32) columns[first + of_lower + i] = upper_columns[from_upper + i];
    for (long long i = lane; i < of_lower * area; i += 32) blocks[first * area + i] = lower[from_lower * area + i];
    for (long long i = lane; i < of_upper * area; i += 32) blocks[(first + of_lower) * area + i] = upper[from_upper * area + i];
}

// Sets diagonal entries that are at most a share of `sizes` to these, where their blocks are stored, and says which in
// `replaced`, which is false before. One thread per unknown.
__global__ void __launch_bounds__(256) replace_vanishing(
    const long long unknowns, const int size, const double share, const double* __restrict__ sizes,
    const long long* __restrict__ offsets, const int* __restrict__ columns, double* __restrict__ blocks, bool* replaced)
{
    const long long unknown = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (unknown >= unknowns) return;
    const long long row = unknown / size, within = unknown % size;
    const long long place = place_of(int(row), columns, offsets[row], offsets[row + 1]);
    if (place < 0) return;
    double& own = blocks[(place * size + within) * size + within];
    if (!(fabs(own) <= share * sizes[unknown])) return;
    own = sizes[unknown];
    replaced[unknown] = true;
}

// count += the rows that have entries, one addition a warp.
__global__ void __launch_bounds__(256) count_rows_with_entries(
    const long long rows, const long long* __restrict__ offsets, int* count)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned all = PENSTOCK_BALLOT(row < rows && offsets[row] < offsets[row + 1]);
    if (threadIdx.x % 32 == 0 && all) atomicAdd(count, __popc(all));
}
