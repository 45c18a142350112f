"""What the loaded end of a body does under each load: its deflection, its twist or its temperature, and beam theory beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.experiments.cantilever.configuration import LoadCase, LoadSection
from penstock.fem import Cantilever, LinearElasticity, UniformMaterial, timoshenko_tip_deflection

_DEFLECTION, _TWIST, _TEMPERATURE = "tip deflection", "tip twist", "tip temperature"
#: Lengths of a beam in its heights from which on the theory of beams is worth a comparison.
_SLENDER = 3.0


def quantities(load: LoadSection, dof: int, columns: int) -> list[str]:
    """Return the name of the quantity reported for the tip, for each right-hand side."""
    cases: list[LoadCase] = [load] * columns if load.cases is None else list(load.cases)
    return [_TEMPERATURE if dof == 1 else _TWIST if case.kind == "torsion" else _DEFLECTION for case in cases]


def tips(cantilever: Cantilever, names: list[str], solutions: Any) -> list[float]:
    """Return these quantities from solutions ``(unknowns, columns)``, of which the rows of the tip suffice."""
    return [
        cantilever.tip_twist(column) if name == _TWIST else cantilever.tip_deflection(column)
        for name, column in zip(names, np.asarray(solutions).T, strict=True)
    ]


def beam_theory(cantilever: Cantilever, load: LoadSection) -> float | None:
    """Return the deflection by Timoshenko's theory, for a uniform slender beam under a shear force; None for anything else."""
    x, y, z = cantilever.mesh.side_lengths
    law, kind = cantilever.law, "shear" if load.kind == "auto" else load.kind
    single = load.cases is None and load.samples is None and kind in ("shear", "shear_y")
    uniform = isinstance(cantilever.material, UniformMaterial) and isinstance(law, LinearElasticity)
    if not single or not uniform or x < _SLENDER * max(y, z):
        return None
    assert isinstance(law, LinearElasticity), "checked above"
    height, width, sign = (z, y, -1.0) if kind == "shear" else (y, z, 1.0)  # along the force, which pulls down or to +y
    return sign * timoshenko_tip_deflection(load.magnitude, x, height, width, law.young, law.poisson)
