// Rows of the matrix of a mesh of linear tetrahedra or hexahedra, or of a user's elements, from coordinates and connectivity.
//
// One lane, or four, make the row of blocks of one node: they go through the elements of the node in the order of their numbers,
// compute the node's row of each element's matrix, and add its blocks to those of the row. Nothing is added atomically, so bits
// repeat.

constexpr int HEIGHT = 32;  // nodes in a chunk, and the rows of a thread block

// A shape is made of the corners of an element. Its nodes and its integration points are divided among the lanes of a row.
//
//   node_of    the number of a node of a lane, of OF_LANE
//   integrate  adds up, over all integration points, what Physics makes of the gradient v of the shape function of the node whose
//              row is made, times the weight of the point, and of that of each node of the lane
struct Tetrahedron {
    static constexpr int NODES = 4, LANES = 1, OF_LANE = 4, POINTS_OF_LANE = 1;

    __device__ Tetrahedron(const int, const double (&x)[NODES][3], const double*)
    {
        double d[3][3];
        for (int e = 0; e < 3; ++e)
            for (int c = 0; c < 3; ++c) d[e][c] = x[e + 1][c] - x[0][c];
        for (int e = 0; e < 3; ++e) {
            const double *left = d[(e + 1) % 3], *right = d[(e + 2) % 3];
            gradients[e + 1][0] = left[1] * right[2] - left[2] * right[1];
            gradients[e + 1][1] = left[2] * right[0] - left[0] * right[2];
            gradients[e + 1][2] = left[0] * right[1] - left[1] * right[0];
        }
        determinant = d[0][0] * gradients[1][0] + d[0][1] * gradients[1][1] + d[0][2] * gradients[1][2];
        for (int c = 0; c < 3; ++c) gradients[0][c] = -(gradients[1][c] + gradients[2][c] + gradients[3][c]);
    }

    __device__ static constexpr int node_of(const int, const int index) { return index; }

    template <typename Physics>
    __device__ __forceinline__ void integrate(const int own, const double factor, double (&added)[OF_LANE][Physics::SUMS]) const
    {
        // All gradients are to be divided by the determinant, of which the volume takes one away.
        const double weight = factor / (6.0 * fabs(determinant));
        double v[3];
#pragma unroll
        for (int b = 0; b < NODES; ++b)
            if (b == own)
                for (int c = 0; c < 3; ++c) v[c] = weight * gradients[b][c];
#pragma unroll
        for (int b = 0; b < NODES; ++b) Physics::add(added[b], v, gradients[b]);
    }

private:
    double gradients[NODES][3], determinant;
};

// Every lane turns the first two axes of the reference element so that its nodes and points are on their far sides: coordinates
// then lie alike for all lanes. An axis that is turned changes the sign of all gradients times the determinant, so of no
// block.
struct Hexahedron {
    static constexpr int NODES = 8, LANES = 4, OF_LANE = 2, POINTS_OF_LANE = 2;

    __device__ Hexahedron(const int lane, const double (&x)[NODES][3], const double*)
    {
        double sign[2], near[2], far[2];  // weights of the corners on both sides along an axis, before it is turned
        for (int axis = 0; axis < 2; ++axis) {
            is_turned[axis] = !(lane >> axis & 1);
            sign[axis] = is_turned[axis] ? -1.0 : 1.0;
            near[axis] = is_turned[axis] ? 0.5 * SAME : 0.5 * OTHER;
            far[axis] = is_turned[axis] ? 0.5 * OTHER : 0.5 * SAME;
        }
#pragma unroll
        for (int c = 0; c < 3; ++c) {
            double at[2][2][2];  // coordinates of the corners, by their side along each axis
#pragma unroll
            for (int b = 0; b < NODES; ++b) at[is_far(b, 0)][is_far(b, 1)][is_far(b, 2)] = x[b][c];
            double along_first[2], along_second[2], along_last[2];  // differences, by the side along the last or the first axis
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                along_first[k] = sign[0] * near[1] * (at[1][0][k] - at[0][0][k]) + sign[0] * far[1] * (at[1][1][k] - at[0][1][k]);
                along_second[k] =
                    sign[1] * near[0] * (at[0][1][k] - at[0][0][k]) + sign[1] * far[0] * (at[1][1][k] - at[1][0][k]);
                along_last[k] = near[1] * (at[k][0][1] - at[k][0][0]) + far[1] * (at[k][1][1] - at[k][1][0]);
            }
#pragma unroll
            for (int point = 0; point < POINTS_OF_LANE; ++point) {
                J[point][0][c] = 0.5 * SAME * along_first[point] + 0.5 * OTHER * along_first[1 - point];
                J[point][1][c] = 0.5 * SAME * along_second[point] + 0.5 * OTHER * along_second[1 - point];
                J[point][2][c] = near[0] * along_last[0] + far[0] * along_last[1];
            }
        }
    }

    // The corners of the reference element are in the order of VTK and gmsh: once around the bottom, then around the top.
    __device__ static constexpr int node_of(const int lane, const int index) { return index * 4 + (lane ^ lane >> 1); }

    // The gradients of the two nodes of a lane are a multiple of one vector, p, which is larger for the node on the side of the
    // point, minus and plus another: so p is added up for the points on each side, and the other for all.
    template <typename Physics>
    __device__ __forceinline__ void integrate(const int own, const double factor, double (&added)[OF_LANE][Physics::SUMS]) const
    {
        double of_across[Physics::SUMS] = {};
#pragma unroll
        for (int point = 0; point < POINTS_OF_LANE; ++point) {
            double cofactors[3][3], own_v[3];
            work_out(point, own, factor, cofactors, own_v);
#pragma unroll
            for (int step = 0; step < LANES; ++step) {
                // What the lane `lane ^ step` needs of the point of this lane, whose own it is with step 0.
                const double first = 0.125 * (step & 1 ? OTHER : SAME), second = step & 2 ? OTHER : SAME;
                double v[3], p[3], across[3];
#pragma unroll
                for (int c = 0; c < 3; ++c) {
                    v[c] = of_lane(own_v[c], step);
                    p[c] = of_lane(cofactors[0][c] * (step & 1 ? -0.125 * second : 0.125 * second) +
                                       cofactors[1][c] * (step & 2 ? -first : first), step);
                    across[c] = of_lane(cofactors[2][c] * (first * second), step);
                }
                Physics::add(added[point], v, p);
                Physics::add(of_across, v, across);
            }
        }
#pragma unroll
        for (int k = 0; k < Physics::SUMS; ++k) {
            const double near = added[0][k], far = added[1][k];
            added[0][k] = SAME * near + OTHER * far - of_across[k];
            added[1][k] = OTHER * near + SAME * far + of_across[k];
        }
    }

private:
    static constexpr double AT = 0.57735026918962576451;  // integration points on each axis: at -AT and AT
    // Twice the shape functions of one axis: of the side where the point is, and of the other.
    static constexpr double SAME = 1.0 + AT, OTHER = 1.0 - AT;
    double J[POINTS_OF_LANE][3][3];  // twice the Jacobian at the points of the lane
    bool is_turned[2];

    // Computes the cofactors of J and, from those, v. Gradients are to be divided by the determinant, of which the weight takes
    // one away.
    __device__ void work_out(
        const int point, const int own, const double factor, double (&cofactors)[3][3], double (&v)[3]) const
    {
        const double (&j)[3][3] = J[point];
#pragma unroll
        for (int r = 0; r < 3; ++r)
#pragma unroll
            for (int c = 0; c < 3; ++c)
                cofactors[r][c] = j[(r + 1) % 3][(c + 1) % 3] * j[(r + 2) % 3][(c + 2) % 3] -
                                  j[(r + 1) % 3][(c + 2) % 3] * j[(r + 2) % 3][(c + 1) % 3];
        const double determinant = j[0][0] * cofactors[0][0] + j[0][1] * cofactors[0][1] + j[0][2] * cofactors[0][2];
        const double weight = 0.0625 * factor * (1.0 / fabs(determinant));  // an eighth, and 2^3 over 2^4 for twice the Jacobian
        bool ahead[3], same[3];  // whether the node is on the far side, and on that of the point
        double along[3], derivatives[3];
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
            ahead[axis] = axis == 2 ? is_far(own, 2) : is_far(own, axis) != is_turned[axis];
            same[axis] = axis == 2 ? ahead[2] == (point == 1) : ahead[axis];
            along[axis] = same[axis] ? SAME : OTHER;
        }
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
            const double size = weight * (along[(axis + 1) % 3] * along[(axis + 2) % 3]);
            derivatives[axis] = ahead[axis] ? size : -size;
        }
#pragma unroll
        for (int c = 0; c < 3; ++c)
            v[c] = derivatives[0] * cofactors[0][c] + derivatives[1] * cofactors[1][c] + derivatives[2] * cofactors[2][c];
    }

    __device__ static constexpr bool is_far(const int node, const int axis)
    {
        return axis == 0 ? (node & 3) == 1 || (node & 3) == 2 : axis == 1 ? (node & 2) != 0 : (node & 4) != 0;
    }

    __device__ static double of_lane(const double value, const int step)
    {
        return step == 0 ? value : PENSTOCK_SHUFFLE(value, (threadIdx.x ^ step * (32 / LANES)) % 32, 32);
    }
};

// What is added up over integration points of the block of two nodes, and the entries that this gives.
struct Elasticity {
    static constexpr int DOF = 3, SUMS = 9;

    __device__ static void add(double* sums, const double (&v)[3], const double (&g)[3])
    {
#pragma unroll
        for (int r = 0; r < 3; ++r)
#pragma unroll
            for (int c = 0; c < 3; ++c) sums[r * 3 + c] += v[r] * g[c];
    }

    __device__ static double entry(const double* sums, const int r, const int c, const double lambda, const double mu)
    {
        const double sum = lambda * sums[r * 3 + c] + mu * sums[c * 3 + r];
        return r == c ? sum + mu * (sums[0] + sums[4] + sums[8]) : sum;
    }
};

struct Diffusion {
    static constexpr int DOF = 1, SUMS = 1;

    __device__ static void add(double* sums, const double (&v)[3], const double (&g)[3])
    {
        sums[0] += v[0] * g[0] + v[1] * g[1] + v[2] * g[2];
    }

    __device__ static double entry(const double* sums, int, int, const double conductivity, double)
    {
        return conductivity * sums[0];
    }
};

#if defined(OWN_NODES)
// An element of a user, who has written
// __device__ void element_row(const double (*x)[3], const double* parameters, int own, double* blocks).
struct OwnElement {
    static constexpr int NODES = OWN_NODES, LANES = 1, OF_LANE = NODES, POINTS_OF_LANE = 0;  // the user integrates
    const double (&x)[NODES][3];
    const double* parameters;

    __device__ OwnElement(const int, const double (&corners)[NODES][3], const double* numbers)
        : x(corners), parameters(numbers)
    {
    }

    __device__ static constexpr int node_of(const int, const int index) { return index; }

    __device__ void add_blocks(const int own, const double factor, double* blocks) const
    {
        element_row(x, parameters, own, blocks);
        for (int k = 0; k < NODES * OWN_DOF * OWN_DOF; ++k) blocks[k] *= factor;
    }
};

struct OwnPhysics {
    static constexpr int DOF = OWN_DOF, SUMS = DOF * DOF;

    __device__ static double entry(const double* sums, const int r, const int c, double, double) { return sums[r * DOF + c]; }
};
#endif

// Arrays may hold a window of the mesh: numbers of nodes in them are those of the whole mesh, numbers of elements are not.
//
// coordinates        [nodes][3]
// connectivity       [elements][Shape::NODES]
// factors            [elements] of the stiffness; none if all are 1
// parameters         Lame's lambda and mu, the conductivity and 0, or those of a user's element
// fixed              [nodes * DOF]: unknowns whose rows and columns keep their diagonal only; none if there are none
// repeats            whether an element names a node twice
// element_offsets    [nodes + 1] into node_elements: for each node, its places in the connectivity
// pattern_offsets    [nodes + 1] into pattern: the columns of the row of each node; with `upper` those from the node on
// chunk_starts       where the chunks of the whole matrix begin, in blocks, from the slab's first chunk on; for CHUNKS
// all_columns        of the matrix: nodes from there on have none
// first_row          the node of the first entry of both offsets, whose values count from the start of the whole lists
// first_node         the node that coordinates and fixed unknowns begin with
// parts              which arrays are written: 1 offsets and indices, 2 values
// widest             rows of up to this many blocks are added up in shared memory; none if it is 0
//
// Launch: HEIGHT * Shape::LANES threads for every HEIGHT rows; shared memory of HEIGHT rows of `widest` blocks and int32 columns,
// and one column more.
template <typename Shape, typename Physics, typename Offset, int layout, bool upper>
__global__ void __launch_bounds__(HEIGHT * Shape::LANES, Shape::LANES == 1 ? 1 : 4) element_rows(
    const long long start, const long long rows, const int all_columns, const long long first_row, const int first_node,
    const int parts, const double* __restrict__ coordinates,
    const int* __restrict__ connectivity, const double* __restrict__ factors, const int uniform,
    const double* __restrict__ parameters, const unsigned char* __restrict__ fixed, const int has_fixed,
    const int repeats, const long long* __restrict__ element_offsets, const int* __restrict__ node_elements,
    const long long* __restrict__ pattern_offsets, const int* __restrict__ pattern, const long long* __restrict__ chunk_starts,
    const int widest, Offset* __restrict__ offsets, int* __restrict__ columns, double* __restrict__ values)
{
    PENSTOCK_DYNAMIC_SHARED(double, sums);
    constexpr int NODES = Shape::NODES, LANES = Shape::LANES, OF_LANE = Shape::OF_LANE, OF_GROUP = 32 / LANES;
    constexpr int DOF = Physics::DOF, SCALARS = DOF * DOF;
    // Lanes of a row are apart, so that neighbouring lanes read neighbouring numbers.
    const int place_in_block = threadIdx.x / 32 * OF_GROUP + threadIdx.x % OF_GROUP, lane = threadIdx.x % 32 / OF_GROUP;
    const long long row = (long long)blockIdx.x * HEIGHT + place_in_block, node = start + row;
    const bool structure = parts & 1, numbers = parts & 2, exists = row < rows;
    const long long local_row = node - first_row, first_offset = pattern_offsets[0];
    const long long first = exists ? pattern_offsets[local_row] : first_offset;
    const int count = exists ? int(pattern_offsets[local_row + 1] - first) : 0;
    const int* row_columns = pattern + (first - first_offset);
    constexpr int between = layout == CHUNKS ? HEIGHT : 1;  // slots of a row, in blocks, and the scalars of a block
    int width = count;
    long long place;  // of the first block of the row
    if constexpr (layout == CHUNKS) {
        const long long begin = chunk_starts[blockIdx.x] - chunk_starts[0], end = chunk_starts[blockIdx.x + 1] - chunk_starts[0];
        place = begin + place_in_block;
        width = int((end - begin) / HEIGHT);
        if (structure && threadIdx.x == 0) {
            offsets[blockIdx.x] = Offset(begin);
            if (blockIdx.x + 1 == gridDim.x) offsets[blockIdx.x + 1] = Offset(end);
        }
    } else {
        place = first - pattern_offsets[start - first_row];
        if (structure && exists && lane == 0) {
            offsets[row] = Offset(place);
            if (row + 1 == rows) offsets[rows] = Offset(place + count);
        }
    }
    double* row_values = values + (layout == CHUNKS ? (place - place_in_block) * SCALARS + place_in_block : place * SCALARS);
    if (structure)
        for (int slot = lane; slot < width; slot += LANES)
            columns[place + (long long)slot * between] = slot < count ? row_columns[slot] : -1;
    if (!numbers) return;
    // Blocks are added up where every row has a column of its own: written to memory at once, they fill whole lines there.
    // The numbers of the columns stand there, too, as they are searched for every block that is added.
    const bool is_shared = width <= widest;
    // Lanes of a row add to different slots at once, for which the columns of neighbouring slots are turned against each other.
    constexpr int TURNED = LANES > 1 ? OF_GROUP : 0;
    const int to_scalar = is_shared ? HEIGHT : between;
    const auto block_at = [&](const int slot) {
        return is_shared ? sums + slot * (SCALARS * HEIGHT) + (place_in_block + TURNED * slot) % HEIGHT
                         : row_values + (long long)slot * between * SCALARS;
    };
    int* searched = reinterpret_cast<int*>(sums + widest * SCALARS * HEIGHT) + place_in_block * (widest | 1);
    for (int slot = lane; slot < width; slot += LANES) {
        for (int k = 0; k < SCALARS; ++k) block_at(slot)[k * to_scalar] = 0.0;
        if (is_shared && slot < count) searched[slot] = row_columns[slot];
    }
    const int* const row_search = is_shared ? searched : row_columns;

    constexpr bool has_moduli = Shape::POINTS_OF_LANE > 0;
    const double first_modulus = has_moduli ? parameters[0] : 0.0, second_modulus = has_moduli ? parameters[1] : 0.0;
    const long long entry = exists ? element_offsets[local_row] - element_offsets[0] : 0;
    const int elements = exists ? int(element_offsets[local_row + 1] - element_offsets[local_row]) : 0;
    // Where the next elements are is read ahead: their corners, and the places of the ones after.
    int next = elements > 0 ? node_elements[entry] : 0, after = elements > 1 ? node_elements[entry + 1] : 0, nodes[NODES];
    const auto fetch = [&]() {
        constexpr int TOGETHER = NODES % 4 == 0 ? 4 : 1;
        const auto* packs = reinterpret_cast<const Pack<int, TOGETHER>*>(connectivity + (long long)(next / NODES) * NODES);
#pragma unroll
        for (int pack = 0; pack < NODES / TOGETHER; ++pack) {
            const Pack<int, TOGETHER> some = packs[pack];
            for (int k = 0; k < TOGETHER; ++k) nodes[pack * TOGETHER + k] = some.number[k];
        }
    };
    fetch();
    // The lanes of a row may add to the same block in one turn only if an element names a node twice; they then add in turn.
    const bool in_turn = LANES > 1 && repeats;
    for (int turn = 0; LANES == 1 ? turn < elements : PENSTOCK_BALLOT(turn < elements) != 0; ++turn) {
        if constexpr (LANES > 1) PENSTOCK_SYNC_GROUP();
        const bool active = turn < elements;  // the others only keep the lanes of their group company
        const int corner = next, element = corner / NODES, own = corner % NODES;
        int others[OF_LANE];
        double x[NODES][3], added[OF_LANE][Physics::SUMS] = {};
#pragma unroll
        for (int b = 0; b < NODES; ++b)
            for (int c = 0; c < 3; ++c) x[b][c] = coordinates[(long long)(nodes[b] - first_node) * 3 + c];
#pragma unroll
        for (int index = 0; index < OF_LANE; ++index) {
            others[index] = nodes[Shape::node_of(0, index)];
#pragma unroll
            for (int other = 1; other < LANES; ++other)
                if (lane == other) others[index] = nodes[Shape::node_of(other, index)];
            if (!active || others[index] >= all_columns || (upper && others[index] < node)) others[index] = -1;
        }
        const double factor = uniform ? 1.0 : factors[element];
        Shape shape(lane, x, parameters);
        if constexpr (Shape::POINTS_OF_LANE == 0)
            shape.add_blocks(own, factor, &added[0][0]);
        else
            shape.template integrate<Physics>(own, factor, added);
        next = after;
        fetch();
        after = turn + 2 < elements ? node_elements[entry + turn + 2] : 0;
        for (int turn_of = 0; turn_of < (in_turn ? LANES : 1); ++turn_of) {
            if (in_turn && turn_of > 0) PENSTOCK_SYNC_GROUP();
#pragma unroll
            for (int index = 0; index < OF_LANE; ++index) {
                if (others[index] < 0 || (in_turn && lane != turn_of)) continue;
                double* block = block_at(int(place_of(others[index], row_search, 0, count)));
#pragma unroll
                for (int k = 0; k < SCALARS; ++k)
                    block[k * to_scalar] += Physics::entry(added[index], k / DOF, k % DOF, first_modulus, second_modulus);
            }
        }
    }
    if constexpr (LANES > 1) PENSTOCK_SYNC_GROUP();
    for (int slot = lane; slot < count; slot += LANES) {
        const int column = row_columns[slot];
        double* block = block_at(slot);
        if (has_fixed)
            for (int k = 0; k < SCALARS; ++k) {
                const bool held = fixed[(node - first_node) * DOF + k / DOF] || fixed[(long long)(column - first_node) * DOF + k % DOF];
                if (held && (column != node || k / DOF != k % DOF)) block[k * to_scalar] = 0.0;
            }
        if (column == node)  // the block of the node with itself is symmetric but for rounding
            for (int r = 1; r < DOF; ++r)
                for (int c = 0; c < r; ++c) block[(r * DOF + c) * to_scalar] = block[(c * DOF + r) * to_scalar];
    }
    if (is_shared)
        for (int slot = lane; slot < width; slot += LANES)
            for (int k = 0; k < SCALARS; ++k)
                row_values[(long long)slot * between * SCALARS + k * between] =
                    block_at(slot)[k * to_scalar];
}
