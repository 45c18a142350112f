"""Every CUDA kernel compiles for every architecture, without a GPU."""

import re

import nvrtc
import pytest
from kernel_instances import ARCHITECTURES, INSTANCES, SAMPLED_FOR, instances_for

from penstock.spmv.compilation.cuda_module import cuda_source


@pytest.fixture(autouse=True)
def _needs_nvrtc():
    try:
        nvrtc.load_nvrtc()
    except (nvrtc.NvrtcUnavailableError, OSError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.mark.parametrize("architecture", [SAMPLED_FOR, *ARCHITECTURES])
@pytest.mark.parametrize("file_name", sorted(INSTANCES))
def test_instantiations_compile(file_name, architecture):
    instances = instances_for(architecture, file_name)

    size = nvrtc.compile_for(architecture, cuda_source(file_name), instances)

    assert size > 1000 * len(instances)  # about a kilobyte a kernel at least


@pytest.mark.parametrize("file_name", sorted(INSTANCES))
def test_every_kernel_of_a_file_is_instantiated(file_name):
    kernels = set(re.findall(r"__launch_bounds__\([^()]+\)\s*(\w+)\(", cuda_source(file_name)))

    assert kernels == {expression.partition("<")[0] for expression in INSTANCES[file_name]}


def test_a_compile_error_names_the_kernel_file_and_line():
    with pytest.raises(RuntimeError, match=r"csr\.cu\(\d+\)"):
        nvrtc.compile_for(
            "sm_90", cuda_source("csr.cu").replace("const int lane ", "const integer lane "), INSTANCES["csr.cu"][:1]
        )
