// One iteration of preconditioned conjugate gradients in three passes, whose scalars never leave the device.
//
// Every pass is launched with the same grid of blocks of 256 threads. A pass writes one partial sum per block and inner
// product; each block of the next pass sums them all in the same order, so that no kernel in between is needed and all
// blocks agree to the last bit. No pass writes one of `numbers` that another block of the same pass reads.
// Passes write `partials` and read `sums`: the same memory, or with vectors spread over ranks, the partial sums of all of them.
//
// Vector is the element type; all arithmetic is in double.

constexpr int THREADS = 256, ITEMS = 4, TILE = THREADS * ITEMS;

// Scalar, Sum and Halt are the Python enums of these names in solvers/cg_kernels.py, which explain their members.

__device__ __forceinline__ bool is_finite(const double value) { return value - value == 0.0; }

// The sum of one number per thread over the block, returned to every thread. All threads must call it.
__device__ __forceinline__ double sum_over_block(double value)
{
    __shared__ double sums[THREADS / 32];
    value = sum_over_lanes<32>(value);
    __syncthreads();  // the sums of an earlier call may still be read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    double total = 0.0;
#pragma unroll
    for (int group = 0; group < THREADS / 32; ++group) total += sums[group];
    return total;
}

__device__ __forceinline__ void leave(double* partials, const Sum which, double value)
{
    value = sum_over_block(value);
    if (threadIdx.x == 0) partials[which * gridDim.x + blockIdx.x] = value;
}

// The sum of the partial sums that `blocks` blocks of an earlier pass wrote.
__device__ __forceinline__ double gather(const double* sums, const Sum which, const int blocks)
{
    double sum = 0.0;
    for (int block = threadIdx.x; block < blocks; block += THREADS) sum += sums[which * blocks + block];
    return sum_over_block(sum);
}

// Ends an iteration: bounds the drift of the recursive residual from the true one by rounding (van der Vorst and Ye 2000).
// Run by one block, in the next iteration or before the host reads the numbers, whichever comes first.
__device__ __forceinline__ void close_iteration(const double* sums, double* numbers, const int blocks)
{
    const double solution_squared = gather(sums, X_X, blocks);
    if (threadIdx.x != 0) return;
    numbers[RHO] = numbers[NEXT_RHO];
    if (numbers[ADVANCED] != 0.0) {
        const double unit = numbers[UNIT], residual = sqrt(numbers[RESIDUAL_SQUARED]);
        const double drift = numbers[DRIFT] + unit * (numbers[MATRIX_NORM] * sqrt(solution_squared) + residual);
        const double limit = sqrt(unit) * residual, first = numbers[FIRST_DRIFT];
        // A recomputed residual must be much better, and good enough, and the tolerance must be out of reach without it.
        const bool harmful = drift > limit && 100.0 * drift * drift > numbers[THRESHOLD_SQUARED];
        if (numbers[HALT] == NO_HALT && harmful && drift > 10.0 * first && first <= limit) numbers[HALT] = DRIFTED;
        numbers[DRIFT] = drift;
        numbers[ADVANCED] = 0.0;
    }
    numbers[ACTIVE] = numbers[HALT] == NO_HALT;
}

// Launch: one block, after passes with `blocks` blocks.
__global__ void __launch_bounds__(256) cg_close(const int blocks, const double* __restrict__ sums, double* __restrict__ numbers)
{
    close_iteration(sums, numbers, blocks);
}

// The curvature of the next direction z + beta p by Chronopoulos and Gear's formula, in the place of its sum. One block.
__global__ void __launch_bounds__(256) cg_foresee(const int blocks, double* sums, const double* __restrict__ numbers)
{
    if (numbers[ACTIVE] == 0.0) return;
    const double r_z = gather(sums, R_Z, blocks), w_z = gather(sums, W_Z, blocks);
    const double beta = r_z / numbers[RHO], next = w_z - beta * beta * numbers[CURVATURE];
    for (int block = threadIdx.x; block < blocks; block += THREADS) sums[P_Q * blocks + block] = block == 0 ? next : 0.0;
}

// p.q, p.p and q.q: reads 2 n values. `closes` ends the last iteration too: ranks have yet to add up x.x before they can.
template <typename Vector>
__global__ void __launch_bounds__(256) cg_curvature(
    const long long n, const Vector* __restrict__ p, const Vector* __restrict__ q, double* partials, const double* sums,
    double* __restrict__ numbers, const bool closes)
{
    double p_q = 0.0, p_p = 0.0, q_q = 0.0;
    for (long long tile = (long long)blockIdx.x * TILE; tile < n; tile += (long long)gridDim.x * TILE) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const long long i = tile + item * THREADS + threadIdx.x;
            if (i >= n) break;
            const double direction = p[i], image = q[i];
            p_q += direction * image;
            p_p += direction * direction;
            q_q += image * image;
        }
    }
    leave(partials, P_Q, p_q);
    leave(partials, P_P, p_p);
    leave(partials, Q_Q, q_q);
    if (closes && blockIdx.x == 0) close_iteration(sums, numbers, gridDim.x);
}

// alpha = rho / p.q, r -= alpha q, r.r, and with a preconditioner of dense diagonal blocks of `size` also z = M r and r.z.
// Reads 2 n values and writes n; with a preconditioner, reads size n more and writes n more. Size 0 writes r.r in place of r.z.
template <typename Vector, int size>
__global__ void __launch_bounds__(256) cg_descend(
    const long long n, const Vector* __restrict__ q, const Vector* __restrict__ diagonal_blocks, Vector* __restrict__ r,
    Vector* __restrict__ z, double* partials, const double* sums, double* __restrict__ numbers)
{
    if (numbers[ACTIVE] == 0.0) return;
    const double curvature = gather(sums, P_Q, gridDim.x);
    const bool positive = curvature > 0.0 && is_finite(curvature);
    const double alpha = numbers[RHO] / curvature;
    if (blockIdx.x == 0) {
        const double stretched = gather(sums, Q_Q, gridDim.x), length = gather(sums, P_P, gridDim.x);
        if (threadIdx.x == 0) {
            numbers[CURVATURE] = curvature;
            if (positive) {
                numbers[ALPHA] = alpha;
                numbers[MATRIX_NORM] = fmax(numbers[MATRIX_NORM], sqrt(stretched / length));
            }
        }
    }
    if (!positive) return;
    constexpr int rows = size == 0 ? 1 : size, items = rows == 1 ? ITEMS : 1;
    double r_r = 0.0, r_z = 0.0;
    for (long long tile = (long long)blockIdx.x * THREADS * items; tile < n / rows; tile += (long long)gridDim.x * THREADS * items) {
        double residual[items][rows];
#pragma unroll
        for (int item = 0; item < items; ++item) {
            const long long i = tile + item * THREADS + threadIdx.x;
#pragma unroll
            for (int row = 0; row < rows; ++row)
                residual[item][row] = i < n / rows ? Vector(double(r[i * rows + row]) - alpha * double(q[i * rows + row])) : Vector(0);
        }
#pragma unroll
        for (int item = 0; item < items; ++item) {
            const long long i = tile + item * THREADS + threadIdx.x;
            if (i >= n / rows) break;
#pragma unroll
            for (int row = 0; row < rows; ++row) {
                r[i * rows + row] = Vector(residual[item][row]);
                r_r += residual[item][row] * residual[item][row];
                if constexpr (size > 0) {
                    double sum = 0.0;
#pragma unroll
                    for (int column = 0; column < rows; ++column)
                        sum += double(diagonal_blocks[(i * rows + row) * rows + column]) * residual[item][column];
                    const Vector image = Vector(sum);
                    z[i * rows + row] = image;
                    r_z += residual[item][row] * double(image);
                }
            }
        }
    }
    leave(partials, R_R, r_r);
    leave(partials, R_Z, size == 0 ? r_r : r_z);
}

// r.z, after a preconditioner with kernels of its own, or another product of two vectors: reads 2 n values.
template <typename Vector>
__global__ void __launch_bounds__(256) cg_residual_product(
    const long long n, const Vector* __restrict__ r, const Vector* __restrict__ z, double* __restrict__ partials, const int which)
{
    double r_z = 0.0;
    for (long long tile = (long long)blockIdx.x * TILE; tile < n; tile += (long long)gridDim.x * TILE) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const long long i = tile + item * THREADS + threadIdx.x;
            if (i < n) r_z += double(r[i]) * double(z[i]);
        }
    }
    leave(partials, Sum(which), r_z);
}

// x += alpha p, x.x, and p = z + beta p with beta = r.z / rho: reads 3 n values, writes 2 n. z may be r.
template <typename Vector>
__global__ void __launch_bounds__(256) cg_extend(
    const long long n, const Vector* __restrict__ z, Vector* __restrict__ x, Vector* __restrict__ p,
    double* partials, const double* sums, double* __restrict__ numbers, double* __restrict__ norms_squared, const int norms_kept)
{
    if (numbers[ACTIVE] == 0.0) return;
    const double curvature = numbers[CURVATURE];
    if (!(curvature > 0.0 && is_finite(curvature))) {
        if (blockIdx.x == 0 && threadIdx.x == 0) numbers[HALT] = BAD_CURVATURE;
        return;
    }
    const double r_r = gather(sums, R_R, gridDim.x), r_z = gather(sums, R_Z, gridDim.x);
    const double alpha = numbers[ALPHA], beta = r_z / numbers[RHO];
    Halt halt = NO_HALT;
    if (!is_finite(r_r))
        halt = NOT_FINITE;
    else if (r_r <= numbers[THRESHOLD_SQUARED])
        halt = SMALL;
    else if (!is_finite(r_z))
        halt = NOT_FINITE;
    else if (r_z <= 0.0)
        halt = BAD_PRECONDITIONER;
    double x_x = 0.0;
    for (long long tile = (long long)blockIdx.x * TILE; tile < n; tile += (long long)gridDim.x * TILE) {
        double solution[ITEMS], direction[ITEMS], image[ITEMS];
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const long long i = tile + item * THREADS + threadIdx.x;
            const bool inside = i < n;
            solution[item] = inside ? double(x[i]) : 0.0;
            direction[item] = inside ? double(p[i]) : 0.0;
            image[item] = inside ? double(z[i]) : 0.0;
        }
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const long long i = tile + item * THREADS + threadIdx.x;
            if (i >= n) break;
            const Vector moved = Vector(solution[item] + alpha * direction[item]);
            x[i] = moved;
            x_x += double(moved) * double(moved);
            if (halt == NO_HALT) p[i] = Vector(image[item] + beta * direction[item]);
        }
    }
    leave(partials, X_X, x_x);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        const int iteration = int(numbers[ITERATION]);
        norms_squared[iteration % norms_kept] = r_r;
        numbers[ITERATION] = iteration + 1;
        numbers[RESIDUAL_SQUARED] = r_r;
        if (halt == NO_HALT) numbers[NEXT_RHO] = r_z;
        numbers[HALT] = halt;
        numbers[ADVANCED] = 1.0;
    }
}

// q = w + beta q, the image of p = z + beta p, where w is that of z: reads 2 n values, writes n.
template <typename Vector>
__global__ void __launch_bounds__(256) cg_extend_image(
    const long long n, const Vector* __restrict__ w, Vector* __restrict__ q, const double* __restrict__ numbers)
{
    if (numbers[ACTIVE] == 0.0 || numbers[HALT] != NO_HALT) return;
    const double beta = numbers[NEXT_RHO] / numbers[RHO];
    for (long long tile = (long long)blockIdx.x * TILE; tile < n; tile += (long long)gridDim.x * TILE) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const long long i = tile + item * THREADS + threadIdx.x;
            if (i < n) q[i] = Vector(double(w[i]) + beta * double(q[i]));
        }
    }
}
