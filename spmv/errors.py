"""Every error that penstock raises on purpose.

::

    PenstockError
    ├── InputError          (ValueError)    a matrix, vector, option or file that cannot mean what it says
    ├── BudgetError         (MemoryError)   a request that does not fit the memory it was allowed
    ├── StoreError          (OSError)       a matrix on disk or in host memory that cannot be read or written
    └── DeviceError         (RuntimeError)  an accelerator that is asked for and is not there

Each also derives from the built-in error a caller would expect, so ``except ValueError`` keeps working.
"""

__all__ = ["BudgetError", "DeviceError", "InputError", "PenstockError", "StoreError"]


class PenstockError(Exception):
    """Base of all errors raised by penstock."""


class InputError(PenstockError, ValueError):
    """What was handed over cannot be used; the message says what was expected and what came."""


class BudgetError(PenstockError, MemoryError):
    """A request exceeds the memory it was allowed; the message names the smallest budget that would do."""


class StoreError(PenstockError, OSError):
    """A stored matrix is missing, truncated, altered or cannot be written; the message names the file and the place."""


class DeviceError(PenstockError, RuntimeError):
    """The requested device is not usable; the message says why and what would make it so."""
