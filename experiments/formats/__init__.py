"""Compares storage formats and peer libraries on one matrix."""
