"""
A Poisson problem larger than its budget
========================================

``penstock.solve`` takes a SciPy matrix and a limit for its memory. Here the limit is a quarter of the matrix: it is cut into row
slabs that stream from disk, and one pass over it serves several products.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse

import penstock

nodes = 40
line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(nodes, nodes))
A = scipy.sparse.kronsum(scipy.sparse.kronsum(line, line), line, format="csr")

# Heat is put in along an edge and taken out along the opposite one.
source = np.zeros((nodes, nodes, nodes))
source[8, 8, :], source[-8, -8, :] = 1.0, -1.0
b = source.ravel()

matrix_nbytes = 12 * A.nnz
result = penstock.solve(A, b, memory=matrix_nbytes // 4, device="cpu")
print(result.explain())

# %%
# The residual that counts is that of the matrix, the right-hand side and the solution themselves.
true_residual = np.linalg.norm(b - A @ result.x) / np.linalg.norm(b)
assert result.info == 0
assert true_residual <= 1e-8
assert result.bytes_streamed > 0

# %%
figure, (field, history) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
shown = field.imshow(result.x.reshape(source.shape)[:, :, nodes // 2], cmap="coolwarm")
field.set(title="temperature in the middle plane", xticks=[], yticks=[])
figure.colorbar(shown, ax=field)
history.semilogy(result.residual_norms, "o-")
history.axhline(1e-8, color="0.5", ls=":")
history.set(xlabel="iteration", ylabel="relative residual", title=f"{result.bytes_streamed / 1e6:.0f} MB streamed")
plt.show()
