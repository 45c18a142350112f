// Aggregation of the nodes of a graph by a maximal independent set of distance 2 (Bell, Dalton and Olson 2012): its nodes are the
// roots of aggregates, and every other node is one or two edges from a root.
//
// A key holds what a node is (2 bits), and which of the open nodes comes first: a priority that looks random (30 bits) and its number
// (32 bits), or only its number, whose bits are inverted: then the roots are those that would be chosen one after the other.

typedef unsigned long long Key;

enum Standing { PASSED = 0, OPEN = 1, ROOT = 2 };

__device__ __forceinline__ int standing_of(const Key key) { return int(key >> 62); }

// Nodes that are not active take no part: they are never roots, and no way between others leads through them. (A multiplicative hash, Knuth 1998, section 6.4, mixed once more.)
__global__ void __launch_bounds__(256) make_keys(
    const int nodes, const bool in_order, const bool* __restrict__ active, Key* __restrict__ keys)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    unsigned priority = unsigned(node) * 2654435761u;
    priority = (priority ^ priority >> 15) * 2246822519u;
    const Key place = in_order ? Key(~unsigned(node)) : Key(priority >> 2) << 32 | unsigned(node);
    keys[node] = Key(active[node] ? OPEN : PASSED) << 62 | place;
}

// active = whether a node has neighbours other than itself; `alone` counts those that have none.
__global__ void __launch_bounds__(256) mark_coupled(
    const int nodes, const long long* __restrict__ offsets, const int* __restrict__ columns, bool* __restrict__ active,
    long long* alone)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    bool coupled = false;
    if (node < nodes) {
        for (long long entry = offsets[node]; entry < offsets[node + 1] && !coupled; ++entry) coupled = columns[entry] != node;
        active[node] = coupled;
    }
    const unsigned all = PENSTOCK_BALLOT(node < nodes && !coupled);
    if (threadIdx.x % 32 == 0 && all) atomicAdd((unsigned long long*)alone, (unsigned long long)__popc(all));
}

// The largest key of a team of `lanes` neighbouring lanes, a power of two; only the first of them holds it afterwards.
__device__ __forceinline__ Key largest_of_team(Key key, const int lanes)
{
    for (int by = lanes / 2; by > 0; by /= 2) {
        const Key other = PENSTOCK_SHUFFLE_DOWN(key, by, lanes);
        key = other > key ? other : key;
    }
    return key;
}

// The largest of the keys that a node and its neighbours have, found by a team, or 0 if there is nothing to be found.
__device__ __forceinline__ Key largest_around(
    const bool wanted, const int node, const int lanes, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const Key* __restrict__ of_nodes)
{
    Key best = 0;
    if (wanted) {
        best = of_nodes[node];
        for (long long entry = offsets[node] + threadIdx.x % lanes; entry < offsets[node + 1]; entry += lanes) {
            const Key other = of_nodes[columns[entry]];
            best = other > best ? other : best;
        }
    }
    return largest_of_team(best, lanes);
}

// largest[i] = the largest key of node i and its neighbours. Launch: `lanes` threads for each node.
__global__ void __launch_bounds__(256) find_largest(
    const int nodes, const int lanes, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const bool* __restrict__ active, const Key* __restrict__ keys, Key* __restrict__ largest)
{
    const int node = int(((long long)blockIdx.x * blockDim.x + threadIdx.x) / lanes);
    const Key best = largest_around(node < nodes && active[node], node, lanes, offsets, columns, keys);
    if (node < nodes && threadIdx.x % lanes == 0) largest[node] = best;
}

// An open node becomes a root if its key is the largest within two edges, and passes if a root is there. `near` holds the largest keys
// within one edge; the nodes that are left are added to `open`. Launch: `lanes` threads for each node.
__global__ void __launch_bounds__(256) decide(
    const int nodes, const int lanes, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const Key* __restrict__ near, Key* keys, int* open)
{
    const int node = int(((long long)blockIdx.x * blockDim.x + threadIdx.x) / lanes);
    const Key own = node < nodes ? keys[node] : 0;
    const bool wanted = standing_of(own) == OPEN;
    const Key best = largest_around(wanted, node, lanes, offsets, columns, near);
    bool left = false;
    if (wanted && threadIdx.x % lanes == 0) {
        if (best == own)
            keys[node] = own + (Key(1) << 62);
        else if (standing_of(best) == ROOT)
            keys[node] = own - (Key(1) << 62);
        else
            left = true;
    }
    const unsigned all = PENSTOCK_BALLOT(left);
    if (threadIdx.x % 32 == 0 && all) atomicAdd(open, __popc(all));
}

// A node without an aggregate joins that of most of its active neighbours, the smallest of several; so do nodes that are not active,
// which then are where they can do no harm. Launch: `lanes` threads for each node.
__global__ void __launch_bounds__(256) join_aggregates(
    const int nodes, const int lanes, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const bool* __restrict__ active, const int* __restrict__ before, int* __restrict__ after)
{
    const int node = int(((long long)blockIdx.x * blockDim.x + threadIdx.x) / lanes);
    const int known = node < nodes ? before[node] : 0;
    Key most = 0;  // votes, and the candidate with its bits inverted
    if (known < 0)
        for (long long entry = offsets[node] + threadIdx.x % lanes; entry < offsets[node + 1]; entry += lanes) {
            const int candidate = before[columns[entry]];
            if (candidate < 0 || !active[columns[entry]]) continue;
            int votes = 0;
            for (long long other = offsets[node]; other < offsets[node + 1]; ++other) votes += before[columns[other]] == candidate;
            const Key vote = Key(votes) << 32 | unsigned(~candidate);
            most = vote > most ? vote : most;
        }
    most = largest_of_team(most, lanes);
    if (node < nodes && threadIdx.x % lanes == 0) after[node] = known < 0 && most ? ~int(unsigned(most)) : known;
}

// numbers = 1 for roots, 0 for others.
__global__ void __launch_bounds__(256) mark_roots(const int nodes, const Key* __restrict__ keys, long long* __restrict__ numbers)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node < nodes) numbers[node] = standing_of(keys[node]) == ROOT;
}

// labels = the aggregate of roots, -1 for others; numbers[node] are the roots up to a node.
__global__ void __launch_bounds__(256) label_roots(
    const int nodes, const Key* __restrict__ keys, const long long* __restrict__ numbers, int* __restrict__ labels)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node < nodes) labels[node] = standing_of(keys[node]) == ROOT ? int(numbers[node]) - 1 : -1;
}

// Puts nodes without an aggregate into that of the last root before them, or the first one.
__global__ void __launch_bounds__(256) place_others(const int nodes, const long long* __restrict__ numbers, int* labels)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node < nodes && labels[node] < 0) labels[node] = numbers[node] > 0 ? int(numbers[node]) - 1 : 0;
}

// Frobenius norms of the blocks on the diagonal; a block has `size` scalars.
__global__ void __launch_bounds__(256) measure_diagonal(
    const int nodes, const int size, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, double* __restrict__ norms)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    for (long long place = offsets[node]; place < offsets[node + 1]; ++place)
        if (columns[place] == node) {
            double squares = 0.0;
            for (int i = 0; i < size; ++i) squares += blocks[place * size + i] * blocks[place * size + i];
            norms[node] = sqrt(squares);
        }
}

// Whether the block at a place, in the row of a node, couples it strongly with another one. The rows of some consecutive nodes
// begin with that of `start`; norms are of all nodes.
__device__ __forceinline__ bool is_strong(
    const long long place, const int node, const int size, const int* __restrict__ columns, const double* __restrict__ blocks,
    const double theta, const double* __restrict__ norms)
{
    double squares = 0.0;
    for (int i = 0; i < size; ++i) squares += blocks[place * size + i] * blocks[place * size + i];
    return columns[place] != node && squares > theta * theta * norms[node] * norms[columns[place]];
}

__global__ void __launch_bounds__(256) count_strong(
    const int nodes, const int start, const int size, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, const double theta, const double* __restrict__ norms, long long* __restrict__ counts)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    long long count = 0;
    for (long long place = offsets[node]; place < offsets[node + 1]; ++place)
        count += is_strong(place, start + node, size, columns, blocks, theta, norms);
    counts[node] = count;
}

__global__ void __launch_bounds__(256) list_strong(
    const int nodes, const int start, const int size, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, const double theta, const double* __restrict__ norms,
    const long long* __restrict__ of_strong, int* __restrict__ strong)
{
    const int node = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (node >= nodes) return;
    long long following = of_strong[node];
    for (long long place = offsets[node]; place < offsets[node + 1]; ++place)
        if (is_strong(place, start + node, size, columns, blocks, theta, norms)) strong[following++] = columns[place];
}
