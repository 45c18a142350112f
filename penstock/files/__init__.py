"""Reads matrices and arrays in files of other programs, and makes stores of them."""
