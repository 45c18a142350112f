// The tentative prolongator T of a coarse level: on every aggregate of nodes an orthonormal basis of `modes` vectors.
// basis[row * modes + mode] holds the entries of T, of_node the aggregate of every node, and order the nodes by aggregate, those
// of aggregate g from offsets[g]. A node has `size` rows. Vectors may be blocks (rows, vectors).

// out = T coarse, one thread a row and vector.
template <int modes>
__global__ void __launch_bounds__(256) prolong(
    const long long entries, const int size, const int vectors, const int* __restrict__ of_node,
    const double* __restrict__ basis, const double* __restrict__ coarse, double* __restrict__ out)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= entries) return;
    const long long row = vectors == 1 ? i : i / vectors;
    const double* values = coarse + (long long)of_node[row / size] * modes * vectors + (i - row * vectors);
    double total = 0;
#pragma unroll
    for (int mode = 0; mode < modes; ++mode) total += basis[row * modes + mode] * values[(long long)mode * vectors];
    out[i] = total;
}

// out = T^T fine, 32 lanes an aggregate: `across` of them, a power of two, take neighbouring vectors, the others further rows.
template <int modes>
__global__ void __launch_bounds__(256) restrict_rows(
    const long long aggregates, const int size, const int vectors, const int across, const long long* __restrict__ offsets,
    const int* __restrict__ order, const double* __restrict__ basis, const double* __restrict__ fine,
    double* __restrict__ out)
{
    const long long aggregate = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (aggregate >= aggregates) return;
    const int lane = threadIdx.x % 32, first = lane / across, step = 32 / across;
    const int* nodes = order + offsets[aggregate];
    const int rows = int(offsets[aggregate + 1] - offsets[aggregate]) * size;
    for (int left = 0; left < vectors; left += across) {
        const int k = left + lane % across;
        double total[modes] = {};
        for (int i = first; i < rows && k < vectors; i += step) {
            const long long row = (long long)nodes[i / size] * size + i % size;
            const double value = fine[row * vectors + k];
#pragma unroll
            for (int mode = 0; mode < modes; ++mode) total[mode] += basis[row * modes + mode] * value;
        }
#pragma unroll
        for (int mode = 0; mode < modes; ++mode) {
            for (int by = 16; by >= across; by /= 2) total[mode] += PENSTOCK_SHUFFLE_DOWN(total[mode], by, 32);
            if (first == 0 && k < vectors) out[(aggregate * modes + mode) * vectors + k] = total[mode];
        }
    }
}

// Turns the near-null space in `basis`, zero at rows that take no part, into an orthonormal basis on every aggregate, by Gram and
// Schmidt's algorithm, twice; `coarse` (aggregates, modes, modes), zero before, receives the upper triangular factors. A vector
// of whose square less than the share `dependent` is new becomes zero. 32 lanes an aggregate; each touches its own rows only.
template <int modes>
__global__ void __launch_bounds__(128) orthonormalise(
    const long long aggregates, const int size, const long long* __restrict__ offsets, const int* __restrict__ order,
    double* __restrict__ basis, double* __restrict__ coarse, const double dependent)
{
    const long long aggregate = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (aggregate >= aggregates) return;
    const int lane = threadIdx.x % 32;
    const int* nodes = order + offsets[aggregate];
    const int rows = int(offsets[aggregate + 1] - offsets[aggregate]) * size;
    const auto values = [&](int i) { return basis + ((long long)nodes[i / size] * size + i % size) * modes; };
    const auto product = [&](int left, int right) {
        double total = 0;
        for (int i = lane; i < rows; i += 32) total += values(i)[left] * values(i)[right];
        return PENSTOCK_SHUFFLE(sum_over_lanes<32>(total), 0, 32);
    };
    double* factor = coarse + aggregate * (modes * modes);
    for (int mode = 0; mode < modes; ++mode) {
        const double given = product(mode, mode);
        for (int round = 0; round < 2; ++round)
            for (int earlier = 0; earlier < mode; ++earlier) {
                const double share = product(mode, earlier);
                if (lane == 0) factor[earlier * modes + mode] += share;
                for (int i = lane; i < rows; i += 32) values(i)[mode] -= share * values(i)[earlier];
            }
        const double square = product(mode, mode);
        const bool present = square > dependent * given && square > 0;
        if (lane == 0 && present) factor[mode * modes + mode] = sqrt(square);
        const double scale = present ? 1 / sqrt(square) : 0.0;
        for (int i = lane; i < rows; i += 32) values(i)[mode] = present ? values(i)[mode] * scale : 0.0;
    }
}
