// Recursive bisection of nodes, a level at a time: nodes of a part follow each other in `order`, and parts begin at `starts`.
//
// Along every axis the nodes are ranked once, by that coordinate, then by the others, then by number. Sorting 64-bit keys of part
// and rank then puts the first half of each part before its cut. Arrays of an axis follow each other: `ranks[axis * nodes + node]`,
// and `sorted[axis * nodes + rank]` is the node of a rank.

__device__ __forceinline__ int part_of(const long long position, const int parts, const long long* __restrict__ starts)
{
    int low = 0, high = parts;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= position) low = middle; else high = middle;
    }
    return low;
}

// keys[place] = an integer that sorts as coordinate `axis` of node order[place] does, or of node `place` where `order` is null.
// Coordinates are finite; -0 and 0 get the same integer.
__global__ void __launch_bounds__(256) make_sortable(
    const int nodes, const int dimensions, const int axis, const long long* __restrict__ order, const double* __restrict__ points,
    long long* __restrict__ keys)
{
    const int place = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (place >= nodes) return;
    const long long node = order ? order[place] : place;
    const long long bits = __double_as_longlong(points[node * dimensions + axis] + 0.0);
    keys[place] = bits < 0 ? bits ^ 0x7fffffffffffffffll : bits;
}

// places = order[places].
__global__ void __launch_bounds__(256) follow_order(const int nodes, const long long* __restrict__ order, long long* places)
{
    const int i = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (i < nodes) places[i] = order[places[i]];
}

__global__ void __launch_bounds__(256) rank_nodes(
    const int nodes, const long long* __restrict__ by_axis, int* __restrict__ sorted, int* __restrict__ ranks)
{
    const int rank = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (rank >= nodes) return;
    const int node = int(by_axis[rank]);
    sorted[rank] = node;
    ranks[node] = rank;
}

// The smallest and the largest rank of every part along every axis: lowest and highest, (parts, dimensions). A thread looks at a run
// of positions, so that it seldom needs an atomic operation.
__global__ void __launch_bounds__(256) find_extents(
    const int nodes, const int run, const int dimensions, const int parts, const long long* __restrict__ starts,
    const int* __restrict__ order, const int* __restrict__ ranks, int* lowest, int* highest)
{
    const long long first = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * run;
    if (first >= nodes) return;
    const long long last = first + run < nodes ? first + run : nodes;
    for (int axis = 0; axis < dimensions; ++axis) {
        int part = part_of(first, parts, starts), low = nodes, high = -1;
        for (long long position = first; position < last; ++position) {
            if (part + 1 < parts && position >= starts[part + 1]) {
                atomicMin(lowest + part * dimensions + axis, low);
                atomicMax(highest + part * dimensions + axis, high);
                part = part_of(position, parts, starts), low = nodes, high = -1;
            }
            const int rank = ranks[(long long)axis * nodes + order[position]];
            low = rank < low ? rank : low, high = rank > high ? rank : high;
        }
        atomicMin(lowest + part * dimensions + axis, low);
        atomicMax(highest + part * dimensions + axis, high);
    }
}

// The axis of the longest extent of every part, the first of several.
__global__ void __launch_bounds__(256) choose_axes(
    const int nodes, const int dimensions, const int parts, const double* __restrict__ points, const int* __restrict__ sorted,
    const int* __restrict__ lowest, const int* __restrict__ highest, int* __restrict__ axes)
{
    const int part = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (part >= parts) return;
    int best = 0;
    double longest = -1.0;
    for (int axis = 0; axis < dimensions; ++axis) {
        const int* of_axis = sorted + (long long)axis * nodes;
        const long long low = of_axis[lowest[part * dimensions + axis]], high = of_axis[highest[part * dimensions + axis]];
        const double extent = points[high * dimensions + axis] - points[low * dimensions + axis];
        if (extent > longest) best = axis, longest = extent;
    }
    axes[part] = best;
}

template <typename Key>
__global__ void __launch_bounds__(256) make_part_keys(
    const int nodes, const int parts, const long long* __restrict__ starts, const int* __restrict__ axes,
    const int* __restrict__ order, const int* __restrict__ ranks, Key* __restrict__ keys)
{
    const long long position = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (position >= nodes) return;
    const int part = part_of(position, parts, starts);
    keys[position] = Key(part) * nodes + ranks[(long long)axes[part] * nodes + order[position]];
}

template <typename Key>
__global__ void __launch_bounds__(256) take_nodes(
    const int nodes, const int* __restrict__ axes, const int* __restrict__ sorted, const Key* __restrict__ keys,
    int* __restrict__ order)
{
    const long long position = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (position >= nodes) return;
    const int part = int(keys[position] / nodes);
    order[position] = sorted[(long long)axes[part] * nodes + keys[position] % nodes];
}

__global__ void __launch_bounds__(256) number_parts(
    const int nodes, const int parts, const long long* __restrict__ starts, const int* __restrict__ order,
    int* __restrict__ of_node)
{
    const long long position = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (position < nodes) of_node[order[position]] = part_of(position, parts, starts);
}
