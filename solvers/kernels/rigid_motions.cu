// The tentative prolongator of a coarse level whose near-null space are the rigid motions of nodes in space, not stored but
// computed from their coordinates. A motion has six numbers: a displacement t and a rotation w. It moves a node at x by
// t + (w x x); a node of `size` 6 also turns by w. An aggregate takes motions through an upper triangular 6 x 6 matrix, which
// makes their values on its nodes orthonormal. free[row] is zero at unknowns that the coarse level leaves out. `order` holds the
// nodes by aggregate, those of aggregate g from offsets[g]. Vectors may be blocks (rows, vectors). Coordinates are three numbers a
// node, or, of a structured mesh of nx * ny * nz nodes, those along its axes one after another; otherwise nx is 0.
struct Points {
    const double* __restrict__ coordinates;
    int nx, ny, nz;

    __device__ __forceinline__ double at(long long node, int axis) const
    {
        if (nx == 0) return coordinates[3 * node + axis];
        const unsigned number = unsigned(node), line = number / unsigned(nz);
        if (axis == 2) return coordinates[nx + ny + number - line * unsigned(nz)];
        const unsigned plane = line / unsigned(ny);
        return coordinates[axis == 0 ? plane : nx + line - plane * unsigned(ny)];
    }
};

// The motion of component d of a node; the numbers of the motion are `stride` apart.
__device__ __forceinline__ double moved(const Points points, long long node, const double* motion, long long stride, int d)
{
    if (d >= 3) return motion[d * stride];
    const int a = d == 2 ? 0 : d + 1, b = d == 0 ? 2 : d - 1;
    return motion[d * stride] + motion[(3 + a) * stride] * points.at(node, b) - motion[(3 + b) * stride] * points.at(node, a);
}

// out = F in on every aggregate, or F^T in; one thread a motion's number and vector.
template <bool transposed>
__global__ void __launch_bounds__(256) apply_factors(
    const long long entries, const int vectors, const double* __restrict__ factors, const double* __restrict__ in,
    double* __restrict__ out)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= entries) return;
    const long long row = i / vectors, aggregate = row / 6;
    const int mode = int(row - 6 * aggregate);
    const double* factor = factors + 36 * aggregate;
    const double* values = in + 6 * aggregate * vectors + (i - row * vectors);
    double total = 0;
#pragma unroll
    for (int other = 0; other < 6; ++other)
        total += (transposed ? factor[6 * other + mode] : factor[6 * mode + other]) * values[(long long)other * vectors];
    out[i] = total;
}

// Moves every node with its aggregate, one thread a row and vector.
template <int size>
__global__ void __launch_bounds__(256) move_nodes(
    const long long entries, const int vectors, const int* __restrict__ of_node, const bool* __restrict__ free,
    const double* __restrict__ coordinates, const int nx, const int ny, const int nz, const double* __restrict__ motions,
    double* __restrict__ out)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= entries) return;
    const long long row = vectors == 1 ? i : i / vectors, node = row / size;
    const double* motion = motions + 6ll * of_node[node] * vectors + (i - row * vectors);
    const double value = moved({coordinates, nx, ny, nz}, node, motion, vectors, int(row - node * size));
    out[i] = free[row] ? value : 0.0;
}

// The transpose: the forces and moments about the origin of the loads on every aggregate. 32 lanes an aggregate: `across` of
// them, a power of two, take neighbouring vectors, the others further nodes.
template <int size>
__global__ void __launch_bounds__(256) sum_loads(
    const long long aggregates, const int vectors, const int across, const long long* __restrict__ offsets,
    const int* __restrict__ order, const bool* __restrict__ free, const double* __restrict__ coordinates, const int nx,
    const int ny, const int nz, const double* __restrict__ loads, double* __restrict__ out)
{
    const Points points{coordinates, nx, ny, nz};
    const long long aggregate = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (aggregate >= aggregates) return;
    const int lane = threadIdx.x % 32, first = lane / across, step = 32 / across;
    for (int left = 0; left < vectors; left += across) {
        const int k = left + lane % across;
        double total[6] = {};
        for (long long i = offsets[aggregate] + first; i < offsets[aggregate + 1] && k < vectors; i += step) {
            const long long node = order[i];
            const double x[3] = {points.at(node, 0), points.at(node, 1), points.at(node, 2)};
            double load[size];
#pragma unroll
            for (int d = 0; d < size; ++d)
                load[d] = free[node * size + d] ? loads[(node * size + d) * vectors + k] : 0.0;
#pragma unroll
            for (int d = 0; d < size; ++d) total[d] += load[d];
            total[3] += x[1] * load[2] - x[2] * load[1];
            total[4] += x[2] * load[0] - x[0] * load[2];
            total[5] += x[0] * load[1] - x[1] * load[0];
        }
#pragma unroll
        for (int mode = 0; mode < 6; ++mode) {
            for (int by = 16; by >= across; by /= 2) total[mode] += PENSTOCK_SHUFFLE_DOWN(total[mode], by, 32);
            if (first == 0 && k < vectors) out[(aggregate * 6 + mode) * vectors + k] = total[mode];
        }
    }
}

// The rows of consecutive nodes from `start` on as blocks (size, 6), one thread an entry.
template <int size>
__global__ void __launch_bounds__(256) motion_blocks(
    const long long entries, const long long start, const int* __restrict__ of_node, const bool* __restrict__ free,
    const double* __restrict__ coordinates, const int nx, const int ny, const int nz, const double* __restrict__ factors,
    double* __restrict__ out)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= entries) return;
    const long long row = start * size + i / 6, node = row / size;
    const double* motion = factors + 36ll * of_node[node] + i % 6;
    const double value = moved({coordinates, nx, ny, nz}, node, motion, 6, int(row - node * size));
    out[i] = free[row] ? value : 0.0;
}

// Makes the motions of every aggregate orthonormal by the Cholesky factors R of their Gram matrices, twice: `factors` receives
// the inverses of the products of both, `coarse` the products (Yamamoto et al. 2015, CholeskyQR2). A motion of whose square less
// than the share `dependent` is new is left out: its row and column of the inverse are zero. 32 lanes an aggregate, which all
// factor the same 6 x 6 matrices.
template <int size>
__global__ void __launch_bounds__(128) factor_motions(
    const long long aggregates, const long long* __restrict__ offsets, const int* __restrict__ order,
    const bool* __restrict__ free, const double* __restrict__ coordinates, const int nx, const int ny, const int nz,
    double* __restrict__ factors, double* __restrict__ coarse, const double dependent)
{
    const Points points{coordinates, nx, ny, nz};
    const long long aggregate = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (aggregate >= aggregates) return;
    const int lane = threadIdx.x % 32;
    double inverse[6][6], product[6][6];
    for (int i = 0; i < 6; ++i)
        for (int j = 0; j < 6; ++j) inverse[i][j] = product[i][j] = i == j;
    for (int round = 0; round < 2; ++round) {
        double gram[6][6] = {};
        for (long long place = offsets[aggregate] + lane; place < offsets[aggregate + 1]; place += 32) {
            const long long node = order[place];
            for (int d = 0; d < size; ++d) {
                if (!free[node * size + d]) continue;
                double row[6];
                for (int j = 0; j < 6; ++j) row[j] = moved(points, node, &inverse[0][j], 6, d);
                for (int i = 0; i < 6; ++i)
                    for (int j = i; j < 6; ++j) gram[i][j] += row[i] * row[j];
            }
        }
        for (int i = 0; i < 6; ++i)
            for (int j = i; j < 6; ++j) gram[i][j] = PENSTOCK_SHUFFLE(sum_over_lanes<32>(gram[i][j]), 0, 32);
        // R, and its inverse U, row by row.
        double R[6][6] = {}, U[6][6] = {};
        for (int i = 0; i < 6; ++i) {
            double square = gram[i][i];
            for (int k = 0; k < i; ++k) square -= R[k][i] * R[k][i];
            if (!(square > dependent * gram[i][i])) continue;
            R[i][i] = sqrt(square);
            U[i][i] = 1 / R[i][i];
            for (int j = i + 1; j < 6; ++j) {
                double value = gram[i][j];
                for (int k = 0; k < i; ++k) value -= R[k][i] * R[k][j];
                R[i][j] = value * U[i][i];
            }
        }
        for (int j = 0; j < 6; ++j)
            for (int i = 0; i < j; ++i) {
                double value = 0;
                for (int k = i; k < j; ++k) value -= U[i][k] * R[k][j];
                U[i][j] = value * U[j][j];
            }
        double next_inverse[6][6] = {}, next_product[6][6] = {};
        for (int i = 0; i < 6; ++i)
            for (int j = i; j < 6; ++j)
                for (int k = i; k <= j; ++k) {
                    next_inverse[i][j] += inverse[i][k] * U[k][j];
                    next_product[i][j] += R[i][k] * product[k][j];
                }
        for (int i = 0; i < 6; ++i)
            for (int j = 0; j < 6; ++j) inverse[i][j] = next_inverse[i][j], product[i][j] = next_product[i][j];
    }
    if (lane) return;
    for (int i = 0; i < 6; ++i)
        for (int j = 0; j < 6; ++j) {
            factors[36 * aggregate + 6 * i + j] = inverse[i][j];
            coarse[36 * aggregate + 6 * i + j] = product[i][j];
        }
}

// Sums of coordinates (nodes, dimensions) along every axis: partial[block * dimensions + axis], in a fixed order. Launch: any number
// of blocks of 256 threads.
__global__ void __launch_bounds__(256) sum_coordinates(
    const long long nodes, const int dimensions, const double* __restrict__ coordinates, double* __restrict__ partial)
{
    __shared__ double of_warp[8];
    for (int axis = 0; axis < dimensions; ++axis) {
        double total = 0;
        for (long long node = (long long)blockIdx.x * 256 + threadIdx.x; node < nodes; node += 256ll * gridDim.x)
            total += coordinates[node * dimensions + axis];
        total = sum_over_lanes<32>(total);
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = total;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int warp = 1; warp < 8; ++warp) total += of_warp[warp];
            partial[(long long)blockIdx.x * dimensions + axis] = total;
        }
        __syncthreads();
    }
}

// out = coordinates - centre, one thread a number.
__global__ void __launch_bounds__(256) centre_coordinates(
    const long long numbers, const int dimensions, const double* __restrict__ coordinates, const double* __restrict__ centre,
    double* __restrict__ out)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < numbers) out[i] = coordinates[i] - centre[i % dimensions];
}
