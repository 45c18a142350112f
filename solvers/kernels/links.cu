// Couplings of the unknowns of two nodes that a smoother must treat together: those across flat elements, and ties.

// scales[i] = the reciprocal roots of the diagonal of node i; 0 where it is not positive. A block is `size` x `size`.
__global__ void __launch_bounds__(256) scale_unknowns(
    const int nodes, const int size, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, double* __restrict__ scales)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    for (long long place = offsets[node]; place < offsets[node + 1]; ++place)
        if (columns[place] == node)
            for (int k = 0; k < size; ++k) {
                const double entry = blocks[(place * size + k) * size + k];
                scales[node * (long long)size + k] = entry > 0.0 ? 1.0 / sqrt(entry) : 0.0;
            }
}

// The coupling of the block at a place in the row of a node: positive where both want to move alike.
__device__ __forceinline__ double coupling_at(
    const long long place, const int node, const int size, const int* __restrict__ columns, const double* __restrict__ blocks,
    const double* __restrict__ scales)
{
    const double *own = scales + node * (long long)size, *other = scales + columns[place] * (long long)size;
    double sum = 0.0;
    for (int k = 0; k < size; ++k) sum -= blocks[(place * size + k) * size + k] * own[k] * other[k];
    return sum / size;
}

// Nodes with one or two couplings above `strong`, and others that add up to less than `-opposite`.
__global__ void __launch_bounds__(256) find_flat(
    const int nodes, const int size, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, const double* __restrict__ scales, const double strong, const double opposite,
    bool* __restrict__ flat)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    int above = 0;
    double negative = 0.0;
    for (long long place = offsets[node]; place < offsets[node + 1]; ++place) {
        if (columns[place] == node) continue;
        const double coupling = coupling_at(place, node, size, columns, blocks, scales);
        above += coupling > strong;
        negative -= fmin(coupling, 0.0);
    }
    flat[node] = above > 0 && above < 3 && negative > opposite;
}

// Whether a place links its node with another one: a strong coupling of two flat nodes, or a tie.
__device__ __forceinline__ bool is_link(
    const long long place, const int node, const int size, const int* __restrict__ columns, const double* __restrict__ blocks,
    const double* __restrict__ scales, const double strong, const double tie, const bool* __restrict__ flat)
{
    if (columns[place] == node) return false;
    const double coupling = coupling_at(place, node, size, columns, blocks, scales);
    return coupling > tie || (coupling > strong && flat[node] && flat[columns[place]]);
}

__global__ void __launch_bounds__(256) count_links(
    const int nodes, const int size, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, const double* __restrict__ scales, const double strong, const double tie,
    const bool* __restrict__ flat, long long* __restrict__ counts)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    long long count = 0;
    for (long long place = offsets[node]; place < offsets[node + 1]; ++place)
        count += is_link(place, node, size, columns, blocks, scales, strong, tie, flat);
    counts[node] = count;
}

__global__ void __launch_bounds__(256) list_links(
    const int nodes, const int size, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, const double* __restrict__ scales, const double strong, const double tie,
    const bool* __restrict__ flat, const long long* __restrict__ of_links, int* __restrict__ links)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    long long following = of_links[node];
    for (long long place = offsets[node]; place < offsets[node + 1]; ++place)
        if (is_link(place, node, size, columns, blocks, scales, strong, tie, flat)) links[following++] = columns[place];
}
