"""Runs CUDA C++ kernels on NumPy arrays, on a machine without a GPU, and reports what a GPU would leave undefined."""

from cuda_emulator.emulator import EmulatedModule
from cuda_emulator.errors import EmulationError, EmulatorUnavailableError

__all__ = ["EmulatedModule", "EmulationError", "EmulatorUnavailableError"]
