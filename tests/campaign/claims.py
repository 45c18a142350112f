"""Whether a result is honest: checked in long double."""

import numpy as np
import scipy.sparse


def honest(A: object, B: np.ndarray, result: object, rtol: float) -> str:
    """Return whether all columns converged; every claim is checked in long double, up to rounding in float64."""
    C = scipy.sparse.coo_array(A)
    x, b = (np.asarray(of, np.longdouble).reshape(len(B), -1) for of in (result.x, B))
    residual, rounding = b.copy(), np.abs(b)
    np.subtract.at(residual, C.row, np.asarray(C.data, np.longdouble)[:, None] * x[C.col])
    np.add.at(rounding, C.row, np.abs(C.data)[:, None] * np.abs(x[C.col]))
    with np.errstate(over="ignore"):
        norms, scales, floors = (np.sqrt((of**2).sum(axis=0)).astype(float) for of in (residual, b, rounding))
    for number, column in enumerate(getattr(result, "columns", [result])):
        scale = scales[number] or 1.0
        true, slack = norms[number] / scale, 50 * np.finfo(float).eps * floors[number] / scale
        if column.converged:
            assert true <= rtol * (1 + 1e-6) + slack, f"claims {column.true_residual}, and is {true}"
        elif true < 1e100:  # squares of larger ones leave the range of float64
            apart = abs(column.true_residual - true)
            assert apart <= 1e-6 * true + slack, f"tells {column.true_residual}, and is {true}"
    return "converged" if result.converged else "not converged"
