// Compressed sparse rows. Template parameters: Value, the stored type; Vector, that of x and out; Offset, of the row
// offsets. Sums are formed in double.

// out = alpha A x + beta out, with `lanes` neighbouring lanes on one row (Bell and Garland 2008, the vector kernel).
// Launch: one thread per lane, rows * lanes threads rounded up to whole blocks.
// Reads (sizeof(Value) + 4) bytes an entry and sizeof(Offset) a row, gathers x, writes out.
template <typename Value, typename Vector, typename Offset, int lanes>
__global__ void __launch_bounds__(256) csr_spmv(
    const long long rows, const Offset* __restrict__ row_offsets, const int* __restrict__ column_indices,
    const Value* __restrict__ values, const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha,
    const double beta)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = thread / lanes;
    const int lane = threadIdx.x % lanes;
    double total = 0.0;
    if (row < rows) {  // no early return: every lane must reach the shuffles
        const long long stop = row_offsets[row + 1];
        for (long long entry = row_offsets[row] + lane; entry < stop; entry += lanes)
            total += double(PENSTOCK_STREAM_LOAD(values + entry)) * double(x[PENSTOCK_STREAM_LOAD(column_indices + entry)]);
    }
    total = sum_over_lanes<lanes>(total);
    if (row < rows && lane == 0) store_product(out + row, total, alpha, beta);
}

// The same for a C-ordered block of vectors: one thread per entry of out, so that neighbouring threads read neighbouring
// columns of the same row of x. Launch: rows * columns threads rounded up to whole blocks.
template <typename Value, typename Vector, typename Offset>
__global__ void __launch_bounds__(256) csr_spmm(
    const long long rows, const long long columns, const Offset* __restrict__ row_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, const Vector* __restrict__ x,
    Vector* __restrict__ out, const double alpha, const double beta)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = thread / columns, column = thread % columns;
    if (row >= rows) return;
    double total = 0.0;
    for (long long entry = row_offsets[row]; entry < row_offsets[row + 1]; ++entry)
        total += double(values[entry]) * double(x[column_indices[entry] * columns + column]);
    store_product(out + thread, total, alpha, beta);
}

// Copies the dense blocks on the diagonal into blocks[][size][size], zeroed before. One thread per row of the slab, whose
// row 0 is row `first_row` of the whole matrix.
template <typename Value, typename Vector, typename Offset>
__global__ void __launch_bounds__(256) csr_diagonal_blocks(
    const long long rows, const long long first_row, const long long size, const Offset* __restrict__ row_offsets,
    const int* __restrict__ column_indices, const Value* __restrict__ values, Vector* __restrict__ blocks)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const long long block = (first_row + row) / size, r = (first_row + row) % size;
    for (long long entry = row_offsets[row]; entry < row_offsets[row + 1]; ++entry) {
        const long long c = column_indices[entry] - block * size;
        if (c >= 0 && c < size) blocks[(block * size + r) * size + c] = Vector(values[entry]);
    }
}
