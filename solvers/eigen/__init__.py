"""The lowest modes of ``K x = lambda M x``."""
