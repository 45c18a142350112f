"""Products of sparse matrices, of numbers or of small dense blocks."""
