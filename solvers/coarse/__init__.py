"""The coarse level: aggregates, a smoothed prolongator that is never stored, one sweep an iteration."""
