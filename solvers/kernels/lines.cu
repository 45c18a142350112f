// The inverse of the blocks of a matrix on lines of nodes: block tridiagonal factorisations.
//
// The nodes of a line are stored from starts[line] to starts[line + 1]. `pivots` holds the inverses of the pivots, `below` the
// blocks of the unit factor below the diagonal, SIZE x SIZE each; below the first node of a line it is zero.

// Replaces a symmetric positive definite block by its inverse W^T W, where W = L^-1; returns whether it is one.
template <int SIZE>
__device__ __forceinline__ bool invert(double (&block)[SIZE][SIZE])
{
    double work[SIZE][SIZE];
    for (int i = 0; i < SIZE; ++i)
        for (int j = 0; j <= i; ++j) {
            double sum = block[i][j];
            for (int k = 0; k < j; ++k) sum -= work[i][k] * work[j][k];
            if (i != j) work[i][j] = sum / work[j][j];
            else if (sum > 0.0) work[i][i] = sqrt(sum);
            else return false;
        }
    for (int j = 0; j < SIZE; ++j)  // L by W, column by column
        for (int i = j; i < SIZE; ++i) {
            double sum = i == j ? 1.0 : 0.0;
            for (int k = j; k < i; ++k) sum -= work[i][k] * block[k][j];
            block[i][j] = sum / work[i][i];
        }
    for (int i = 0; i < SIZE; ++i)
        for (int j = 0; j <= i; ++j) {
            double sum = 0.0;
            for (int k = i; k < SIZE; ++k) sum += block[k][i] * block[k][j];
            work[i][j] = sum;
        }
    for (int i = 0; i < SIZE; ++i)
        for (int j = 0; j <= i; ++j) block[i][j] = block[j][i] = work[i][j];
    return true;
}

// Factorises lines in place, from their diagonal blocks, which are multiplied by `factor` on the diagonal, and those below them.
template <int SIZE>
__global__ void __launch_bounds__(128) factorise_lines(
    const int lines, const double factor, const long long* __restrict__ starts, double* __restrict__ pivots,
    double* __restrict__ below, bool* __restrict__ regular)
{
    const int line = int((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (line >= lines) return;
    double pivot[SIZE][SIZE], coupling[SIZE][SIZE];  // the inverse of the pivot before, until it is replaced
    for (long long node = starts[line]; node < starts[line + 1]; ++node) {
        const long long place = node * SIZE * SIZE;
        double here[SIZE][SIZE];
        for (int i = 0; i < SIZE; ++i)
            for (int j = 0; j < SIZE; ++j) here[i][j] = pivots[place + i * SIZE + j] * (i == j ? factor : 1.0);
        if (node > starts[line]) {
            for (int i = 0; i < SIZE; ++i)
                for (int j = 0; j < SIZE; ++j) coupling[i][j] = below[place + i * SIZE + j];
            for (int i = 0; i < SIZE; ++i) {
                double row[SIZE];
                for (int j = 0; j < SIZE; ++j) {
                    double sum = 0.0;
                    for (int k = 0; k < SIZE; ++k) sum += coupling[i][k] * pivot[k][j];
                    below[place + i * SIZE + j] = row[j] = sum;
                }
                for (int j = 0; j < SIZE; ++j)
                    for (int k = 0; k < SIZE; ++k) here[i][j] -= row[k] * coupling[j][k];
            }
        }
        for (int i = 0; i < SIZE; ++i)
            for (int j = 0; j < SIZE; ++j) pivot[i][j] = here[i][j];
        if (!invert<SIZE>(pivot)) {
            regular[line] = false;
            return;
        }
        for (int i = 0; i < SIZE; ++i)
            for (int j = 0; j < SIZE; ++j) pivots[place + i * SIZE + j] = pivot[i][j];
    }
}

// The place of unknown i of a node on a line in one column of a block of `count` vectors, which is stored row by row.
template <int SIZE>
struct Vectors {
    int count, vector;
    const int* nodes;
    __device__ long long at(const long long place, const int i) const
    {
        return ((long long)nodes[place] * SIZE + i) * count + vector;
    }
};

// out = a D (f - y) + b v + c out at the nodes of lines of a few nodes, one thread a line and vector. f is left out unless
// `driven`; y becomes zero if `clears`. `work` has a number for every row on lines and each of `vectors` columns.
template <int SIZE>
__global__ void __launch_bounds__(128) step_short_lines(
    const int first, const int last, const int vectors, const int driven, const int clears, const double a, const double b,
    const double c, const long long* __restrict__ starts, const int* __restrict__ nodes, const double* __restrict__ pivots,
    const double* __restrict__ below, const double* __restrict__ f, double* __restrict__ y, const double* __restrict__ v,
    double* __restrict__ work, double* __restrict__ out)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= (long long)(last - first) * vectors) return;
    const long long line = first + thread / vectors, begin = starts[line], end = starts[line + 1];
    const Vectors<SIZE> of = {vectors, int(thread % vectors), nodes};
    double before[SIZE], here[SIZE];
    for (int i = 0; i < SIZE; ++i) before[i] = 0.0;
    for (long long place = begin; place < end; ++place) {
        for (int i = 0; i < SIZE; ++i) {
            const long long at = of.at(place, i);
            double sum = (driven ? f[at] : 0.0) - y[at];
            if (clears) y[at] = 0.0;
            for (int j = 0; j < SIZE; ++j) sum -= below[(place * SIZE + i) * SIZE + j] * before[j];
            here[i] = sum;
        }
        for (int i = 0; i < SIZE; ++i) work[(place * SIZE + i) * vectors + of.vector] = before[i] = here[i];
    }
    // From here on `before` is the part of a node that the node after it leaves to subtract.
    for (int i = 0; i < SIZE; ++i) before[i] = 0.0;
    for (long long place = end - 1; place >= begin; --place) {
        for (int i = 0; i < SIZE; ++i) {
            double sum = -before[i];
            for (int j = 0; j < SIZE; ++j)
                sum += pivots[(place * SIZE + i) * SIZE + j] * work[(place * SIZE + j) * vectors + of.vector];
            here[i] = sum;
        }
        for (int j = 0; j < SIZE; ++j) {
            before[j] = 0.0;
            for (int i = 0; i < SIZE; ++i) before[j] += below[(place * SIZE + i) * SIZE + j] * here[i];
        }
        for (int i = 0; i < SIZE; ++i) {
            const long long at = of.at(place, i);
            double total = a * here[i];
            if (b != 0.0) total += b * v[at];
            if (c != 0.0) total += c * out[at];
            out[at] = total;
        }
    }
}

// The affine map x -> shift + factor x by which what enters a part of a line becomes what leaves it.
template <int SIZE>
struct Passage {
    double factor[SIZE][SIZE], shift[SIZE];

    __device__ void begin()
    {
        for (int i = 0; i < SIZE; ++i) {
            shift[i] = 0.0;
            for (int j = 0; j < SIZE; ++j) factor[i][j] = i == j ? 1.0 : 0.0;
        }
    }
    // Goes on by x -> value - block x, or its transpose.
    __device__ void go_on(const double (&value)[SIZE], const double* __restrict__ block, const bool transposed)
    {
        double next[SIZE];
        for (int i = 0; i < SIZE; ++i) {
            next[i] = value[i];
            for (int j = 0; j < SIZE; ++j) next[i] -= block[transposed ? j * SIZE + i : i * SIZE + j] * shift[j];
        }
        for (int i = 0; i < SIZE; ++i) shift[i] = next[i];
        for (int k = 0; k < SIZE; ++k) {
            for (int i = 0; i < SIZE; ++i) {
                next[i] = 0.0;
                for (int j = 0; j < SIZE; ++j) next[i] -= block[transposed ? j * SIZE + i : i * SIZE + j] * factor[j][k];
            }
            for (int i = 0; i < SIZE; ++i) factor[i][k] = next[i];
        }
    }
    // Becomes this passage after another one.
    __device__ void follow(const Passage& other)
    {
        double row[SIZE];
        for (int i = 0; i < SIZE; ++i) {
            for (int j = 0; j < SIZE; ++j) shift[i] += factor[i][j] * other.shift[j];
            for (int k = 0; k < SIZE; ++k) {
                row[k] = 0.0;
                for (int j = 0; j < SIZE; ++j) row[k] += factor[i][j] * other.factor[j][k];
            }
            for (int k = 0; k < SIZE; ++k) factor[i][k] = row[k];
        }
    }
};

// The passage of a lane that is `by` lanes before this one, or after it.
template <int SIZE>
__device__ __forceinline__ Passage<SIZE> of_lane(const Passage<SIZE>& own, const int by, const bool after)
{
    Passage<SIZE> other;
    for (int i = 0; i < SIZE; ++i) {
        other.shift[i] = after ? PENSTOCK_SHUFFLE_DOWN(own.shift[i], by, 32) : PENSTOCK_SHUFFLE_UP(own.shift[i], by, 32);
        for (int j = 0; j < SIZE; ++j)
            other.factor[i][j] =
                after ? PENSTOCK_SHUFFLE_DOWN(own.factor[i][j], by, 32) : PENSTOCK_SHUFFLE_UP(own.factor[i][j], by, 32);
    }
    return other;
}

// What enters the part of a lane: the passages of all lanes before it, or after it, from zero (Hillis and Steele 1986).
template <int SIZE>
__device__ __forceinline__ void enter(Passage<SIZE>& passage, const int lane, const bool after, double (&value)[SIZE])
{
    const int place = after ? 31 - lane : lane;
    for (int by = 1; by < 32; by *= 2) {
        const Passage<SIZE> other = of_lane<SIZE>(passage, by, after);
        if (place >= by) passage.follow(other);
    }
    for (int i = 0; i < SIZE; ++i) {
        const double other =
            after ? PENSTOCK_SHUFFLE_DOWN(passage.shift[i], 1, 32) : PENSTOCK_SHUFFLE_UP(passage.shift[i], 1, 32);
        value[i] = place ? other : 0.0;
    }
}

// As step_short_lines, for long lines, of which each of 32 lanes has a part. A substitution passes twice over its part: it finds what leaves
// the part as a function of what enters, and, once that is known, its values. The depth is 4/32 of the nodes, not twice the nodes.
template <int SIZE>
__global__ void __launch_bounds__(128) step_long_lines(
    const int first, const int last, const int vectors, const int driven, const int clears, const double a, const double b,
    const double c, const long long* __restrict__ starts, const int* __restrict__ nodes, const double* __restrict__ pivots,
    const double* __restrict__ below, const double* __restrict__ f, double* __restrict__ y, const double* __restrict__ v,
    double* __restrict__ work, double* __restrict__ out)
{
    const long long group = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (group >= (long long)(last - first) * vectors) return;
    const int lane = threadIdx.x % 32, square = SIZE * SIZE;
    const long long line = first + group / vectors, end = starts[line + 1];
    const long long part = (end - starts[line] + 31) / 32, low = min(starts[line] + lane * part, end), high = min(low + part, end);
    const Vectors<SIZE> of = {vectors, int(group % vectors), nodes};
    Passage<SIZE> passage;
    double value[SIZE], here[SIZE];
    passage.begin();
    for (long long place = low; place < high; ++place) {
        for (int i = 0; i < SIZE; ++i) {
            const long long at = of.at(place, i);
            here[i] = (driven ? f[at] : 0.0) - y[at];
            if (clears) y[at] = 0.0;
            work[(place * SIZE + i) * vectors + of.vector] = here[i];
        }
        passage.go_on(here, below + place * square, false);
    }
    enter<SIZE>(passage, lane, false, value);
    passage.begin();
    for (long long place = low; place < high; ++place) {
        for (int i = 0; i < SIZE; ++i) {
            here[i] = work[(place * SIZE + i) * vectors + of.vector];
            for (int j = 0; j < SIZE; ++j) here[i] -= below[place * square + i * SIZE + j] * value[j];
        }
        for (int i = 0; i < SIZE; ++i) value[i] = here[i];
        for (int i = 0; i < SIZE; ++i) {
            double sum = 0.0;
            for (int j = 0; j < SIZE; ++j) sum += pivots[place * square + i * SIZE + j] * value[j];
            work[(place * SIZE + i) * vectors + of.vector] = sum;
        }
    }
    for (long long place = high - 1; place >= low; --place) {
        for (int i = 0; i < SIZE; ++i) here[i] = work[(place * SIZE + i) * vectors + of.vector];
        if (place + 1 < end) passage.go_on(here, below + (place + 1) * square, true);
        else
            for (int i = 0; i < SIZE; ++i) passage.shift[i] = here[i];  // nothing enters at the end
    }
    enter<SIZE>(passage, lane, true, value);
    for (long long place = high - 1; place >= low; --place) {
        for (int i = 0; i < SIZE; ++i) {
            here[i] = work[(place * SIZE + i) * vectors + of.vector];
            if (place + 1 < end)
                for (int j = 0; j < SIZE; ++j) here[i] -= below[(place + 1) * square + j * SIZE + i] * value[j];
        }
        for (int i = 0; i < SIZE; ++i) {
            value[i] = here[i];
            const long long at = of.at(place, i);
            double total = a * here[i];
            if (b != 0.0) total += b * v[at];
            if (c != 0.0) total += c * out[at];
            out[at] = total;
        }
    }
}

// Replaces right-hand sides of lines by solutions, one thread for each column of a pair of a line and a block column. What a pair
// has at a step is the block values[starts[pair] + step] of `width` columns; the nodes of a line begin at first[line].
template <int SIZE>
__global__ void __launch_bounds__(128) solve_pairs(
    const long long pairs, const int width, const long long* __restrict__ first, const double* __restrict__ pivots,
    const double* __restrict__ below, const long long* __restrict__ line, const long long* __restrict__ starts,
    double* __restrict__ values)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= pairs * width) return;
    const long long pair = thread / width, low = starts[pair], high = starts[pair + 1], place = first[line[pair]] - low;
    const int column = int(thread % width);
    double before[SIZE], here[SIZE];
    for (int i = 0; i < SIZE; ++i) before[i] = 0.0;
    for (long long step = low; step < high; ++step) {
        double* value = values + step * SIZE * width + column;
        const double* factor = below + (place + step) * SIZE * SIZE;
        for (int i = 0; i < SIZE; ++i) {
            here[i] = value[i * width];
            for (int j = 0; j < SIZE; ++j) here[i] -= factor[i * SIZE + j] * before[j];
        }
        for (int i = 0; i < SIZE; ++i) value[i * width] = before[i] = here[i];
    }
    for (int i = 0; i < SIZE; ++i) before[i] = 0.0;
    for (long long step = high - 1; step >= low; --step) {
        double* value = values + step * SIZE * width + column;
        const double *factor = below + (place + step) * SIZE * SIZE, *pivot = pivots + (place + step) * SIZE * SIZE;
        for (int i = 0; i < SIZE; ++i) {
            here[i] = -before[i];
            for (int j = 0; j < SIZE; ++j) here[i] += pivot[i * SIZE + j] * value[j * width];
        }
        for (int j = 0; j < SIZE; ++j) {
            before[j] = 0.0;
            for (int i = 0; i < SIZE; ++i) before[j] += factor[i * SIZE + j] * here[i];
        }
        for (int i = 0; i < SIZE; ++i) value[i * width] = here[i];
    }
}
