// Rows of the stiffness matrix of a box of 8-node hexahedra, made from one stiffness factor an element.
//
// Nodes are numbered (ix * ny + iy) * nz + iz. A thread makes the row of blocks of one node: it loads the factors of the eight
// elements around the node once, and every block of the row is a sum of at most eight of them, each times a block of the one
// element matrix. Which blocks these are is known when the kernel is compiled, so all lanes read the same word of shared memory.

constexpr int HEIGHT = 32;  // nodes in a chunk
constexpr int AROUND = 8;   // elements around a node, and nodes of an element

__device__ __forceinline__ int neighbours_along(const int count, const int node)
{
    return 3 - (node == 0) - (node == count - 1);
}

// The connections of the first `before` of `count` nodes of a line: 2 for each end, 3 inside.
__device__ __forceinline__ long long connections_along(const int count, const int before)
{
    return (before > 0 ? 3ll * before - 1 : 0) - (before == count);
}

// The connections of all nodes before one, itself a connection of each.
__device__ __forceinline__ long long connections_before(
    const int nx, const int ny, const int nz, const int ix, const int iy, const int iz)
{
    const long long line = connections_along(nz, nz), plane = connections_along(ny, ny) * line;
    const long long before = connections_along(nx, ix) * plane;
    if (ix == nx) return before;
    const long long in_plane = connections_along(ny, iy) * line + neighbours_along(ny, iy) * connections_along(nz, iz);
    return before + neighbours_along(nx, ix) * in_plane;
}

// Blocks of `dof` x `dof` of the rows of nodes `start` to `start + rows`; with `upper` those on and right of the diagonal only.
//
// element            [8][8][dof * dof]: its blocks, by the numbers 4 x + 2 y + z of two of its nodes
// first_layer,
// stop_layer         the layers of elements along x that there are: -1 and nx - 1 are shared with nodes of other planes
// factors            [layers][ny - 1][nz - 1], of these layers; none if all are 1
// chunk_starts       where the chunks of the whole matrix begin, in blocks, from the slab's first chunk on; for CHUNKS
// clamped            the unknowns of the nodes with ix = 0 keep their diagonal, and all else in their rows and columns is 0
// parts              which arrays are written: 1 offsets and indices, 2 values
template <typename Value, typename Offset, int dof, int layout, bool upper>
__global__ void __launch_bounds__(128) box_rows(
    const long long start, const long long rows, const int nx, const int ny, const int nz, const int first_layer,
    const int stop_layer, const int clamped, const int parts, const double* __restrict__ element,
    const double* __restrict__ factors, const int uniform, const long long* __restrict__ chunk_starts,
    Offset* __restrict__ offsets, int* __restrict__ columns, Value* __restrict__ values)
{
    constexpr int SCALARS = dof * dof;
    __shared__ double blocks[AROUND * AROUND * SCALARS];
    for (int k = threadIdx.x; k < AROUND * AROUND * SCALARS; k += blockDim.x) blocks[k] = element[k];
    __syncthreads();

    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const bool structure = parts & 1, numbers = parts & 2;
    const int lane = int(row % HEIGHT);
    long long place;  // of the first block of the row, in blocks
    int width = 0;    // slots of each row of the chunk
    if constexpr (layout == CHUNKS) {
        if (row / HEIGHT * HEIGHT >= rows) return;
        const long long first = chunk_starts[row / HEIGHT] - chunk_starts[0];
        const long long stop = chunk_starts[row / HEIGHT + 1] - chunk_starts[0];
        place = first + lane;
        width = int((stop - first) / HEIGHT);
        if (structure && lane == 0) {
            offsets[row / HEIGHT] = Offset(first);
            if (row + HEIGHT >= rows) offsets[row / HEIGHT + 1] = Offset(stop);
        }
    }
    if (row >= rows) {
        if constexpr (layout == CHUNKS)
            for (int slot = 0; slot < width; ++slot) {
                const long long block = place + slot * HEIGHT;
                if (structure) columns[block] = -1;
                if (numbers)
                    for (int k = 0; k < SCALARS; ++k) values[(block - lane) * SCALARS + k * HEIGHT + lane] = Value(0);
            }
        return;
    }

    const long long node = start + row;
    const int ix = int(node / ((long long)ny * nz)), iy = int(node / nz % ny), iz = int(node % nz);
    const int count = neighbours_along(nx, ix) * neighbours_along(ny, iy) * neighbours_along(nz, iz);
    if constexpr (layout != CHUNKS) {
        const int sx = int(start / ((long long)ny * nz)), sy = int(start / nz % ny), sz = int(start % nz);
        place = connections_before(nx, ny, nz, ix, iy, iz) - connections_before(nx, ny, nz, sx, sy, sz);
        if (structure) {
            const int lines = layout == SCALAR_ROWS ? dof : 1;  // of offsets for a node, each of a row of scalars or of blocks
            const long long first = layout == SCALAR_ROWS ? place * SCALARS : place;
            const long long each = layout == SCALAR_ROWS ? (long long)count * dof : count;
            for (int line = 0; line < lines; ++line) offsets[row * lines + line] = Offset(first + line * each);
            if (row + 1 == rows) offsets[rows * lines] = Offset(first + lines * each);
        }
    }

    double around[AROUND];
#pragma unroll
    for (int e = 0; e < AROUND; ++e) {
        const int ex = ix - 1 + (e >> 2), ey = iy - 1 + (e >> 1 & 1), ez = iz - 1 + (e & 1);
        const bool exists = ex >= first_layer && ey >= 0 && ez >= 0 && ex < stop_layer && ey < ny - 1 && ez < nz - 1;
        around[e] = 0.0;  // adds nothing
        if (exists)
            around[e] = uniform ? 1.0 : factors[((long long)(ex - first_layer) * (ny - 1) + ey) * (nz - 1) + ez];
    }

    int connection = 0;
#pragma unroll
    for (int step = upper ? 13 : 0; step < 27; ++step) {  // the node itself is number 13
        const int dx = step / 9 - 1, dy = step / 3 % 3 - 1, dz = step % 3 - 1;
        const int jx = ix + dx, jy = iy + dy, jz = iz + dz;
        if (jx < 0 || jy < 0 || jz < 0 || jx >= nx || jy >= ny || jz >= nz) continue;
        double total[SCALARS];
#pragma unroll
        for (int k = 0; k < SCALARS; ++k) total[k] = 0.0;
#pragma unroll
        for (int e = 0; e < AROUND; ++e) {
            // Of the node and of its neighbour in the element: 1 where they lie on its far side.
            const int ax = 1 - (e >> 2), ay = 1 - (e >> 1 & 1), az = 1 - (e & 1), bx = ax + dx, by = ay + dy, bz = az + dz;
            if (bx < 0 || by < 0 || bz < 0 || bx > 1 || by > 1 || bz > 1) continue;
            const double* block = blocks + ((ax * 4 + ay * 2 + az) * AROUND + bx * 4 + by * 2 + bz) * SCALARS;
#pragma unroll
            for (int k = 0; k < SCALARS; ++k) total[k] = fma(around[e], block[k], total[k]);
        }
        if (clamped && (ix == 0 || jx == 0)) {
#pragma unroll
            for (int k = 0; k < SCALARS; ++k)
                if (step != 13 || k % (dof + 1)) total[k] = 0.0;
        }
        const int other = int(((long long)jx * ny + jy) * nz + jz);
        if constexpr (layout == CHUNKS) {
            const long long block = place + (long long)connection * HEIGHT;
            if (structure) columns[block] = other;
            if (numbers) {
                Value* target = values + (block - lane) * SCALARS + lane;
#pragma unroll
                for (int k = 0; k < SCALARS; ++k) target[k * HEIGHT] = Value(total[k]);
            }
        } else if constexpr (layout == BLOCK_ROWS) {
            const long long block = place + connection;
            if (structure) columns[block] = other;
            if (numbers)
#pragma unroll
                for (int k = 0; k < SCALARS; ++k) values[block * SCALARS + k] = Value(total[k]);
        } else {
#pragma unroll
            for (int k = 0; k < SCALARS; ++k) {
                const long long entry = place * SCALARS + (k / dof * (long long)count + connection) * dof + k % dof;
                if (structure) columns[entry] = other * dof + k % dof;
                if (numbers) values[entry] = Value(total[k]);
            }
        }
        ++connection;
    }
    if constexpr (layout == CHUNKS)
        for (; connection < width; ++connection) {
            const long long block = place + (long long)connection * HEIGHT;
            if (structure) columns[block] = -1;
            if (numbers)
                for (int k = 0; k < SCALARS; ++k) values[(block - lane) * SCALARS + k * HEIGHT + lane] = Value(0);
        }
}
