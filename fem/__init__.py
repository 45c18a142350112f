"""Model problems: stiffness matrices of boxes of 8-node hexahedra with 1, 3 or 6 degrees of freedom per node."""

from penstock.fem.assembly import assemble_rows, symbolic_rows
from penstock.fem.box_rows import BoxElements, BoxRowMaker
from penstock.fem.cantilever import LOAD_KINDS, Cantilever, Element
from penstock.fem.closed_forms import (
    cosine_mode,
    cosine_mode_source,
    timoshenko_tip_deflection,
    uniform_source_profile,
)
from penstock.fem.diffusion import HeatConduction
from penstock.fem.elasticity import LinearElasticity
from penstock.fem.element_rows import ElementRowMaker
from penstock.fem.field_output import vtkhdf_writer, write_vtkhdf, write_vtkhdf_series
from penstock.fem.load import body_load, end_load, face_load, integrate_body_load
from penstock.fem.material import LognormalMaterial, Material, TwoPhaseMaterial, UniformMaterial
from penstock.fem.mesh import BoxMesh
from penstock.fem.micropolar import MicropolarElasticity

__all__ = [
    "LOAD_KINDS",
    "BoxElements",
    "BoxMesh",
    "BoxRowMaker",
    "Cantilever",
    "Element",
    "ElementRowMaker",
    "HeatConduction",
    "LinearElasticity",
    "LognormalMaterial",
    "Material",
    "MicropolarElasticity",
    "TwoPhaseMaterial",
    "UniformMaterial",
    "assemble_rows",
    "body_load",
    "cosine_mode",
    "cosine_mode_source",
    "end_load",
    "face_load",
    "integrate_body_load",
    "symbolic_rows",
    "timoshenko_tip_deflection",
    "uniform_source_profile",
    "vtkhdf_writer",
    "write_vtkhdf",
    "write_vtkhdf_series",
]
