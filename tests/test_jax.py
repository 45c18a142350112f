"""JAX differentiates through ``penstock.jax.solve``, in ``jit`` and outside."""

import gc
from functools import partial

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.driver.prepared import PreparedSystem

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - needs JAX
from jax.experimental.sparse import BCOO, BCSR  # noqa: E402

import penstock.jax  # noqa: E402

N = 12
LINE = scipy.sparse.diags_array([-1.0, 3.0, -1.0], offsets=[-1, 0, 1], shape=(N, N), format="csr")
ROWS, COLUMNS = LINE.tocoo().coords
PLACE = {place: number for number, place in enumerate(zip(ROWS, COLUMNS, strict=True))}
MIRRORED = np.array([PLACE[j, i] for i, j in zip(ROWS, COLUMNS, strict=True)])
solve = partial(penstock.jax.solve, rtol=1e-13)


@pytest.fixture(autouse=True)
def float64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def matrix(values, kind=BCSR):
    """Return the matrix of these values, made symmetric, as a perturbation of one value alone would not be."""
    values = (values + values[MIRRORED]) / 2
    places = (LINE.indices, LINE.indptr) if kind is BCSR else (np.stack([ROWS, COLUMNS], axis=1),)
    return kind((values, *map(jnp.asarray, places)), shape=(N, N))


def vector(*shape, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(0).normal(size=(N, *shape)).astype(dtype))


def check_by_differences(loss, arguments, gradients, rtol):
    """Compare gradients with the change of a loss along random directions."""
    for number, gradient in enumerate(gradients):
        change = np.random.default_rng(number + 1).normal(size=gradient.shape)
        steps = [list(arguments), list(arguments)]
        for sign, moved in zip((1, -1), steps, strict=True):
            moved[number] = moved[number] + sign * 1e-5 * change
        difference = (loss(*steps[0]) - loss(*steps[1])) / 2e-5
        np.testing.assert_allclose((gradient * change).sum(), difference, rtol=rtol)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", [BCSR, BCOO])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_gradients_are_those_of_finite_differences(wrap, kind, shape):
    weights = vector(*shape)[::-1]

    def loss(values, b):
        return (weights * solve(matrix(values, kind), b, device="cpu") ** 2).sum()

    arguments = jnp.asarray(LINE.data), vector(*shape)
    check_by_differences(loss, arguments, wrap(jax.grad(loss, argnums=(0, 1)))(*arguments), rtol=1e-6)


def test_entries_given_twice_and_those_that_fill_up_get_their_gradients():
    data = jnp.append(jnp.asarray(LINE.data), jnp.array([0.5, 9.0]))
    places = jnp.asarray(np.concatenate([np.stack([ROWS, COLUMNS], axis=1), [[0, 0], [N, N]]]))
    gradient = jax.grad(lambda data: solve(BCOO((data, places), shape=(N, N)), vector(), device="cpu").sum())(data)
    assert gradient[-2] == gradient[PLACE[0, 0]] != 0
    assert gradient[-1] == 0

    data, places = jnp.append(jnp.asarray(LINE.data), 9.0), (jnp.append(LINE.indices, 0), jnp.asarray(LINE.indptr))
    gradient = jax.grad(lambda data: solve(BCSR((data, *places), shape=(N, N)), vector(), device="cpu").sum())(data)
    assert gradient[0] != 0
    assert gradient[-1] == 0


def test_rows_of_a_jacobian_are_solves():
    jacobian = jax.jacrev(lambda b: solve(matrix(jnp.asarray(LINE.data)), b, device="cpu"))(vector())
    np.testing.assert_allclose(jacobian, np.linalg.inv(LINE.toarray()), atol=1e-12)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_prepared_system_gives_the_gradient_of_b(wrap):
    system = penstock.prepare(LINE, device="cpu")
    gradient = wrap(jax.grad(lambda b: (solve(system, b) ** 2).sum()))(vector())
    inverse = np.linalg.inv(LINE.toarray())
    np.testing.assert_allclose(gradient, 2 * inverse @ (inverse @ vector()), rtol=1e-9, atol=1e-12)


def test_a_system_that_was_updated_before_the_gradient_is_refused():
    system = penstock.prepare(LINE, device="cpu")
    x, pull_back = jax.vjp(lambda b: solve(system, b), vector())
    system.update(2.0 * LINE)
    with pytest.raises(penstock.InputError, match="from version 0 of its values to 1"):
        pull_back(x)


def test_nothing_stays_set_up_once_the_gradient_is_there():
    def systems():
        gc.collect()
        return sum(isinstance(one, PreparedSystem) for one in gc.get_objects())

    before = systems()
    x, pull_back = jax.vjp(lambda values: solve(matrix(values), vector(), device="cpu"), jnp.asarray(LINE.data))
    assert systems() == before + 1
    jax.vmap(pull_back)(jnp.stack([x, x]))
    del pull_back
    assert systems() == before


@pytest.mark.parametrize("types", [("float32", "float32"), ("float32", "float64"), ("float64", "float32")])
def test_gradients_have_the_types_of_what_they_are_of(types):
    values, b = jnp.asarray(LINE.data, dtype=types[0]), vector(2, dtype=types[1])
    gradients = jax.grad(lambda values, b: solve(matrix(values), b, device="cpu").sum(), argnums=(0, 1))(values, b)
    assert tuple(one.dtype for one in gradients) == types
    np.testing.assert_allclose(gradients[1], np.linalg.inv(LINE.toarray()) @ np.ones((N, 2)), rtol=1e-5)


def test_second_derivatives_are_refused():
    def loss(values, b):
        return (solve(matrix(values), b, device="cpu") ** 2).sum()

    arguments = jnp.asarray(LINE.data), vector()
    for number in (0, 1):
        gradient = jax.grad(loss, argnums=number)
        for second in (jax.hessian(loss, argnums=number), jax.grad(lambda *a: gradient(*a).sum(), argnums=number)):  # noqa: B023
            with pytest.raises(penstock.InputError, match="only first derivatives"):
                second(*arguments)


def test_both_solves_must_converge():
    once = partial(penstock.jax.solve, LINE, maxiter=1, device="cpu")
    with pytest.raises(penstock.NotConvergedError):
        once(vector())
    with pytest.raises(penstock.NotConvergedError):
        jax.grad(lambda b: (vector() * once(b)).sum())(jnp.zeros(N))  # whose solution needs no iteration
    with pytest.raises(RuntimeError, match="NotConvergedError"):
        jax.jit(once)(vector()).block_until_ready()


def test_plain_solves_refuse_what_is_traced():
    for way in (jax.jit, jax.grad):
        with pytest.raises(penstock.InputError, match=r"b is traced by JAX, .*penstock\.jax\.solve"):
            way(lambda b: penstock.solve(LINE, b).x.sum())(vector())
        with pytest.raises(penstock.InputError, match=r"A is traced by JAX"):
            way(lambda values: penstock.solve(matrix(values), np.ones(N)).x.sum())(jnp.asarray(LINE.data))


def test_arguments_that_cannot_pass_gradients_on_are_refused():
    with pytest.raises(penstock.InputError, match="A is a dense array that JAX traces"):
        jax.grad(lambda A: solve(A, vector()).sum())(jnp.asarray(LINE.toarray()))
    with pytest.raises(penstock.InputError, match=r"b must be of float64 or float32 and of shape .*, not int64"):
        solve(LINE, jnp.arange(N))
    with pytest.raises(penstock.InputError, match="1 batch and 0 dense dimensions"):
        solve(BCOO.fromdense(jnp.ones((2, 2, 2)), n_batch=1), vector())


class TestEigsh:
    """Derivatives of eigenvalues; each problem has simple ones."""

    masses = 1.0 + np.random.default_rng(5).random(N)

    @staticmethod
    def lowest(values, masses, kind=BCSR, k=3):
        return penstock.jax.eigsh(matrix(values, kind), k, masses, device="cpu")[0]

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
    @pytest.mark.parametrize("kind", [BCSR, BCOO])
    @pytest.mark.parametrize("of_mass", ["diagonal", "matrix"])
    def test_gradients_are_those_of_finite_differences(self, wrap, kind, of_mass):
        weights = jnp.array([0.7, -1.0, 0.3])
        start = self.masses if of_mass == "diagonal" else LINE.data + 9.0 * (ROWS == COLUMNS)

        def loss(values, masses):
            M = masses if of_mass == "diagonal" else matrix(masses, kind)
            return weights @ self.lowest(values, M, kind) ** 2

        arguments = jnp.asarray(LINE.data), jnp.asarray(start)
        check_by_differences(loss, arguments, wrap(jax.grad(loss, argnums=(0, 1)))(*arguments), rtol=1e-5)

    def test_vectors_pass_no_gradients_on(self):
        def loss(values):
            return penstock.jax.eigsh(matrix(values), 2, device="cpu")[1].sum()

        assert not jax.grad(loss)(jnp.asarray(LINE.data)).any()

    def test_a_matrix_that_is_not_of_jax_leaves_the_gradient_of_the_masses(self):
        gradient = jax.grad(lambda m: penstock.jax.eigsh(LINE, 1, m, device="cpu")[0][0])(jnp.asarray(self.masses))
        values, vectors = penstock.eigsh(LINE, 1, self.masses, device="cpu")
        np.testing.assert_allclose(gradient, -values[0] * vectors[:, 0] ** 2, rtol=1e-9)

    def test_second_derivatives_are_refused(self):
        gradient = jax.grad(lambda values: self.lowest(values, None)[0])
        with pytest.raises(penstock.InputError, match="only first derivatives"):
            jax.grad(lambda values: gradient(values).sum())(jnp.asarray(LINE.data))

    def test_plain_eigsh_refuses_what_is_traced(self):
        with pytest.raises(penstock.InputError, match=r"K is traced by JAX, .*penstock\.jax\.eigsh"):
            jax.grad(lambda values: penstock.eigsh(matrix(values), 1).values[0])(jnp.asarray(LINE.data))
        with pytest.raises(penstock.InputError, match=r"M is traced by JAX, .*penstock\.jax\.eigsh"):
            jax.grad(lambda m: penstock.eigsh(LINE, 1, m).values[0])(jnp.asarray(self.masses))
