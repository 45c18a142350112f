"""Linear systems in files."""
