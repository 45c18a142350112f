"""Multigrid for matrices that are held in memory: smoothed aggregation with a stored prolongator."""
