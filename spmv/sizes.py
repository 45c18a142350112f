"""Parses and formats sizes in bytes."""

from __future__ import annotations

import re

from penstock.spmv.errors import InputError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_nbytes(size: int | float | str) -> int:
    """Return the bytes of a size: ``"2 GiB"``, ``"500MB"`` or a number of bytes.

    Parameters
    ----------
    size : int, float or str
        In bytes, or with a unit: kB, MB, GB, TB of powers of 1000, KiB, MiB, GiB, TiB of powers of 1024.

    Returns
    -------
    int

    Raises
    ------
    InputError
        If it is not a positive size.

    Examples
    --------
    >>> from penstock.spmv import parse_nbytes
    >>> parse_nbytes("1.5 KiB"), parse_nbytes("500MB")
    (1536, 500000000)
    """
    if isinstance(size, int | float) and not isinstance(size, bool):
        nbytes = float(size)
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", str(size).lower())
        if not match or match[2] not in _UNITS:
            raise InputError(
                f"cannot read {size!r} as a size; write a number of bytes or for example '512 MiB' or '2 GiB'"
            )
        nbytes = float(match[1]) * _UNITS[match[2]]
    if not 1 <= nbytes < 2**63:
        raise InputError(f"a size must be positive, not {size!r}")
    return int(nbytes)


def format_nbytes(nbytes: float) -> str:
    """Format a number of bytes in binary units.

    Parameters
    ----------
    nbytes : float
        Of any sign; rounded to 4 digits.

    Returns
    -------
    str
        In B, KiB, MiB, GiB or TiB.

    Examples
    --------
    >>> from penstock.spmv import format_nbytes
    >>> format_nbytes(1536)
    '1.5 KiB'
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.4g} {unit}"
