"""Smoothed aggregation: one coarsening, for the coarse level of a sweep and for multigrid cycles over stored levels."""
