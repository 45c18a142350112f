"""Which functions of the CUDA driver and runtime a program calls, counted by NVIDIA's CUPTI."""

from __future__ import annotations

import ctypes
import glob
from collections import Counter
from types import TracebackType
from typing import Any, Self

_DRIVER, _RUNTIME, _ENTER = 1, 2, 0


class _CallbackData(ctypes.Structure):
    """The head of ``CUpti_CallbackData``, as far as it is read."""

    _fields_ = (("site", ctypes.c_int), ("function_name", ctypes.c_char_p))


class CallTrace:
    """Counts calls of the CUDA driver and runtime by name between ``__enter__`` and ``__exit__``, of all threads.

    Raises
    ------
    OSError
        If CUPTI is not installed.
    """

    def __init__(self) -> None:
        paths = ["libcupti.so", *sorted(glob.glob("/usr/local/cuda*/targets/*/lib/libcupti.so*"))]
        for number, path in enumerate(paths):
            try:
                self._cupti = ctypes.CDLL(path)
                break
            except OSError:
                if number == len(paths) - 1:
                    raise
        self._calls: Counter[str] = Counter()
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_CallbackData))
        self._callback = kind(self._note)
        self._subscriber = ctypes.c_void_p()

    def _note(self, _user: Any, _domain: int, _function: int, data: Any) -> None:
        if data.contents.site == _ENTER:
            self._calls[data.contents.function_name.decode()] += 1

    def take(self) -> dict[str, int]:
        """Return the calls since the last time."""
        calls = dict(self._calls)
        self._calls.clear()
        return calls

    def __enter__(self) -> Self:
        self._check(self._cupti.cuptiSubscribe(ctypes.byref(self._subscriber), self._callback, None))
        for domain in (_DRIVER, _RUNTIME):
            self._check(self._cupti.cuptiEnableDomain(ctypes.c_uint32(1), self._subscriber, domain))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._check(self._cupti.cuptiUnsubscribe(self._subscriber))

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise OSError(f"CUPTI reports error {status}")
