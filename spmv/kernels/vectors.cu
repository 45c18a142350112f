// Arithmetic on whole vectors. Vector is the element type; sums are formed in double.

// partial[block] = this block's part of x . y: elements block * threads + thread, then in steps of the whole grid.
// Grid and block are fixed by the caller, so the order of summation depends only on n. Block: 256 threads.
template <typename Vector>
__global__ void __launch_bounds__(256) dot_partial(
    const long long n, const Vector* __restrict__ x, const Vector* __restrict__ y, double* __restrict__ partial)
{
    __shared__ double sums[8];  // one for every 32 lanes
    double sum = 0.0;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride)
        sum += double(x[i]) * double(y[i]);
    sum = sum_over_lanes<32>(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (int part = 0; part < (int)blockDim.x / 32; ++part) total += sums[part];
        partial[blockIdx.x] = total;
    }
}

// y = alpha x + beta y, one thread per element.
template <typename Vector>
__global__ void __launch_bounds__(256) combine(
    const long long n, const double alpha, const Vector* __restrict__ x, const double beta, Vector* __restrict__ y)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = Vector(alpha * double(x[i]) + beta * double(y[i]));
}

// out = a D (f - y) + b v + c out for blocks of k vectors side by side, one thread per `size` rows of a vector; n is rows
// times k. D consists of dense blocks of `size` rows on the diagonal. It is left out unless `scaled`, f unless `driven`;
// `clears` sets y to zero afterwards. Terms with a zero b or c are not read.
template <typename Vector, int size>
__global__ void __launch_bounds__(256) three_terms(
    const long long n, const int k, const int scaled, const int driven, const int clears, const double a, const double b,
    const double c, const Vector* __restrict__ diagonal, const Vector* __restrict__ f, Vector* __restrict__ y,
    const Vector* __restrict__ v, Vector* __restrict__ out)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= n / size) return;
    const long long block = k == 1 ? thread : thread / k, first = block * size * k + (k == 1 ? 0 : thread % k);
    double change[size];
#pragma unroll
    for (int row = 0; row < size; ++row)
        change[row] = (driven ? double(f[first + row * k]) : 0.0) - double(y[first + row * k]);
#pragma unroll
    for (int row = 0; row < size; ++row) {
        const long long i = first + row * k;
        double sum = change[row];
        if (scaled) {
            sum = 0.0;
#pragma unroll
            for (int column = 0; column < size; ++column)
                sum += double(diagonal[(block * size + row) * size + column]) * change[column];
        }
        sum *= a;
        if (b != 0.0) sum += b * double(v[i]);
        if (c != 0.0) sum += c * double(out[i]);
        out[i] = Vector(sum);
        if (clears) y[i] = Vector(0);
    }
}

// Inverts symmetric blocks, one per thread: A = L L^T (Golub and Van Loan 2013, algorithm 4.2.1), then L^-T L^-1, in double.
// `first_bad` receives the smallest number of a block that is not positive definite, and of an inverse that is not finite.
template <class Vector, int size>
__global__ void __launch_bounds__(256) invert_blocks(
    const long long count, const Vector* __restrict__ blocks, Vector* __restrict__ inverses,
    unsigned long long* __restrict__ first_bad)
{
    const long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    double factor[size][size];
    for (int row = 0; row < size; ++row)
        for (int column = 0; column < size; ++column) factor[row][column] = double(blocks[(k * size + row) * size + column]);
    bool positive = true, finite = true;
    for (int column = 0; column < size; ++column)
        for (int row = column; row < size; ++row) {
            double entry = factor[row][column];
            for (int inner = 0; inner < column; ++inner) entry -= factor[row][inner] * factor[column][inner];
            if (row > column)
                factor[row][column] = entry / factor[column][column];
            else if (entry > 0.0 && entry - entry == 0.0)
                factor[column][column] = sqrt(entry);
            else {
                positive = false;
                factor[column][column] = 1.0;
            }
        }
    for (int column = 0; column < size; ++column) {  // L^-1 overwrites L
        factor[column][column] = 1.0 / factor[column][column];
        for (int row = column + 1; row < size; ++row) {
            double entry = 0.0;
            for (int inner = column; inner < row; ++inner) entry -= factor[row][inner] * factor[inner][column];
            factor[row][column] = entry / factor[row][row];
        }
    }
    for (int row = 0; row < size; ++row)
        for (int column = 0; column <= row; ++column) {
            double entry = 0.0;
            for (int inner = row; inner < size; ++inner) entry += factor[inner][row] * factor[inner][column];
            const Vector rounded = Vector(entry);
            finite = finite && rounded - rounded == Vector(0);
            // Exactly symmetric, as CG requires of a preconditioner.
            inverses[(k * size + row) * size + column] = inverses[(k * size + column) * size + row] = rounded;
        }
    if (!positive) atomicMin(first_bad, (unsigned long long)k);
    if (!finite) atomicMin(first_bad + 1, (unsigned long long)k);
}
