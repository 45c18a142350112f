// Couplings of the unknowns of two nodes that a smoother must treat together: those across flat elements, and ties.
//
// The rows are those of `nodes` consecutive nodes from `first` on; columns and `scales` are numbered from the first node of the
// matrix. Links are looked for among `among` nodes from `low` on, of which `flat` tells, and numbered from there.

// scales[i] = the reciprocal roots of the diagonal of node i; 0 where it is not positive. The rows are all of the matrix. A block is `size` x `size`.
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

// The coupling of the block at a place in the row of a node with another one: positive where both want to move alike.
__device__ __forceinline__ double coupling_at(
    const long long place, const long long node, const long long with, const int size, const double* __restrict__ blocks,
    const double* __restrict__ scales)
{
    const double *own = scales + node * size, *other = scales + with * size;
    double sum = 0.0;
    for (int k = 0; k < size; ++k) sum -= blocks[(place * size + k) * size + k] * own[k] * other[k];
    return sum / size;
}

// Nodes with one or two couplings above `strong`, where others add up to less than `-opposite`, or where there are others and
// these are most of the diagonal, more than the share `most`, or half as much beside the rest at an end of a line.
__global__ void __launch_bounds__(256) find_flat(
    const int nodes, const int size, const int first, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, const double* __restrict__ scales, const double strong, const double opposite,
    const double most, bool* __restrict__ flat)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    const long long own = (long long)node + first;
    int above = 0, others = 0;
    double negative = 0.0, share = 0.0;
    for (long long place = offsets[node]; place < offsets[node + 1]; ++place) {
        if (columns[place] == own) continue;
        const double coupling = coupling_at(place, own, columns[place], size, blocks, scales);
        negative -= fmin(coupling, 0.0);
        if (coupling > strong) {
            ++above;
            share += coupling_at(place, own, own, size, blocks, scales);
        } else {
            others += coupling != 0.0;
        }
    }
    const double limit = above == 2 ? most : most / (2.0 - most);
    flat[node] = above > 0 && above < 3 && (negative > opposite || (share > limit && others > 0));
}

// Whether a place links its node, a number in the matrix, with another one: a strong coupling of two flat nodes, or a tie.
__device__ __forceinline__ bool is_link(
    const long long place, const long long node, const int size, const int low, const int among,
    const int* __restrict__ columns, const double* __restrict__ blocks, const double* __restrict__ scales, const double strong,
    const double tie, const bool* __restrict__ flat)
{
    const long long other = columns[place];
    if (other == node || other < low || other >= (long long)low + among) return false;
    const double coupling = coupling_at(place, node, other, size, blocks, scales);
    return coupling > tie || (coupling > strong && flat[node - low] && flat[other - low]);
}

// shares[i] = the share of the diagonal of node i that its links make up.
__global__ void __launch_bounds__(256) count_links(
    const int nodes, const int size, const int first, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, const double* __restrict__ scales, const int low, const int among, const double strong,
    const double tie, const bool* __restrict__ flat, long long* __restrict__ counts, double* __restrict__ shares)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    const long long own = (long long)node + first;
    long long count = 0;
    double share = 0.0;
    for (long long place = offsets[node]; place < offsets[node + 1]; ++place)
        if (is_link(place, own, size, low, among, columns, blocks, scales, strong, tie, flat)) {
            ++count;
            share += coupling_at(place, own, own, size, blocks, scales);
        }
    counts[node] = count;
    shares[node] = share;
}

__global__ void __launch_bounds__(256) list_links(
    const int nodes, const int size, const int first, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, const double* __restrict__ scales, const int low, const int among, const double strong,
    const double tie, const bool* __restrict__ flat, const long long* __restrict__ of_links, int* __restrict__ links)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    const long long own = (long long)node + first;
    long long following = of_links[node];
    for (long long place = offsets[node]; place < offsets[node + 1]; ++place)
        if (is_link(place, own, size, low, among, columns, blocks, scales, strong, tie, flat))
            links[following++] = columns[place] - low;
}
