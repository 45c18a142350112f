"""Stores hold matrices on disk or in host memory, cut into subdivisions."""
