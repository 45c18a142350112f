// D = W^T W on groups of nodes: the lower triangular factor W of each group is stored row by row, in single precision.
// Group g has the nodes order[starts[g]] to order[starts[g + 1] - 1] of `size` unknowns each, and its factor begins at places[g].
// Vectors may be blocks (rows, vectors), which begin at row `first_row` of the matrix.

// Unknowns of a group, at most.
#define MOST_UNKNOWNS 160

// out = a D (f - y) + b v + c out, one thread block a group. f is left out unless `driven`; y becomes zero if `clears`.
__global__ void __launch_bounds__(128) group_step(
    const long long first, const int size, const int vectors, const long long first_row, const int driven, const int clears,
    const double a, const double b, const double c, const long long* __restrict__ starts, const int* __restrict__ order,
    const long long* __restrict__ places, const float* __restrict__ factors, const double* __restrict__ f, double* y,
    const double* __restrict__ v, double* out)
{
    __shared__ double given[MOST_UNKNOWNS], halfway[MOST_UNKNOWNS];
    const long long group = first + blockIdx.x;
    const int* nodes = order + starts[group];
    const int unknowns = int(starts[group + 1] - starts[group]) * size;
    const float* W = factors + places[group];
    const auto place = [&](int i, int k) { return ((long long)nodes[i / size] * size + i % size - first_row) * vectors + k; };
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int k = 0; k < vectors; ++k) {
        for (int i = threadIdx.x; i < unknowns; i += blockDim.x) {
            const long long at = place(i, k);
            given[i] = (driven ? f[at] : 0.0) - y[at];
            if (clears) y[at] = 0.0;
        }
        __syncthreads();
        for (int i = warp; i < unknowns; i += warps) {
            double total = 0.0;
            for (int j = lane; j <= i; j += 32) total += double(W[i * (i + 1) / 2 + j]) * given[j];
            for (int by = 16; by; by /= 2) total += PENSTOCK_SHUFFLE_DOWN(total, by, 32);
            if (lane == 0) halfway[i] = total;
        }
        __syncthreads();
        for (int j = threadIdx.x; j < unknowns; j += blockDim.x) {
            double total = 0.0;
            for (int i = j; i < unknowns; ++i) total += double(W[i * (i + 1) / 2 + j]) * halfway[i];
            const long long at = place(j, k);
            total *= a;
            if (b != 0.0) total += b * v[at];
            if (c != 0.0) total += c * out[at];
            out[at] = total;
        }
        __syncthreads();  // the shared memory serves the next vector
    }
}

// Solves D out = x, one thread a group and vector: W^T u = x, W out = u. `out` holds x before.
__global__ void __launch_bounds__(128) group_solve(
    const long long groups, const int size, const int vectors, const long long* __restrict__ starts,
    const int* __restrict__ order, const long long* __restrict__ places, const float* __restrict__ factors, double* out)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= groups * vectors) return;
    const long long group = thread / vectors, k = thread % vectors;
    const int* nodes = order + starts[group];
    const int unknowns = int(starts[group + 1] - starts[group]) * size;
    const float* W = factors + places[group];
    const auto entry = [&](int i) -> double& { return out[((long long)nodes[i / size] * size + i % size) * vectors + k]; };
    for (int i = unknowns - 1; i >= 0; --i) {
        double total = entry(i);
        for (int below = i + 1; below < unknowns; ++below) total -= double(W[below * (below + 1) / 2 + i]) * entry(below);
        entry(i) = total / double(W[i * (i + 1) / 2 + i]);
    }
    for (int i = 0; i < unknowns; ++i) {
        double total = entry(i);
        for (int j = 0; j < i; ++j) total -= double(W[i * (i + 1) / 2 + j]) * entry(j);
        entry(i) = total / double(W[i * (i + 1) / 2 + i]);
    }
}
