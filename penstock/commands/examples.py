"""Examples at the end of the help of every command."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": ("penstock run beam.yaml", "penstock run beam.yaml --dry-run", "penstock run --resume results/beam"),
    "plan": (
        "penstock plan beam.yaml",
        "penstock plan beam.yaml --rates h100",
        "penstock plan beam.yaml --ranks 64 --figure scaling.png",
    ),
    "solve": (
        "penstock solve A.mtx b.npy",
        "penstock solve A.mtx b.npy --coordinates X.npy",
        "penstock solve A.petsc b.petsc --memory '8 GiB' --dry-run",
        "penstock solve cube32-dof3 --precond chebyshev --format symmetric_bsr",
        "penstock solve --resume results/solve-A",
    ),
    "store": (
        "penstock store A.petsc A-store",
        "penstock store part1.npz part2.npz A-store",
        "penstock store A-store half --format symmetric_bsr --slab '64 MiB'",
    ),
    "bench": ("penstock bench A.mtx cube32-dof3 --columns 1,8,32", "penstock bench A.mtx --operation spgemm"),
    "overlap": (
        "penstock overlap examples/overlap/small_cpu.yaml",
        "penstock overlap --resume results/overlap-small_cpu",
    ),
    "compare": ("penstock compare beam.yaml", "penstock compare --resume results/compare-beam"),
    "show": ("penstock show results/beam",),
    "init": ("penstock init beam.yaml",),
    "schema": ("penstock schema > experiment.schema.json",),
    "warm-up": ("penstock warm-up", "penstock warm-up --device cuda"),
    "info": ("penstock info", "penstock info --no-measure", "penstock info --refresh"),
}


def examples_of(command: str) -> str:
    """Return the end of a command's help, a paragraph for each example."""
    return "\n\n".join(["For example:", *EXAMPLES[command]])
