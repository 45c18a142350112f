"""The errors of the emulator."""


class EmulationError(RuntimeError):
    """A kernel does not compile, or did something that is an error or undefined on a GPU."""


class EmulatorUnavailableError(EmulationError):
    """The emulator needs Linux on x86-64 and g++, and this machine lacks one. A test may skip on this error."""
