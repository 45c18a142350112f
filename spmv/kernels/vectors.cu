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

// out = a D (f - y) + b v + c out, one thread per row; D consists of dense blocks of `size` rows on the diagonal. It is left out
// unless `scaled`, f unless `driven`; `clears` sets y to zero afterwards. Terms with a zero b or c are not read. Launch: thread
// blocks of a multiple of `size` threads, 256 at most. Rows of blocks of an even size are loaded in pairs, so D must be aligned to
// two scalars.
template <typename Vector, int size>
__global__ void __launch_bounds__(256) three_terms(
    const long long n, const int scaled, const int driven, const int clears, const double a, const double b,
    const double c, const Vector* __restrict__ diagonal, const Vector* __restrict__ f, Vector* __restrict__ y,
    const Vector* __restrict__ v, Vector* __restrict__ out)
{
    constexpr int together = size % 2 ? 1 : 2;
    typedef Pack<Vector, together> Loaded;
    __shared__ double changes[256];
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const double change = i < n ? (driven ? double(f[i]) : 0.0) - double(y[i]) : 0.0;
    double sum = change;
    if (scaled) {
        changes[threadIdx.x] = change;
        __syncthreads();
        if (i >= n) return;
        const double* of_block = changes + threadIdx.x / size * size;
        const Loaded* of_diagonal = (const Loaded*)(diagonal + i * size);
        sum = 0.0;
#pragma unroll
        for (int column = 0; column < size; column += together) {
            const Loaded loaded = of_diagonal[column / together];
#pragma unroll
            for (int other = 0; other < together; ++other) sum += double(loaded.number[other]) * of_block[column + other];
        }
    }
    if (i >= n) return;
    sum *= a;
    if (b != 0.0) sum += b * double(v[i]);
    if (c != 0.0) sum += c * double(out[i]);
    out[i] = Vector(sum);
    if (clears) y[i] = Vector(0);
}

// The same for k vectors side by side, one thread per `size` rows of a vector; n is rows times k.
template <typename Vector, int size>
__global__ void __launch_bounds__(256) three_terms_of_block(
    const long long n, const int k, const int scaled, const int driven, const int clears, const double a, const double b,
    const double c, const Vector* __restrict__ diagonal, const Vector* __restrict__ f, Vector* __restrict__ y,
    const Vector* __restrict__ v, Vector* __restrict__ out)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= n / size) return;
    const long long block = thread / k, first = block * size * k + thread % k;
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

// Numbers between -1 and 1 without a pattern, those of row `first` and the ones after it (Steele, Lea and Flood 2014, SplitMix64).
__global__ void __launch_bounds__(256) fill_noise(const long long n, const long long first, double* __restrict__ out)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned long long z = (unsigned long long)(first + 1 + i) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    out[i] = double(z >> 11) * 0x1p-52 - 1.0;
}
