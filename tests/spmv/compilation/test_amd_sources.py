"""Every CUDA kernel compiles for AMD's architectures through hiprtc, without a GPU."""

import hiprtc
import pytest
from kernel_instances import ENDS, FIRSTS

from penstock.spmv.formats.csr import CSR_KERNELS

ARCHITECTURES = ("gfx90a", "gfx1030")  # warps of 64 lanes and of 32


@pytest.fixture(autouse=True)
def _needs_hiprtc():
    try:
        hiprtc.load_hiprtc()
    except hiprtc.HiprtcUnavailableError as error:
        pytest.skip(f"hiprtc is not installed: {error}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", ENDS, ids=str)
def test_instantiations_compile(source, architecture):
    instances = (ENDS if architecture == "gfx90a" else FIRSTS)[source]

    size = hiprtc.compile_for(architecture, source.text(), instances)

    assert size > 1000 * len(instances)  # machine code of about a kilobyte a kernel at least


def test_a_compile_error_names_the_kernel_file_and_line():
    with pytest.raises(RuntimeError, match=r"csr\.cu:\d+:\d+: error: .*'integer'"):
        hiprtc.compile_for(
            "gfx90a", CSR_KERNELS.text().replace("const int lane ", "const integer lane "), ENDS[CSR_KERNELS][:1]
        )


def test_the_nvidia_spelling_of_a_shuffle_is_refused():
    # Under hiprtc it is not known, so the tests above show that the AMD branch of common.cuh is the one compiled.
    source = "__global__ void kernel(double* out) { *out = __shfl_sync(0xffffffffu, *out, 0, 32); }"

    with pytest.raises(RuntimeError, match="__shfl_sync"):
        hiprtc.compile_for("gfx90a", source, ["kernel"])
