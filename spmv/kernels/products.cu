// The pattern of a product C = A B of sparse matrices, and its values where the entries are numbers, by Gustavson's algorithm (1978):
// a row of C is the sum of the rows of B that a row of A names.
//
// Rows are sorted into bins by the length of a table that holds their columns. A group of lanes takes a row; it goes through the
// entries of the row of A one after another, and its lanes through the row of B. The columns of a row of B differ, so no two lanes
// add to one sum, and every sum is formed in the order of the entries of A: results are the same in every run. Columns come out
// ascending. Rows of B are numbered from `start`. Columns smaller than the row's number in A, from 0, plus `least` are left out. Rows whose tables would be longer than 2^LARGEST_TABLE slots are dense rows.

constexpr int SMALLEST_TABLE = 5, LARGEST_TABLE = 13, BINS = 16, DENSE = 15;  // tables have 2^5 to 2^13 slots
constexpr int NO_COLUMN = 0x7fffffff;

// Purpose, what rows are made for, is the Python enum of spmv/products/hashing.py.

// The bin of a row that needs room for so many columns.
__device__ __forceinline__ int bin_of(const long long columns)
{
    int exponent = SMALLEST_TABLE;
    while (exponent <= LARGEST_TABLE && (1ll << exponent) < columns) ++exponent;
    return exponent > LARGEST_TABLE ? DENSE : exponent;
}

// Adds the members of a block of threads to counters, one addition a block and bin; returns the place of the caller's member.
__device__ __forceinline__ int count_members(const int bin, int* counters)
{
    __shared__ int members[BINS], begin[BINS];
    if (threadIdx.x < BINS) members[threadIdx.x] = 0;
    __syncthreads();
    const int own = bin >= 0 ? atomicAdd(members + bin, 1) : 0;
    __syncthreads();
    if (threadIdx.x < BINS && members[threadIdx.x]) begin[threadIdx.x] = atomicAdd(counters + threadIdx.x, members[threadIdx.x]);
    __syncthreads();
    return bin >= 0 ? begin[bin] + own : 0;
}

// lengths[row] = the columns that a row of C has at most, and the number of rows in every bin. Launch: 256 threads.
__global__ void __launch_bounds__(256) bound_rows(
    const long long rows, const long long* __restrict__ offsets, const int* __restrict__ columns, const long long start,
    const long long* __restrict__ b_offsets, const long long width, int* __restrict__ lengths, int* bins)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long first = row < rows ? offsets[row] : 0, stop = row < rows ? offsets[row + 1] : 0;
    const auto length_of = [&](const long long entry) {
        const long long other = columns[entry] - start;
        return b_offsets[other + 1] - b_offsets[other];
    };
    const bool is_long = stop - first > 256;
    long long total = 0;
    if (!is_long)
        for (long long entry = first; entry < stop; ++entry) total += length_of(entry);
    for (unsigned todo = PENSTOCK_BALLOT(is_long); todo; todo &= todo - 1) {  // all lanes together
        const int owner = __ffs(int(todo)) - 1;
        const long long from = PENSTOCK_SHUFFLE(first, owner, 32), to = PENSTOCK_SHUFFLE(stop, owner, 32);
        long long part = 0;
        for (long long entry = from + threadIdx.x % 32; entry < to; entry += 32) part += length_of(entry);
        for (int by = 16; by; by /= 2) part += PENSTOCK_SHUFFLE_DOWN(part, by, 32);
        part = PENSTOCK_SHUFFLE(part, 0, 32);
        if (int(threadIdx.x % 32) == owner) total = part;
    }
    total = total < width ? total : width;
    if (row < rows) lengths[row] = int(total);
    count_members(row < rows ? bin_of(total) : -1, bins);
}

// The number of rows in every bin for tables with a third more slots than columns. Launch: 256 threads.
__global__ void __launch_bounds__(256) bin_rows(const long long rows, const long long* __restrict__ c_offsets, int* bins)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long length = row < rows ? c_offsets[row + 1] - c_offsets[row] : 0;
    count_members(row < rows ? bin_of(length + length / 3) : -1, bins);
}

// The rows of every bin, in any order. map[bin] is the bin that takes the rows of a bin, and map[BINS + bin] starts as its first
// place in `listed`. Lengths come from `lengths`, or from the offsets of C. Launch: 256 threads.
__global__ void __launch_bounds__(256) list_rows(
    const long long rows, const int* __restrict__ lengths, const long long* __restrict__ c_offsets, int* map, int* listed)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    int bin = -1;
    if (row < rows) {
        const long long length = lengths ? lengths[row] : c_offsets[row + 1] - c_offsets[row];
        bin = map[bin_of(lengths ? length : length + length / 3)];
    }
    const int place = count_members(bin, map + BINS);
    if (row < rows) listed[place] = int(row);
}

// The lanes of a group: up to 32, or the whole block.
template <int lanes>
__device__ __forceinline__ void meet()
{
    if (lanes > 32)
        __syncthreads();
    else
        PENSTOCK_SYNC_GROUP();
}

// Whether to go on: groups of fewer than 32 lanes do so together with their neighbours.
template <int lanes>
__device__ __forceinline__ bool any(const bool wanted)
{
    return lanes < 32 ? PENSTOCK_BALLOT(wanted) != 0 : wanted;
}

// The slot of a column in a table of `slots` slots, a power of two; `found` grows if it is a new one.
__device__ __forceinline__ int slot_of(const int column, int* keys, const int slots, int& found)
{
    int slot = int(unsigned(column) * 2654435761u >> 7) & (slots - 1);
    for (int tried = 0; tried < slots; ++tried, slot = (slot + 1) & (slots - 1)) {
        int key = keys[slot];
        if (key == NO_COLUMN) {
            key = atomicCAS(keys + slot, NO_COLUMN, column);
            found += key == NO_COLUMN;
            if (key == NO_COLUMN) return slot;
        }
        if (key == column) return slot;
    }
    return 0;  // never: a table has a slot for every column
}

// The sum of the values of the threads before the caller; `total` becomes that of all. The whole block, of at most 512 threads.
__device__ __forceinline__ int sum_before(const int value, int& total)
{
    __shared__ int of_warp[16];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int through = value;
    for (int by = 1; by < 32; by *= 2) {
        const int other = PENSTOCK_SHUFFLE_UP(through, by, 32);
        if (lane >= by) through += other;
    }
    if (lane == 31) of_warp[warp] = through;
    __syncthreads();
    int earlier = 0;
    total = 0;
    for (int i = 0; i < int(blockDim.x) / 32; ++i) {
        if (i == warp) earlier = total;
        total += of_warp[i];
    }
    __syncthreads();
    return earlier + through - value;
}

// Writes the columns of a table in ascending order, and its sums: a bit a column, and the number of bits before every word, tell
// the place of each. The whole block.
template <int purpose, typename Value>
__device__ __forceinline__ void write_by_rank(
    const int* keys, const double* sums, const int slots, unsigned* bits, int* before, const int words, int* c_columns,
    Value* c_values)
{
    for (int word = threadIdx.x; word < words; word += blockDim.x) bits[word] = 0;
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x)
        if (keys[slot] != NO_COLUMN) atomicOr(bits + keys[slot] / 32, 1u << (keys[slot] % 32));
    __syncthreads();
    int seen = 0;
    for (int base = 0; base < words; base += blockDim.x) {
        const int word = base + threadIdx.x;
        int total;
        const int place = sum_before(word < words ? __popc(bits[word]) : 0, total);
        if (word < words) before[word] = seen + place;
        seen += total;
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        const int key = keys[slot];
        if (key == NO_COLUMN) continue;
        const int place = before[key / 32] + __popc(bits[key / 32] & ((1u << (key % 32)) - 1));
        c_columns[place] = key;
        if (purpose == VALUES) c_values[place] = Value(sums[slot]);
    }
}

// Sorts the columns of a table, and its sums with them; empty slots come last (Batcher 1968). The whole block.
template <int purpose>
__device__ __forceinline__ void sort_table(int* keys, double* sums, const int slots)
{
    for (int length = 2; length <= slots; length *= 2)
        for (int step = length / 2; step > 0; step /= 2) {
            for (int pair = threadIdx.x; pair < slots / 2; pair += blockDim.x) {
                const int low = pair / step * step * 2 + pair % step, high = low + step;
                const int first = keys[low], second = keys[high];
                if ((first > second) == ((low & length) == 0)) {
                    keys[low] = second;
                    keys[high] = first;
                    if (purpose == VALUES) {
                        const double sum = sums[low];
                        sums[low] = sums[high];
                        sums[high] = sum;
                    }
                }
            }
            __syncthreads();
        }
}

// The rows of one bin. `listed` are the rows, null for all. Launch: a multiple of `lanes` threads, exactly `lanes` of more than 32;
// shared memory for `slots` columns, and for VALUES as many sums before them, a group. `words` of more than 32 lanes: a word for 32
// columns, twice in shared memory; 0 if that is too much, then the table is sorted.
template <typename Value, int lanes, int purpose>
__global__ void __launch_bounds__(lanes > 32 ? lanes : 128) hash_rows(
    const long long count, const int* __restrict__ listed, const long long* __restrict__ offsets,
    const int* __restrict__ columns, const Value* __restrict__ values, const long long start,
    const long long* __restrict__ b_offsets, const int* __restrict__ b_columns, const Value* __restrict__ b_values,
    long long* __restrict__ counts, const long long* __restrict__ c_offsets, int* __restrict__ c_columns,
    Value* __restrict__ c_values, const long long least, const int slots, const int words)
{
    PENSTOCK_DYNAMIC_SHARED(double, shared);
    __shared__ int shared_found;
    const int groups = blockDim.x / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    double* sums = shared + (purpose == VALUES ? group * slots : 0);
    int* keys = reinterpret_cast<int*>(shared + (purpose == VALUES ? groups * slots : 0)) + group * slots;
    const long long number = (long long)blockIdx.x * groups + group;
    const bool live = number < count;
    const long long row = live ? (listed ? listed[number] : number) : 0;
    const long long stop = live ? offsets[row + 1] : 0;
    for (int slot = lane; slot < slots; slot += lanes) {
        keys[slot] = NO_COLUMN;
        if (purpose == VALUES) sums[slot] = 0;
    }
    if (lanes > 32 && threadIdx.x == 0) shared_found = 0;
    meet<lanes>();
    int found = 0;
    for (long long base = live ? offsets[row] : 0; any<lanes>(base < stop); base += lanes > 32 ? 1 : lanes) {
        // Every lane looks up one entry of A; groups of more than 32 lanes take one together.
        const long long entry = lanes > 32 ? base : base + lane;
        long long from = 0, to = 0;
        double factor = 0;
        if (entry < stop) {
            const long long other = columns[entry] - start;
            from = b_offsets[other], to = b_offsets[other + 1];
            if (purpose == VALUES) factor = double(values[entry]);
        }
        const int batch = lanes > 32 ? 1 : int(stop - base < lanes ? (stop - base > 0 ? stop - base : 0) : lanes);
        for (int e = 0; any<lanes>(e < batch); ++e) {
            const long long first = lanes > 32 ? from : PENSTOCK_SHUFFLE(from, e, lanes);
            const long long last = lanes > 32 ? to : PENSTOCK_SHUFFLE(to, e, lanes);
            const double scale = lanes > 32 || purpose != VALUES ? factor : PENSTOCK_SHUFFLE(factor, e, lanes);
            for (long long b_base = first; any<lanes>(e < batch && b_base < last); b_base += lanes)
                if (e < batch && b_base + lane < last && b_columns[b_base + lane] - row >= least) {
                    const int slot = slot_of(b_columns[b_base + lane], keys, slots, found);
                    if (purpose == VALUES) sums[slot] += scale * double(b_values[b_base + lane]);
                }
            if (purpose == VALUES) meet<lanes>();
        }
    }
    meet<lanes>();
    if (purpose == COUNT) {
        for (int by = (lanes < 32 ? lanes : 32) / 2; by; by /= 2) found += PENSTOCK_SHUFFLE_DOWN(found, by, (lanes < 32 ? lanes : 32));
        if (lanes > 32) {
            if (threadIdx.x % 32 == 0) atomicAdd(&shared_found, found);
            __syncthreads();
            found = shared_found;
        }
        if (live && lane == 0) counts[row] = found;
        return;
    }
    const long long out = live ? c_offsets[row] : 0;
    const int length = live ? int(c_offsets[row + 1] - out) : 0;
    if (lanes > 32) {
        if (words) {
            int* bits = keys + slots;
            write_by_rank<purpose>(
                keys, sums, slots, reinterpret_cast<unsigned*>(bits), bits + words, words, c_columns + out, c_values + out);
            return;
        }
        sort_table<purpose>(keys, sums, slots);
        for (int i = lane; i < length; i += lanes) {
            c_columns[out + i] = keys[i];
            if (purpose == VALUES) c_values[out + i] = Value(sums[i]);
        }
        return;
    }
    // The columns to the front of the table; then each to the place given by the number of smaller ones.
    int kept = 0;
    for (int base = 0; base < slots; base += lanes) {
        const int key = keys[base + lane];
        const double sum = purpose == VALUES ? sums[base + lane] : 0;
        const unsigned all = PENSTOCK_BALLOT(key != NO_COLUMN);
        const unsigned taken = lanes == 32 ? all : all >> (threadIdx.x % 32 / lanes * lanes) & ((1u << (lanes % 32)) - 1);
        meet<lanes>();
        if (key != NO_COLUMN) {
            const int place = kept + __popc(taken & ((1u << lane) - 1));
            keys[place] = key;
            if (purpose == VALUES) sums[place] = sum;
        }
        kept += __popc(taken);
        meet<lanes>();
    }
    for (int i = lane; i < length; i += lanes) {
        const int key = keys[i];
        int smaller = 0;
        for (int other = 0; other < length; ++other) smaller += keys[other] < key;
        c_columns[out + smaller] = key;
        if (purpose == VALUES) c_values[out + smaller] = Value(sums[i]);
    }
}

// The rows that are too long for a table, one block a row: a bit a column tells whether it is there, and dense rows hold sums.
//
// With `parts` of 1 the whole block goes through the entries of A for VALUES, and warps share them out otherwise, where no order
// matters. With more parts, for long rows of A, every warp has its share of the entries and a dense row of its own, and the parts
// are added in order. For every block of the grid, `dense` has `parts` times `width` numbers, of any values, and `bits` `parts` times
// ceil(width / 32) words, which are zero; null: the words are in shared memory. Launch: 512 threads, or 32 a part.
template <typename Value, int purpose, int parts>
__global__ void __launch_bounds__(512) dense_rows(
    const long long count, const int* __restrict__ listed, const long long* __restrict__ offsets,
    const int* __restrict__ columns, const Value* __restrict__ values, const long long start,
    const long long* __restrict__ b_offsets, const int* __restrict__ b_columns, const Value* __restrict__ b_values,
    long long* __restrict__ counts, const long long* __restrict__ c_offsets, int* __restrict__ c_columns,
    Value* __restrict__ c_values, const long long least, const long long width, unsigned* bits, double* dense)
{
    PENSTOCK_DYNAMIC_SHARED(unsigned, shared_bits);
    constexpr bool by_warp = purpose != VALUES || parts > 1;
    const int words = int((width + 31) / 32), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int workers = by_warp ? blockDim.x / 32 : 1, worker = by_warp ? warp : 0;
    unsigned* all_bits = bits ? bits + (long long)blockIdx.x * parts * words : shared_bits;
    double* all_sums = purpose == VALUES ? dense + (long long)blockIdx.x * parts * width : nullptr;
    unsigned* bit = all_bits + (parts > 1 ? warp * words : 0);
    double* sums = purpose == VALUES ? all_sums + (parts > 1 ? warp * width : 0) : nullptr;
    if (!bits)
        for (int word = threadIdx.x; word < parts * words; word += blockDim.x) all_bits[word] = 0;
    const auto add = [&](const long long row, const long long place, const double scale) {
        const int column = b_columns[place];
        if (column - row < least) return;
        const unsigned own = 1u << (column % 32), before = atomicOr(bit + column / 32, own);
        if (purpose == VALUES) {
            const double term = scale * double(b_values[place]);
            sums[column] = before & own ? sums[column] + term : term;
        }
    };
    __syncthreads();
    for (long long number = blockIdx.x; number < count; number += gridDim.x) {
        const long long row = listed ? listed[number] : number, length = offsets[row + 1] - offsets[row];
        const long long stop = offsets[row] + length * (worker + 1) / workers;
        for (long long base = offsets[row] + length * worker / workers; base < stop; base += by_warp ? 32 : 1) {
            // Every lane of a warp looks up one entry of A; a block takes one together.
            const long long entry = by_warp ? base + lane : base;
            long long from = 0, to = 0;
            double factor = 0;
            if (entry < stop) {
                const long long other = columns[entry] - start;
                from = b_offsets[other], to = b_offsets[other + 1];
                if (purpose == VALUES) factor = double(values[entry]);
            }
            if (by_warp)
                for (int e = 0; e < 32 && base + e < stop; ++e) {
                    const long long first = PENSTOCK_SHUFFLE(from, e, 32), last = PENSTOCK_SHUFFLE(to, e, 32);
                    const double scale = purpose == VALUES ? PENSTOCK_SHUFFLE(factor, e, 32) : 0;
                    for (long long place = first + lane; place < last; place += 32) add(row, place, scale);
                    if (purpose == VALUES) PENSTOCK_SYNC_GROUP();  // the next entry may add to the same sums
                }
            else {
                for (long long place = from + threadIdx.x; place < to; place += blockDim.x) add(row, place, factor);
                __syncthreads();
            }
        }
        __syncthreads();
        long long out = purpose == COUNT ? 0 : c_offsets[row];
        for (int base = 0; base < words; base += blockDim.x) {
            const int word = base + threadIdx.x;
            unsigned of_part[parts], set = 0;
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                of_part[part] = word < words ? all_bits[part * words + word] : 0;
                set |= of_part[part];
                if (word < words) all_bits[part * words + word] = 0;
            }
            int total;
            const int before = sum_before(__popc(set), total);
            // A warp writes word after word, a lane a column, so that neighbours in memory are written together.
            for (int e = 0; purpose != COUNT && e < 32; ++e) {
                const unsigned all = PENSTOCK_SHUFFLE(set, e, 32);
                const long long place = out + PENSTOCK_SHUFFLE(before, e, 32) + __popc(all & ((1u << lane) - 1));
                const int column = (base + warp * 32 + e) * 32 + lane;
                double sum = 0;
#pragma unroll
                for (int part = 0; part < parts; ++part) {
                    const unsigned own = parts > 1 ? PENSTOCK_SHUFFLE(of_part[part], e, 32) : all;
                    if (purpose == VALUES && (own >> lane & 1)) sum += all_sums[part * width + column];
                }
                if (all >> lane & 1) {
                    c_columns[place] = column;
                    if (purpose == VALUES) c_values[place] = Value(sum);
                }
            }
            out += total;
        }
        if (purpose == COUNT && threadIdx.x == 0) counts[row] = out;
        __syncthreads();
    }
}
