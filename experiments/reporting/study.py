"""A study: points measured one after another, with records in a folder from which an interrupted study is resumed."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from penstock.driver.progress import Reporter
from penstock.experiments.reporting.atomic import write_json
from penstock.experiments.reporting.base_folder import BaseFolder
from penstock.experiments.reporting.interrupts import stop_requests
from penstock.spmv import InputError

Record = dict[str, Any]
Point = TypeVar("Point")
AnyFolder = TypeVar("AnyFolder", bound=BaseFolder)


class StudyStopped(Exception):
    """Raised by :meth:`Study.measure` if a point was stopped on request; the point stays to be measured."""


class StudyFolder(BaseFolder):
    """The folder of a study: its configuration, and one JSON file with all records."""

    #: Name of the JSON file, and whether it is a list of records or an object with the list under ``"records"``.
    records_name: ClassVar[str] = "records.json"
    is_list: ClassVar[bool] = False
    damaged_advice = "; start the study anew"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.records = path / self.records_name

    def read(self) -> dict[str, Any]:
        """Return the contents of the JSON file with the list under ``"records"``; no records if there is no file yet."""
        if not self.records.exists():
            return {"records": []}
        data = self.read_json(self.records)
        document = {"records": data} if isinstance(data, list) and self.is_list else data
        if not isinstance(document, dict) or not isinstance(document.get("records"), list):
            raise InputError(f"cannot read {self.records}: it holds no list of records{self.damaged_advice}")
        return document

    def write(self, header: Record, records: list[Record]) -> None:
        """Write all records, after the header if the file is an object."""
        write_json(self.records, records if self.is_list else {**header, "records": records}, indent=1)


class Study(ABC, Generic[Point, AnyFolder]):
    """Measures points one after another; records are written after each, so that an interrupt loses one point at most.

    A study that does not write its records to a :class:`StudyFolder` overrides :meth:`load` and :meth:`save`. ``resources``
    are closed when measuring ends, for example a matrix that several points share.
    """

    #: Errors of a point that are recorded by :meth:`refused` instead of ending the study.
    refusals: ClassVar[tuple[type[Exception], ...]] = ()
    #: Whether SIGINT and SIGTERM stop the study after the point being measured. False if :meth:`measure` sees to them.
    stops_between_points: ClassVar[bool] = True

    def __init__(self, folder: AnyFolder, reporter: Reporter | None = None) -> None:
        self.folder = folder
        self.reporter = reporter or Reporter()
        self.records: list[Record] = []
        self.resources = contextlib.ExitStack()

    @abstractmethod
    def points(self) -> Sequence[Point]:
        """Return all points, in the order in which they are measured."""

    @abstractmethod
    def is_done(self, point: Point) -> bool:
        """Return whether :attr:`records` hold those of a point."""

    @abstractmethod
    def measure(self, point: Point) -> list[Record]:
        """Measure a point and return its records, or raise StudyStopped if stopped on request."""

    @abstractmethod
    def report(self) -> None:
        """Write what all records show together; called when no point is missing."""

    def refused(self, point: Point, error: Exception) -> list[Record]:
        """Return the records of a point that could not be measured for one of :attr:`refusals`."""
        return []

    def header(self) -> dict[str, Any]:
        """Return what the JSON file holds before the records."""
        return {}

    def prepare(self, missing: Sequence[Point]) -> None:
        """Get ready to measure; called once if points are missing."""

    def load(self) -> list[Record]:
        """Return the records of earlier runs."""
        assert isinstance(self.folder, StudyFolder)
        return list(self.folder.read()["records"])

    def save(self) -> None:
        """Write all records so far."""
        assert isinstance(self.folder, StudyFolder)
        self.folder.write(self.header(), self.records)

    def missing(self) -> list[Point]:
        """Return the points without records."""
        return [point for point in self.points() if not self.is_done(point)]

    def run(self) -> bool:
        """Measure the missing points and report; return whether all points are measured, False if stopped on request."""
        self.records = self.load()
        missing = self.missing()
        with self._stop_requests() as stop, self.resources:
            if missing:
                self.prepare(missing)
            for point in missing:
                if stop.is_set():
                    return False
                try:
                    self.records += self._measured(point)
                except StudyStopped:
                    return False
                self.save()
        self.report()
        return True

    def _measured(self, point: Point) -> list[Record]:
        try:
            return self.measure(point)
        except self.refusals as error:
            return self.refused(point, error)

    def _stop_requests(self) -> contextlib.AbstractContextManager[threading.Event]:
        if not self.stops_between_points:
            return contextlib.nullcontext(threading.Event())
        return stop_requests(self.reporter, "this point")
