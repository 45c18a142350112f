"""Every CUDA kernel compiles for every architecture, without a GPU."""

import re

import nvrtc
import pytest
from kernel_instances import ARCHITECTURES, ENDS, FIRSTS, INSTANCES

from penstock.spmv.formats.csr import CSR_KERNELS


@pytest.fixture(autouse=True)
def _needs_nvrtc():
    try:
        nvrtc.load_nvrtc()
    except (nvrtc.NvrtcUnavailableError, OSError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.mark.parametrize("source", INSTANCES, ids=str)
def test_every_instantiation_compiles(source):
    size = nvrtc.compile_for("compute_90", source.text(), INSTANCES[source])

    assert size > 1000 * len(INSTANCES[source])  # about a kilobyte a kernel at least


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", INSTANCES, ids=str)
def test_machine_code_is_made_for_every_architecture(source, architecture):
    size = nvrtc.compile_for(architecture, source.text(), ENDS[source])

    assert size > 1000 * len(ENDS[source])


@pytest.mark.parametrize("source", INSTANCES, ids=str)
def test_optimised_code_is_made_of_one_of_every_kernel(source):
    size = nvrtc.compile_for("sm_90", source.text(), FIRSTS[source], optimised=True)

    assert size > 1000 * len(FIRSTS[source])


@pytest.mark.parametrize("source", INSTANCES, ids=str)
def test_every_kernel_of_a_file_is_instantiated(source):
    kernels = set(re.findall(r"__launch_bounds__\([^()]+\)\s*(\w+)\(", source.text()))

    assert kernels == {expression.partition("<")[0] for expression in INSTANCES[source]}


def test_a_compile_error_names_the_kernel_file_and_line():
    with pytest.raises(RuntimeError, match=r"csr\.cu\(\d+\)"):
        nvrtc.compile_for(
            "sm_90", CSR_KERNELS.text().replace("const int lane ", "const integer lane "), INSTANCES[CSR_KERNELS][:1]
        )
