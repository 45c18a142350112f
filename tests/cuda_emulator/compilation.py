"""Compile kernels and the emulator's headers into a shared library, once for every distinct source."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    source, the headers and the command. It appears there by one atomic rename. A process that wants what another one is
    compiling waits for it. Modules without options of their own share the precompiled headers.

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
    command += [f"-DPENSTOCK_EMULATED_WARP={warp_size}"]
    command += [option for option in options if not option.lstrip("-").startswith("std=")]
    library = _private_cache_folder() / f"{_fingerprint(source, *command)}.so"
    with _work_folder_unless_there(library) as work:
        if work:
            folders = [HEADER_FOLDER] if options else [_precompiled_headers(command), HEADER_FOLDER]
            (work / "kernels.cpp").write_text(source)
            quoted = [word for folder in folders for word in ("-iquote", str(folder))]
            _run([*command, *quoted, "-c", "kernels.cpp", "-o", "kernels.o"], work)
            _run([compiler, "-shared", "kernels.o", "-o", "kernels.so"], work)
            os.replace(work / "kernels.so", library)
    return library


def _precompiled_headers(command: Sequence[str]) -> Path:
    """Return a folder that holds all headers compiled for a command; g++ passes over what another command made.

    Reading the headers takes a second for every module, and compiling them takes three once.
    """
    compiled = _private_cache_folder() / _fingerprint(*command) / "cuda_emulator.h.gch"
    compiled.parent.mkdir(exist_ok=True)
    with _work_folder_unless_there(compiled) as work:
        if work:
            _run([*command, "-x", "c++-header", str(HEADER_FOLDER / "cuda_emulator.h"), "-o", compiled.name], work)
            os.replace(work / compiled.name, compiled)
    return compiled.parent


def _fingerprint(*texts: str) -> str:
    """Return a hash of texts and of the headers."""
    fingerprint = hashlib.sha256("\0".join(texts).encode())
    for header in sorted(HEADER_FOLDER.glob("*.h")):
        fingerprint.update(header.read_bytes())
    return fingerprint.hexdigest()[:32]


@contextmanager
def _work_folder_unless_there(file: Path) -> Iterator[Path | None]:
    """Give a folder in which a file may be made, to one process at a time; None if the file exists."""
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the lock is closed
        if file.exists():
            yield None
            return
        with tempfile.TemporaryDirectory(dir=file.parent) as work_folder:
            yield Path(work_folder)


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
