"""The YAML file of the communication-hiding study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from penstock.experiments.cantilever.configuration import MaterialSection, Model, NodeCount
from penstock.experiments.cantilever.sections import FormatName, Section, Size, SubdivisionCount
from penstock.experiments.reporting.yaml_files import read_configuration
from penstock.fem import Cantilever
from penstock.spmv.vectors.block_space import LARGEST_VECTOR_BLOCK

Repeats = Annotated[int, Field(ge=1, le=10_000)]
Columns = Annotated[int, Field(ge=1, le=LARGEST_VECTOR_BLOCK)]


class OverlapCase(Section):
    """A matrix of the study."""

    dof: Literal[1, 3, 6] = Field(description="unknowns per node")
    nodes: NodeCount | tuple[NodeCount, NodeCount, NodeCount] = Field(description="nodes along each side")

    @model_validator(mode="after")
    def _is_a_body(self) -> Self:
        """Refuse a mesh that an experiment would refuse."""
        try:
            _ = self.model
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return self

    @property
    def model(self) -> Model:
        """The body, as in an experiment."""
        return Model(nodes=self.nodes, dof=self.dof)

    @property
    def name(self) -> str:
        """Name of the matrix in records, such as ``cube128-dof3``."""
        nodes = (self.nodes,) if isinstance(self.nodes, int) else self.nodes
        kind = "cube" if len(set(nodes)) == 1 else "beam"
        return f"{kind}{'x'.join(map(str, nodes if len(set(nodes)) > 1 else nodes[:1]))}-dof{self.dof}"


class OverlapStudy(Section):
    """Products of streamed matrices with and without overlap of transfers and computations."""

    protocol: Literal["paper", "engine"] = Field(
        default="paper",
        description="paper: two buffers, values only; engine: a ring of slots, whole slabs",
    )
    device: str = Field(default="cpu", description="cpu, cuda or cuda:<number>", pattern=r"^(cpu|cuda(:\d+)?)$")
    cases: Annotated[tuple[OverlapCase, ...], Field(min_length=1)] = Field(
        description="matrices: dof and nodes of each"
    )
    material: MaterialSection = MaterialSection(kind="lognormal")
    format: FormatName = Field(
        default="auto", description="auto: csr for dof 1, else bsr with blocks of the unknowns of a node"
    )
    values: Literal["float64", "float32"] = Field(default="float64", description="type the matrix is stored in")
    subdivisions: Annotated[tuple[SubdivisionCount, ...], Field(min_length=1)] = Field(
        default=(2, 4, 8, 16, 32, 64), description="numbers of row slabs that the matrix is cut into"
    )
    repeats: Annotated[tuple[Repeats, ...], Field(min_length=1)] = Field(
        default=(50,), description="products with each subdivision, each with a vector of its own"
    )
    columns: Annotated[tuple[Columns, ...], Field(min_length=1)] = Field(
        default=(1,), description="vectors that a product is applied to at once"
    )
    slots: Annotated[int, Field(ge=2)] = Field(default=3, description="length of the ring (protocol: engine)")
    budget: Size | None = Field(
        default=None,
        description="memory for matrix storage (protocol: engine); default: the ring only, with nothing resident",
    )
    samples: Repeats = Field(default=7, description="timed sweeps of each kind")
    folder: Path | None = Field(
        default=None, description="folder for matrices on disk (device: cpu); default: the results folder"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, data: Any) -> Any:
        """Read ``repeats: 50`` as ``repeats: [50]``."""
        lists = ("subdivisions", "repeats", "columns")
        if not isinstance(data, dict):
            return data
        data = {key: [value] if key in lists and isinstance(value, int) else value for key, value in data.items()}
        # A repeated value is measured once.
        for key in lists:
            if isinstance(data.get(key), list | tuple):
                data[key] = [value for n, value in enumerate(data[key]) if value not in data[key][:n]]
        return data

    @model_validator(mode="after")
    def _matrices_have_names_of_their_own(self) -> OverlapStudy:
        names = [case.name for case in self.cases]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"cases name {', '.join(sorted(twice))} more than once")
        return self

    @model_validator(mode="after")
    def _the_paper_has_no_ring(self) -> OverlapStudy:
        present = self.model_fields_set & {"slots", "budget"}
        if self.protocol == "paper" and present:
            raise ValueError(
                f"{', '.join(sorted(present))} belong to protocol: engine; the paper's protocol has exactly two buffers"
            )
        return self

    def cantilever(self, case: OverlapCase) -> Cantilever:
        """Return the model problem of a case."""
        return self.material.cantilever(case.model)

    def format_of(self, case: OverlapCase) -> str:
        """Return the name of the storage format of a case."""
        return self.format if self.format != "auto" else "csr" if case.dof == 1 else "bsr"


def read_overlap_study(path: str | Path) -> OverlapStudy:
    """Read a file of the study; errors as for :func:`read_experiment`."""
    return read_configuration(path, OverlapStudy)
