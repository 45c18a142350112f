"""Executes plans: transfers, computations, and the memory for both."""
