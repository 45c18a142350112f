"""
Formats compared on a matrix of your own
========================================

Which storage format is fastest depends on the matrix. ``suggest_format`` ranks them by a roofline model, from the bytes that
a product moves, and times as many of the best as you ask for. Predictions are for a quiet machine: where others compute
beside it, as often where this page is made, times are longer.
"""

import matplotlib.pyplot as plt
import numpy as np

from penstock.fem import Cantilever
from penstock.spmv import suggest_format

A = Cantilever(nodes=24, dof=3).matrix().to_csr()  # or yours: any SciPy or penstock CSR matrix
x = np.random.default_rng(0).standard_normal(A.shape[1])
expected = A @ x

suggestions = suggest_format(A, device="cpu", measure=5)
for suggestion in suggestions:
    print(suggestion)

# %%
# ``build`` converts. All formats give the same product, up to the order in which a row is summed.
measured = [suggestion for suggestion in suggestions if suggestion.measured_seconds is not None]
for suggestion in measured:
    product = suggestion.build(A) @ x
    assert np.allclose(product, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())

# %%
names = [str(suggestion).partition(":")[0] for suggestion in measured]
figure, (times, sizes) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
times.barh(names, [1e3 * suggestion.measured_seconds for suggestion in measured])
times.plot([1e3 * suggestion.predicted_seconds for suggestion in measured], names, "k|", ms=16, label="predicted")
times.set(xlabel="milliseconds of a product")
times.legend()
sizes.barh(names, [suggestion.nbytes / 1e6 for suggestion in measured], color="tab:gray")
sizes.set(xlabel="MB stored")
times.invert_yaxis()
plt.show()
