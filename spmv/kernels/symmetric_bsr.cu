// The upper half of a symmetric matrix of small blocks, in chunks of 32 block rows laid out as in sell.cu. Template
// parameters: Value, the stored type, or what stands for it below; Vector, that of x and out; size, scalars on a side of a block.
// Products are formed in double and added to out by atomic operations in the type of out, so the last digits depend on the order
// of arrival.
//
// Values of 16 bits are multiples of a power of two that each block has: `exponents` holds its exponent as that of a float, in 8
// bits. Where `corrected` is not 0, `corrections`, (block rows of the matrix or slab, size, size), are added to the blocks on the
// diagonal. Other matrices pass any arrays for these two.

constexpr int SPMV_THREADS = 128;

// In place of a stored type: the absolute values of numbers of that type.
template <typename Value>
struct Absolute {
    Value number;
    __device__ __forceinline__ operator double() const { return fabs(double(number)); }
};

// In place of a stored type: reads as a bound of the error of rounding to it, 2^-24 of the absolute value for float32; for 16 bits
// 0.5, in units of the power of two of the block, without reading the number.
template <typename Value>
struct Rounding {
    Value number;
    __device__ __forceinline__ operator double() const { return 0x1p-24 * fabs(double(number)); }
};
template <>
struct Rounding<short> {
    __device__ __forceinline__ operator double() const { return 0.5; }
};

// Whether values are multiples of a power of two that their block has.
template <typename Value>
constexpr bool is_scaled = sizeof(Value) == 2;
template <>
constexpr bool is_scaled<Rounding<short>> = true;

template <typename Value>
constexpr bool has_sign = true;
template <typename Value>
constexpr bool has_sign<Absolute<Value>> = false;
template <typename Value>
constexpr bool has_sign<Rounding<Value>> = false;

template <typename Value>
__device__ __forceinline__ Value load_stored(const Value* value) { return PENSTOCK_STREAM_LOAD(value); }
template <typename Value>
__device__ __forceinline__ Absolute<Value> load_stored(const Absolute<Value>* value) { return {load_stored(&value->number)}; }
template <typename Value>
__device__ __forceinline__ Rounding<Value> load_stored(const Rounding<Value>* value) { return {load_stored(&value->number)}; }
__device__ __forceinline__ Rounding<short> load_stored(const Rounding<short>*) { return {}; }

template <typename Value, int size>
__device__ __forceinline__ void symmetric_bsr_correct(const float* corrections, const double* own_x, double* total)
{
#pragma unroll
    for (int r = 0; r < size; ++r)
#pragma unroll
        for (int c = 0; c < size; ++c) {
            const double correction = double(corrections[r * size + c]);
            total[r] += (has_sign<Value> ? correction : fabs(correction)) * own_x[c];
        }
}

// Copies the `size` numbers at numbers[size * place] of the place of every lane to `shared`, lane after lane, and zeros for places
// below 0. Neighbouring lanes read neighbouring numbers. All 32 lanes together.
template <int size, typename Vector>
__device__ __forceinline__ void gather_lanes(const int place, const Vector* __restrict__ numbers, double* shared)
{
    constexpr int height = 32;
    const int lane = threadIdx.x % height;
    PENSTOCK_SYNC_GROUP();
#pragma unroll
    for (int k = 0; k < size; ++k) {
        const int number = k * height + lane, of_lane = PENSTOCK_SHUFFLE(place, number / size, height);
        shared[number] = of_lane < 0 ? 0.0 : double(numbers[(long long)of_lane * size + number % size]);
    }
    PENSTOCK_SYNC_GROUP();
}

// Adds `size` numbers of every lane to those at out[size * place], except where places are below 0: by way of `shared` where many
// lanes add, so that neighbouring lanes add to neighbouring numbers, as cache lines that atomics are sent for count. All 32 lanes
// together.
template <int size, typename Vector>
__device__ __forceinline__ void add_lanes(const int place, const double* numbers, const double alpha, double* shared, Vector* out)
{
    constexpr int height = 32, few = 4;  // at the end of a run of columns one lane adds, and at most some at the ends of lines
    const int lane = threadIdx.x % height;
    if (size == 1 || __popc(PENSTOCK_BALLOT(place >= 0)) <= few) {
        if (place < 0) return;
#pragma unroll
        for (int r = 0; r < size; ++r) atomicAdd(out + (long long)place * size + r, Vector(alpha * numbers[r]));
        return;
    }
    PENSTOCK_SYNC_GROUP();
#pragma unroll
    for (int r = 0; r < size; ++r) shared[lane * size + r] = alpha * numbers[r];
    PENSTOCK_SYNC_GROUP();
#pragma unroll
    for (int k = 0; k < size; ++k) {
        const int number = k * height + lane, of_lane = PENSTOCK_SHUFFLE(place, number / size, height);
        if (of_lane >= 0) atomicAdd(out + (long long)of_lane * size + number % size, Vector(shared[number]));
    }
}

// out += alpha A x, one thread per block row: A[i, j] x[j] is summed for row i, and A[i, j]^T x[i], if j > i, goes to row j.
// In the matrices of meshes the contribution of row i + 1 to column j and the next one of row i to the same j come one slot
// apart, so each lane offers its contribution to its left neighbour before adding it itself: this saves two thirds of the
// atomics of a 27-point stencil. Launch: 32 threads per chunk, in thread blocks of 128, for which there is shared memory; with
// several rows of thread blocks (gridDim.y) each processes its share of every chunk's slots. out was scaled by beta before.
// Reads sizeof(Value) * size * size + 4 bytes per stored block, about half those of the full matrix.
template <typename Value, typename Vector, int size>
__global__ void __launch_bounds__(SPMV_THREADS) symmetric_bsr_spmv(
    const long long block_rows, const long long first_row, const long long* __restrict__ chunk_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values,
    const unsigned char* __restrict__ exponents, const float* __restrict__ corrections, const int corrected,
    const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha)
{
    constexpr int height = 32;
    constexpr bool scaled = is_scaled<Value>;
    __shared__ double all_shared[SPMV_THREADS / height][height * size];
    const long long position = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = threadIdx.x % height;
    if (position - lane >= block_rows) return;  // all 32 lanes together
    double* shared = all_shared[threadIdx.x / height];
    const bool stored_row = position < block_rows;
    const long long row = first_row + position, first = chunk_offsets[position / height];
    const int width = int((chunk_offsets[position / height + 1] - first) / height);
    const int begin = int(width * blockIdx.y / gridDim.y), stop = int(width * (blockIdx.y + 1) / gridDim.y);
    const int* columns = column_indices + first + lane;
    const unsigned char* exponent = exponents + first + lane;
    const Value* blocks = values + first * (size * size) + lane;
    double own_x[size], total[size] = {}, pending[size] = {};
    int pending_column = -1;
    // Columns and exponents are read a slot ahead, because the gather of x and the scaling wait for them. With 1 x 1 blocks the
    // registers cost more than the wait: 1.09 ms instead of 0.92 with 16.8 million unknowns on an H200.
    constexpr bool ahead = size > 1;
    int next_column = ahead && begin < stop ? PENSTOCK_STREAM_LOAD(columns + (long long)begin * height) : -1;
    int next_exponent = ahead && scaled && begin < stop ? exponent[(long long)begin * height] : 0;
#pragma unroll
    for (int r = 0; r < size; ++r) own_x[r] = stored_row ? double(x[row * size + r]) : 0.0;
#pragma unroll 2
    for (int slot = begin; slot < stop; ++slot) {
        const int column = ahead ? next_column : PENSTOCK_STREAM_LOAD(columns + (long long)slot * height);
        const double scale = scaled ? power_of_two(ahead ? next_exponent : exponent[(long long)slot * height]) : 1.0;
        if (ahead && slot + 1 < stop) {
            next_column = PENSTOCK_STREAM_LOAD(columns + (long long)(slot + 1) * height);
            if constexpr (scaled) next_exponent = exponent[(long long)(slot + 1) * height];
        }
        Value a[size * size];
#pragma unroll
        for (int e = 0; e < size * size; ++e)
            a[e] = load_stored(blocks + (long long)(slot * size * size + e) * height);
        if constexpr (size > 1) gather_lanes<size>(column, x, shared);  // one number a lane is read in order anyway
        double right[size] = {}, below[size] = {};  // contributions of the block, and of its transpose to row `column`
        if (column >= 0) {
#pragma unroll
            for (int c = 0; c < size; ++c) {
                const double xc = size > 1 ? shared[lane * size + c] : double(x[column]);
#pragma unroll
                for (int r = 0; r < size; ++r) {
                    const double value = double(a[r * size + c]);
                    (scaled ? right : total)[r] += value * xc;
                    below[c] += value * own_x[r];
                }
            }
            if constexpr (scaled) {
#pragma unroll
                for (int r = 0; r < size; ++r) {
                    total[r] += scale * right[r];
                    below[r] *= scale;
                }
            }
        }
        const int target = column > row ? column : -1;
        const int offered = PENSTOCK_SHUFFLE_DOWN(pending_column, 1, height);
        const bool take = lane < height - 1 && target >= 0 && offered == target;
#pragma unroll
        for (int r = 0; r < size; ++r) {
            const double more = PENSTOCK_SHUFFLE_DOWN(pending[r], 1, height);
            if (take) below[r] += more;
        }
        const int taken = PENSTOCK_SHUFFLE_UP(int(take), 1, height);
        add_lanes<size>(lane > 0 && taken ? -1 : pending_column, pending, alpha, shared, out);
        pending_column = target;
#pragma unroll
        for (int r = 0; r < size; ++r) pending[r] = below[r];
    }
    add_lanes<size>(pending_column, pending, alpha, shared, out);
    if (corrected && blockIdx.y == 0 && stored_row)
        symmetric_bsr_correct<Value, size>(corrections + position * (size * size), own_x, total);
    add_lanes<size>(stored_row ? int(row) : -1, total, alpha, shared, out);
}

// out += alpha A x for a C-ordered block of vectors: one thread per column of a block row. Launch: block_rows * columns threads
// rounded up to whole blocks.
template <typename Value, typename Vector, int size>
__global__ void __launch_bounds__(256) symmetric_bsr_spmm(
    const long long block_rows, const long long first_row, const long long columns,
    const long long* __restrict__ chunk_offsets, const int* __restrict__ column_indices, const Value* __restrict__ values,
    const unsigned char* __restrict__ exponents, const float* __restrict__ corrections, const int corrected,
    const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha)
{
    constexpr int height = 32;
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long position = thread / columns, k = thread % columns, row = first_row + position;
    if (position >= block_rows) return;
    const int lane = int(position % height);
    double own_x[size], total[size] = {};
#pragma unroll
    for (int r = 0; r < size; ++r) own_x[r] = double(x[(row * size + r) * columns + k]);
    const long long stop = chunk_offsets[position / height + 1];
    for (long long entry = chunk_offsets[position / height]; entry < stop; entry += height) {
        const long long column = column_indices[entry + lane];
        if (column < 0) continue;
        const Value* a = values + entry * (size * size) + lane;
        const double scale = scale_of_block<Value>(exponents + entry + lane);
        double below[size] = {};
#pragma unroll
        for (int c = 0; c < size; ++c) {
            const double xc = double(x[(column * size + c) * columns + k]);
#pragma unroll
            for (int r = 0; r < size; ++r) {
                const double value = scale * double(a[(long long)(r * size + c) * height]);
                total[r] += value * xc;
                below[c] += value * own_x[r];
            }
        }
        if (column > row) {
#pragma unroll
            for (int c = 0; c < size; ++c) atomicAdd(out + (column * size + c) * columns + k, Vector(alpha * below[c]));
        }
    }
    if (corrected) symmetric_bsr_correct<Value, size>(corrections + position * (size * size), own_x, total);
#pragma unroll
    for (int r = 0; r < size; ++r) atomicAdd(out + (row * size + r) * columns + k, Vector(alpha * total[r]));
}

// Copies the blocks on the diagonal to `diagonal`, (block rows of the slab, size, size); one thread per block row.
// Columns ascend and begin at the diagonal, so little more than the first slot is read.
template <typename Value, typename Vector, int size>
__global__ void __launch_bounds__(256) symmetric_bsr_diagonal(
    const long long block_rows, const long long first_row, const long long* __restrict__ chunk_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, Vector* __restrict__ diagonal)
{
    constexpr int height = 32;
    const long long position = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (position >= block_rows) return;
    const long long row = first_row + position, lane = position % height;
    const long long first = chunk_offsets[position / height], stop = chunk_offsets[position / height + 1];
    for (long long slot = first; slot < stop; slot += height) {
        const int column = column_indices[slot + lane];
        if (column < 0 || column > row) return;
        if (column < row) continue;
        for (int e = 0; e < size * size; ++e)
            diagonal[position * size * size + e] = Vector(values[slot * (size * size) + lane + (long long)e * height]);
        return;
    }
}
