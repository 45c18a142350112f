"""Compiles, looks up and launches kernels on CPUs and CUDA devices."""
