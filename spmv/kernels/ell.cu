// ELLPACK: every row padded to the same width, stored by columns, so that the entry in slot s of row i is at
// [s * rows + i]; column index -1 is padding and ends the row. Template parameters: Value, the stored type; Vector, that
// of x and out. Sums are formed in double.

// out = alpha A x + beta out after Tsai, Cojean and Anzt (2020), Algorithm 4. A block of 512 threads serves 512 / groups
// rows: each of `groups` groups of neighbouring threads processes every groups-th slot, and sums are combined in shared memory.
// With blocks_per_row > 1 several blocks share the slots of a row and add to out, scaled before, by one atomic each (`add`).
// Launch: blocks_per_row blocks of 512 for every 512 / groups rows.
template <typename Value, typename Vector, bool add>
__global__ void __launch_bounds__(512) ell_spmv(
    const long long rows, const int width, const int groups, const int blocks_per_row,
    const int* __restrict__ column_indices, const Value* __restrict__ values, const Vector* __restrict__ x,
    Vector* __restrict__ out, const double alpha, const double beta)
{
    __shared__ double part[512];
    const int group_size = 512 / groups, place = threadIdx.x % group_size, group = threadIdx.x / group_size;
    const long long row = blockIdx.x / blocks_per_row * (long long)group_size + place;
    double total = 0.0;
    if (row < rows) {
        const int step = groups * blocks_per_row;
#pragma unroll 4
        for (int slot = blockIdx.x % blocks_per_row * groups + group; slot < width; slot += step) {
            const int column = PENSTOCK_STREAM_LOAD(column_indices + slot * rows + row);
            if (column < 0) break;  // padding: the row has ended
            total += double(PENSTOCK_STREAM_LOAD(values + slot * rows + row)) * double(x[column]);
        }
    }
    if (groups > 1) {
        part[threadIdx.x] = total;
        for (int by = groups / 2; by > 0; by /= 2) {
            __syncthreads();
            if (group < by) part[threadIdx.x] += part[threadIdx.x + by * group_size];
        }
        total = part[threadIdx.x];
    }
    if (row >= rows || group > 0) return;
    if (add) atomicAdd(out + row, Vector(alpha * total));
    else store_product(out + row, total, alpha, beta);
}

// The older kernel (Anzt, Tomov and Dongarra 2014), kept for comparison: `lanes` neighbouring threads of one warp share a
// row, so that neighbouring threads read memory a whole column apart. Launch: rows * lanes threads, rounded up.
template <typename Value, typename Vector, int lanes>
__global__ void __launch_bounds__(256) ell_spmv_lanes(
    const long long rows, const int width, const int* __restrict__ column_indices, const Value* __restrict__ values,
    const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha, const double beta)
{
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    const int lane = threadIdx.x % lanes;
    double total = 0.0;
    for (int slot = lane; row < rows && slot < width; slot += lanes) {
        const int column = column_indices[slot * rows + row];
        if (column < 0) break;
        total += double(values[slot * rows + row]) * double(x[column]);
    }
    total = sum_over_lanes<lanes>(total);
    if (row < rows && lane == 0) store_product(out + row, total, alpha, beta);
}

// out = alpha A x + beta out for a C-ordered block of vectors: one thread per column of a row. Launch: rows * columns threads,
// rounded up.
template <typename Value, typename Vector>
__global__ void __launch_bounds__(256) ell_spmm(
    const long long rows, const int width, const long long columns, const int* __restrict__ column_indices,
    const Value* __restrict__ values, const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha,
    const double beta)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = thread / columns, k = thread % columns;
    if (row >= rows) return;
    double total = 0.0;
    for (int slot = 0; slot < width; ++slot) {
        const long long column = column_indices[slot * rows + row];
        if (column < 0) break;
        total += double(values[slot * rows + row]) * double(x[column * columns + k]);
    }
    store_product(out + thread, total, alpha, beta);
}
