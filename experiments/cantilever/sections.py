"""What all sections of an experiment file have in common, and the section that says where the matrix lives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from penstock.fem.assembly import ASSEMBLED_FORMATS
from penstock.spmv import parse_nbytes

Size = Annotated[int, BeforeValidator(parse_nbytes)]
#: A plan simulates every subdivision: this many take a quarter of a minute. Of a matrix of 500 GB each has 30 MB.
SubdivisionCount = Annotated[int, Field(ge=1, le=16_384)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _text_is_plain(self) -> Self:
        for name, value in self.__dict__.items():
            if isinstance(value, str | Path) and "\0" in str(value):
                raise ValueError(f"{name} holds a NUL character")
        return self


def _check_format(name: str) -> str:
    """Refuse a format in which no matrix can be assembled."""
    if name not in ("auto", *ASSEMBLED_FORMATS):
        raise ValueError(f"expected auto or one of {', '.join(ASSEMBLED_FORMATS)}, not {name!r}")
    return name


FormatName = Annotated[
    str, AfterValidator(_check_format), WithJsonSchema({"type": "string", "enum": ["auto", *ASSEMBLED_FORMATS]})
]


class MemorySection(Section):
    """Where the matrix lives and how much of it at a time."""

    device: str = Field(default="cpu", description="cpu, cuda or cuda:<number>", pattern=r"^(cpu|cuda(:\d+)?)$")
    devices: tuple[str, str] | None = Field(
        default=None,
        description="instead of device: a GPU and cpu, such as [cuda:0, cpu], which share every product",
    )
    gpu_subdivisions: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="with devices: how many of the subdivisions the GPU takes; default: measured"
    )
    budget: Size | None = Field(
        default=None, description="memory for matrix storage, such as 2 GiB; default: the whole matrix stays resident"
    )
    format: FormatName = Field(
        default="auto",
        description="storage format; auto: bsr in memory; streamed, the one whose sweeps are predicted to be shortest",
    )
    values: Literal["float64", "float32"] = Field(default="float64", description="type the matrix is stored in")
    precision: Literal["float64", "auto", "float32", "int16"] = Field(
        default="float64",
        description="of the values with which a matrix that does not fit the budget is iterated: float64 streams it in every "
        "iteration; others hold an image of it in memory, and stream it for residuals only; auto: the finest that fits",
    )
    subdivisions: SubdivisionCount | None = Field(default=None, description="default: the plan chooses")
    slots: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="length of the ring; default: the plan chooses"
    )
    overlap: bool = Field(default=True, description="transfer during computation")
    matrix: Literal["auto", "stored", "on_arrival"] = Field(
        default="auto",
        description="stored: assembled once in host memory, or on disk for a CPU, and streamed from there; on_arrival: never "
        "stored, subdivisions are assembled from 8 bytes an element where kernels use them, or, without a budget, all of it on "
        "the device; auto: on_arrival on a GPU",
    )
    store: Path | None = Field(
        default=None, description="directory for the matrix on disk, reused by later runs; default: a temporary one"
    )

    @model_validator(mode="before")
    @classmethod
    def _vectors_are_on_the_gpu(cls, data: Any) -> Any:
        """Take the GPU of ``devices`` as the device."""
        if not isinstance(data, dict) or data.get("devices") is None:
            return data
        names = list(data["devices"]) if isinstance(data["devices"], list | tuple) else []
        gpus = [name for name in names if str(name).startswith("cuda")]
        if len(names) != 2 or len(gpus) != 1 or "cpu" not in names:
            raise ValueError(f"devices are one GPU and cpu, such as [cuda:0, cpu], not {data['devices']}")
        if data.setdefault("device", gpus[0]) != gpus[0]:
            raise ValueError(f"device {data['device']} contradicts devices {names}; leave device out")
        return data

    @property
    def on_arrival(self) -> bool:
        """Whether the matrix is assembled where it is used, and stored nowhere."""
        stored = self.store is not None or self.devices is not None
        return self.matrix == "on_arrival" or (self.matrix == "auto" and self.device != "cpu" and not stored)

    @model_validator(mode="after")
    def _streaming_needs_a_budget(self) -> MemorySection:
        present = self.model_fields_set & {
            "precision",
            "subdivisions",
            "slots",
            "overlap",
            "store",
            "devices",
            "gpu_subdivisions",
        }
        if self.gpu_subdivisions is not None and self.devices is None:
            raise ValueError("gpu_subdivisions divides a matrix between devices; give devices: [cuda:0, cpu]")
        if self.precision != "float64" and self.values != "float64":
            raise ValueError(
                f"images are of float64, not of values: {self.values}; leave one of values and precision out"
            )
        if self.precision != "float64" and self.devices is not None:
            raise ValueError("devices share every product, so there is no image; leave precision out")
        if self.matrix == "on_arrival" and (self.store is not None or self.devices is not None):
            name = "store keeps" if self.store is not None else "devices share"
            raise ValueError(f"{name} a stored matrix; leave out matrix: on_arrival, or memory.{name.split()[0]}")
        if self.budget is None and present:
            raise ValueError(
                f"{', '.join(sorted(present))} say how to stream; that takes a budget, such as budget: 2 GiB"
            )
        return self
