// Solves with a sparse triangle of small dense blocks, and the greedy colouring of its rows, which is the same recurrence.
//
// Rows are numbered by their place in the order of the solve, so the columns of a row are places before it. `rows[place]` is the
// row of b and out; null means that places are rows. With `columns` right-hand sides, which alternate in b, out and y, a row counts
// as so many: nothing below distinguishes them. Offsets count blocks; `inverse` holds W, the inverse of the diagonal block times
// omega, for every place. A solve computes, for every place,
//     y = W (b - sum of a y)                  or, for the second half of a symmetric sweep,
//     y = gamma b - W (sum of a y)            where `scaled` is set,
// and out = alpha y + beta out. Sums are formed in the order of the entries, lane by lane and then over the lanes, so no bit of a
// result depends on timing.

__device__ __forceinline__ double number_of_bits(const long long bits)
{
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

__device__ __forceinline__ double not_a_number() { return number_of_bits(0x7ff8000000000000ll); }

__device__ __forceinline__ bool is_missing(const double number)
{
    long long bits;
    memcpy(&bits, &number, sizeof bits);
    return bits == -1;
}

__device__ __forceinline__ bool is_missing(const int number) { return number == -1; }

// The place and the right-hand side that a group of lanes works on.
struct Target {
    int place, column;
    __device__ Target(const long long number, const int columns)
        : place(columns == 1 ? int(number) : int(number / columns)), column(columns == 1 ? 0 : int(number % columns))
    {
    }
};

// What a solve computes for a place. `Word` is what other places wait for, `Sum` what a lane has collected. What is known
// before anybody waits, `Row` of a place and `Entry` of an entry, is loaded ahead.
template <typename Value, typename Vector, int block_size>
struct Substitution {
    static constexpr int size = block_size;
    static constexpr bool keeps_inverse = size <= 3;  // in registers
    typedef double Word;
    struct Sum {
        double of[size];
    };
    struct Row {
        long long number;
        double given[size], inverse[keeps_inverse ? size * size : 1];
    };
    struct Entry {
        Value block[size * size];
    };

    const Value* __restrict__ blocks;
    const double* __restrict__ inverse;
    const int* __restrict__ rows;
    const Vector* __restrict__ b;  // null: y holds the right-hand side
    Vector* __restrict__ out;      // null: only y is written
    double alpha, beta, gamma;
    int scaled, columns;
    const double* y;

    static __device__ Word missing() { return number_of_bits(-1); }
    static __device__ Sum none() { return Sum{}; }

    __device__ void load(Entry& entry, const long long number) const
    {
#pragma unroll
        for (int i = 0; i < size * size; ++i) entry.block[i] = blocks[number * (size * size) + i];
    }

    __device__ void load(Row& row, const Target target) const
    {
        row.number = rows ? rows[target.place] : target.place;
        if (keeps_inverse)
#pragma unroll
            for (int i = 0; i < size * size; ++i) row.inverse[i] = inverse[(long long)target.place * (size * size) + i];
#pragma unroll
        for (int i = 0; i < size; ++i)
            row.given[i] = b ? double(b[(row.number * size + i) * columns + target.column])
                             : y[((long long)target.place * size + i) * columns + target.column];
    }

    static __device__ void take(Sum& sum, const Entry& entry, const Word (&y)[size])
    {
#pragma unroll
        for (int i = 0; i < size; ++i)
#pragma unroll
            for (int j = 0; j < size; ++j) sum.of[i] = fma(double(entry.block[i * size + j]), y[j], sum.of[i]);
    }

    static __device__ void join(Sum& sum, const int by, const int lanes)
    {
#pragma unroll
        for (int i = 0; i < size; ++i) sum.of[i] += PENSTOCK_SHUFFLE_DOWN(sum.of[i], by, lanes);
    }

    __device__ void finish(const Sum& sum, const Row& row, const Target target, Word (&y)[size], int*) const
    {
        const double* w = keeps_inverse ? row.inverse : inverse + (long long)target.place * (size * size);
#pragma unroll
        for (int i = 0; i < size; ++i) {
            double total = 0;
#pragma unroll
            for (int j = 0; j < size; ++j)
                total = fma(w[i * size + j], scaled ? -sum.of[j] : row.given[j] - sum.of[j], total);
            if (scaled) total = fma(gamma, row.given[i], total);
            y[i] = is_missing(total) ? not_a_number() : total;  // a NaN of b must not look missing
        }
    }

    __device__ void write(const Row& row, const Target target, const Word (&y)[size]) const
    {
        if (!out) return;
#pragma unroll
        for (int i = 0; i < size; ++i) store_product(out + (row.number * size + i) * columns + target.column, y[i], alpha, beta);
    }

    // The places that are given up become NaN, so that no caller takes the result for a solution.
    __device__ void give_up(const Row& row, const Target target) const
    {
        for (int i = 0; i < size; ++i) out[(row.number * size + i) * columns + target.column] = Vector(not_a_number());
    }
};

// The smallest colour that no earlier neighbour has; at most 64 colours, else `failed` becomes 2.
struct Colour {
    static constexpr int size = 1;
    typedef int Word;
    struct Sum {
        unsigned long long taken;
    };
    struct Row {};
    struct Entry {};

    static __device__ Word missing() { return -1; }
    static __device__ Sum none() { return Sum{0}; }
    static __device__ void load(Entry&, long long) {}
    static __device__ void load(Row&, Target) {}
    static __device__ void take(Sum& sum, const Entry&, const Word (&y)[1]) { sum.taken |= 1ull << y[0]; }
    static __device__ void join(Sum& sum, const int by, const int lanes)
    {
        const unsigned low = PENSTOCK_SHUFFLE_DOWN(unsigned(sum.taken), by, lanes);
        const unsigned high = PENSTOCK_SHUFFLE_DOWN(unsigned(sum.taken >> 32), by, lanes);
        sum.taken |= (unsigned long long)high << 32 | low;
    }
    static __device__ void finish(const Sum& sum, const Row&, Target, Word (&y)[1], int* failed)
    {
        const int first = __ffsll((long long)~sum.taken);
        if (!first) PENSTOCK_STORE_RELAXED(failed, 2);
        y[0] = first ? first - 1 : 0;
    }
    static __device__ void write(const Row&, Target, const Word (&)[1]) {}
    static __device__ void give_up(const Row&, Target) {}
};

// All places in one launch. A group of `lanes` lanes takes a place, `in_flight` of its entries a lane at a time.
//
// y starts as words of all ones, and a word that differs is there: nothing else is published with it, so relaxed loads and stores
// suffice. Places are claimed from a counter in ascending order: the first one that is not done is always held by lanes that run
// and has all it needs, so polling ends, whatever the order in which blocks start. A turn polls and publishes, and waits for
// nothing in between, so a lane that waits never keeps another lane of its warp from publishing. Words of the same warp come by
// shuffle. After `cap` turns a warp gives up and sets `failed`, which ends all others.
template <class Operation, int lanes, int in_flight>
__device__ __forceinline__ void solve_by_dataflow(
    const Operation& operation, const long long count, const int columns, const int* __restrict__ offsets,
    const int* __restrict__ places, typename Operation::Word* y, int* ticket, int* failed, const int cap)
{
    typedef typename Operation::Word Word;
    constexpr int size = Operation::size, groups = 32 / lanes;
    constexpr unsigned all = lanes == 32 ? ~0u : (1u << (lanes % 32)) - 1;
    const int lane = threadIdx.x % 32, own = lane % lanes, group = lane / lanes;
    for (;;) {
        int claimed = 0;
        if (lane == 0) claimed = atomicAdd(ticket, 1);
        const long long first = (long long)PENSTOCK_SHUFFLE(claimed, 0, 32) * groups, number = first + group;
        if (first >= count) return;
        const bool live = number < count;
        const Target target(live ? number : 0, columns);
        int next = live ? offsets[target.place] + own : 0;
        const int stop = live ? offsets[target.place + 1] : 0;
        typename Operation::Sum sum = Operation::none();
        typename Operation::Row row;
        typename Operation::Entry entry[in_flight];
        if (live && own == 0) operation.load(row, target);
        Word mine[size], word[in_flight][size];
        long long at[in_flight];  // the first word of the place that an entry needs
        int from = 0;
        unsigned missing = 0;     // of the entries in flight
        bool loaded = false, written = !live;
#pragma unroll
        for (int i = 0; i < size; ++i) mine[i] = Operation::missing();
        for (int turn = 0;;) {
            if (!loaded && next < stop) {
                from = next;
#pragma unroll
                for (int u = 0; u < in_flight; ++u) {
                    const bool inside = next + u * lanes < stop;
                    at[u] = inside ? (long long)places[next + u * lanes] * (size * columns) + target.column : 0;
                    if (inside) operation.load(entry[u], next + u * lanes);
                    if (inside) missing |= 1u << u;
                }
                next += in_flight * lanes;
                loaded = true;
            }
            unsigned near = 0;  // those of other groups of this warp
            if (size == 1)
#pragma unroll
                for (int u = 0; u < in_flight; ++u) near |= unsigned(missing >> u & 1 && at[u] >= first) << u;
            // All loads are on their way before the first word is looked at.
#pragma unroll
            for (int u = 0; u < in_flight; ++u)
                if ((missing & ~near) >> u & 1)
#pragma unroll
                    for (int i = 0; i < size; ++i) word[u][i] = PENSTOCK_LOAD_RELAXED(y + at[u] + (long long)i * columns);
            if (size == 1 && PENSTOCK_BALLOT(near != 0))
#pragma unroll
                for (int u = 0; u < in_flight; ++u) {
                    const bool wanted = near >> u & 1;
                    const Word found = PENSTOCK_SHUFFLE(mine[0], wanted ? int(at[u] - first) * lanes : lane, 32);
                    if (wanted) word[u][0] = found;
                }
#pragma unroll
            for (int u = 0; u < in_flight; ++u)
                if (missing >> u & 1) {
                    bool there = true;
#pragma unroll
                    for (int i = 0; i < size; ++i) there = there && !is_missing(word[u][i]);
                    if (there) missing &= ~(1u << u);
                }
            if (loaded && !missing) {
#pragma unroll
                for (int u = 0; u < in_flight; ++u)
                    if (from + u * lanes < stop) operation.take(sum, entry[u], word[u]);
                loaded = false;
            }
            bool ends = !loaded && next >= stop && !written;
            typename Operation::Sum total = sum;
            if (lanes > 1) {
                const unsigned ready = PENSTOCK_BALLOT(!loaded && next >= stop);
                ends = !written && (ready >> group * lanes & all) == all;
                if (PENSTOCK_BALLOT(ends))
                    for (int by = lanes / 2; by; by /= 2) Operation::join(total, by, lanes);
            }
            if (ends) {
                written = true;
                if (own == 0) {
                    operation.finish(total, row, target, mine, failed);
#pragma unroll
                    for (int i = 0; i < size; ++i)
                        PENSTOCK_STORE_RELAXED(y + ((long long)target.place * size + i) * columns + target.column, mine[i]);
                    operation.write(row, target, mine);
                }
            }
            if (!PENSTOCK_BALLOT(!written)) break;
            if (++turn > cap || turn % 1024 == 0) {
                if (PENSTOCK_BALLOT(turn > cap || PENSTOCK_LOAD_RELAXED(failed) == 1)) {
                    if (lane == 0) PENSTOCK_STORE_RELAXED(failed, 1);
                    if (!written && own == 0) operation.give_up(row, target);
                    break;  // the places that follow are given up one by one
                }
            }
            PENSTOCK_PAUSE();
        }
    }
}

// Launch: any number of blocks of 256 threads; more than run at once are of no use.
template <typename Value, typename Vector, int size, int lanes, int in_flight>
__global__ void __launch_bounds__(256) substitute(
    const long long count, const int columns, const int* __restrict__ offsets, const int* __restrict__ places,
    const Value* __restrict__ blocks, const double* __restrict__ inverse, const int* __restrict__ rows,
    const Vector* __restrict__ b, Vector* __restrict__ out, const double alpha, const double beta, const double gamma,
    const int scaled, double* y, int* ticket, int* failed, const int cap)
{
    const Substitution<Value, Vector, size> operation{blocks, inverse, rows, b, out, alpha, beta, gamma, scaled, columns, y};
    solve_by_dataflow<Substitution<Value, Vector, size>, lanes, in_flight>(
        operation, count, columns, offsets, places, y, ticket, failed, cap);
}

// The greedy colouring of rows in the order of their numbers; `places` holds the earlier neighbours of every row.
template <int lanes>
__global__ void __launch_bounds__(256) colour_rows(
    const long long count, const int* __restrict__ offsets, const int* __restrict__ places, int* colours, int* ticket,
    int* failed, const int cap)
{
    solve_by_dataflow<Colour, lanes, 4>(Colour{}, count, 1, offsets, places, colours, ticket, failed, cap);
}

// Makes all words of y missing, rewinds the counter, and forgets that lanes gave up.
template <typename Word>
__global__ void __launch_bounds__(256) forget(const long long count, Word* y, int* ticket, int* failed)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) memset(y + i, 0xff, sizeof(Word));
    if (i == 0) *ticket = *failed = 0;
}

// A place when all before it that it needs are done. All lanes of a warp call this together.
template <typename Value, typename Vector, int size, int lanes>
__device__ __forceinline__ void solve_place(
    const Substitution<Value, Vector, size>& operation, const long long number, const bool live,
    const int* __restrict__ offsets, const int* __restrict__ places, double* y)
{
    const int columns = operation.columns;
    const Target target(live ? number : 0, columns);
    auto sum = operation.none();
    typename Substitution<Value, Vector, size>::Row row;
    if (live && threadIdx.x % lanes == 0) operation.load(row, target);
    if (live)
        for (int entry = offsets[target.place] + threadIdx.x % lanes; entry < offsets[target.place + 1]; entry += lanes) {
            double word[size];
#pragma unroll
            for (int i = 0; i < size; ++i) word[i] = y[((long long)places[entry] * size + i) * columns + target.column];
            typename Substitution<Value, Vector, size>::Entry block;
            operation.load(block, entry);
            operation.take(sum, block, word);
        }
    for (int by = lanes / 2; by; by /= 2) operation.join(sum, by, lanes);
    if (live && threadIdx.x % lanes == 0) {
        double found[size];
        operation.finish(sum, row, target, found, nullptr);
        operation.write(row, target, found);
#pragma unroll
        for (int i = 0; i < size; ++i) y[((long long)target.place * size + i) * columns + target.column] = found[i];
    }
}

// One level: places `first` to `stop`, counted with their right-hand sides, none of which needs another. Launch: 256 threads a
// block, `lanes` a place.
template <typename Value, typename Vector, int size, int lanes>
__global__ void __launch_bounds__(256) substitute_level(
    const long long first, const long long stop, const int columns, const int* __restrict__ offsets,
    const int* __restrict__ places, const Value* __restrict__ blocks, const double* __restrict__ inverse,
    const int* __restrict__ rows, const Vector* __restrict__ b, Vector* __restrict__ out, const double alpha,
    const double beta, const double gamma, const int scaled, double* y)
{
    const Substitution<Value, Vector, size> operation{blocks, inverse, rows, b, out, alpha, beta, gamma, scaled, columns, y};
    const long long number = first + ((long long)blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    solve_place<Value, Vector, size, lanes>(operation, number, number < stop, offsets, places, y);
}

// Consecutive narrow levels, the last one first where `descending` is set: level l holds places levels[l] to levels[l + 1].
// Launch: one block.
template <typename Value, typename Vector, int size, int lanes>
__global__ void __launch_bounds__(512) substitute_narrow_levels(
    const int first_level, const int stop_level, const int* __restrict__ levels, const int descending, const int columns,
    const int* __restrict__ offsets, const int* __restrict__ places, const Value* __restrict__ blocks,
    const double* __restrict__ inverse, const int* __restrict__ rows, const Vector* __restrict__ b,
    Vector* __restrict__ out, const double alpha, const double beta, const double gamma, const int scaled, double* y)
{
    const Substitution<Value, Vector, size> operation{blocks, inverse, rows, b, out, alpha, beta, gamma, scaled, columns, y};
    for (int step = 0; step < stop_level - first_level; ++step) {
        const int level = descending ? stop_level - 1 - step : first_level + step;
        const long long stop = (long long)levels[level + 1] * columns;
        for (long long at = (long long)levels[level] * columns; at < stop; at += blockDim.x / lanes) {
            const long long number = at + threadIdx.x / lanes;
            solve_place<Value, Vector, size, lanes>(operation, number, number < stop, offsets, places, y);
        }
        __syncthreads();
    }
}

// The same solve by columns (Liu, Li, Hogg, Duff, Vinter 2016): a place that has received all it needs adds its share to the
// places that need it. `waits` starts as the number of entries of every row, `sums` as zero. The order of additions, and so the
// last digits, depend on timing. `offsets` and `places` are those of the columns. 32 lanes a place.
template <typename Value, typename Vector>
__global__ void __launch_bounds__(256) substitute_columns(
    const long long count, const int* __restrict__ offsets, const int* __restrict__ places,
    const Value* __restrict__ values, const double* __restrict__ inverse, const int* __restrict__ rows,
    const Vector* __restrict__ b, Vector* __restrict__ out, const double alpha, const double beta, double* sums,
    int* waits, int* ticket, int* failed, const int cap)
{
    const int lane = threadIdx.x % 32;
    for (;;) {
        int claimed = 0;
        if (lane == 0) claimed = atomicAdd(ticket, 1);
        const long long place = PENSTOCK_SHUFFLE(claimed, 0, 32);
        if (place >= count) return;
        const long long row = rows ? rows[place] : place;
        bool gave_up = false;
        for (int turn = 0; PENSTOCK_BALLOT(PENSTOCK_LOAD_RELAXED(waits + place) != 0);) {
            if (++turn > cap || turn % 1024 == 0)
                if (PENSTOCK_BALLOT(turn > cap || PENSTOCK_LOAD_RELAXED(failed) == 1)) {
                    if (lane == 0) PENSTOCK_STORE_RELAXED(failed, 1);
                    gave_up = true;
                    break;
                }
            PENSTOCK_PAUSE();
        }
        __threadfence();
        const double y = gave_up ? not_a_number() : (double(b[row]) - PENSTOCK_LOAD_RELAXED(sums + place)) * inverse[place];
        if (lane == 0) store_product(out + row, y, alpha, gave_up ? 0.0 : beta);
        for (int entry = offsets[place] + lane; entry < offsets[place + 1]; entry += 32)
            atomicAdd(sums + places[entry], double(values[entry]) * y);
        __threadfence();
        for (int entry = offsets[place] + lane; entry < offsets[place + 1]; entry += 32) atomicAdd(waits + places[entry], -1);
    }
}
