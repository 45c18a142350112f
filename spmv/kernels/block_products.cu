// Products of sparse matrices of small dense blocks, C = A B, by Gustavson's algorithm.
// Rows of B are numbered from `start`, and those of B and C have ascending columns, so that results are the same in every run.

// C = A B, or C += A B with `add`, for blocks (height, inner) of A and (inner, across) of B. Sums are formed in the order of the
// entries of A.
//
// A group of lanes forms a block of C in registers, each one or two of its columns. `groups` share a row of C: some of those of a
// warp, all of them, or all of a thread block of `warps`. Results do not depend on that.
//
// A chunk of 32 `words` entries of a row of A is taken at a time, and a tile of the blocks of its row of C. First the lanes look up
// which blocks the entries contribute to: masks[block] has a bit for every entry that does, places[block][entry] says by which block
// of its row of B, or `far` where a byte cannot. Then every group goes through the bits of its blocks. All lanes of a group read the
// whole block of A: it may be `copied` to shared memory meanwhile, which answers faster but lets fewer warps run.
template <int height, int inner, int across, int groups, int warps, int words, int tile, bool copied>
__global__ void __launch_bounds__(warps * 32) multiply_blocks(
    const long long rows, const long long* __restrict__ offsets, const int* __restrict__ columns,
    const double* __restrict__ blocks, const long long start, const long long* __restrict__ b_offsets,
    const int* __restrict__ b_columns, const double* __restrict__ b_blocks, const long long* __restrict__ c_offsets,
    const int* __restrict__ c_columns, double* __restrict__ c_blocks, const bool add)
{
    constexpr int wide = across % 2 ? 1 : 2, lanes = across / wide, of_warp = 32 / lanes;
    constexpr bool by_block = groups > of_warp;
    constexpr int rows_of_warp = by_block ? 1 : of_warp / groups, teams = by_block ? 1 : warps * rows_of_warp;
    constexpr int chunk = 32 * words, area = height * across, a_area = height * inner, far = 0xff;
    typedef Pack<double, wide> Own;  // neighbouring columns of a block
    alignas(16) __shared__ double all_copies[copied ? teams * chunk * a_area : 1];
    __shared__ unsigned all_masks[teams * tile * words];
    __shared__ long long all_firsts[teams * chunk];
    __shared__ unsigned char all_places[teams * tile * chunk];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_warp = lane / lanes, in_group = lane % lanes;
    const int c = in_group * wide;  // the first column of this lane
    const bool idle = in_warp >= (by_block ? of_warp : rows_of_warp * groups);
    const int team = by_block || idle ? 0 : warp * rows_of_warp + in_warp / groups;
    const long long row = idle && !by_block ? rows : (long long)blockIdx.x * teams + team;
    // Idle lanes start behind the last entry and the last block.
    const int group = idle ? chunk + tile : by_block ? warp * of_warp + in_warp : in_warp % groups;
    const int member = group * lanes + in_group;
    double* copies = all_copies + team * (chunk * a_area);
    unsigned* masks = all_masks + team * (tile * words);
    unsigned char* places = all_places + team * (tile * chunk);
    long long* firsts = all_firsts + team * chunk;
    const auto sync = [] {
        if constexpr (by_block)
            __syncthreads();
        else
            PENSTOCK_SYNC_GROUP();
    };
    const auto any = [](const bool mine) { return by_block ? mine : PENSTOCK_BALLOT(mine) != 0; };
    // Copies `count` blocks of A from `base` on, with as many threads as there are.
    const auto copy = [&](const long long base, const int count, double* target, const int thread, const int threads) {
        constexpr int at_once = a_area % 2 ? 1 : 2;
        for (int i = at_once * thread; i < count * a_area; i += at_once * threads)
            PENSTOCK_COPY_ASYNC(8 * at_once, target + i, blocks + base * a_area + i);
    };

    const long long first = row < rows ? offsets[row] : 0, stop = row < rows ? offsets[row + 1] : 0;
    const long long c_first = row < rows ? c_offsets[row] : 0, c_stop = row < rows ? c_offsets[row + 1] : 0;
    for (long long base = first; any(base < stop); base += chunk) {
        const int count = base >= stop ? 0 : int(stop - base < chunk ? stop - base : chunk);
        if constexpr (copied && by_block) copy(base, count, all_copies, threadIdx.x, 32 * warps);
        if constexpr (copied && !by_block)
            for (int other = 0; other < rows_of_warp; ++other) {
                const int source = other * groups * lanes;
                copy(PENSTOCK_SHUFFLE(base, source, 32), PENSTOCK_SHUFFLE(count, source, 32),
                     all_copies + (warp * rows_of_warp + other) * (chunk * a_area), lane, 32);
            }
        PENSTOCK_COPY_COMMIT();
        for (long long left = c_first; any(count > 0 && left < c_stop); left += tile) {
            const int slots = count == 0 || left >= c_stop ? 0 : int(c_stop - left < tile ? c_stop - left : tile);
            for (int i = member; i < slots * words; i += groups * lanes) masks[i] = 0;
            sync();
            for (int k = member; k < count && slots > 0; k += groups * lanes) {
                const long long other = columns[base + k] - start, b_first = b_offsets[other], b_stop = b_offsets[other + 1];
                firsts[k] = b_first;
                if (!copied) PENSTOCK_PREFETCH(blocks + (base + k) * a_area);
                int slot = 0;
                for (long long place = b_first; place < b_stop; ++place) {  // both rows ascend
                    const int found = int(place_of(b_columns[place], c_columns + left, slot, slots));
                    if (found < 0) continue;
                    slot = found + 1;
                    atomicOr(masks + found * words + k / 32, 1u << k % 32);
                    places[found * chunk + k] = (unsigned char)(place - b_first < far ? place - b_first : far);
                }
            }
            PENSTOCK_COPY_WAIT(0);
            sync();
            int slot = group, word = 0;
            unsigned left_over = 0;
            double total[height][wide];
            double* target = c_blocks + (left + slot) * area + c;
            const bool go_on = add || base != first;
            const auto begin = [&] {
                left_over = masks[slot * words];
#pragma unroll
                for (int r = 0; r < height; ++r) {
                    const Own before = go_on ? *(const Own*)(target + r * across) : Own{};
#pragma unroll
                    for (int w = 0; w < wide; ++w) total[r][w] = before.number[w];
                }
            };
            if (slot < slots) begin();
            while (slot < slots) {
                if (left_over) {
                    const int k = 32 * word + __ffs(int(left_over)) - 1;
                    left_over &= left_over - 1;
                    const double* of_a = copied ? copies + k * a_area : blocks + (base + k) * a_area;
                    const int nearby = places[slot * chunk + k];
                    const long long place = nearby < far ? firsts[k] + nearby : place_of(
                        c_columns[left + slot], b_columns, firsts[k], b_offsets[columns[base + k] - start + 1]);
                    const double* of_b = b_blocks + place * (inner * across) + c;
#pragma unroll
                    for (int i = 0; i < inner; ++i) {
                        const Own b = *(const Own*)(of_b + i * across);
#pragma unroll
                        for (int r = 0; r < height; ++r) {
                            const double a = of_a[r * inner + i];
#pragma unroll
                            for (int w = 0; w < wide; ++w) total[r][w] += a * b.number[w];
                        }
                    }
                } else if (words > 1 && word + 1 < words) {
                    left_over = masks[slot * words + ++word];
                } else {
#pragma unroll
                    for (int r = 0; r < height; ++r) {
                        Own after;
#pragma unroll
                        for (int w = 0; w < wide; ++w) after.number[w] = total[r][w];
                        *(Own*)(target + r * across) = after;
                    }
                    slot += groups;
                    target += groups * area;
                    word = 0;
                    if (slot < slots) begin();
                }
            }
            sync();
        }
    }
}

// blocks = own - factor D blocks for rows of A P and of P, which has some of their columns; D is (rows, height, height).
// 32 lanes a row, one lane a column of scalars.
template <int height, int across>
__global__ void __launch_bounds__(256) smooth_block_rows(
    const long long rows, const long long* __restrict__ offsets, const int* __restrict__ columns,
    double* __restrict__ blocks, const long long* __restrict__ own_offsets, const int* __restrict__ own_columns,
    const double* __restrict__ own_blocks, const double* __restrict__ diagonal, const double factor)
{
    const int lane = threadIdx.x % 32;
    const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const double* d = diagonal + row * (height * height);
    for (long long i = offsets[row] * across + lane; i < offsets[row + 1] * across; i += 32) {
        const long long entry = i / across;
        double* image = blocks + entry * (height * across) + i % across;
        const long long own = place_of(columns[entry], own_columns, own_offsets[row], own_offsets[row + 1]);
        double total[height];
#pragma unroll
        for (int r = 0; r < height; ++r) {
            total[r] = 0;
#pragma unroll
            for (int k = 0; k < height; ++k) total[r] += d[r * height + k] * image[k * across];
        }
#pragma unroll
        for (int r = 0; r < height; ++r)
            image[r * across] = (own < 0 ? 0.0 : own_blocks[(own * height + r) * across + i % across]) - factor * total[r];
    }
}
