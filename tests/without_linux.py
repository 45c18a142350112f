"""Takes from this process what only Linux has, and lets files behave as on Windows, which removes nothing that is open.

Imported first, by a process of its own: ``import without_linux``. Libraries are loaded before, since they ask for the platform.
"""

import builtins
import io
import mmap
import os
import shutil
import sys
import tempfile
from pathlib import Path

# What penstock is built on; these are at home on every system.
import h5py
import llvmlite.binding
import matplotlib.pyplot
import numba
import numpy
import platformdirs
import psutil
import pydantic
import rich.console
import scipy.linalg
import scipy.sparse
import typer
import yaml

LIBRARIES = (h5py, llvmlite, matplotlib, numba, numpy, platformdirs, psutil, pydantic, rich, scipy, typer, yaml)
MODULES = ("fcntl", "grp", "posix", "pwd", "resource", "syslog", "termios")
OF_OS = """
    O_CLOEXEC O_DIRECT O_DIRECTORY fdatasync fork getegid geteuid getgid getloadavg getpgid getuid killpg mkfifo nice pread
    preadv process_cpu_count pwrite pwritev posix_fadvise posix_fallocate readv sched_getaffinity sched_setaffinity sysconf
    sysconf_names uname writev
"""
HIDDEN = ("/proc", "/sys")

for name in MODULES:
    sys.modules[name] = None  # import then raises ModuleNotFoundError
for name in OF_OS.split():
    if hasattr(os, name):
        delattr(os, name)
for name in ("MADV_HUGEPAGE", "MAP_PRIVATE", "MAP_ANONYMOUS"):
    delattr(mmap, name)
shutil._use_fd_functions = False  # a tree is then removed by names
tempfile.TemporaryFile = tempfile.NamedTemporaryFile  # which has a name until it is closed


def opened_files():
    """Return the names of the files that this process has open, mapped into memory or not."""
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # that of the list itself
            continue
    with real_open("/proc/self/maps") as lines:
        return names | {line.split(maxsplit=5)[-1].strip() for line in lines}


def refuse_if_open(path):
    path = os.path.realpath(path)
    for name in opened_files():
        if name == path or name.startswith(path + os.sep):
            raise PermissionError(13, "Windows: in use by this process", name)


def hidden(path):
    if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(HIDDEN):
        return False
    frame = sys._getframe(2)
    while frame is not None:  # psutil asks Linux here, and Windows there
        if frame.f_globals.get("__name__", "").startswith("psutil"):
            return False
        frame = frame.f_back
    return True


real_open, real_os_open, real_rename, real_unlink = io.open, os.open, os.rename, os.unlink


def open_file(path, *arguments, **keywords):
    if hidden(path):
        raise FileNotFoundError(2, "no such file on this system", path)
    return real_open(path, *arguments, **keywords)


def open_descriptor(path, *arguments, **keywords):
    if os.path.isdir(path):
        raise PermissionError(13, "Windows: a folder cannot be opened", path)
    return real_os_open(path, *arguments, **keywords)


def rename(source, target, **keywords):
    if os.path.lexists(target):
        raise FileExistsError(17, "Windows: the name is taken", target)
    refuse_if_open(source)
    real_rename(source, target, **keywords)


def unlink(path, **keywords):
    refuse_if_open(path)
    real_unlink(path, **keywords)


builtins.open = io.open = open_file
os.open, os.rename, os.unlink, os.remove = open_descriptor, rename, unlink, unlink

if "penstock" in sys.modules:
    raise RuntimeError("import without_linux first")
import penstock.streaming.stores.store_place  # noqa: E402

penstock.streaming.stores.store_place._RENAMES_TO_EMPTY_FOLDERS = False
assert not Path("/sys").joinpath("nothing").exists()
