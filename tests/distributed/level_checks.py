"""What ranks check together of coarse levels and of streamed matrices; see ``rank_checks.py``."""

import numpy as np
import scipy.sparse
from awkward_systems import diffusion, flat_hexahedra, jumping
from rank_systems import all_rows, device, get, message_of, put

import penstock
from penstock.distributed import (
    DistributedImage,
    DistributedMatrix,
    DistributedStreamedMatrix,
    RowPartition,
    split_elements,
    split_rows,
)
from penstock.fem import BoxMesh, Cantilever, HeatConduction, LinearElasticity, LognormalMaterial, TwoPhaseMaterial
from penstock.solvers import block_cg, cg, chebyshev, smoothed_aggregation, solve_by_image
from penstock.solvers.amg.smoothed_aggregation import with_new_values
from penstock.spmv import CsrMatrix, VectorSpace
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep
from penstock.streaming import HostStore, MadeStore, Ring, StreamedMatrix, Workload, index_of, layer_order

#: Of a hexahedron.
TETRAHEDRA = ((0, 1, 2, 6), (0, 2, 3, 6), (0, 3, 7, 6), (0, 7, 4, 6), (0, 4, 5, 6), (0, 5, 1, 6))


def coarse_levels(ranks):
    """Aggregates of a rank's own nodes make a coarse level of all ranks: the Galerkin product, and iterations as alone."""
    beam = Cantilever(nodes=(33, 9, 9), dof=3)
    matrix, b, modes = beam.matrix().to_csr(), beam.load(), beam.rigid_body_modes()
    points, plane = beam.mesh.coordinates(), 3 * 81
    even = RowPartition.even(len(b), ranks.size, multiple=plane)
    # The last one of several ranks has no rows.
    fewer = RowPartition.even(len(b), max(1, ranks.size - 1), multiple=plane)
    empty = RowPartition((*fewer.bounds[: ranks.size], len(b)))
    for name, partition, storage in (
        ("boxes", even, "symmetric_bsr"),
        ("lattice", even, "symmetric_bsr"),
        ("graph", empty, "csr"),
    ):
        own = partition.of(ranks.rank)
        nodes, counts = slice(own.start // 3, own.stop // 3), ((own.stop - own.start) // plane, 9, 9)
        how = {
            "boxes": {"coordinates": points[nodes], "aggregates": counts},
            "lattice": {"coordinates": points[nodes]},
            "graph": {"near_null_space": modes[own]},
        }[name]
        A = DistributedMatrix.from_rows(
            matrix[own], partition, ranks, format=storage, block_size=3, device=device(ranks)
        )
        M = smoothed_aggregation(A, block_size=3, **how)
        # Ranks may have parts of a lattice that do not follow each other along the first axis.
        yield f"{name}: next level", name != "lattice" or (M.level.T.aggregates.grid is None) == (ranks.size > 1)
        space = VectorSpace.of(A)
        c, d = (put(ranks, np.random.default_rng(seed).normal(size=M.level.T.unknowns)) for seed in (0, 1))
        fine = space.dot(prolonged(M, d), A @ prolonged(M, c))
        missing = M.level.T.missing  # columns of P that vanish, for which the coarse matrix has a positive diagonal
        added = M.level.A.to_csr().diagonal()[get(missing)]
        coarse = float(get(d) @ get(M.level.A @ c) - get(d[missing]) @ (added * get(c[missing])))
        expected = iterations_alone(ranks, beam.matrix(), b, M, points)
        yield f"{name}: {fine} = {coarse}", abs(fine - coarse) <= 1e-12 * abs(coarse)
        for columns in (None, 3):
            loads = b if columns is None else np.random.default_rng(2).normal(size=(len(b), columns))
            found = (cg if columns is None else block_cg)(A, put(ranks, loads[own]), M=M, rtol=1e-9)
            true = np.linalg.norm(loads - matrix @ all_rows(ranks, found.x), axis=0) / np.linalg.norm(loads, axis=0)
            yield f"{name}: true residual {true}", found.converged and bool((true <= 1.1e-9).all())
            yield f"{name}: {found.iterations}, {expected}", abs(found.iterations - expected) <= 1
    if ranks.size > 1:
        wide = modes[own][:, : 3 if ranks.rank else 6]
        yield "modes of different number", "modes" in message_of(lambda: smoothed_aggregation(A, wide, block_size=3))


def strong_couplings(ranks):
    """Lines, groups and aggregates by strong couplings stay inside ranks, and save as many iterations as alone."""
    rng = np.random.default_rng(0)
    blocks = np.where(rng.random((4, 4, 4)) < 0.5, 1.0, 1e4)
    beam = Cantilever(nodes=(18, 5, 5), dof=3, material=TwoPhaseMaterial(1e4, 0.5))
    systems = {
        "jumps": (diffusion(np.kron(blocks, np.ones((3, 3, 3)))), 144, {}),
        "lines": (flat_hexahedra((13, 8, 20), 1000.0), 160, {"grouped": "lines"}),
        "groups": (jumping((12, 9, 9)), 81, {"grouped": True}),
        "further columns": (beam.matrix().to_csr(), 75, {"grouped": True}),
    }
    for name, (matrix, layer, how) in systems.items():
        size, n = 3 if name == "further columns" else 1, matrix.shape[0]
        partition = RowPartition.even(n, ranks.size, multiple=layer)
        own, b = partition.of(ranks.rank), rng.standard_normal(n)
        b[:layer] = 0  # held in a beam
        of_all, of_own, storage = {}, {}, {}
        if size == 3:
            points, storage = beam.mesh.coordinates(), {"format": "symmetric_bsr"}
            of_all, of_own = {"coordinates": points}, {"coordinates": points[own.start // 3 : own.stop // 3]}
        A = DistributedMatrix.from_rows(matrix[own], partition, ranks, block_size=size, device=device(ranks), **storage)
        M = smoothed_aggregation(A, block_size=size, **of_own, **how)
        alone = smoothed_aggregation(CsrMatrix.from_csr(matrix), block_size=size, **of_all, **how)
        yield f"{name}: found", (M.level.jumps, type(M.level.groups)) == (alone.level.jumps, type(alone.level.groups))
        expected = cg(CsrMatrix.from_csr(matrix), b, M=alone, rtol=1e-8).iterations
        for of_values in (M, with_new_values(M)):
            found = cg(A, put(ranks, b[own]), M=of_values, rtol=1e-8)
            true = np.linalg.norm(b - matrix @ all_rows(ranks, found.x)) / np.linalg.norm(b)
            yield f"{name}: true residual {true}", found.converged and true <= 1.01e-8
            yield f"{name}: {found.iterations}, {expected}", found.iterations <= expected + 2


def different_arguments(ranks):
    """Aggregates may be those of some ranks only, and grouping must be asked for by all alike."""
    matrix = diffusion(np.ones((12, 6, 6)))
    partition = RowPartition.even(432, ranks.size, multiple=36)
    own = partition.of(ranks.rank)
    A = DistributedMatrix.from_rows(matrix[own], partition, ranks, device=device(ranks))
    of_node = np.arange(own.stop - own.start) // 36 if ranks.rank == 0 else None
    b = np.random.default_rng(5).standard_normal(432)
    found = cg(A, put(ranks, b[own]), M=smoothed_aggregation(A, aggregates=of_node, grouped=True), rtol=1e-8)
    yield "aggregates of one rank", found.converged
    word = "lines" if ranks.rank else True
    told = message_of(lambda: smoothed_aggregation(A, grouped=word))
    yield f"grouped: {told}", ranks.size == 1 or "grouped" in told


def iterations_alone(ranks, matrix, b, M, points):
    """The iterations that one rank needs with the aggregates that ranks have made."""
    of_node = all_rows(ranks, M.level.T.rows(0, len(M.level.T.of_node)).columns)
    level = smoothed_aggregation(matrix, coordinates=points, aggregates=of_node)
    return cg(matrix, b, M=level, rtol=1e-9).iterations


def prolonged(M, c):
    """``P c``, by the recurrence that smooths T."""
    A = M.A
    v, other, image = (A.device.xp.zeros(A.shape[0]) for _ in range(3))
    M.level.T.prolong(c, v)
    return Recurrence(M.smooth, v, other, v, M.diagonal.blocks, image, VectorSpace.of(A)).run(A).copy()


def images(ranks):
    """An image of each rank's square in memory leaves a few sweeps of the streamed matrix, and claims no more than is true."""
    beam = Cantilever(nodes=(49, 5, 5), dof=3, material=LognormalMaterial(sigma=0.5))
    matrix, b, plane = beam.matrix().to_csr(), beam.load(), 75
    B = np.random.default_rng(4).standard_normal((len(b), 2))
    B[:plane] = 0
    partition = RowPartition.even(len(b), ranks.size, multiple=plane)
    own = partition.of(ranks.rank)
    square, couplings = split_rows(matrix[own], partition, ranks, block_size=3)
    couplings, csr = [coupling.to_device(device(ranks)) for coupling in couplings], square.to_csr()
    points = beam.mesh.coordinates()[own.start // 3 : own.stop // 3]
    ways = (
        ("symmetric_bsr", "float32", b, cg, "bound"),
        ("symmetric_bsr", "int16", B, block_cg, "norm"),
        ("bsr", "float32", B, block_cg, "bound"),
    )
    for storage, dtype, loads, solve, verify in ways:
        slabs = (csr[start : start + 2 * 96] for start in range(0, csr.shape[0], 2 * 96))
        with HostStore.create(slabs, format=storage, block_size=3) as store:
            budget = int(0.7 * sum(part.nbytes for part in store.index.subdivisions))
            with StreamedMatrix(store, budget, device=device(ranks), ring=Ring(sweeps="alternate")) as streamed_square:
                A = DistributedStreamedMatrix(streamed_square, couplings, ranks)
                if storage == "bsr":
                    told = message_of(lambda A=A: DistributedImage.of(A, "int16"))
                    yield f"16 bits need half of a matrix: {told}", "no image in int16" in told
                image = DistributedImage.of(A, dtype)
                M = smoothed_aggregation(image, coordinates=points, block_size=3)
                part = put(ranks, np.ascontiguousarray(loads[own]))
                found = solve_by_image(solve, A, image, part, M=M, rtol=1e-8, verify=verify)
                rest = loads - matrix @ all_rows(ranks, found.x)
                true = np.linalg.norm(rest, axis=0) / np.linalg.norm(loads, axis=0)
                told = np.array([column.true_residual for column in found.columns])
                label = f"{storage}, {dtype}, {verify}: {found.sweeps} sweeps, residual {true}, told {told}"
                yield label, found.converged and bool((true <= np.minimum(1.0001e-8, 1.01 * told)).all())
                yield f"{label}: few", found.sweeps <= (4 if dtype == "float32" else 9)


def wide_edges(ranks):
    """Ranks that couple along all of their rows, as lines of a grid do, still multiply right: then every product is a sweep."""
    m, size = 64, ranks.size
    line = scipy.sparse.diags_array([np.full(m - 1, -1.0), np.full(m, 4.0), np.full(m - 1, -1.0)], offsets=[-1, 0, 1])
    links = scipy.sparse.diags_array([np.full(size - 1, -1.0)] * 2, offsets=[-1, 1], shape=(size, size))
    matrix = scipy.sparse.csr_array(
        scipy.sparse.kron(scipy.sparse.eye_array(size), line) + scipy.sparse.kron(links, scipy.sparse.eye_array(m))
    )
    partition = RowPartition.even(size * m, size, multiple=m)
    own = partition.of(ranks.rank)
    square, couplings = split_rows(matrix[own], partition, ranks)
    couplings, csr = [coupling.to_device(device(ranks)) for coupling in couplings], square.to_csr()
    with HostStore.create((csr[start : start + 4] for start in range(0, m, 4)), format="csr") as store:
        whole = sum(part.nbytes for part in store.index.subdivisions)
        plan = {"workload": Workload(degree=5), "ring": Ring(sweeps="alternate")}
        for budget in (int(0.6 * whole), 2 * whole):
            with StreamedMatrix(store, budget, device=device(ranks), **plan) as streamed_square:
                A = DistributedStreamedMatrix(streamed_square, couplings, ranks)
                v = np.random.default_rng(3).normal(size=size * m)
                M, before = chebyshev(A, 5), A.sweeps
                found = all_rows(ranks, M @ put(ranks, v[own]))
                yield f"sweeps with {budget} bytes", A.sweeps - before == A.sweeps_of(4) == 4
                expected = chebyshev(matrix, 5) @ v
                yield "a polynomial", np.allclose(found, expected, rtol=0, atol=1e-12 * abs(expected).max())


def elements(ranks):
    """A mesh in random order is shared out by its nodes: its entries are those of the whole, in memory and on arrival."""
    rng, mesh = np.random.default_rng(4), BoxMesh((33, 6, 5))
    permutation = rng.permutation(33 * 30)
    points, place = mesh.coordinates()[permutation], np.argsort(permutation)
    tetrahedra = place[np.concatenate([mesh.connectivity()[:, list(corners)] for corners in TETRAHEDRA])]
    for dof, element in ((1, HeatConduction(2.0)), (3, LinearElasticity())):
        fixed = (np.flatnonzero(points[:, 0] == 0)[:, None] * dof + np.arange(dof)).ravel()
        factors = rng.uniform(0.5, 2.0, len(tetrahedra))
        body = penstock.ElementMatrix(points, tetrahedra, element=element, material=factors, fixed=fixed)
        body = body.renumbered(layer_order(points).permutation)
        matrix, b = body.to_csr(), rng.normal(size=body.shape[0]) * (body.fixed == 0)
        partition = RowPartition.even(body.shape[0], ranks.size, multiple=30 * dof)
        own = partition.of(ranks.rank)
        square, couplings = split_elements(body, partition, ranks)
        yield "the square, bit for bit", (square.to_csr() != matrix[own, own]).nnz == 0
        couplings = [coupling.to_device(device(ranks)) for coupling in couplings]
        A = DistributedMatrix(square.matrix("symmetric_bsr", device=device(ranks)), couplings, ranks)
        x = rng.normal(size=len(b))
        scale = (abs(matrix) @ abs(x))[own]
        yield "products", bool((abs(get(A @ put(ranks, x[own])) - (matrix @ x)[own]) <= 4e-15 * scale).all())
        index = index_of(square.symbolic_slabs(6, "symmetric_bsr"), square.shape)
        store = MadeStore(index, square.row_maker("symmetric_bsr", device(ranks)))
        plan = {"workload": Workload(degree=9), "ring": Ring(sweeps="alternate", on_arrival=True)}
        with StreamedMatrix(store, int(0.7 * index.nbytes), device=device(ranks), **plan) as on_arrival:
            yield f"{on_arrival.plan.slots} slots", on_arrival.plan.slots >= 2
            for system in (A, DistributedStreamedMatrix(on_arrival, couplings, ranks)):
                M = smoothed_aggregation(system, block_size=dof, coordinates=square.coordinates)
                found = cg(system, put(ranks, b[own]), M=M, rtol=1e-9)
                true = np.linalg.norm(b - matrix @ all_rows(ranks, found.x)) / np.linalg.norm(b)
                yield f"true residual {true} after {found.iterations}", found.converged and true <= 1.1e-9
            yield "nothing is streamed", on_arrival.bytes_streamed == 0
        other = square.with_factors_of(body.with_material(body.factors[::-1]))
        expected = body.with_material(body.factors[::-1]).to_csr()[own, own]
        yield "another material", (other.to_csr() != expected).nnz == 0
    uneven = RowPartition((0, *[body.shape[0]] * ranks.size))
    yield (
        "a rank without nodes",
        ranks.size == 1 or "a part has one node" in message_of(lambda: split_elements(body, uneven, ranks)),
    )
    cut = RowPartition((0, *range(4, 4 + ranks.size - 1), body.shape[0]))
    yield "cut nodes", ranks.size == 1 or "cuts nodes" in message_of(lambda: split_elements(body, cut, ranks))
    if ranks.size > 1:
        other = body.with_material(1.0 + ranks.rank) if ranks.rank else body
        yield "different meshes", "factors" in message_of(lambda: split_elements(other, partition, ranks))
        none = body if ranks.rank == 0 else None
        yield "no mesh", "takes an ElementMatrix" in message_of(lambda: split_elements(none, partition, ranks))
    fewer = RowPartition((0, body.shape[0] - 3))
    yield "other rows", "the partition has" in message_of(lambda: split_elements(body, fewer, ranks))


def streamed(ranks):
    """Sweeps of several products give what separate products in memory do, mirrored or not, for full and half storage."""
    beam = Cantilever(nodes=(65, 4, 4), dof=3)
    matrix, b = beam.matrix().to_csr(), beam.load()
    plane = 48
    partition = RowPartition.even(65 * plane, ranks.size, multiple=plane)
    own = partition.of(ranks.rank)
    alone = cg(beam.matrix(), b, M=chebyshev(beam.matrix(), 9, block_size=3), rtol=1e-6)
    points = beam.mesh.coordinates()
    square, couplings = split_rows(matrix[own], partition, ranks, block_size=3)
    square = square.to_csr()
    couplings = [coupling.to_device(device(ranks)) for coupling in couplings]
    for name, mirrored in (("bsr", True), ("bsr", False), ("symmetric_bsr", True), ("symmetric_bsr", False)):
        # Half a matrix is stored in whole chunks of 32 nodes.
        step = plane if name == "bsr" else 2 * plane
        slabs = (square[start : start + step] for start in range(0, square.shape[0], step))
        with HostStore.create(slabs, format=name, block_size=3) as store:
            budget = int(0.6 * sum(part.nbytes for part in store.index.subdivisions))
            plan = {"workload": Workload(degree=9), "ring": Ring(sweeps="alternate")}
            with StreamedMatrix(store, budget, device=device(ranks), **plan) as own_square:
                A = DistributedStreamedMatrix(own_square, couplings, ranks, mirrored=mirrored)
                count = len(store.index.subdivisions)
                yield f"{count} subdivisions, {A.square.plan.slots} slots", 3 <= A.square.plan.slots < count
                before, messages = A.sweeps, ranks.messages
                v = np.random.default_rng(2).normal(size=65 * plane)
                steps = [RecurrenceStep(-1.0, 0.0, 0.0, scaled=False, driven=False)] * 4
                vectors = put(ranks, v[own]), *put(ranks, np.zeros((2, own.stop - own.start)))
                scale = put(ranks, np.ones((own.stop - own.start, 1, 1)))
                space = VectorSpace.of(A)
                found = Recurrence(steps, *vectors[:2], vectors[0], scale, vectors[2], space).run(A)
                expected = v
                for _ in steps:
                    expected = matrix @ expected
                yield "powers", np.allclose(get(found), expected[own], rtol=0, atol=1e-13 * abs(expected).max())
                yield "they share sweeps", A.sweeps - before < 4
                yield "a message a product and neighbour", ranks.messages - messages == 4 * len(couplings)
                if mirrored:
                    nodes, planes = slice(own.start // 3, own.stop // 3), (own.stop - own.start) // plane
                    M = smoothed_aggregation(A, coordinates=points[nodes], aggregates=(planes, 4, 4))
                    begun, halfway = A.sweeps, cg(A, put(ranks, b[own]), M=M, maxiter=4).state
                    coarse = cg(A, put(ranks, b[own]), M=M, rtol=1e-9, state=halfway)
                    true = np.linalg.norm(b - matrix @ all_rows(ranks, coarse.x)) / np.linalg.norm(b)
                    yield f"coarse level: true residual {true}", coarse.converged and true <= 1.1e-9
                    count = coarse.state.iteration
                    fewest = 14 * count // A.square.plan.slots
                    yield f"coarse level: {A.sweeps - begun} sweeps", A.sweeps - begun <= 2 * fewest + 20
                    expected = iterations_alone(ranks, beam.matrix(), b, M, points)
                    yield f"coarse level: {count}, {expected}", abs(count - expected) <= 1
                if mirrored == (name == "symmetric_bsr"):
                    continue  # solves are long: one of each format, and one of each way to sweep
                result = cg(A, put(ranks, b[own]), M=chebyshev(A, 9, block_size=3), rtol=1e-6)
                true = np.linalg.norm(b - matrix @ all_rows(ranks, result.x)) / np.linalg.norm(b)
                yield f"true residual {true}", result.converged and true <= 1.1e-6
                more = abs(result.iterations - alone.iterations)
                yield f"{result.iterations}, {alone.iterations}", more <= 0.05 * alone.iterations
                yield "streamed", 0 < result.sweeps < 9 * result.iterations and result.bytes_streamed > 0
