// Block compressed sparse rows with square blocks of `size` scalars a side, row-major. Template parameters: Value, the
// stored type; Vector, that of x and out; Offset, of the row offsets. Sums are formed in double.

// out = alpha A x + beta out, 32 neighbouring lanes per block row. Lane = group * size + r: the group processes every
// (32 / size)-th block, the lane row r of it, so that neighbouring lanes read neighbouring memory; lanes left over
// (2 of 32 for size 3 and 6) idle. `batch` blocks are loaded before the first is used. Launch: 32 threads per block row
// rounded up to whole blocks; small blocks keep the lines of x in the first-level cache. Rows of blocks of an even size are
// loaded in pairs, so values must be aligned to two scalars.
// Reads sizeof(Value) * size * size + 4 bytes per block, gathers x, writes out.
template <typename Value, typename Vector, typename Offset, int size>
__global__ void __launch_bounds__(256) bsr_spmv(
    const long long block_rows, const Offset* __restrict__ row_offsets, const int* __restrict__ column_indices,
    const Value* __restrict__ values, const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha,
    const double beta)
{
    constexpr int lanes = 32, groups = lanes / size, batch = size <= 3 ? 3 : 2, together = size % 2 ? 1 : 2;
    typedef Pack<Value, together> Loaded;
    const long long block_row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    const int lane = threadIdx.x % lanes, group = lane / size, r = lane % size;
    double part = 0.0;
    if (block_row < block_rows && group < groups) {  // no early return: every lane must reach the shuffles
        const long long start = row_offsets[block_row];
        const int blocks = int((long long)row_offsets[block_row + 1] - start);
        for (int block = group; block < blocks; block += groups * batch) {
            int column[batch];
            Loaded value[batch][size / together];
#pragma unroll
            for (int b = 0; b < batch; ++b)
                column[b] = block + b * groups < blocks ? PENSTOCK_STREAM_LOAD(column_indices + start + block + b * groups) : -1;
#pragma unroll
            for (int b = 0; b < batch; ++b)
#pragma unroll
                for (int c = 0; c < size / together; ++c)
                    value[b][c] = column[b] < 0 ? Loaded{} : ((const Loaded*)(values + ((start + block + b * groups) * size + r) * size))[c];
#pragma unroll
            for (int b = 0; b < batch; ++b) {
                if (column[b] < 0) continue;
#pragma unroll
                for (int c = 0; c < size; ++c)
                    part += double(value[b][c / together].number[c % together]) * double(x[(long long)column[b] * size + c]);
            }
        }
    }
    double total = 0.0;
#pragma unroll
    for (int g = 0; g < groups; ++g) total += PENSTOCK_SHUFFLE(part, g * size + r, lanes);
    if (block_row < block_rows && lane < size) store_product(out + block_row * size + lane, total, alpha, beta);
}

// out = alpha A x + beta out for a C-ordered block of vectors: one thread per entry of out. Launch: rows * columns threads
// rounded up.
template <typename Value, typename Vector, typename Offset, int size>
__global__ void __launch_bounds__(256) bsr_spmm(
    const long long rows, const long long columns, const Offset* __restrict__ row_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, const Vector* __restrict__ x,
    Vector* __restrict__ out, const double alpha, const double beta)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = thread / columns, column = thread % columns;
    if (row >= rows) return;
    const int r = row % size;
    double total = 0.0;
    for (long long block = row_offsets[row / size]; block < row_offsets[row / size + 1]; ++block) {
        const Value* a = values + ((long long)block * size + r) * size;
        const Vector* part_of_x = x + (long long)column_indices[block] * size * columns + column;
#pragma unroll
        for (int c = 0; c < size; ++c) total += double(a[c]) * double(part_of_x[c * columns]);
    }
    store_product(out + thread, total, alpha, beta);
}

// Copies dense blocks of `wanted` scalars a side from the diagonal into blocks[][wanted][wanted], zeroed before. One
// thread per scalar row of the slab, whose row 0 is row `first_row` of the whole matrix.
template <typename Value, typename Vector, typename Offset, int size>
__global__ void __launch_bounds__(256) bsr_diagonal_blocks(
    const long long rows, const long long first_row, const long long wanted, const Offset* __restrict__ row_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, Vector* __restrict__ blocks)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const long long target = (first_row + row) / wanted, i = (first_row + row) % wanted;
    for (long long block = row_offsets[row / size]; block < row_offsets[row / size + 1]; ++block)
        for (int c = 0; c < size; ++c) {
            const long long j = (long long)column_indices[block] * size + c - target * wanted;
            if (j >= 0 && j < wanted)
                blocks[(target * wanted + i) * wanted + j] = Vector(values[((long long)block * size + row % size) * size + c]);
        }
}
