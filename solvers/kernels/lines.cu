// The inverse of the blocks of a matrix on lines of nodes: a block tridiagonal factorisation, one thread a line and column.

// out[i] += alpha * (D x)[i] for the unknowns i of nodes on lines.
//
// Lines are ordered by descending length; the nodes at step s of all lines that are so long follow each other from starts[s] on.
// `pivots` holds the inverses of the pivots, `below` the blocks of the factor below the diagonal, SIZE x SIZE each; `work` has a
// number for every row of them and each of `vectors` columns.
template <int SIZE>
__global__ void __launch_bounds__(128) solve_lines(
    const int lines, const int vectors, const double alpha, const int* __restrict__ lengths,
    const long long* __restrict__ starts, const int* __restrict__ nodes, const double* __restrict__ pivots,
    const double* __restrict__ below, const double* __restrict__ x, double* __restrict__ work, double* __restrict__ out)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= (long long)lines * vectors) return;
    const int line = int(thread / vectors), vector = int(thread % vectors), length = lengths[line];
    double last[SIZE], here[SIZE];
    for (int i = 0; i < SIZE; ++i) last[i] = 0.0;
    for (int step = 0; step < length; ++step) {
        const long long place = starts[step] + line, node = nodes[place];
        const double* factor = below + place * SIZE * SIZE;
        for (int i = 0; i < SIZE; ++i) {
            double sum = x[(node * SIZE + i) * vectors + vector];
            for (int j = 0; j < SIZE; ++j) sum -= factor[i * SIZE + j] * last[j];
            here[i] = sum;
        }
        for (int i = 0; i < SIZE; ++i) work[(place * SIZE + i) * vectors + vector] = last[i] = here[i];
    }
    // From here on `last` is the part of the node before that the node after it leaves to subtract.
    for (int i = 0; i < SIZE; ++i) last[i] = 0.0;
    for (int step = length - 1; step >= 0; --step) {
        const long long place = starts[step] + line, node = nodes[place];
        const double *pivot = pivots + place * SIZE * SIZE, *factor = below + place * SIZE * SIZE;
        for (int i = 0; i < SIZE; ++i) {
            double sum = -last[i];
            for (int j = 0; j < SIZE; ++j) sum += pivot[i * SIZE + j] * work[(place * SIZE + j) * vectors + vector];
            here[i] = sum;
            out[(node * SIZE + i) * vectors + vector] += alpha * sum;
        }
        for (int j = 0; j < SIZE; ++j) {
            double sum = 0.0;
            for (int i = 0; i < SIZE; ++i) sum += factor[i * SIZE + j] * here[i];
            last[j] = sum;
        }
    }
}
