"""Interrupts at a place that tests choose."""

import signal


def interrupt_at(patch, module, iteration):
    """Send this process SIGINT when an iteration ends, as a module that shows progress hears of it."""
    real = module.solve_progress

    def watched(record, *arguments):
        if record.iteration == iteration:
            signal.raise_signal(signal.SIGINT)
        return real(record, *arguments)

    patch.setattr(module, "solve_progress", watched)
