"""Results folders, figures, progress bars, checkpoints."""
