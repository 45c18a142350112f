// The order in which the rows of a sparse triangle are solved: its entries, the levels of its rows, its rows in that order.
//
// Row i waits for row j if the matrix has an entry (i, j) and j comes before i: its rank is smaller, or larger where `upper` is
// set. Ranks are colours; null means the numbers of the rows. Entries are blocks, and so rows are those of blocks.

__device__ __forceinline__ bool comes_before(const int j, const int i, const int* __restrict__ ranks, const int upper)
{
    const int of_j = ranks ? ranks[j] : j, of_i = ranks ? ranks[i] : i;
    return upper ? of_j > of_i : of_j < of_i;
}

// For every row the number of rows that it waits for and the place of its diagonal entry, or -1. figures[0] becomes the first
// row with an entry of a later row, figures[1] the first one without a diagonal entry; they start as `rows`. figures[2] becomes
// the largest of the numbers; it starts as 0.
__global__ void __launch_bounds__(256) count_waits(
    const int rows, const long long* __restrict__ offsets, const int* __restrict__ columns, const int* __restrict__ ranks,
    const int upper, int* __restrict__ waits, long long* __restrict__ diagonal, int* __restrict__ figures)
{
    const int row = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= rows) return;
    int count = 0;
    long long own = -1;
    bool later = false;
    for (long long entry = offsets[row]; entry < offsets[row + 1]; ++entry) {
        const int column = columns[entry];
        if (column == row)
            own = entry;
        else if (comes_before(column, row, ranks, upper))
            ++count;
        else
            later = true;
    }
    waits[row] = count;
    diagonal[row] = own;
    if (later) atomicMin(figures, row);
    if (own < 0) atomicMin(figures + 1, row);
    if (count > figures[2]) atomicMax(figures + 2, count);
}

// The rows that wait for every row, in any order. With `followers` null only their numbers are counted, in ends[row]; otherwise
// ends[row] is the end of the free places of a row, and moves down as they are filled.
__global__ void __launch_bounds__(256) list_followers(
    const int rows, const long long* __restrict__ offsets, const int* __restrict__ columns, const int* __restrict__ ranks,
    const int upper, int* ends, int* followers)
{
    const int row = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= rows) return;
    for (long long entry = offsets[row]; entry < offsets[row + 1]; ++entry) {
        const int column = columns[entry];
        if (column == row || !comes_before(column, row, ranks, upper)) continue;
        if (followers)
            followers[atomicAdd(ends + column, -1) - 1] = row;
        else
            atomicAdd(ends + column, 1);
    }
}

// Appends `row` to the queue where `wanted` is set, with one addition for 32 lanes, all of which call this together.
__device__ __forceinline__ void append(const bool wanted, const int row, int* queue, int* tail)
{
    const unsigned chosen = PENSTOCK_BALLOT(wanted);
    if (!chosen) return;
    const int lane = threadIdx.x % 32;
    int start = 0;
    if (lane == 0) start = atomicAdd(tail, __popc(chosen));
    start = PENSTOCK_SHUFFLE(start, 0, 32);
    if (wanted) queue[start + __popc(chosen & ((1u << lane) - 1))] = row;
}

// Levels by breadth-first search: level 0 are the rows that wait for none, level l + 1 those whose last wait ends in level l.
//
// order[levels[l]] to order[levels[l + 1]] are the rows of level l, in an order that depends on timing. levels[0] is 0 and the
// others start as -1; the end of a level, once it is there, tells all blocks to go on. A level of at most `narrow` rows is the
// work of block 0 alone; the followers of a row are the work of `lanes` lanes. counters: the end of the queue, blocks that
// arrived, the number of levels, which is not written if there are more than `most`. All blocks must run at once.
template <int lanes>
__global__ void __launch_bounds__(512) find_levels(
    const int rows, const int* __restrict__ follower_offsets, const int* __restrict__ followers, int* waits, int* order,
    int* levels, int* counters, const int narrow, const int most, int* failed, const long long cap)
{
    __shared__ int shared_stop;
    int arrivals = 0;
    const auto close = [&](const int level, const bool together) {
        __syncthreads();
        if (threadIdx.x) return;
        __threadfence();
        if (together) arrivals += gridDim.x;
        if (!together || atomicAdd(counters + 1, 1) == arrivals - 1) {
            __threadfence();
            PENSTOCK_STORE_RELAXED(levels + level + 1, PENSTOCK_LOAD_RELAXED(counters));
        }
    };
    for (long long base = (long long)blockIdx.x * blockDim.x; base < rows; base += (long long)gridDim.x * blockDim.x) {
        const int row = int(base + threadIdx.x);
        append(row < rows && waits[row] == 0, row, order, counters);
    }
    close(0, true);
    for (int level = 0, first = 0;; ++level) {
        if (threadIdx.x == 0) {
            int stop = PENSTOCK_LOAD_RELAXED(levels + level + 1);
            for (long long turn = 0; stop < 0; stop = PENSTOCK_LOAD_RELAXED(levels + level + 1)) {
                if (++turn > cap || (turn % 1024 == 0 && PENSTOCK_LOAD_RELAXED(failed))) {
                    PENSTOCK_STORE_RELAXED(failed, 1);
                    stop = first;
                    break;
                }
                PENSTOCK_PAUSE();
            }
            __threadfence();
            shared_stop = stop;
        }
        __syncthreads();
        const int stop = shared_stop;
        __syncthreads();
        if (stop == first) {
            if (blockIdx.x == 0 && threadIdx.x == 0) counters[2] = level;
            return;
        }
        if (level == most) return;
        const bool together = stop - first > narrow;
        if (together || blockIdx.x == 0) {
            const int step = int(together ? gridDim.x * blockDim.x : blockDim.x) / lanes;
            const int begin = int(together ? blockIdx.x * blockDim.x + threadIdx.x : threadIdx.x) / lanes;
            for (int base = first; base < stop; base += step) {
                const bool live = base + begin < stop;
                const int row = live ? PENSTOCK_LOAD_RELAXED(order + base + begin) : 0;
                int next = live ? follower_offsets[row] + int(threadIdx.x % lanes) : 0;
                const int end = live ? follower_offsets[row + 1] : 0;
                for (; PENSTOCK_BALLOT(next < end); next += lanes) {
                    const int follower = next < end ? followers[next] : 0;
                    const bool ready = next < end && atomicAdd(waits + follower, -1) == 1;
                    append(ready, follower, order, counters);
                }
            }
            close(level + 1, together);
        }
        first = stop;
    }
}

// Keys that sort rows by levels, and by their numbers within a level: keys[place] for the row at every place of `order`.
__global__ void __launch_bounds__(256) key_levels(
    const int rows, const int count, const int* __restrict__ levels, const int* __restrict__ order, long long* __restrict__ keys)
{
    const int place = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (place >= rows) return;
    int level = 0, stop = count;
    while (stop - level > 1) {
        const int middle = (level + stop) / 2;
        if (levels[middle] <= place)
            level = middle;
        else
            stop = middle;
    }
    keys[place] = (long long)level << 32 | order[place];
}

// The entries of the rows at every place: the place that each waits for, and where it stands in the matrix.
__global__ void __launch_bounds__(256) list_entries(
    const int rows, const long long* __restrict__ offsets, const int* __restrict__ columns, const int* __restrict__ ranks,
    const int upper, const int* __restrict__ order, const int* __restrict__ place_of, const int* __restrict__ new_offsets,
    int* __restrict__ places, int* __restrict__ sources)
{
    const int place = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (place >= rows) return;
    const int row = order ? order[place] : place;
    int next = new_offsets[place];
    for (long long entry = offsets[row]; entry < offsets[row + 1]; ++entry) {
        const int column = columns[entry];
        if (column == row || !comes_before(column, row, ranks, upper)) continue;
        places[next] = place_of ? place_of[column] : column;
        sources[next++] = int(entry);
    }
}

// W = omega times the inverse of the diagonal block of the row at every place, by Gauss and Jordan without exchanges of rows;
// diagonal null: omega times the identity. first_bad becomes the first row whose block has a pivot that is zero or not finite,
// or negative where all must be `positive`.
template <typename Value, int size>
__global__ void __launch_bounds__(256) invert_diagonal(
    const int rows, const Value* __restrict__ values, const long long* __restrict__ diagonal, const int* __restrict__ order,
    const double omega, const int positive, double* __restrict__ inverse, int* __restrict__ first_bad)
{
    const int place = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (place >= rows) return;
    const int row = order ? order[place] : place;
    double block[size][size];
    bool good = true;
#pragma unroll
    for (int i = 0; i < size; ++i)
#pragma unroll
        for (int j = 0; j < size; ++j)
            block[i][j] = diagonal ? double(values[diagonal[row] * (size * size) + i * size + j]) : double(i == j);
#pragma unroll
    for (int k = 0; k < size; ++k) {
        const double pivot = 1.0 / block[k][k];
        good = good && (block[k][k] > 0 || (block[k][k] < 0 && !positive)) && pivot != 0 && pivot - pivot == 0;
        block[k][k] = 1;
#pragma unroll
        for (int j = 0; j < size; ++j) block[k][j] *= pivot;
#pragma unroll
        for (int i = 0; i < size; ++i) {
            if (i == k) continue;
            const double factor = block[i][k];
            block[i][k] = 0;
#pragma unroll
            for (int j = 0; j < size; ++j) block[i][j] -= factor * block[k][j];
        }
    }
#pragma unroll
    for (int i = 0; i < size; ++i)
#pragma unroll
        for (int j = 0; j < size; ++j) inverse[((long long)place * size + i) * size + j] = omega * block[i][j];
    if (!good) atomicMin(first_bad, row);
}

// first_bad becomes the first value that is not finite; it starts as `count`.
template <typename Value>
__global__ void __launch_bounds__(256) find_not_finite(
    const long long count, const Value* __restrict__ values, unsigned long long* __restrict__ first_bad)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && !(values[i] - values[i] == 0)) atomicMin(first_bad, (unsigned long long)i);
}

// first_bad becomes the first row with an entry that has no mirror image; it starts as `rows`. Columns ascend in every row.
__global__ void __launch_bounds__(256) find_unpaired(
    const int rows, const long long* __restrict__ offsets, const int* __restrict__ columns, int* __restrict__ first_bad)
{
    const int row = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= rows) return;
    bool paired = true;
    for (long long entry = offsets[row]; entry < offsets[row + 1] && paired; ++entry) {
        const int other = columns[entry];
        paired = place_of(row, columns, offsets[other], offsets[other + 1]) >= 0;
    }
    if (!paired) atomicMin(first_bad, row);
}
