"""Measures the rates of this machine for predicted times of plans."""
