"""Materials: any layer on its own, the same every time, with the statistics asked for."""

import numpy as np
import pytest

from penstock.fem import Cantilever, LognormalMaterial, TwoPhaseMaterial, UniformMaterial
from penstock.spmv import InputError

# Sample figures of n values may stray by this many standard errors: a false alarm once in 1.7 million seeds, and the
# seeds are fixed.
STANDARD_ERRORS = 5
SHAPE, LAYERS = (40, 50), 10
COUNT = SHAPE[0] * SHAPE[1] * LAYERS
RANDOM_MATERIALS = [LognormalMaterial(0.8, seed=3), TwoPhaseMaterial(50.0, 0.4, seed=3)]


def body(material) -> np.ndarray:
    return np.stack([material.layer(index, SHAPE) for index in range(LAYERS)])


@pytest.mark.parametrize("material", [UniformMaterial(), *RANDOM_MATERIALS], ids=repr)
def test_a_layer_has_one_positive_factor_an_element(material):
    layer = material.layer(2, (4, 7))

    assert layer.shape == (4, 7)
    assert layer.dtype == np.float64
    assert (layer > 0).all()


def test_the_uniform_material_changes_nothing():
    assert (body(UniformMaterial()) == 1).all()


@pytest.mark.parametrize("material", RANDOM_MATERIALS, ids=repr)
def test_a_layer_does_not_depend_on_which_layers_were_made_before(material):
    forwards = body(material)

    backwards = np.stack([material.layer(index, SHAPE) for index in reversed(range(LAYERS))])[::-1]

    assert np.array_equal(forwards, backwards)
    assert np.array_equal(material.layer(6, SHAPE), forwards[6])


@pytest.mark.parametrize("material", RANDOM_MATERIALS, ids=repr)
@pytest.mark.parametrize("count", [2, 5, 23])
def test_the_cut_into_slabs_does_not_change_the_material(material, count):
    problem = Cantilever((7, 4, 5), dof=1, material=material)

    slabs = list(problem.subdivisions(count))

    assert np.concatenate([slab.values for slab in slabs]).tobytes() == problem.matrix().values.tobytes()


@pytest.mark.parametrize("kind", [LognormalMaterial, TwoPhaseMaterial])
def test_a_seed_gives_the_same_material_again_and_another_seed_another(kind):
    first, again, other = body(kind(seed=4)), body(kind(seed=4)), body(kind(seed=5))

    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("material", RANDOM_MATERIALS, ids=repr)
def test_no_two_layers_are_alike(material):
    layers = body(material)

    assert len({layer.tobytes() for layer in layers}) == LAYERS


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
def test_the_logarithm_of_a_lognormal_factor_has_mean_zero_and_deviation_sigma(sigma):
    logarithms = np.log(body(LognormalMaterial(sigma)))

    # Standard errors of the mean and of the deviation of n normal values.
    assert abs(logarithms.mean()) < STANDARD_ERRORS * sigma / np.sqrt(COUNT)
    assert abs(logarithms.std() - sigma) < STANDARD_ERRORS * sigma / np.sqrt(2 * COUNT)


def test_neighbouring_factors_are_independent():
    logarithms = np.log(body(LognormalMaterial(1.0)))

    for axis in range(3):
        first, second = np.delete(logarithms, -1, axis), np.delete(logarithms, 0, axis)
        assert abs((first * second).mean()) < STANDARD_ERRORS / np.sqrt(first.size)


def test_no_deviation_is_the_uniform_material():
    assert (body(LognormalMaterial(0.0)) == 1).all()


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("contrast", [100.0, 1e-3])
def test_two_phases_have_the_factors_and_the_share_asked_for(contrast, fraction):
    factors = body(TwoPhaseMaterial(contrast, fraction))

    assert set(np.unique(factors)) == {1.0, contrast}
    error = np.sqrt(fraction * (1 - fraction) / COUNT)
    assert abs((factors == contrast).mean() - fraction) < STANDARD_ERRORS * error


def test_all_or_none_of_the_elements_can_be_inclusions():
    assert (body(TwoPhaseMaterial(100.0, 0.0)) == 1).all()
    assert (body(TwoPhaseMaterial(100.0, 1.0)) == 100).all()


@pytest.mark.parametrize("sigma", [-0.1, float("nan"), float("inf")])
def test_a_deviation_that_is_negative_or_no_number_is_refused(sigma):
    with pytest.raises(InputError, match=f"sigma .* {sigma}"):
        LognormalMaterial(sigma)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("contrast", "fraction"), [(0.0, 0.3), (-1.0, 0.3), (NAN, 0.3), (INF, 0.3), (10.0, -0.1), (10.0, 1.1), (10.0, NAN)]
)
def test_a_contrast_or_a_fraction_outside_its_range_is_refused(contrast, fraction):
    with pytest.raises(InputError, match=rf"contrast > 0 and 0 <= fraction <= 1, not {contrast} and {fraction}"):
        TwoPhaseMaterial(contrast, fraction)


@pytest.mark.parametrize("kind", [LognormalMaterial, TwoPhaseMaterial])
@pytest.mark.parametrize("seed", [-1, 1.5])
def test_a_seed_that_is_no_whole_number_from_zero_is_refused(kind, seed):
    with pytest.raises(InputError, match=f"seed .* {seed}"):
        kind(seed=seed)
