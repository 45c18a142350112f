"""The communication-hiding study."""
