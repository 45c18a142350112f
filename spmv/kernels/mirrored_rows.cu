// Complete rows of blocks of a symmetric matrix whose upper half is stored as in symmetric_bsr.cu: row i gets the transpose of
// every block (j, i) with j < i, before its own blocks. Rows `start` to `stop` are completed at a time, from one or several slabs.
// Blocks that mirror those of earlier rows wait in lists of rows, columns and blocks, in any order.
//
// The kernels run one after another. The first ones count the blocks of each row, then the columns are listed. Last, every row
// looks up where its blocks are, and takes them in ascending order. So results do not depend on the order in which threads run, and
// a row is written as a whole.

// A slab whose rows begin at `first`.
template <typename Value>
struct Slab {
    long long first;
    const long long* chunk_offsets;
    const int* column_indices;
    const Value* values;
    const unsigned char* exponents;  // null but for values of 16 bits
};

// For each block that has waited, its number in the list of those is stored inside the row's own output, in the last `below` words of
// the space for the blocks left of the diagonal, of `area` scalars each. Blocks are written in ascending order, 32 at a time, so a
// number is read before it is overwritten.
__device__ __forceinline__ long long* numbers_of(double* blocks, const long long below, const int area)
{
    return reinterpret_cast<long long*>(blocks + below * (area - 1));
}

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

// counts[row + 1] = upper[row] + lower[row]. One thread per row.
__global__ void __launch_bounds__(256) add_counts(
    const long long rows, const int* __restrict__ upper, const int* __restrict__ lower, long long* __restrict__ counts)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) counts[row + 1] = upper[row] + lower[row];
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

// Lists the blocks that have waited for the rows that are completed. One thread per block.
__global__ void __launch_bounds__(256) list_waiting(
    const long long count, const long long start, const long long stop, const int* __restrict__ rows,
    const int* __restrict__ of_column, const long long* __restrict__ offsets, const int* __restrict__ lower, int* placed,
    int* __restrict__ columns, const int area, double* blocks)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count || rows[i] >= stop) return;
    const long long row = rows[i] - start, begin = offsets[row];
    const int place = atomicAdd(placed + row, 1);
    columns[begin + place] = of_column[i];
    numbers_of(blocks + begin * area, lower[row], area)[place] = i;
}

// Sorts the columns left of the diagonal, and the numbers of blocks that have waited, in rows with more than 32 of them, by Shell's method with the gaps of
// Knuth (1973). One thread per row: a row of 100,000 takes some tens of milliseconds.
__global__ void __launch_bounds__(256) sort_mirrored(
    const long long rows, const long long* __restrict__ offsets, const int* __restrict__ lower, int* columns, const int area,
    double* blocks)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows || lower[row] <= 32) return;
    int *own = columns + offsets[row], count = lower[row], gap = 1;
    long long* numbers = numbers_of(blocks + offsets[row] * area, count, area);
    while (gap < count / 9) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (int i = gap; i < count; ++i) {
            const int column = own[i];
            const long long number = numbers[i];
            int place = i;
            for (; place >= gap && own[place - gap] > column; place -= gap) {
                own[place] = own[place - gap];
                numbers[place] = numbers[place - gap];
            }
            own[place] = column;
            numbers[place] = number;
        }
}

// Scalar e of the block in a slot.
template <typename Value, int size>
__device__ __forceinline__ double scalar_of(const Value* values, const unsigned char* exponents, const long long slot, const int e)
{
    const int lane = int(slot % 32);
    return scale_of_block<Value>(exponents + slot) * double(values[(slot - lane) * (size * size) + e * 32 + lane]);
}

// The slot of the block in a row and a column of a slab, by binary search among the row's `blocks` blocks.
template <typename Value>
__device__ __forceinline__ long long slot_of(const Slab<Value>& slab, const long long row, const int blocks, const int column)
{
    const long long position = row - slab.first, first = slab.chunk_offsets[position / 32] + position % 32;
    int low = 0, high = blocks;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (slab.column_indices[first + 32ll * middle] < column) low = middle + 1; else high = middle;
    }
    return first + 32ll * low;
}

// Fills the rows of slab `own_slab` of `slabs`: the blocks left of the diagonal, transposed, and its own ones; `waiting` are the
// blocks that have waited, of rows before `start`. Values, exponents and corrections are those of symmetric_bsr.cu. 32 lanes a row,
// so that neighbouring lanes write neighbouring scalars; neighbouring rows read those of a slot.
template <typename Value, int size>
__global__ void __launch_bounds__(256) fill_mirrored(
    const long long block_rows, const long long start, const int own_slab, const Slab<Value>* __restrict__ slabs,
    const float* __restrict__ corrections, const int corrected, const double* __restrict__ waiting,
    const long long* __restrict__ offsets, const int* __restrict__ lower, int* columns, double* blocks)
{
    constexpr int area = size * size;
    const Slab<Value>& slab = slabs[own_slab];
    const int lane = threadIdx.x % 32;
    const long long position = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (position >= block_rows) return;  // all 32 lanes together
    const long long row = slab.first + position, begin = offsets[row - start];
    const int below = lower[row - start], own = int(offsets[row - start + 1] - begin) - below;
    for (int base = 0; base < below; base += 32) {
        const int held = below - base < 32 ? below - base : 32, last = held * area;
        int *own_columns = columns + begin + base, column = 0, rank = lane, number = own_slab;
        double* out = blocks + (begin + base) * area;
        long long source = 0;  // a slot, or the number of a block that has waited
        if (lane < held) {
            column = own_columns[lane];
            if (column < start)
                source = numbers_of(blocks + begin * area, below, area)[base + lane];
            else {
                while (column < slabs[number].first) --number;
                const int of_row = int(offsets[column - start + 1] - offsets[column - start]) - lower[column - start];
                source = slot_of(slabs[number], column, of_row, int(row));
            }
        }
        if (below <= 32) {  // longer rows are sorted
            rank = 0;
            for (int other = 0; other < held; ++other) rank += PENSTOCK_SHUFFLE(column, other, 32) < column;
        }
        PENSTOCK_SYNC_GROUP();  // all have read what they overwrite
        if (lane < held) own_columns[rank] = column;
        for (int i = lane; i - lane < last; i += 32) {
            const int block = i < last ? i / area : 0, e = i % area;
            const long long from = PENSTOCK_SHUFFLE(source, block, 32);
            const int to = PENSTOCK_SHUFFLE(rank, block, 32), of = PENSTOCK_SHUFFLE(number, block, 32);
            const bool waited = PENSTOCK_SHUFFLE(column, block, 32) < start;
            if (i >= last) continue;
            out[to * area + e] = waited ? waiting[from * area + e]
                : scalar_of<Value, size>(slabs[of].values, slabs[of].exponents, from, e % size * size + e / size);
        }
    }
    const long long from = slab.chunk_offsets[position / 32] + position % 32;
    double* out = blocks + (begin + below) * area;
    for (int i = lane; i < own * area; i += 32) {
        const long long slot = from + 32ll * (i / area);
        const int e = i % area;
        const double more = corrected && slab.column_indices[slot] == row ? double(corrections[position * area + e]) : 0.0;
        out[i] = scalar_of<Value, size>(slab.values, slab.exponents, slot, e) + more;
    }
}

// Adds the blocks of a slab that mirror those of rows from `stop` on to the lists of blocks that wait; `listed`, zero before, counts
// them. One thread per block row.
template <typename Value, int size>
__global__ void __launch_bounds__(256) keep_mirrored(
    const long long block_rows, const long long first, const long long stop, const long long* __restrict__ chunk_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, const unsigned char* __restrict__ exponents,
    int* listed, int* __restrict__ waiting_rows, int* __restrict__ waiting_columns, double* __restrict__ waiting)
{
    constexpr int area = size * size;
    const long long position = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (position >= block_rows) return;
    const long long row = first + position, end = chunk_offsets[position / 32 + 1];
    for (long long slot = chunk_offsets[position / 32] + position % 32; slot < end; slot += 32) {
        const int column = column_indices[slot];
        if (column < stop || column <= row) continue;
        const int place = atomicAdd(listed, 1);
        waiting_rows[place] = column;
        waiting_columns[place] = int(row);
        for (int e = 0; e < area; ++e)
            waiting[(long long)place * area + e] = scalar_of<Value, size>(values, exponents, slot, e % size * size + e / size);
    }
}
