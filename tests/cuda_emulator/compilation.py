"""Compile kernels and the emulator's headers into a shared library, once for every distinct source."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cuda_emulator.errors import EmulationError, EmulatorUnavailableError

HEADER_FOLDER = Path(__file__).resolve().parent

COMPILER_FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-w",
    "-fno-strict-aliasing",
    # Kernels of equal name in two modules must remain two kernels with two sets of shared variables.
    "-fno-gnu-unique",
    "-fvisibility=hidden",
)
# The functions that the compiler calls at a failed check are in memory_checks.h, so libubsan is not linked.
SANITIZER_FLAGS = ("-fsanitize=null,alignment,bounds", "-fno-sanitize-recover=all")


def require_supported_machine() -> None:
    """Raise `EmulatorUnavailableError` unless this is Linux on x86-64, for which the switch of stacks is written."""
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in ("x86_64", "AMD64"):
        raise EmulatorUnavailableError(
            f"the CUDA emulator runs on Linux on x86-64 only; this machine is {sys.platform} on {machine}"
        )


def compile_library(source: str, *, warp_size: int, options: Sequence[str], sanitize: bool) -> Path:
    """Compile C++ source that includes the emulator's headers; return the path of the shared library.

    The library is kept in a folder of this user under the system's temporary folder and found again by a hash of the
    source, the headers and the command. It appears there by one atomic rename, so processes may compile at once.

    Parameters
    ----------
    source
        A complete translation unit.
    warp_size
        32 or 64; becomes the macro ``PENSTOCK_EMULATED_WARP``.
    options
        More options for g++. A language standard among them is left out: the headers need the one given here.
    sanitize
        Whether to test alignment, null pointers and indices into arrays of known size at every access.

    Raises
    ------
    EmulatorUnavailableError
        If there is no g++.
    EmulationError
        If the source does not compile; the message is the compiler's.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise EmulatorUnavailableError("the CUDA emulator compiles kernels with g++, which is not on the PATH")
    command = [compiler, *COMPILER_FLAGS, *(SANITIZER_FLAGS if sanitize else ())]
    command += [f"-DPENSTOCK_EMULATED_WARP={warp_size}", "-iquote", str(HEADER_FOLDER)]
    command += [option for option in options if not option.lstrip("-").startswith("std=")]

    fingerprint = hashlib.sha256("\0".join([source, *command]).encode())
    for header in sorted(HEADER_FOLDER.glob("*.h")):
        fingerprint.update(header.read_bytes())
    folder = _private_cache_folder()
    library = folder / f"{fingerprint.hexdigest()[:32]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work_folder:
            work = Path(work_folder)
            (work / "kernels.cpp").write_text(source)
            _run([*command, "-c", "kernels.cpp", "-o", "kernels.o"], work)
            _run([compiler, "-shared", "kernels.o", "-o", "kernels.so"], work)
            os.replace(work / "kernels.so", library)
    return library


def _private_cache_folder() -> Path:
    """Return the folder of compiled libraries; refuse one that belongs to another user, who could plant a library."""
    user = os.getuid()
    folder = Path(tempfile.gettempdir()) / f"penstock-cuda-emulator-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != user:
        raise EmulationError(f"{folder} belongs to another user; remove it or set TMPDIR to a folder of your own")
    return folder


def _run(command: Sequence[str], folder: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C"}  # messages in English and ASCII
    completed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise EmulationError(f"the kernels do not compile for the emulator:\n{completed.stderr}")
