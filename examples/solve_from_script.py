"""A SciPy matrix in, a solution out: the same call as SciPy's, and an honest residual."""

import numpy as np
import scipy.sparse

from penstock.solvers import cg, jacobi

# The 5-point Laplacian on a 200 x 200 grid, with a varying coefficient on the diagonal.
n = 200
line = scipy.sparse.diags_array([-np.ones(n - 1), 2 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1])
A = scipy.sparse.kronsum(line, line, format="csr") + scipy.sparse.diags_array(np.linspace(0, 0.1, n * n))
b = np.ones(n * n)

result = cg(A, b, M=jacobi(A), rtol=1e-10)
x, info = result  # SciPy's way works too

print(f"{'unknowns':<28}{n * n:>14,}")
print(f"{'iterations':<28}{result.iterations:>14}")
print(f"{'true relative residual':<28}{np.linalg.norm(b - A @ x) / np.linalg.norm(b):>14.2e}")
print(f"{'info':<28}{info:>14}")
