"""Every CUDA source is declared once, where it stands, and its text depends on nothing but its content."""

import enum
from pathlib import Path

from kernel_instances import INSTANCES

from penstock.spmv.compilation.cuda_module import CudaSource

ROOT = Path(__file__).parents[3]


class Colour(enum.IntEnum):
    RED = 3
    BLUE = 5


def test_every_file_is_a_source_with_a_name_of_its_own():
    declared = [(source.folder, source.file_name) for source in INSTANCES]
    on_disk = {(f"penstock.{path.parts[-3]}.kernels", path.name) for path in ROOT.glob("*/kernels/*.cu")}

    assert set(declared) == on_disk
    assert len({name for _, name in declared}) == len(declared)  # compilers and tests name files without their folders


def test_enums_of_the_caller_stand_between_the_common_header_and_the_file(tmp_path):
    (tmp_path / "own.cu").write_text("__global__ void paint(int* out) { *out = BLUE; }\n")
    text = CudaSource(tmp_path, "own.cu", enums=(Colour,)).text()

    common = (ROOT / "spmv" / "kernels" / "common.cuh").read_text()
    assert text == (
        f'#line 1 "common.cuh"\n{common}\nenum Colour {{ RED = 3, BLUE = 5 }};\n'
        '#line 1 "own.cu"\n__global__ void paint(int* out) { *out = BLUE; }\n'
    )


def test_the_text_is_the_same_wherever_the_file_lies(tmp_path):
    """CuPy finds compiled kernels again by their text."""
    texts = set()
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "own.cu").write_text("__global__ void nothing() {}\n")
        texts.add(CudaSource(folder, "own.cu").text())

    assert len(texts) == 1
