"""Systems as engineers and researchers have them, generated, and what solves them: ``python benchmarks/zoo cpu2``.

This module imports nothing, so that a peer's process can import :mod:`zoo.peers` where penstock is not installed.
"""
