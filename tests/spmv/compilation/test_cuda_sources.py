"""Every CUDA kernel compiles for every architecture, without a GPU."""

import re

import nvrtc
import pytest
from kernel_instances import ARCHITECTURES, ENDS, FIRSTS, INSTANCES

from penstock.spmv.compilation.cuda_module import cuda_source


@pytest.fixture(autouse=True)
def _needs_nvrtc():
    try:
        nvrtc.load_nvrtc()
    except (nvrtc.NvrtcUnavailableError, OSError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.mark.parametrize("file_name", sorted(INSTANCES))
def test_every_instantiation_compiles(file_name):
    size = nvrtc.compile_for("compute_90", cuda_source(file_name), INSTANCES[file_name])

    assert size > 1000 * len(INSTANCES[file_name])  # about a kilobyte a kernel at least


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file_name", sorted(INSTANCES))
def test_machine_code_is_made_for_every_architecture(file_name, architecture):
    size = nvrtc.compile_for(architecture, cuda_source(file_name), ENDS[file_name])

    assert size > 1000 * len(ENDS[file_name])


@pytest.mark.parametrize("file_name", sorted(INSTANCES))
def test_optimised_code_is_made_of_one_of_every_kernel(file_name):
    size = nvrtc.compile_for("sm_90", cuda_source(file_name), FIRSTS[file_name], optimised=True)

    assert size > 1000 * len(FIRSTS[file_name])


@pytest.mark.parametrize("file_name", sorted(INSTANCES))
def test_every_kernel_of_a_file_is_instantiated(file_name):
    kernels = set(re.findall(r"__launch_bounds__\([^()]+\)\s*(\w+)\(", cuda_source(file_name)))

    assert kernels == {expression.partition("<")[0] for expression in INSTANCES[file_name]}


def test_a_compile_error_names_the_kernel_file_and_line():
    with pytest.raises(RuntimeError, match=r"csr\.cu\(\d+\)"):
        nvrtc.compile_for(
            "sm_90", cuda_source("csr.cu").replace("const int lane ", "const integer lane "), INSTANCES["csr.cu"][:1]
        )
