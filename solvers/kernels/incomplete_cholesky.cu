// Incomplete Cholesky factors of sparse matrices of small dense blocks: A is about L L', where L has entries only where `columns`
// has them.
//
// Rows of L hold ascending columns, the last of them the diagonal. A block starts as that of A and becomes
//     L_ij = (A_ij - sum over k < j of L_ik L_jk') / L_jj',    L_ii = chol(A_ii - sum over k < i of L_ik L_ik').
// 32 lanes take a row. Rows are claimed from a counter in an order in which each follows those it needs, and wait for each such
// row until its flag is set, as in triangular.cu. What other rows wrote is read past the first-level cache.

template <int size>
struct Block {
    double of[size][size];
};

template <int size>
__device__ __forceinline__ void read(Block<size>& block, const double* values, const int entry)
{
#pragma unroll
    for (int i = 0; i < size * size; ++i) block.of[i / size][i % size] = PENSTOCK_LOAD_RELAXED(values + (long long)entry * (size * size) + i);
}

// sum += left right'
template <int size>
__device__ __forceinline__ void add_product(Block<size>& sum, const Block<size>& left, const Block<size>& right)
{
#pragma unroll
    for (int i = 0; i < size; ++i)
#pragma unroll
        for (int j = 0; j < size; ++j)
#pragma unroll
            for (int k = 0; k < size; ++k) sum.of[i][j] = fma(left.of[i][k], right.of[j][k], sum.of[i][j]);
}

// The sum over 32 lanes; only the first one holds it afterwards.
template <int size>
__device__ __forceinline__ void sum_blocks(Block<size>& sum)
{
#pragma unroll
    for (int i = 0; i < size; ++i)
#pragma unroll
        for (int j = 0; j < size; ++j) sum.of[i][j] = sum_over_lanes<32>(sum.of[i][j]);
}

// `done` starts as 0; order[place] is the row at every place, null for ascending rows. first_bad becomes the first row whose
// pivot is at most `smallest` times its diagonal entry; it starts as `rows`. Launch: blocks of 256 threads.
template <int size>
__global__ void __launch_bounds__(256) factor_rows(
    const int rows, const int* __restrict__ offsets, const int* __restrict__ columns, const int* __restrict__ order,
    double* values, const double smallest, int* done, int* ticket, int* first_bad, int* failed, const int cap)
{
    const int lane = threadIdx.x % 32;
    for (;;) {
        int place = 0;
        if (lane == 0) place = atomicAdd(ticket, 1);
        place = PENSTOCK_SHUFFLE(place, 0, 32);
        if (place >= rows) return;
        const int row = order ? order[place] : place, first = offsets[row], own = offsets[row + 1] - 1;
        Block<size> square{};  // the sum of L_ik L_ik'
        for (int entry = first; entry < own; ++entry) {
            const int other = columns[entry];
            for (int turn = 0; PENSTOCK_BALLOT(!PENSTOCK_LOAD_RELAXED(done + other)); PENSTOCK_PAUSE())
                if (++turn > cap || (turn % 1024 == 0 && PENSTOCK_BALLOT(PENSTOCK_LOAD_RELAXED(failed)))) {
                    if (lane == 0) PENSTOCK_STORE_RELAXED(failed, 1);
                    return;
                }
            __threadfence();
            const int start = offsets[other], diagonal = offsets[other + 1] - 1;
            Block<size> sum{};
            for (int k = start + lane; k < diagonal; k += 32) {
                const int mine = place_of(columns[k], columns, first, entry);
                if (mine < 0) continue;
                Block<size> left, right;
                read(left, values, mine);
                read(right, values, k);
                add_product(sum, left, right);
            }
            sum_blocks(sum);
            if (lane == 0) {
                Block<size> block, pivot;
                read(block, values, entry);
                read(pivot, values, diagonal);
#pragma unroll
                for (int i = 0; i < size; ++i)
#pragma unroll
                    for (int j = 0; j < size; ++j) {
                        double total = block.of[i][j] - sum.of[i][j];
#pragma unroll
                        for (int k = 0; k < j; ++k) total -= block.of[i][k] * pivot.of[j][k];
                        block.of[i][j] = total / pivot.of[j][j];
                    }
#pragma unroll
                for (int i = 0; i < size * size; ++i)
                    PENSTOCK_STORE_RELAXED(values + (long long)entry * (size * size) + i, block.of[i / size][i % size]);
                add_product(square, block, block);
            }
            __threadfence();
            PENSTOCK_SYNC_GROUP();
        }
        if (lane == 0) {
            Block<size> block;
            read(block, values, own);
            bool good = true;
#pragma unroll
            for (int j = 0; j < size; ++j) {
                const double before = block.of[j][j];
                double total = before - square.of[j][j];
#pragma unroll
                for (int k = 0; k < j; ++k) total -= block.of[j][k] * block.of[j][k];
                good = good && total > smallest * before && total - total == 0;
                block.of[j][j] = sqrt(good ? total : 1.0);
#pragma unroll
                for (int i = j + 1; i < size; ++i) {
                    double below = block.of[i][j] - square.of[i][j];
#pragma unroll
                    for (int k = 0; k < j; ++k) below -= block.of[i][k] * block.of[j][k];
                    block.of[i][j] = below / block.of[j][j];
                }
            }
#pragma unroll
            for (int i = 0; i < size; ++i)
#pragma unroll
                for (int j = 0; j < size; ++j)
                    PENSTOCK_STORE_RELAXED(values + ((long long)own * size + i) * size + j, j > i ? 0.0 : block.of[i][j]);
            if (!good) atomicMin(first_bad, row);
            __threadfence();
            PENSTOCK_STORE_RELAXED(done + row, 1);
        }
        PENSTOCK_SYNC_GROUP();
    }
}
