"""Kernels on vectors and blocks of vectors."""
