// Products of sparse matrices of small dense blocks, C = A B, by Gustavson's algorithm: 32 lanes a row of C.
// Rows of B are numbered from `start`, and those of C have ascending columns, so that results are the same in every run.

// C += A B for blocks (height, inner) of A and (inner, across) of B. The sums of a row of up to 32 blocks are formed in shared
// memory. Every entry of C is the sum of its products in the order of the entries of A. Launch: `warps` times 32 threads.
template <int height, int inner, int across, int warps>
__global__ void __launch_bounds__(warps * 32) add_block_products(
    const long long rows, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, const long long start, const long long* __restrict__ b_offsets,
    const int* __restrict__ b_columns, const double* __restrict__ b_blocks, const long long* __restrict__ c_offsets,
    const int* __restrict__ c_columns, double* __restrict__ c_blocks)
{
    constexpr int area = height * across, capacity = 32 * area;
    __shared__ double sums[warps * capacity];
    __shared__ int targets[warps * 32];
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows || offsets[row] == offsets[row + 1]) return;  // all 32 lanes together
    const long long first = c_offsets[row], stop = c_offsets[row + 1], length = (stop - first) * area;
    double* own = c_blocks + first * area;
    double* total = own;
    int* target = targets + group * 32;
    if (length <= capacity) {
        total = sums + group * capacity;
        for (int i = lane; i < length; i += 32) total[i] = own[i];
    }
    for (long long entry = offsets[row]; entry < offsets[row + 1]; ++entry) {
        const double* left = blocks + entry * (height * inner);
        const long long other = columns[entry] - start, b_stop = b_offsets[other + 1];
        for (long long b_first = b_offsets[other]; b_first < b_stop; b_first += 32) {
            const int count = int(b_stop - b_first < 32 ? b_stop - b_first : 32);
            if (lane < count) target[lane] = int(place_of(b_columns[b_first + lane], c_columns, first, stop) - first);
            PENSTOCK_SYNC_GROUP();
            // The columns of a row of B differ: no two lanes add to the same sum.
#pragma unroll(area > 18 ? 4 : 1)
            for (int i = lane; i < count * area; i += 32) {
                const int place = i / area, r = i % area / across, c = i % across;
                const double* right = b_blocks + (b_first + place) * (inner * across) + c;
                double sum = 0;
#pragma unroll
                for (int k = 0; k < inner; ++k) sum += left[r * inner + k] * right[k * across];
                total[(long long)target[place] * area + r * across + c] += sum;
            }
            PENSTOCK_SYNC_GROUP();
        }
    }
    if (length <= capacity)
        for (int i = lane; i < length; i += 32) own[i] = total[i];
}

// blocks = own - factor D blocks for rows of A P and of P, which has some of their columns; D is (rows, height, height).
// 32 lanes a row, one lane a column of scalars.
template <int height, int across>
__global__ void __launch_bounds__(256) smooth_block_rows(
    const long long rows, const long long* __restrict__ offsets, const int* __restrict__ columns,
    double* __restrict__ blocks, const long long* __restrict__ own_offsets, const int* __restrict__ own_columns,
    const double* __restrict__ own_blocks, const double* __restrict__ diagonal, const double factor)
{
    const int lane = threadIdx.x % 32;
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const double* d = diagonal + row * (height * height);
    for (long long i = offsets[row] * across + lane; i < offsets[row + 1] * across; i += 32) {
        const long long entry = i / across;
        double* image = blocks + entry * (height * across) + i % across;
        const long long own = place_of(columns[entry], own_columns, own_offsets[row], own_offsets[row + 1]);
        double total[height];
#pragma unroll
        for (int r = 0; r < height; ++r) {
            total[r] = 0;
#pragma unroll
            for (int k = 0; k < height; ++k) total[r] += d[r * height + k] * image[k * across];
        }
#pragma unroll
        for (int r = 0; r < height; ++r)
            image[r * across] = (own < 0 ? 0.0 : own_blocks[(own * height + r) * across + i % across]) - factor * total[r];
    }
}
