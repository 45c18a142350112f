"""Cantilevers described in YAML: solved, resumed, sampled and compared."""
