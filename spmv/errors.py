"""The exceptions that penstock raises.

::

    PenstockError
    ├── InputError          (ValueError)    an invalid matrix, vector, option or file
    ├── BudgetError         (MemoryError)   a request that exceeds its memory budget
    ├── StoreError          (OSError)       a matrix on disk or in host memory that cannot be read or written
    └── DeviceError         (RuntimeError)  a requested accelerator that is not usable

Each also derives from the matching built-in exception, so ``except ValueError`` keeps working.
"""

__all__ = ["BudgetError", "DeviceError", "InputError", "PenstockError", "StoreError"]


class PenstockError(Exception):
    """Base of all errors raised by penstock."""


class InputError(PenstockError, ValueError):
    """An argument or file is invalid; the message says what was expected and what was received."""


class BudgetError(PenstockError, MemoryError):
    """A request exceeds its memory budget; the message names the smallest sufficient budget."""


class StoreError(PenstockError, OSError):
    """A stored matrix is missing, truncated, altered or cannot be written; the message names the file and the place."""


class DeviceError(PenstockError, RuntimeError):
    """The requested device is not usable; the message says why and how to make it so."""
