"""Solves with sparse triangles, and the preconditioners made of them."""
