"""Algebraic multigrid by smoothed aggregation: one coarsening, for a coarse level in a sweep and for cycles over stored levels."""
