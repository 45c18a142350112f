// Inverts symmetric blocks, one per thread: A = L L^T (Golub and Van Loan 2013, algorithm 4.2.1), then L^-T L^-1, in double.
// `first_bad` receives the smallest number of a block that is not positive definite, and of an inverse that is not finite.
template <class Vector, int size>
__global__ void __launch_bounds__(256) invert_blocks(
    const long long count, const Vector* __restrict__ blocks, Vector* __restrict__ inverses,
    unsigned long long* __restrict__ first_bad)
{
    const long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    double factor[size][size];
    for (int row = 0; row < size; ++row)
        for (int column = 0; column < size; ++column) factor[row][column] = double(blocks[(k * size + row) * size + column]);
    bool positive = true, finite = true;
    for (int column = 0; column < size; ++column)
        for (int row = column; row < size; ++row) {
            double entry = factor[row][column];
            for (int inner = 0; inner < column; ++inner) entry -= factor[row][inner] * factor[column][inner];
            if (row > column)
                factor[row][column] = entry / factor[column][column];
            else if (entry > 0.0 && entry - entry == 0.0)
                factor[column][column] = sqrt(entry);
            else {
                positive = false;
                factor[column][column] = 1.0;
            }
        }
    for (int column = 0; column < size; ++column) {  // L^-1 overwrites L
        factor[column][column] = 1.0 / factor[column][column];
        for (int row = column + 1; row < size; ++row) {
            double entry = 0.0;
            for (int inner = column; inner < row; ++inner) entry -= factor[row][inner] * factor[inner][column];
            factor[row][column] = entry / factor[row][row];
        }
    }
    for (int row = 0; row < size; ++row)
        for (int column = 0; column <= row; ++column) {
            double entry = 0.0;
            for (int inner = row; inner < size; ++inner) entry += factor[inner][row] * factor[inner][column];
            const Vector rounded = Vector(entry);
            finite = finite && rounded - rounded == Vector(0);
            // Exactly symmetric, as CG requires of a preconditioner.
            inverses[(k * size + row) * size + column] = inverses[(k * size + column) * size + row] = rounded;
        }
    if (!positive) atomicMin(first_bad, (unsigned long long)k);
    if (!finite) atomicMin(first_bad + 1, (unsigned long long)k);
}

// The Frobenius norms of blocks of some entries, one per thread, in double.
template <class Vector>
__global__ void __launch_bounds__(256) measure_blocks(
    const long long count, const int entries, const Vector* __restrict__ blocks, double* __restrict__ norms)
{
    const long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    double squares = 0.0;
    for (int entry = 0; entry < entries; ++entry) {
        const double own = double(blocks[k * entries + entry]);
        squares += own * own;
    }
    norms[k] = sqrt(squares);
}
