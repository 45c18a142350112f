// out = alpha A x + beta out for a matrix stored by diagonals: one thread a row. Launch: one thread a row, rounded up.
template <typename Value, typename Vector>
__global__ void __launch_bounds__(256) dia_spmv(
    const long long rows, const int count, const int* __restrict__ offsets,
    const Value* __restrict__ values, const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha,
    const double beta)
{
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    double total = 0.0;
    for (int d = 0; d < count; ++d) {
        const Value value = values[d * rows + row];
        if (value != Value(0)) total += double(value) * double(x[row + offsets[d]]);
    }
    store_product(out + row, total, alpha, beta);
}
