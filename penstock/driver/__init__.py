"""Solves a whole problem: takes what callers have, decides where and how it is computed, and solves it."""
