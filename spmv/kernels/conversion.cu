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

// Counts the blocks of each block row, but for those whose block column is less than its own number plus `kept`.
// Launch: 8 threads per block row.
template <typename Offset, int size>
__global__ void __launch_bounds__(256) count_blocks(
    const long long block_rows, const long long kept, const Offset* __restrict__ row_offsets,
    const int* __restrict__ source_columns, long long* __restrict__ counts)
{
    const long long block_row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const int blocks = merge_rows<size>(block_row < block_rows, block_row, block_row + kept, row_offsets, source_columns,
                                        [](int, int, long long, long long) {});
    if (block_row < block_rows && threadIdx.x % 8 == 0) counts[block_row] = blocks;
}

// Copies the blocks of each block row into chunks of `height` interleaved block rows, as sell.cu reads them; a height of 1
// is BSR. `kept` as above. column_indices were filled with -1 and values with 0 before. Launch: 8 threads per block row.
template <typename Value, typename Source, typename Offset, int size>
__global__ void __launch_bounds__(256) fill_blocks(
    const long long block_rows, const long long kept, const long long height, const Offset* __restrict__ row_offsets,
    const int* __restrict__ source_columns, const Source* __restrict__ source_values, const int permuted,
    const int* __restrict__ permutation, const long long* __restrict__ chunk_offsets, int* __restrict__ column_indices, Value* __restrict__ values)
{
    const long long position = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const bool exists = position < block_rows;
    const int r = threadIdx.x % 8;
    const long long block_row = exists && permuted ? (long long)permutation[position] : position;
    const long long first = exists ? chunk_offsets[position / height] : 0, place = position % height;
    merge_rows<size>(exists, block_row, block_row + kept, row_offsets, source_columns,
        [&](const int slot, const int column, const long long start, const long long end) {
            if (r == 0) column_indices[first + slot * height + place] = column;
            for (long long entry = start; entry < end; ++entry) {
                const int c = source_columns[entry] - column * size;
                values[first * (size * size) + ((slot * size + r) * (long long)size + c) * height + place] =
                    Value(source_values[entry]);
            }
        });
}

// Writes rows of blocks, `height` x `width` each, as rows of CSR: those of a block row follow each other, and each holds its part
// of the blocks in order. Launch: 32 threads per block row.
template <typename Value>
__global__ void __launch_bounds__(256) scalar_rows(
    const long long block_rows, const int height, const int width, const long long* __restrict__ offsets,
    const int* __restrict__ columns, const Value* __restrict__ blocks, int* __restrict__ column_indices, Value* __restrict__ values)
{
    const long long block_row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (block_row >= block_rows) return;
    const long long first = offsets[block_row];
    const int length = int(offsets[block_row + 1] - first) * width;
    for (int row = 0; row < height; ++row) {
        const long long start = first * height * width + (long long)row * length;
        for (int entry = threadIdx.x % 32; entry < length; entry += 32) {
            const long long block = first + entry / width;
            const int column = entry % width;
            column_indices[start + entry] = columns[block] * width + column;
            values[start + entry] = blocks[(block * height + row) * width + column];
        }
    }
}

// Surveys rows of a CSR matrix, as survey.py describes; Bits is an integer as long as a value. Nothing is read that the offsets
// lead to beyond `entries`. Each group of 32 lanes goes through rows, reads their entries side by side, and adds what it has
// seen to seen[0..4] once: defects, longest row, squares of lengths, positive diagonal entries, skew sum. Launch: any number of whole groups.
__device__ __forceinline__ unsigned long long mixed(
    const unsigned long long low, const unsigned long long high, const unsigned long long bits)
{
    unsigned long long mix = bits + low * 0x9E3779B97F4A7C15ull + high * 0xD1B54A32D192ED03ull;
    mix = (mix ^ (mix >> 30)) * 0xBF58476D1CE4E5B9ull;
    mix = (mix ^ (mix >> 27)) * 0x94D049BB133111EBull;
    return mix ^ (mix >> 31);
}

template <typename Bits, typename Offset>
__global__ void __launch_bounds__(256) survey(
    const long long rows, const long long first_row, const long long columns, const long long entries,
    const Offset* __restrict__ row_offsets, const int* __restrict__ source_columns, const Bits* __restrict__ values,
    unsigned long long* __restrict__ seen)
{
    constexpr bool wide = sizeof(Bits) == 8;
    constexpr unsigned long long infinite = wide ? 0x7FF0000000000000ull : 0x7F800000ull;
    constexpr unsigned long long negative_zero = wide ? 1ull << 63 : 1ull << 31;
    unsigned long long defects = 0, longest = 0, squares = 0, positive = 0, skew = 0;
    const long long groups = (long long)gridDim.x * blockDim.x / 32;
    for (long long place = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32; place < rows; place += groups) {
        const long long start = row_offsets[place], stop = row_offsets[place + 1], row = first_row + place;
        if (start < 0 || stop < start || stop > entries) {
            defects |= 1;
            continue;
        }
        if (longest < (unsigned long long)(stop - start)) longest = stop - start;
        if (threadIdx.x % 32 == 0) squares += (unsigned long long)((stop - start) * (stop - start));
        for (long long entry = start + threadIdx.x % 32; entry < stop; entry += 32) {
            const long long column = source_columns[entry];
            unsigned long long value = (unsigned long long)values[entry];
            if (!wide) value &= 0xFFFFFFFFull;
            if (column < 0 || column >= columns) defects |= 2;
            if (entry > start && source_columns[entry - 1] >= column) defects |= 4;
            if ((value & infinite) == infinite) defects |= 8;
            if (value == negative_zero) value = 0;
            if (column > row) skew += mixed(row, column, value);
            else if (column < row) skew -= mixed(column, row, value);
            else positive += value != 0 && value < negative_zero;
        }
    }
    for (int by = 16; by > 0; by /= 2) {
        defects |= PENSTOCK_SHUFFLE(defects, threadIdx.x % 32 ^ by, 32);
        const unsigned long long other = PENSTOCK_SHUFFLE(longest, threadIdx.x % 32 ^ by, 32);
        if (longest < other) longest = other;
        positive += PENSTOCK_SHUFFLE(positive, threadIdx.x % 32 ^ by, 32);
        skew += PENSTOCK_SHUFFLE(skew, threadIdx.x % 32 ^ by, 32);
    }
    if (threadIdx.x % 32 == 0) {
        if (defects) atomicOr(&seen[0], defects);
        atomicMax(&seen[1], longest);
        atomicAdd(&seen[2], squares);  // of the first lane, which counts for its group
        atomicAdd(&seen[3], positive);
        atomicAdd(&seen[4], skew);
    }
}

// Adds up the mixed bits of places and numbers, modulo 2^64, for each `piece` of an array. Launch: 32 threads per piece.
template <typename Index>
__global__ void __launch_bounds__(256) checksums(
    const long long pieces, const long long piece, const long long count, const Index* __restrict__ numbers,
    unsigned long long* __restrict__ sums)
{
    const long long mine = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (mine >= pieces) return;
    const long long stop = (mine + 1) * piece < count ? (mine + 1) * piece : count;
    unsigned long long sum = 0;
    for (long long place = mine * piece + threadIdx.x % 32; place < stop; place += 32)
        sum += mixed(place + 1, 0, (unsigned long long)(long long)numbers[place]);
    for (int by = 16; by > 0; by /= 2) sum += PENSTOCK_SHUFFLE(sum, threadIdx.x % 32 ^ by, 32);
    if (threadIdx.x % 32 == 0) sums[mine] = sum;
}

// Where the entry of a row and a column stands, or -1; rows ascend.
template <typename Offset>
__device__ __forceinline__ long long find_entry(
    const long long row, const long long column, const Offset* __restrict__ row_offsets, const int* __restrict__ source_columns)
{
    long long low = row_offsets[row];
    const long long stop = row_offsets[row + 1];
    for (long long high = stop; low < high;) {
        const long long middle = (low + high) / 2;
        if (source_columns[middle] < column) low = middle + 1;
        else high = middle;
    }
    return low < stop && source_columns[low] == column ? low : -1;
}

// The square root of the size of each diagonal entry; 0 where there is none. Launch: one thread per row, rounded up.
template <typename Source, typename Offset>
__global__ void __launch_bounds__(256) root_of_diagonal(
    const long long rows, const Offset* __restrict__ row_offsets, const int* __restrict__ source_columns,
    const Source* __restrict__ source_values, double* __restrict__ lengths)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const long long entry = find_entry(row, row, row_offsets, source_columns);
    lengths[row] = entry < 0 ? 0.0 : sqrt(fabs(double(source_values[entry])));
}

// Compares entries above the diagonal with their mirror images, or with `below` only looks for entries below it that have none.
// Adds up for each row: how many differ, and by more than rounding; the largest difference relative to the diagonal entries of
// row and column, and its column; the squared differences. unpaired: entries above the diagonal with an image, less entries
// below it. Launch: one thread per row, rounded up.
template <typename Source, typename Offset>
__global__ void __launch_bounds__(256) compare_mirrors(
    const long long rows, const Offset* __restrict__ row_offsets, const int* __restrict__ source_columns,
    const Source* __restrict__ source_values, const double* __restrict__ lengths, const double rounding, const int below,
    long long* __restrict__ unpaired, long long* __restrict__ differing, long long* __restrict__ beyond,
    double* __restrict__ largest, long long* __restrict__ where, double* __restrict__ squares)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    long long pairs = 0, differ = 0, exceed = 0, worst_column = where[row];
    double worst = largest[row], sum = 0.0;
    for (long long entry = row_offsets[row]; entry < row_offsets[row + 1]; ++entry) {
        const int column = source_columns[entry];
        if ((column < row) != (below != 0)) {
            pairs -= !below;
            continue;
        }
        const long long mirror = find_entry(column, row, row_offsets, source_columns);
        if (mirror >= 0) {
            pairs += column > row;
            if (below || source_values[mirror] == source_values[entry]) continue;
        }
        const int count = mirror < 0 ? 1 : 2;
        const double image = mirror < 0 ? 0.0 : double(source_values[mirror]);
        const double difference = fabs(double(source_values[entry]) - image), scale = lengths[row] * lengths[column];
        const double relative = scale > 0.0 ? difference / scale : difference > 0.0 ? 1.0 / 0.0 : 0.0;
        sum += count * difference * difference;
        differ += count;
        if (relative > rounding) exceed += count;
        if (relative > worst) {
            worst = relative;
            worst_column = column;
        }
    }
    unpaired[row] += pairs;
    differing[row] += differ;
    beyond[row] += exceed;
    largest[row] = worst;
    where[row] = worst_column;
    squares[row] += sum;
}
