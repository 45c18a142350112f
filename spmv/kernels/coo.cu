// Coordinate storage, sorted by rows. Template parameters: Value, the stored type; Vector, that of x and out. Sums are formed
// in double within a segment; a row that several segments share is completed by atomic additions in the type of out.

// out += alpha A x, balanced over nonzeros (Flegar and Anzt 2017): each group of 32 lanes processes `share` consecutive
// entries, 32 at a time. While all lanes stay in one row each adds up its own sum; when some lane's row changes, a
// segmented scan sums each row's lanes and its first lane adds the sum to out. Launch: 32 threads per share. out was scaled
// by beta before. Reads sizeof(Value) + 8 bytes per entry.
template <typename Value, typename Vector>
__global__ void __launch_bounds__(256) coo_spmv(
    const long long entries, const long long share, const int* __restrict__ row_indices,
    const int* __restrict__ column_indices, const Value* __restrict__ values, const Vector* __restrict__ x,
    Vector* __restrict__ out, const double alpha)
{
    const int lane = threadIdx.x % 32;
    const long long first = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32 * share;
    if (first >= entries) return;  // all 32 lanes together
    const long long stop = first + share < entries ? first + share : entries;
    double total = 0.0;
    int row = row_indices[first + lane < stop ? first + lane : stop - 1];
    for (long long base = first; base < stop; base += 32) {
        const long long entry = base + lane, next = entry + 32;
        if (entry < stop) total += double(PENSTOCK_STREAM_LOAD(values + entry)) * double(x[PENSTOCK_STREAM_LOAD(column_indices + entry)]);
        const int next_row = next < stop ? PENSTOCK_STREAM_LOAD(row_indices + next) : row_indices[stop - 1];
        bool changes = next_row != row || base + 32 >= stop;
        for (int by = 16; by > 0; by /= 2) changes |= PENSTOCK_SHUFFLE(int(changes), lane ^ by, 32) != 0;
        if (changes) {
            // Rows ascend over the lanes: adding from the right while the row is the same leaves each sum in its first lane.
            for (int by = 1; by < 32; by *= 2) {
                const int right_row = PENSTOCK_SHUFFLE_DOWN(row, by, 32);
                const double right = PENSTOCK_SHUFFLE_DOWN(total, by, 32);
                if (lane + by < 32 && right_row == row) total += right;
            }
            const int left_row = PENSTOCK_SHUFFLE_UP(row, 1, 32);
            if (lane == 0 || left_row != row) atomicAdd(out + row, Vector(alpha * total));
            total = 0.0;
        }
        row = next_row;
    }
}

// out += alpha A x for a C-ordered block of vectors: `lanes` lanes, a power of two up to 32, process neighbouring columns and
// `share` entries together, adding to out whenever the row changes. Launch: a group of `lanes` threads for every
// share and every `lanes` columns.
template <typename Value, typename Vector>
__global__ void __launch_bounds__(256) coo_spmm(
    const long long entries, const long long share, const long long columns, const int lanes,
    const int* __restrict__ row_indices, const int* __restrict__ column_indices, const Value* __restrict__ values,
    const Vector* __restrict__ x, Vector* __restrict__ out, const double alpha)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x, group = thread / lanes;
    const long long groups_of_columns = (columns + lanes - 1) / lanes;
    const long long k = group % groups_of_columns * lanes + thread % lanes, first = group / groups_of_columns * share;
    if (k >= columns || first >= entries) return;
    const long long stop = first + share < entries ? first + share : entries;
    double total = 0.0;
    int row = row_indices[first];
    for (long long entry = first; entry < stop; ++entry) {
        if (row_indices[entry] != row) {
            atomicAdd(out + (long long)row * columns + k, Vector(alpha * total));
            row = row_indices[entry];
            total = 0.0;
        }
        total += double(values[entry]) * double(x[(long long)column_indices[entry] * columns + k]);
    }
    atomicAdd(out + (long long)row * columns + k, Vector(alpha * total));
}
