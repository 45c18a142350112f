"""Slabs of formats in chunks of 32 nodes: what a plan is told of them, what they hold, and what they give."""

import functools

import numpy as np
import pytest
from tolerances import product_bound

from penstock.experiments import Experiment, plan_experiment
from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import InputError, SlicedBsrMatrix, SymmetricBsrMatrix
from penstock.streaming import index_of

CONVERT = {
    "sliced_bsr": functools.partial(SlicedBsrMatrix.from_csr, sorting_scope=1),
    "symmetric_bsr": SymmetricBsrMatrix.from_csr,
}


@functools.cache
def body(dof, nodes=(5, 5, 6)):
    return Cantilever(nodes, dof, (1.3, 0.7, 2.0), LognormalMaterial(sigma=1.0, seed=5))


@pytest.mark.parametrize("dof", [1, 3, 6])
@pytest.mark.parametrize("format_name", CONVERT)
class TestChunkedSlabs:
    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    @pytest.mark.parametrize("values_dtype", [np.float64, np.float32])
    def test_outlines_tell_their_layout(self, dof, format_name, count, values_dtype):
        problem = body(dof)
        symbolic_slabs, slabs = (
            list(make(count, format_name, values_dtype=values_dtype))
            for make in (problem.symbolic_slabs, problem.subdivisions)
        )

        assert index_of(symbolic_slabs, problem.shape).same_layout(index_of(slabs, problem.shape))
        assert len(slabs) == count
        assert all(slab.shape[0] % (32 * dof) == 0 for slab in slabs[:-1])
        assert all(set(outline.values.strides) == {0} for outline in symbolic_slabs)  # no memory

    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    def test_put_together_they_are_the_whole_bit_for_bit(self, dof, format_name, count):
        problem = body(dof)
        converted = CONVERT[format_name](problem.matrix("csr").to_csr(), block_size=dof)
        slabs = list(problem.subdivisions(count, format_name))

        ends = np.cumsum([0, *(int(slab.chunk_offsets[-1]) for slab in slabs)])
        offsets = [slab.chunk_offsets[:-1] + start for slab, start in zip(slabs, ends[:-1], strict=True)]
        for whole in (converted, problem.matrix(format_name)):
            assert np.array_equal(np.concatenate([*offsets, ends[-1:]]), whole.chunk_offsets)
            for name in ("column_indices", "values"):
                together = np.concatenate([slab.arrays()[name] for slab in slabs])
                assert together.tobytes() == whole.arrays()[name].tobytes()
                assert together.dtype == whole.arrays()[name].dtype
            assert {tuple(slab.parameters().items()) for slab in slabs} == {tuple(whole.parameters().items())}

    @pytest.mark.parametrize("count", [1, 3, 5])
    @pytest.mark.parametrize("columns", [(), (3,)], ids=["vector", "block"])
    def test_their_products_add_up_to_that_of_the_whole(self, dof, format_name, count, columns):
        problem = body(dof)
        reference = problem.matrix("csr").to_csr()
        x, out = np.random.default_rng(7).standard_normal((problem.unknowns, *columns)), None
        out, first_row = np.zeros_like(x), 0

        for slab in problem.subdivisions(count, format_name):
            slab.apply_slab(first_row, x, out, 1.0, 0.0)
            first_row += slab.shape[0]

        bound = product_bound(abs(reference), x, out, 1.0, 0.0, np.float64)
        assert (abs(out - reference @ x) <= 2 * bound).all()


@pytest.mark.parametrize(("nodes", "count"), [((5, 4, 3), 8), ((4, 4, 4), 6)], ids=["beyond", "onto"])
@pytest.mark.parametrize("format_name", CONVERT)
def test_cuts_finer_than_chunks_are_refused_with_a_reason(nodes, count, format_name):
    problem = body(1, nodes)

    assert problem.largest_cut(format_name) == 2
    for cut in (problem.symbolic_slabs, lambda *arguments: list(problem.subdivisions(*arguments))):
        with pytest.raises(InputError, match=f"cannot cut 2 chunks of 32 nodes into {count} slabs"):
            cut(count, format_name)


@pytest.mark.parametrize("format_name", CONVERT)
@pytest.mark.parametrize("nodes", [(5, 5, 6), (4, 4, 4), (9, 3, 7)])
def test_every_cut_that_is_possible_has_no_empty_slab(nodes, format_name):
    problem = body(1, nodes)

    for count in range(1, problem.largest_cut(format_name) + 1):
        rows = [slab.shape[0] for slab in problem.symbolic_slabs(count, format_name)]
        assert (len(rows), sum(rows), min(rows) > 0) == (count, problem.unknowns, True)


def test_a_small_body_has_a_plan_whatever_its_number_of_nodes():
    experiment = Experiment.model_validate({"model": {"nodes": [5, 5, 6]}, "memory": {"budget": "60 KiB"}})

    assert plan_experiment(experiment).slots >= 2
