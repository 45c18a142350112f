"""How fast the generator assembles: python benchmarks/assembly.py cpu2."""

from __future__ import annotations

from collections.abc import Callable

from record import argument_parser, record, write

from penstock.fem import Cantilever, LognormalMaterial, Material, UniformMaterial
from penstock.spmv import CPU
from penstock.spmv.model.timing import time_by_host_clock
from penstock.streaming.measurement.probes import measure_memory

MATERIALS: dict[str, Material] = {"uniform": UniformMaterial(), "lognormal": LognormalMaterial(0.5, 1)}
SUBDIVISIONS = 32


def main() -> None:
    """Measure, print and write the JSON. The floor is one write of the matrix to memory at the measured read rate."""
    parser = argument_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=80)
    arguments = parser.parse_args()
    read = measure_memory(CPU)
    beams = {
        (dof, name): Cantilever(arguments.nodes if dof < 6 else arguments.nodes // 2, dof=dof, material=material)
        for dof in (1, 3, 6)
        for name, material in MATERIALS.items()
    }

    def assemble(beam: Cantilever) -> Callable[[], None]:
        def action() -> None:
            for _ in beam.subdivisions(SUBDIVISIONS):
                pass

        return action

    samples = time_by_host_clock({str(key): assemble(beam) for key, beam in beams.items()}, CPU, repeats=5)
    records = []
    for (dof, name), beam in beams.items():
        nbytes = sum(outline.nbytes for outline in beam.symbolic_slabs(SUBDIVISIONS))
        entry = record(
            f"assembly/bsr/cube{beam.mesh.node_counts[0]}-dof{dof}-{name}",
            samples[str((dof, name))],
            floor=nbytes / read,
            nbytes=nbytes,
            peers={},
        )
        entry["scalars_per_second"] = beam.nnz / entry["seconds"]
        records.append(entry)
        print(f"{entry['name']}: {entry['scalars_per_second'] / 1e6:.0f} million stored scalars a second")
    write("assembly", arguments, {"read_GBps": read / 1e9}, records)


if __name__ == "__main__":
    main()
