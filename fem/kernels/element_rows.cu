// Rows of the matrix of a mesh of linear tetrahedra or hexahedra, made from coordinates and connectivity.
//
// A thread makes the row of blocks of one node: it goes through the elements of the node in the order of their numbers, computes
// the node's row of each element's matrix, and adds its blocks to those of the row. Nothing is added atomically, so bits repeat.

constexpr int HEIGHT = 32;  // nodes in a chunk

// A shape at an integration point: its weight there, and the gradients of the shape functions.
struct Tetrahedron {
    static constexpr int NODES = 4, POINTS = 1;
    double weight, gradients[NODES][3];

    __device__ Tetrahedron(const int, const double (&x)[NODES][3])
    {
        double d[3][3];
        for (int e = 0; e < 3; ++e)
            for (int c = 0; c < 3; ++c) d[e][c] = x[e + 1][c] - x[0][c];
        for (int e = 0; e < 3; ++e) {
            const double *u = d[(e + 1) % 3], *v = d[(e + 2) % 3];
            gradients[e + 1][0] = u[1] * v[2] - u[2] * v[1];
            gradients[e + 1][1] = u[2] * v[0] - u[0] * v[2];
            gradients[e + 1][2] = u[0] * v[1] - u[1] * v[0];
        }
        const double determinant = d[0][0] * gradients[1][0] + d[0][1] * gradients[1][1] + d[0][2] * gradients[1][2];
        const double inverse = 1.0 / determinant;
        for (int c = 0; c < 3; ++c) {
            for (int e = 1; e < NODES; ++e) gradients[e][c] *= inverse;
            gradients[0][c] = -(gradients[1][c] + gradients[2][c] + gradients[3][c]);
        }
        weight = fabs(determinant) / 6.0;
    }

    __device__ void gradient_of(const int node, double (&g)[3]) const
    {
#pragma unroll
        for (int b = 0; b < NODES; ++b)
            if (b == node)
                for (int c = 0; c < 3; ++c) g[c] = gradients[b][c];
    }
};

struct Hexahedron {
    static constexpr int NODES = 8, POINTS = 8;
    double weight, inverse[3][3], below[3], above[3];  // the Jacobian's, and the linear functions of each axis

    // The corners of the reference element in the order of VTK and gmsh: once around the bottom, then around the top.
    __device__ static bool is_far(const int node, const int axis)
    {
        return axis == 0 ? (node & 3) == 1 || (node & 3) == 2 : axis == 1 ? (node & 2) != 0 : (node & 4) != 0;
    }

    __device__ Hexahedron(const int point, const double (&x)[NODES][3])
    {
        for (int axis = 0; axis < 3; ++axis) {
            const double at = is_far(point, axis) ? 0.57735026918962576451 : -0.57735026918962576451;
            below[axis] = 1.0 - at;
            above[axis] = 1.0 + at;
        }
        double J[3][3] = {};
#pragma unroll
        for (int b = 0; b < NODES; ++b) {
            double g[3];
            gradient_of_reference(b, g);
            for (int axis = 0; axis < 3; ++axis)
                for (int c = 0; c < 3; ++c) J[axis][c] += g[axis] * x[b][c];
        }
        for (int r = 0; r < 3; ++r)
            for (int c = 0; c < 3; ++c)
                inverse[r][c] = J[(r + 1) % 3][(c + 1) % 3] * J[(r + 2) % 3][(c + 2) % 3] -
                                J[(r + 1) % 3][(c + 2) % 3] * J[(r + 2) % 3][(c + 1) % 3];
        const double determinant = J[0][0] * inverse[0][0] + J[0][1] * inverse[0][1] + J[0][2] * inverse[0][2];
        const double reciprocal = 1.0 / determinant;
        for (int r = 0; r < 3; ++r)
            for (int c = 0; c < 3; ++c) inverse[r][c] *= reciprocal;
        weight = fabs(determinant);
    }

    __device__ void gradient_of_reference(const int node, double (&g)[3]) const
    {
        double along[3];
        for (int axis = 0; axis < 3; ++axis) along[axis] = is_far(node, axis) ? above[axis] : below[axis];
        for (int axis = 0; axis < 3; ++axis)
            g[axis] = (is_far(node, axis) ? 0.125 : -0.125) * along[(axis + 1) % 3] * along[(axis + 2) % 3];
    }

    __device__ void gradient_of(const int node, double (&g)[3]) const
    {
        double r[3];
        gradient_of_reference(node, r);
        for (int c = 0; c < 3; ++c) g[c] = inverse[0][c] * r[0] + inverse[1][c] * r[1] + inverse[2][c] * r[2];
    }
};

// What a node has at an integration point, and what it adds to the block of itself and another node there.
struct Elasticity {
    static constexpr int DOF = 3;
    double by_lambda[3], by_mu[3];  // the gradient of the node, times weight and moduli

    __device__ Elasticity(const double weight, const double lambda, const double mu, const double (&u)[3])
    {
        for (int c = 0; c < 3; ++c) {
            by_lambda[c] = weight * lambda * u[c];
            by_mu[c] = weight * mu * u[c];
        }
    }

    __device__ void add(double* block, const double (&v)[3]) const
    {
        const double product = by_mu[0] * v[0] + by_mu[1] * v[1] + by_mu[2] * v[2];
#pragma unroll
        for (int r = 0; r < 3; ++r) {
#pragma unroll
            for (int c = 0; c < 3; ++c) block[r * 3 + c] += by_lambda[r] * v[c] + by_mu[c] * v[r];
            block[r * 4] += product;
        }
    }
};

struct Diffusion {
    static constexpr int DOF = 1;
    double by_modulus[3];

    __device__ Diffusion(const double weight, const double conductivity, const double, const double (&u)[3])
    {
        for (int c = 0; c < 3; ++c) by_modulus[c] = weight * conductivity * u[c];
    }

    __device__ void add(double* block, const double (&v)[3]) const
    {
        block[0] += by_modulus[0] * v[0] + by_modulus[1] * v[1] + by_modulus[2] * v[2];
    }
};

// coordinates        [nodes][3]
// connectivity       [elements][Shape::NODES]
// factors            [elements] of the stiffness; none if all are 1
// fixed              [nodes * DOF]: unknowns whose rows and columns keep their diagonal only; none if there are none
// element_offsets    [nodes + 1] into node_elements: for each node, its places in the connectivity
// pattern_offsets    [nodes + 1] into pattern: the columns of the row of each node; with `upper` those from the node on
// chunk_starts       where the chunks of the whole matrix begin, in blocks, from the slab's first chunk on; for CHUNKS
// parts              which arrays are written: 1 offsets and indices, 2 values
// widest             rows of up to this many blocks are added up in shared memory; none if it is 0
template <typename Shape, typename Physics, typename Offset, int layout, bool upper>
__global__ void __launch_bounds__(128) element_rows(
    const long long start, const long long rows, const int parts, const double* __restrict__ coordinates,
    const int* __restrict__ connectivity, const double* __restrict__ factors, const int uniform, const double first_modulus,
    const double second_modulus, const unsigned char* __restrict__ fixed, const int has_fixed,
    const long long* __restrict__ element_offsets, const int* __restrict__ node_elements,
    const long long* __restrict__ pattern_offsets, const int* __restrict__ pattern, const long long* __restrict__ chunk_starts,
    const int widest, Offset* __restrict__ offsets, int* __restrict__ columns, double* __restrict__ values)
{
    PENSTOCK_DYNAMIC_SHARED(double, sums);
    constexpr int NODES = Shape::NODES, DOF = Physics::DOF, SCALARS = DOF * DOF;
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const bool structure = parts & 1, numbers = parts & 2;
    const int lane = int(row % HEIGHT);
    const bool exists = row < rows;
    const long long node = start + row;
    const int* row_columns = pattern;
    int count = 0, width = 0;
    long long place;  // of the first block of the row
    if (exists) {
        row_columns = pattern + pattern_offsets[node];
        count = int(pattern_offsets[node + 1] - pattern_offsets[node]);
    }
    if constexpr (layout == CHUNKS) {
        if (row / HEIGHT * HEIGHT >= rows) return;
        const long long first = chunk_starts[row / HEIGHT] - chunk_starts[0];
        const long long stop = chunk_starts[row / HEIGHT + 1] - chunk_starts[0];
        place = first + lane;
        width = int((stop - first) / HEIGHT);
        if (structure && lane == 0) {
            offsets[row / HEIGHT] = Offset(first);
            if (row + HEIGHT >= rows) offsets[row / HEIGHT + 1] = Offset(stop);
        }
    } else {
        if (!exists) return;
        place = pattern_offsets[node] - pattern_offsets[start];
        width = count;
        if (structure) {
            offsets[row] = Offset(place);
            if (row + 1 == rows) offsets[rows] = Offset(place + count);
        }
    }
    constexpr int between = layout == CHUNKS ? HEIGHT : 1;  // slots of a row, in blocks, and the scalars of a block
    double* row_values = values + (layout == CHUNKS ? (place - lane) * SCALARS + lane : place * SCALARS);
    if (structure)
        for (int slot = 0; slot < width; ++slot)
            columns[place + (long long)slot * between] = slot < count ? row_columns[slot] : -1;
    if (!numbers) return;
    // Blocks are added up where every lane has a column of its own: written to memory at once, they fill whole lines there.
    const bool is_shared = width <= widest;
    double* target = is_shared ? sums + threadIdx.x : row_values;
    const int to_scalar = is_shared ? int(blockDim.x) : between;
    const long long to_slot = is_shared ? (long long)SCALARS * blockDim.x : (long long)between * SCALARS;
    for (int slot = 0; slot < width; ++slot)
        for (int k = 0; k < SCALARS; ++k) target[slot * to_slot + k * to_scalar] = 0.0;

    const long long last = exists ? element_offsets[node + 1] : 0;
    for (long long entry = exists ? element_offsets[node] : 0; entry < last; ++entry) {
        const int element = node_elements[entry] / NODES, own = node_elements[entry] % NODES;
        int nodes[NODES];
        double x[NODES][3], blocks[NODES * SCALARS] = {};
        const Pack<int, 4>* packs = reinterpret_cast<const Pack<int, 4>*>(connectivity + (long long)element * NODES);
#pragma unroll
        for (int pack = 0; pack < NODES / 4; ++pack) {
            const Pack<int, 4> four = packs[pack];
            for (int k = 0; k < 4; ++k) nodes[pack * 4 + k] = four.number[k];
        }
#pragma unroll
        for (int b = 0; b < NODES; ++b)
            for (int c = 0; c < 3; ++c) x[b][c] = coordinates[nodes[b] * 3ll + c];
        const double factor = uniform ? 1.0 : factors[element];
#pragma unroll 1
        for (int point = 0; point < Shape::POINTS; ++point) {
            const Shape at(point, x);
            const double weight = factor * at.weight;
            double of_node[3];
            at.gradient_of(own, of_node);
            const Physics physics(weight, first_modulus, second_modulus, of_node);
#pragma unroll
            for (int b = 0; b < NODES; ++b)
                if (!upper || nodes[b] >= node) {
                    double g[3];
                    at.gradient_of(b, g);
                    physics.add(blocks + b * SCALARS, g);
                }
        }
#pragma unroll
        for (int b = 0; b < NODES; ++b) {
            if (upper && nodes[b] < node) continue;
            const int slot = place_of(nodes[b], row_columns, 0, count);
            double* block = target + slot * to_slot;
#pragma unroll
            for (int k = 0; k < SCALARS; ++k) {
                bool counts = true;
                if (has_fixed) {
                    const bool held = fixed[node * DOF + k / DOF] || fixed[(long long)nodes[b] * DOF + k % DOF];
                    counts = !held || (nodes[b] == node && k / DOF == k % DOF);
                }
                if (counts) block[k * to_scalar] += blocks[b * SCALARS + k];
            }
        }
    }
    if (DOF > 1 && exists) {  // the block of the node with itself is symmetric but for rounding
        double* block = target + (upper ? 0 : place_of(int(node), row_columns, 0, count)) * to_slot;
        for (int r = 1; r < DOF; ++r)
            for (int c = 0; c < r; ++c) block[(r * DOF + c) * to_scalar] = block[(c * DOF + r) * to_scalar];
    }
    if (is_shared)
        for (int slot = 0; slot < width; ++slot)
            for (int k = 0; k < SCALARS; ++k)
                row_values[(long long)slot * between * SCALARS + k * between] =
                    target[slot * to_slot + k * to_scalar];
}
