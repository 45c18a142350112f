"""A SciPy matrix in, a solution out: penstock decides how to store it, whether to stream it, and how to precondition."""

import numpy as np
import scipy.sparse

import penstock

# The 5-point Laplacian on a 300 x 300 grid.
line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(300, 300))
A = scipy.sparse.kronsum(line, line, format="csr")
b = np.ones(A.shape[0])

result = penstock.solve(A, b)
print(result.explain(), end="\n\n")

# The same through 1 MiB of memory for the matrix: it is streamed from disk.
streamed = penstock.solve(A, b, memory="1 MiB")
print(streamed.explain(), end="\n\n")
print(f"true relative residual {np.linalg.norm(b - A @ streamed.x) / np.linalg.norm(b):.2e}")
