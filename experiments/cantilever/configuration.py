"""What an experiment file may say, validated before anything is computed."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field, model_validator

from penstock.experiments.cantilever.sections import MemorySection, Section
from penstock.experiments.reporting.yaml_files import read_configuration
from penstock.fem import (
    Cantilever,
    Element,
    HeatConduction,
    LinearElasticity,
    LognormalMaterial,
    Material,
    MicropolarElasticity,
    TwoPhaseMaterial,
    UniformMaterial,
)
from penstock.solvers import (
    METHODS,
    PRECONDITIONERS,
    PreconditionerSpec,
    SmoothedAggregationSpec,
    method_named,
    preconditioner_spec,
)
from penstock.solvers.amg.grid_points import GridPoints
from penstock.solvers.eigen.modes import block_columns, with_modes_degree
from penstock.spmv import NodeMatrix
from penstock.spmv.vectors.block_space import LARGEST_VECTOR_BLOCK

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NodeCount = Annotated[int, Field(ge=2)]
_MOST_NODES, _MOST_SAMPLES = 10**12, 100_000


def _check_length(length: float) -> float:
    if not 1e-30 <= length <= 1e30:
        raise ValueError(f"{length:g} is outside 1e-30 to 1e30, where volumes stay in the range of float64")
    return length


Length = Annotated[PositiveFloat, AfterValidator(_check_length)]


class Model(Section):
    """The body and its mesh."""

    nodes: NodeCount | tuple[NodeCount, NodeCount, NodeCount] = Field(
        description="nodes a side: one number for a cube, or [nx, ny, nz]"
    )
    dof: Literal[1, 3, 6] = Field(
        default=3, description="unknowns a node: 1 heat conduction, 3 elasticity, 6 micropolar elasticity"
    )
    lengths: Length | tuple[Length, Length, Length] = Field(
        default=1.0, description="side lengths; one number gives cubic elements and that length along x"
    )

    @model_validator(mode="after")
    def _can_be_counted(self) -> Model:
        nodes = self.nodes if isinstance(self.nodes, tuple) else (self.nodes,) * 3
        if math.prod(nodes) > _MOST_NODES:
            raise ValueError(
                f"nodes: {math.prod(nodes):.3g} nodes are more than {_MOST_NODES:.3g}, which no machine could hold"
            )
        return self


class MaterialSection(Section):
    """Moduli, and how they vary from element to element."""

    kind: Literal["uniform", "lognormal", "two_phase"] = Field(
        default="uniform", description="variation between elements"
    )
    young: PositiveFloat = Field(default=1.0, description="Young's modulus (dof 3 and 6)")
    poisson: Annotated[float, Field(gt=-1, lt=0.5)] = Field(default=0.3, description="Poisson's ratio (dof 3 and 6)")
    conductivity: PositiveFloat = Field(default=1.0, description="dof 1")
    coupling: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="micropolar coupling number squared (dof 6)"
    )
    characteristic_length: PositiveFloat = Field(default=0.1, description="micropolar length in bending (dof 6)")
    sigma: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.5, description="of the logarithm (lognormal)"
    )
    contrast: PositiveFloat = Field(default=100.0, description="stiffness of inclusions (two_phase)")
    fraction: Annotated[float, Field(ge=0, le=1)] = Field(default=0.3, description="share of inclusions (two_phase)")
    seed: Annotated[int, Field(ge=0)] = Field(default=1, description="of random factors")
    samples: Annotated[int, Field(ge=1, le=_MOST_SAMPLES)] | None = Field(
        default=None, description="number of seeds to solve for, one after another, from this one on"
    )

    @model_validator(mode="after")
    def _samples_are_random(self) -> MaterialSection:
        if self.samples is not None and self.kind == "uniform":
            raise ValueError("samples of a uniform material are all the same; choose kind: lognormal or two_phase")
        return self

    def cantilever(self, model: Model) -> Cantilever:
        """Return a body of this material."""
        materials: dict[str, Material] = {
            "uniform": UniformMaterial(),
            "lognormal": LognormalMaterial(self.sigma, self.seed),
            "two_phase": TwoPhaseMaterial(self.contrast, self.fraction, self.seed),
        }
        element: Element
        if model.dof == 1:
            element = HeatConduction(self.conductivity)
        elif model.dof == 3:
            element = LinearElasticity(self.young, self.poisson)
        else:
            element = MicropolarElasticity.from_engineering(
                self.young, self.poisson, coupling=self.coupling, characteristic_length=self.characteristic_length
            )
        return Cantilever(model.nodes, model.dof, model.lengths, materials[self.kind], element)


LoadKind = Literal["auto", "shear", "shear_y", "axial", "torsion", "body"]
Magnitude = Annotated[float, Field(allow_inf_nan=False)]


class LoadCase(Section):
    """One of several loads."""

    kind: LoadKind = Field(default="auto", description="auto: end shear, or a uniform source for dof 1")
    magnitude: Magnitude = Field(default=1.0, description="total force, moment or source")

    def kinds(self) -> tuple[str, ...]:
        """Return the arguments of :meth:`Cantilever.load`."""
        return () if self.kind == "auto" else (self.kind,)


class LoadSection(LoadCase):
    """What acts on the body: one load, several cases, or samples of a random load. Several are solved as one block."""

    cases: Annotated[tuple[LoadCase, ...], Field(min_length=1, max_length=LARGEST_VECTOR_BLOCK)] | None = Field(
        default=None, description="load cases instead of one load: a list of {kind: ..., magnitude: ...}"
    )
    samples: Annotated[int, Field(ge=1, le=LARGEST_VECTOR_BLOCK)] | None = Field(
        default=None, description="samples of the load, each of its entries multiplied by a random number"
    )
    spread: PositiveFloat = Field(default=0.2, description="standard deviation of these numbers; their mean is 1")
    seed: Annotated[int, Field(ge=0)] = Field(default=1, description="of these numbers")

    @model_validator(mode="after")
    def _cases_or_samples(self) -> LoadSection:
        if self.cases is not None and self.samples is not None:
            raise ValueError("cases are loads that are known, samples random ones; give one or the other")
        present = sorted(self.model_fields_set & {"kind", "magnitude"})
        if self.cases is not None and present:
            raise ValueError(f"cases have their own kind and magnitude; leave out {' and '.join(present)}")
        return self


# Fields of the solver that are options of preconditioners.
_OPTIONS = ("degree", "aggregate_nodes")


class SolverSection(Section):
    """How the system is solved."""

    rtol: Annotated[float, Field(ge=0, lt=1)] = Field(default=1e-8, description="true residual over the norm of b")
    maxiter: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="iterations at most; default 10 x unknowns"
    )
    method: str = Field(
        default="auto",
        description="cg is conjugate gradients, which auto is; minres also solves systems that are not positive definite",
        json_schema_extra={"enum": ["auto", *METHODS.keys()]},
    )
    preconditioner: str = Field(
        default="block_jacobi",
        description=(
            "block_jacobi inverts the blocks of the unknowns of a node; chebyshev is a polynomial in the matrix; "
            "smoothed_aggregation adds a coarse level to it; auto is smoothed_aggregation, as the rigid motions are known"
        ),
        json_schema_extra={"enum": ["auto", *PRECONDITIONERS.keys()]},
    )
    degree: int | Literal["auto"] = Field(
        default="auto",
        validation_alias=AliasChoices("degree", "products"),
        description="with chebyshev and smoothed_aggregation: degree of the polynomial, odd; auto: chosen",
    )

    aggregate_nodes: int | Literal["auto"] = Field(
        default="auto",
        description="with smoothed_aggregation: nodes in an aggregate, about; auto: chosen",
    )

    options: dict[str, Any] = Field(
        default_factory=dict,
        description="further options of the preconditioner by name, such as order and sweeps of gauss_seidel",
    )

    @model_validator(mode="after")
    def _preconditioner_exists(self) -> SolverSection:
        method_named(self.method)
        if elsewhere := sorted(self.options.keys() & {*_OPTIONS, "block_size"}):
            raise ValueError(
                f"{', '.join(elsewhere)} cannot be among the options: degree and aggregate_nodes are keys of solver itself, and "
                "model.dof is the size of blocks"
            )
        self.spec(1)
        return self

    def spec(self, block_size: int) -> PreconditionerSpec:
        """Return the preconditioner of a matrix with dense blocks of this size."""
        known = {entry.name for entry in dataclasses.fields(PRECONDITIONERS[self.chosen])}
        options = {name: getattr(self, name) for name in _OPTIONS if name in known}
        return preconditioner_spec(self.chosen, block_size=block_size, **options, **self.options)

    @staticmethod
    def options_of(spec: PreconditionerSpec) -> dict[str, Any]:
        """Return those fields of this section that a preconditioner has as options."""
        return {name: getattr(spec, name) for name in _OPTIONS if hasattr(spec, name)}

    @property
    def chosen(self) -> str:
        """The name of the preconditioner, also where it is left to the program."""
        return "smoothed_aggregation" if self.preconditioner == "auto" else self.preconditioner


class AnalysisSection(Section):
    """What is computed: the response to loads, or the lowest modes."""

    kind: Literal["static", "modes"] = Field(
        default="static",
        description="static solves for the loads; modes finds the lowest eigenvalues and eigenvectors of K x = lambda M x",
    )
    count: Annotated[int, Field(ge=1, le=1000)] = Field(default=10, description="number of modes")
    tol: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=1e-6, description="of modes: norm of K x - lambda M x, relative to lambda M x"
    )
    density: PositiveFloat = Field(default=1.0, description="mass, or heat capacity (dof 1), per volume")
    lumped: bool = Field(default=False, description="whether the mass matrix is diagonal")
    rotary_inertia: PositiveFloat | None = Field(
        default=None, description="of rotations, per mass (dof 6); default: that of balls as large as the elements"
    )

    @model_validator(mode="before")
    @classmethod
    def _a_word_is_the_kind(cls, data: Any) -> Any:
        return {"kind": data} if isinstance(data, str) else data

    @property
    def is_modes(self) -> bool:
        """Whether modes are looked for."""
        return self.kind == "modes"


class OutputSection(Section):
    """What is left behind."""

    directory: Path = Field(
        default=Path("results"), description="one folder a run is made in it; inside the working folder"
    )
    field: bool = Field(default=True, description="write solution.vtkhdf for ParaView, of every sample too")
    figures: bool = Field(default=True, description="draw PNG pictures")
    checkpoint_seconds: PositiveFloat = Field(default=60.0, description="seconds between checkpoints")


class Experiment(Section):
    """A cantilever, its load, and how to solve it."""

    model: Model
    analysis: AnalysisSection = AnalysisSection()
    material: MaterialSection = MaterialSection()
    load: LoadSection = LoadSection()
    solver: SolverSection = SolverSection()
    memory: MemorySection = MemorySection()
    output: OutputSection = OutputSection()
    parallel: Literal["mpi"] | None = Field(
        default=None,
        description="mpi: mpiexec or srun starts several ranks, which share the rows out; with cuda, a GPU for each",
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_defaults(cls, data: Any) -> Any:
        """Read ``load:`` with nothing below it as an empty section."""
        if not isinstance(data, dict):
            return data
        plain = {key for key, field in cls.model_fields.items() if field.default is None}  # keys that are no sections
        return {key: {} if value is None and key not in plain else value for key, value in data.items()}

    @model_validator(mode="after")
    def _load_fits_model(self) -> Experiment:
        for case in self.load.cases or (self.load,):
            if self.model.dof == 1 and case.kind not in ("auto", "body"):
                raise ValueError(f"load.kind {case.kind!r} is a force; model.dof 1 (heat conduction) takes 'body'")
        return self

    @model_validator(mode="before")
    @classmethod
    def _count_belongs_to_the_analysis(cls, data: Any) -> Any:
        """Read ``analysis: modes`` with ``count: 20`` beside it."""
        if not isinstance(data, dict) or "count" not in data:
            return data
        analysis = data.get("analysis")
        whole = {"kind": analysis} if isinstance(analysis, str) else dict(analysis or {})
        return {
            **{key: value for key, value in data.items() if key != "count"},
            "analysis": {"count": data["count"], **whole},
        }

    @model_validator(mode="after")
    def _modes_are_of_one_body(self) -> Experiment:
        if not self.analysis.is_modes:
            given, usual = self.analysis, AnalysisSection()
            if present := sorted(
                name for name in AnalysisSection.model_fields if getattr(given, name) != getattr(usual, name)
            ):
                raise ValueError(f"analysis.{present[0]} is for modes; add kind: modes")
            return self
        others = {
            "load": self.load != LoadSection(),
            "material.samples": self.material.samples is not None,
            "parallel": self.parallel is not None,
            "memory.devices": self.memory.devices is not None,
            "memory.precision": self.memory.precision != "float64",
        }
        if wrong := [name for name, present in others.items() if present]:
            raise ValueError(f"analysis: modes has no use for {wrong[0]}; leave it out")
        if self.solver.method != "auto" or self.solver.chosen != "smoothed_aggregation":
            raise ValueError("modes need a coarse level: set solver.preconditioner: auto, and leave out solver.method")
        if self.analysis.rotary_inertia is not None and self.model.dof != 6:
            raise ValueError("analysis.rotary_inertia is of the rotations of model.dof 6; leave it out")
        nodes = self.cantilever().mesh.node_count
        if 4 * block_columns(self.analysis.count, "cpu") > nodes * self.model.dof:
            raise ValueError(
                f"analysis.count: {self.analysis.count} modes are too large a part of those of {nodes} nodes"
            )
        return self

    @model_validator(mode="after")
    def _samples_of_one_thing(self) -> Experiment:
        if self.material.samples is not None:
            if self.load.cases is not None or self.load.samples is not None:
                raise ValueError(
                    "material.samples are solved one after another; give one load, no cases or samples of it"
                )
            if self.memory.store is not None:
                raise ValueError(
                    "memory.store keeps one matrix, but every one of material.samples has its own; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _devices_share_single_products(self) -> Experiment:
        if self.memory.devices is not None and max(self.preconditioner.products_per_iteration(streamed=True)) > 1:
            raise ValueError(
                f"many products of {self.solver.chosen} follow every transfer, which makes the GPU alone faster: leave out "
                "memory.devices, or take solver.preconditioner: block_jacobi"
            )
        return self

    @model_validator(mode="after")
    def _ranks_can(self) -> Experiment:
        if self.parallel is None:
            return self
        if self.memory.store is not None or self.memory.devices is not None:
            name = "store" if self.memory.store is not None else "devices"
            raise ValueError(
                f"parallel: mpi gives each rank a part of the matrix and a device; leave out memory.{name}"
            )
        if self.memory.matrix == "on_arrival" and self.memory.budget is None:
            raise ValueError(
                "parallel: mpi assembles on arrival what is streamed; give memory.budget, or leave out memory.matrix"
            )
        if self.material.samples is not None:
            raise ValueError("parallel: mpi solves one system; leave out material.samples")
        if not PRECONDITIONERS[self.solver.chosen].works_on_ranks:
            able = ", ".join(name for name in sorted(PRECONDITIONERS.keys()) if PRECONDITIONERS[name].works_on_ranks)
            raise ValueError(f"parallel: mpi takes a solver.preconditioner of {able}, not {self.solver.preconditioner}")
        return self

    def cantilever(self) -> Cantilever:
        """Return the model problem this file describes."""
        return self.material.cantilever(self.model)

    def mass(self) -> NodeMatrix:
        """Return the mass matrix."""
        analysis = self.analysis
        return self.cantilever().mass(analysis.density, lumped=analysis.lumped, rotary_inertia=analysis.rotary_inertia)

    @property
    def mass_nbytes(self) -> int:
        """Bytes of the mass matrix, about, before it is made."""
        return self.cantilever().mesh.node_count * (12 * (1 if self.analysis.lumped else 27) + 8)

    @property
    def preconditioner(self) -> PreconditionerSpec:
        """The preconditioner, with the blocks of the unknowns of a node and the nodes of the mesh."""
        mesh, spec = self.cantilever().mesh, self.solver.spec(self.model.dof)
        if self.analysis.is_modes and isinstance(spec, SmoothedAggregationSpec):
            spec = with_modes_degree(spec)
        return spec.with_nodes(GridPoints(mesh.axes()), mesh.node_counts)

    @property
    def on_arrival(self) -> bool:
        """Whether the matrix is assembled where it is used; what a rank holds whole is assembled on the host."""
        return self.memory.on_arrival and (self.parallel is None or self.memory.budget is not None)

    def changed(self, **sections: dict[str, Any]) -> Experiment:
        """Return an experiment with other values in some sections, which are not checked."""
        update = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=update)

    def of_planes(self, count: int) -> Experiment:
        """Return an experiment with ``count`` planes of nodes: its matrix has the pattern of the square of a rank with these."""
        _, *across = self.cantilever().mesh.node_counts
        return self.changed(model={"nodes": (count, *across)}).model_copy(update={"parallel": None})

    @property
    def columns(self) -> int:
        """Right-hand sides that are solved together, or vectors that iterate for modes."""
        if self.analysis.is_modes:
            return block_columns(self.analysis.count, self.memory.device.partition(":")[0])
        return len(self.load.cases) if self.load.cases is not None else self.load.samples or 1

    @property
    def is_block(self) -> bool:
        """Whether right-hand sides are solved as a block, even if it is a block of one."""
        return self.load.cases is not None or self.load.samples is not None


def read_experiment(path: str | Path) -> Experiment:
    """Read an experiment file.

    Parameters
    ----------
    path : path
        A YAML file.

    Returns
    -------
    Experiment

    Raises
    ------
    InputError
        If the file cannot be read, is not YAML, or says something that is not allowed; each problem is one line that
        names the key, and for an unknown key the nearest valid one.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from penstock.experiments import read_experiment
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "beam.yaml")
    ...     _ = path.write_text("model: {nodes: [9, 3, 3], dof: 3}")
    ...     read_experiment(path).cantilever().shape
    (243, 243)
    """
    return read_configuration(path, Experiment)
