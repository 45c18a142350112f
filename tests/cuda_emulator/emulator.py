"""Modules and functions of CUDA C++ source that run on NumPy arrays, with the interface of `cupy.RawModule`."""

import ctypes
import operator
import threading
from collections.abc import Sequence

from cuda_emulator.arguments import PlacedArguments, check_arguments
from cuda_emulator.compilation import compile_library, require_supported_machine
from cuda_emulator.errors import EmulationError

# What CUDA allows, whatever the GPU.
GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
MAX_THREADS_IN_BLOCK = 1024
DEFAULT_MAX_SHARED_NBYTES = 48 * 1024

# The emulator keeps its state in global variables of the library, and modules of equal source are the same library.
ONE_LAUNCH_AT_A_TIME = threading.Lock()
_STACKS: list[ctypes.c_void_p] = []

# Every kernel gets two functions with C names. Its name expression stands alone at namespace scope: no macro is
# confused by the commas of its template arguments, and no parameter hides its name.
MODULE_TEMPLATE = """\
#include "cuda_emulator.h"
#line 1 "kernel source"
{source}
#line 1 "name expressions"
{entry_points}"""
ENTRY_POINTS_TEMPLATE = """\
static constexpr auto penstock_emulated_kernel_{index} = &{name};
extern "C" __attribute__((visibility("default"))) const char* penstock_emulator_parameters_{index}() {{
    return penstock_emulator::parameter_codes(penstock_emulated_kernel_{index}); }}
extern "C" __attribute__((visibility("default"))) const char* penstock_emulator_launch_{index}(
    const unsigned* grid, const unsigned* block, std::size_t shared_bytes, std::uint64_t seed, char* stacks,
    const void* const* arguments) {{
    return penstock_emulator::launch(
        penstock_emulated_kernel_{index}, grid, block, shared_bytes, seed, stacks, arguments); }}
"""


class EmulatedModule:
    """Kernels of one CUDA C++ source, compiled for the CPU.

    The source is plain CUDA C++ as `cupy.RawModule` takes it, with one exception: it declares dynamic shared memory
    with ``EMULATED_DYNAMIC_SHARED(type, name)``. It may ask for the macros ``PENSTOCK_CUDA_EMULATOR`` (1) and
    ``PENSTOCK_EMULATED_WARP`` (the warp size). What it includes besides is not part of the key under which the compiled
    module is kept, so pass whole sources.

    Parameters
    ----------
    source
        CUDA C++ source.
    name_expressions
        The kernels, such as ``"scale"`` or ``"csr_spmv<double, double, long long, 8>"``.
    warp_size
        32 as on NVIDIA GPUs or 64 as on many of AMD.
    options
        More options for g++, such as ``"-DNAME=value"``. A language standard among them is ignored.
    sanitize
        Report misaligned accesses, accesses through null pointers, and indices outside arrays whose size the compiler
        knows (such as static shared memory), with the line of the source. Without it some of them crash the process.

    Raises
    ------
    EmulatorUnavailableError
        If this machine is not Linux on x86-64, or has no g++.
    EmulationError
        If the source does not compile.

    Examples
    --------
    >>> module = EmulatedModule(source, ["scale<double, 4>"])
    >>> scale = module.get_function("scale<double, 4>")
    >>> scale((1,), (128,), (x, np.int32(x.size), np.float64(2.0)))
    """

    def __init__(
        self,
        source: str,
        name_expressions: Sequence[str],
        *,
        warp_size: int = 32,
        options: Sequence[str] = (),
        sanitize: bool = True,
    ) -> None:
        if warp_size not in (32, 64):
            raise ValueError(f"warp_size must be 32 or 64, got {warp_size}")
        if isinstance(name_expressions, str):
            raise TypeError("name_expressions must be a sequence of strings, got one string")
        require_supported_machine()
        entry_points = "".join(
            ENTRY_POINTS_TEMPLATE.format(index=index, name=name) for index, name in enumerate(name_expressions)
        )
        path = compile_library(
            MODULE_TEMPLATE.format(source=source, entry_points=entry_points),
            warp_size=warp_size,
            options=options,
            sanitize=sanitize,
        )
        library = ctypes.CDLL(str(path))
        self._functions = {name: EmulatedFunction(name, library, index) for index, name in enumerate(name_expressions)}

    def get_function(self, name: str) -> "EmulatedFunction":
        """Return the kernel of this name expression, written exactly as it was given to the constructor."""
        if name not in self._functions:
            raise EmulationError(f"no kernel {name!r} in this module; its name expressions are {list(self._functions)}")
        return self._functions[name]


class EmulatedFunction:
    """A kernel that can be launched; `EmulatedModule.get_function` makes them.

    Attributes
    ----------
    name
        The name expression.
    max_dynamic_shared_size_bytes
        A launch with more dynamic shared memory is refused. As in CuPy it may be assigned, to raise it above 48 KiB.
    """

    def __init__(self, name: str, library: ctypes.CDLL, index: int) -> None:
        self.name = name
        self.max_dynamic_shared_size_bytes = DEFAULT_MAX_SHARED_NBYTES
        list_parameters = library[f"penstock_emulator_parameters_{index}"]
        list_parameters.restype = ctypes.c_char_p
        self._parameters: list[str] = list_parameters().decode().split()
        self._library = library
        self._launch = library[f"penstock_emulator_launch_{index}"]
        self._launch.restype = ctypes.c_char_p

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[object],
        shared_mem: int = 0,
        seed: int = 0,
    ) -> None:
        """Run the kernel to its end. If that fails, all arrays keep the content that they had before.

        Parameters
        ----------
        grid, block
            Blocks of the grid and threads of a block, as 1 to 3 positive numbers each.
        args
            C-contiguous NumPy arrays, passed as pointers (None is a null pointer), and NumPy scalars, passed by value
            with exactly their dtype.
        shared_mem
            Bytes of dynamic shared memory.
        seed
            0 lets threads and blocks have their turn in natural order; any other number is the seed of a random order.

        Raises
        ------
        EmulationError
            If the kernel did what is an error or undefined on a GPU: threads wait for others that never come, an access
            lies outside shared memory or in the zone around an array, and so on.
        TypeError, ValueError
            If the arguments do not fit the kernel's parameters, or the launch exceeds what a GPU can do.
        """
        grid_shape = _three_lengths("grid", grid, GRID_LIMITS)
        block_shape = _three_lengths("block", block, BLOCK_LIMITS)
        threads = block_shape[0] * block_shape[1] * block_shape[2]
        if threads > MAX_THREADS_IN_BLOCK:
            raise ValueError(f"a block has at most {MAX_THREADS_IN_BLOCK} threads, got {tuple(block)} = {threads}")
        if not 0 <= shared_mem <= self.max_dynamic_shared_size_bytes:
            raise ValueError(
                f"shared_mem must be 0 to {self.max_dynamic_shared_size_bytes} bytes, got {shared_mem}; "
                f"assign max_dynamic_shared_size_bytes to allow more"
            )
        check_arguments(self.name, self._parameters, args)
        placed = PlacedArguments(self.name, args)
        with ONE_LAUNCH_AT_A_TIME:
            failure: bytes | None = self._launch(
                (ctypes.c_uint * 3)(*grid_shape),
                (ctypes.c_uint * 3)(*block_shape),
                ctypes.c_size_t(shared_mem),
                ctypes.c_uint64(seed),
                _stacks(self._library),
                placed.value_addresses(),
            )
        if failure is not None:
            raise EmulationError(f"{self.name}: {failure.decode()}")
        placed.check_writes()
        placed.copy_back()


def _stacks(library: ctypes.CDLL) -> ctypes.c_void_p:
    """Return the stacks that all launches of this process use one after the other; the first library makes them."""
    if not _STACKS:
        make = library.penstock_emulator_make_stacks
        make.restype, make.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        address = make(MAX_THREADS_IN_BLOCK)
        if address is None:
            raise MemoryError("no address space for the stacks of emulated threads")
        _STACKS.append(ctypes.c_void_p(address))
    return _STACKS[0]


def _three_lengths(what: str, shape: Sequence[int], limits: tuple[int, int, int]) -> tuple[int, int, int]:
    lengths = [operator.index(length) for length in shape]
    x, y, z = (*lengths, 1, 1, 1)[:3]
    if not 1 <= len(lengths) <= len(limits) or not all(1 <= n <= m for n, m in zip((x, y, z), limits, strict=True)):
        raise ValueError(f"{what} must be 1 to 3 integers between 1 and {limits}, got {tuple(shape)}")
    return x, y, z
