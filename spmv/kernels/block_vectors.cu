// Arithmetic on blocks of k vectors, k up to 64, that lie side by side: Gram matrices X^T Y, and combinations of columns.
//
// Everything is built from products of 8 x 4 by 4 x 8 tiles, which tensor cores multiply in double precision with all
// operands in registers. A group of 32 lanes holds such tiles spread over its lanes (PTX ISA, mma.m8n8k4):
// lane l holds element (l / 4, l % 4) of the left one, (l % 4, l / 4) of the right one, and (l / 4, 2 (l % 4) + e), e = 0, 1,
// of the sum. Two facts avoid all exchange between lanes:
//   * A sum over an index may run in any order. Lane l holds elements 2 (l % 4) + e of eight, and product e uses those.
//   * Swapping left and right transposes the sum.
// So lane l reads rows l / 4 of a block of vectors, columns 2 (l % 4) + e of a tile of eight. Combinations of these have
// either the same layout, which is written back, or, with left and right swapped, rows 2 (l % 4) + e and column l / 4, the
// layout of both operands of a Gram matrix.
//
// Matrices of k x k coefficients come as fragments: for rows 8 t + 2 (l % 4) + e and columns 8 j + l / 4, the 32 numbers of
// all lanes in order, at ((2 t + e) tiles + j) 32; rows and columns from k on are zero. Bit t tiles + j of the mask
// that comes with them is set if tile (t, j) is not zero: half of a triangular matrix is skipped.

// sum += left right, for tiles as above.
__device__ __forceinline__ void multiply_tiles(double (&sum)[2], const double left, const double right)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(sum[0]), "+d"(sum[1])
        : "d"(left), "d"(right));
#else
    const int lane = threadIdx.x % 32;
    for (int inner = 0; inner < 4; ++inner) {
        const double of_row = PENSTOCK_SHUFFLE(left, lane / 4 * 4 + inner, 32);
        for (int e = 0; e < 2; ++e) {
            const double of_column = PENSTOCK_SHUFFLE(right, (2 * (lane % 4) + e) * 4 + inner, 32);
            sum[e] += of_row * of_column;
        }
    }
#endif
}

using Mask = unsigned long long;

__device__ __forceinline__ bool has_tile(const Mask mask, const int number) { return mask >> number & 1; }

// Row `row`, columns 8 tile + 2 (l % 4) + e, of a block of k vectors; zero outside.
template <typename Vector>
__device__ __forceinline__ void load_pair(
    double (&pair)[2], const Vector* __restrict__ vectors, const long long row, const int tile, const long long n, const int k)
{
    const int column = 8 * tile + 2 * (threadIdx.x % 4);
    pair[0] = pair[1] = 0.0;
    if (row >= n || column >= k) return;
    const Vector* place = vectors + row * k + column;
    if (k % 2 == 0) {
        const Pack<Vector, 2> both = *reinterpret_cast<const Pack<Vector, 2>*>(place);
        pair[0] = both.number[0];
        pair[1] = both.number[1];
    } else {
        pair[0] = place[0];
        if (column + 1 < k) pair[1] = place[1];
    }
}

template <typename Vector>
__device__ __forceinline__ void store_pair(
    const double (&pair)[2], Vector* __restrict__ vectors, const long long row, const int tile, const long long n, const int k)
{
    const int column = 8 * tile + 2 * (threadIdx.x % 4);
    if (row >= n || column >= k) return;
    Vector* place = vectors + row * k + column;
    if (k % 2 == 0)
        *reinterpret_cast<Pack<Vector, 2>*>(place) = {Vector(pair[0]), Vector(pair[1])};
    else {
        place[0] = Vector(pair[0]);
        if (column + 1 < k) place[1] = Vector(pair[1]);
    }
}

// Every `parts`-th row of tiles of a symmetric Gram matrix, from number `part` on: the tiles on and above the diagonal.
template <int tiles, int parts>
struct Gram {
    static constexpr int ROWS = tiles / parts, NUMBERS = tiles * tiles * 64;
    double sums[ROWS][tiles][2];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < tiles; ++j) sums[i][j][0] = sums[i][j][1] = 0.0;
    }

    // Adds the product of four rows; lane l holds row l % 4 and column l / 4 of each tile of left and right.
    template <typename Left, typename Right>
    __device__ __forceinline__ void add(const int part, const int used, const Left left, const Right right)
    {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < tiles; ++j)
                if (j >= i * parts + part && j < used) multiply_tiles(sums[i][j], left(i), right(j));
    }

    // Writes the sum over the block of threads, group after group; `shared` must hold the sums.
    __device__ __forceinline__ void leave(const int part, double* __restrict__ partials, double* shared)
    {
        const int groups = blockDim.x / 32, group = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int turn = 0; turn < groups; ++turn) {
            if (group == turn) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < tiles; ++j)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int place = ((i * tiles + j) * 32 + lane) * 2 + e;
                            shared[place] = turn == 0 ? sums[i][j][e] : shared[place] + sums[i][j][e];
                        }
            }
            __syncthreads();
        }
        // Row i parts + part of tiles.
        double* mine = partials + (long long)blockIdx.x * NUMBERS;
        for (int place = threadIdx.x; place < ROWS * tiles * 64; place += blockDim.x)
            mine[(place / (tiles * 64) * parts + part) * tiles * 64 + place % (tiles * 64)] = shared[place];
        __syncthreads();
    }
};

// Sums the partial Gram matrices of `blocks` blocks: one thread per number.
__global__ void __launch_bounds__(256) block_sum(
    const int numbers, const int blocks, const double* __restrict__ partials, double* __restrict__ sums)
{
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= numbers) return;
    double sum = 0.0;
    for (int block = 0; block < blocks; ++block) sum += partials[(long long)block * numbers + number];
    sums[number] = sum;
}

// X^T D Y, its tiles on and above the diagonal; D is the identity unless `weighted`. The parts, one per block along y,
// are small enough for their sums to fit the registers. Reads 2 k n values with one part; with more, each reads all of Y.
template <typename Vector, int tiles, int parts>
__global__ void __launch_bounds__(256) block_gram(
    const long long n, const int k, const bool weighted, const Vector* __restrict__ x, const Vector* __restrict__ y,
    const Vector* __restrict__ diagonal, double* __restrict__ partials)
{
    __shared__ double shared[tiles / parts * tiles * 64];
    Gram<tiles, parts> gram;
    gram.clear();
    const int used = (k + 7) / 8, groups = blockDim.x / 32, lane = threadIdx.x % 32, part = blockIdx.y;
    const long long group = (long long)blockIdx.x * groups + threadIdx.x / 32, stride = (long long)gridDim.x * groups * 4;
#pragma unroll 2
    for (long long first = group * 4; first < n; first += stride) {
        const long long row = first + lane % 4;
        const bool inside = row < n;
        const double factor = inside && weighted ? double(diagonal[row]) : 1.0;
        double left[tiles / parts], right[tiles];
#pragma unroll
        for (int i = 0; i < tiles / parts; ++i) {
            const int column = 8 * (i * parts + part) + lane / 4;
            left[i] = inside && column < k ? double(x[row * k + column]) : 0.0;
        }
#pragma unroll
        for (int j = 0; j < tiles; ++j) {
            const int column = 8 * j + lane / 4;
            right[j] = inside && column < k ? factor * double(y[row * k + column]) : 0.0;
        }
        gram.add(part, used, [&](int i) { return left[i]; }, [&](int j) { return right[j]; });
    }
    gram.leave(part, partials, shared);
}

// W := W T - S Xi, and the Gram matrices W^T W and, if `grams` is 2, W^T D W. Reads 2 k n values and writes k n.
template <typename Vector, int tiles, int grams>
__global__ void __launch_bounds__(256, tiles <= 4 ? 2 : 1) block_descend(
    const long long n, const int k, const Mask t_tiles, const Mask xi_tiles, const double* __restrict__ t,
    const double* __restrict__ minus_xi,
    const Vector* __restrict__ s, const Vector* __restrict__ diagonal, Vector* __restrict__ w, double* __restrict__ partials)
{
    __shared__ double shared[grams == 0 ? 1 : tiles * tiles * 64];
    Gram<tiles, 1> plain, weighted;
    if constexpr (grams > 0) plain.clear();
    if constexpr (grams > 1) weighted.clear();
    const int used = (k + 7) / 8, groups = blockDim.x / 32, lane = threadIdx.x % 32;
    const long long group = (long long)blockIdx.x * groups + threadIdx.x / 32, stride = (long long)gridDim.x * groups * 8;
    for (long long first = group * 8; first < n; first += stride) {
        double residual[tiles][2], old[tiles][2], image[tiles][2];
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
            load_pair(old[tile], w, first + lane / 4, tile, n, k);
            load_pair(image[tile], s, first + lane / 4, tile, n, k);
            residual[tile][0] = residual[tile][1] = 0.0;
        }
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int j = 0; j < tiles; ++j) {
                    const int number = tile * tiles + j, place = ((2 * tile + e) * tiles + j) * 32 + lane;
                    if (has_tile(t_tiles, number)) multiply_tiles(residual[j], t[place], old[tile][e]);
                    if (has_tile(xi_tiles, number)) multiply_tiles(residual[j], minus_xi[place], image[tile][e]);
                }
        }
        // Now lane l holds rows 2 (l % 4) + e and column l / 4 of each tile.
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const long long row = first + 2 * (lane % 4) + e;
            const bool inside = row < n;
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) {
                const int column = 8 * tile + lane / 4;
                if (inside && column < k) w[row * k + column] = Vector(residual[tile][e]);
            }
            if constexpr (grams > 0)
                plain.add(0, used, [&](int i) { return residual[i][e]; }, [&](int j) { return residual[j][e]; });
            if constexpr (grams > 1) {
                const double factor = inside ? double(diagonal[row]) : 0.0;
                weighted.add(0, used, [&](int i) { return residual[i][e]; }, [&](int j) { return factor * residual[j][e]; });
            }
        }
    }
    if constexpr (grams > 0) plain.leave(0, partials, shared);
    if constexpr (grams > 1) weighted.leave(0, partials + (long long)gridDim.x * tiles * tiles * 64, shared);
}

// out := D Z T + P C, and X += P Gamma; D is the identity unless `weighted`. Z, P, X and out have k, k_p, k_x and k_out
// columns; P and X may have none. out may be P itself if k_out is k_p. Reads (k + k_p + k_x) n values, writes (k_out + k_x) n.
template <typename Vector, int tiles>
__global__ void __launch_bounds__(256, tiles <= 4 ? 2 : 1) block_extend(
    const long long n, const int k, const int k_p, const int k_x, const int k_out, const bool weighted,
    const Mask t_tiles, const Mask c_tiles, const Mask gamma_tiles,
    const double* __restrict__ t, const double* __restrict__ c, const double* __restrict__ gamma, const Vector* __restrict__ z,
    const Vector* __restrict__ diagonal, const Vector* p, Vector* out, Vector* __restrict__ x)
{
    const int used_x = (k_x + 7) / 8, used_out = (k_out + 7) / 8;
    const int groups = blockDim.x / 32, lane = threadIdx.x % 32;
    constexpr int TURNS = 2;  // rows of tiles that share a coefficient while it is in a register
    const long long group = (long long)blockIdx.x * groups + threadIdx.x / 32, stride = (long long)gridDim.x * groups * 8 * TURNS;
    for (long long first = group * 8 * TURNS; first < n; first += stride) {
        double direction[TURNS][tiles][2], residual[TURNS][tiles][2], sum[TURNS][2];
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const long long row = first + 8 * turn + lane / 4;
            const double factor = weighted && row < n ? double(diagonal[row]) : 1.0;
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) {
                load_pair(residual[turn][tile], z, row, tile, n, k);
                residual[turn][tile][0] *= factor;
                residual[turn][tile][1] *= factor;
                load_pair(direction[turn][tile], p, row, tile, n, k_p);
            }
        }
#pragma unroll
        for (int j = 0; j < tiles; ++j) {
            if (j >= used_x) break;
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) load_pair(sum[turn], x, first + 8 * turn + lane / 4, j, n, k_x);
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (!has_tile(gamma_tiles, tile * tiles + j)) continue;
                    const double coefficient = gamma[((2 * tile + e) * tiles + j) * 32 + lane];
#pragma unroll
                    for (int turn = 0; turn < TURNS; ++turn) multiply_tiles(sum[turn], direction[turn][tile][e], coefficient);
                }
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) store_pair(sum[turn], x, first + 8 * turn + lane / 4, j, n, k_x);
        }
#pragma unroll
        for (int j = 0; j < tiles; ++j) {
            if (j >= used_out) break;
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) sum[turn][0] = sum[turn][1] = 0.0;
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int number = tile * tiles + j, place = ((2 * tile + e) * tiles + j) * 32 + lane;
                    if (has_tile(t_tiles, number)) {
                        const double coefficient = t[place];
#pragma unroll
                        for (int turn = 0; turn < TURNS; ++turn) multiply_tiles(sum[turn], residual[turn][tile][e], coefficient);
                    }
                    if (has_tile(c_tiles, number)) {
                        const double coefficient = c[place];
#pragma unroll
                        for (int turn = 0; turn < TURNS; ++turn) multiply_tiles(sum[turn], direction[turn][tile][e], coefficient);
                    }
                }
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) store_pair(sum[turn], out, first + 8 * turn + lane / 4, j, n, k_out);
        }
    }
}
