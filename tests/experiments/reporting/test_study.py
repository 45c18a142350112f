"""A study measures what is missing, keeps what was measured, and stops when asked to."""

import contextlib
import json
import signal
from typing import ClassVar

import pytest

from penstock.experiments.reporting.base_folder import BaseFolder
from penstock.experiments.reporting.study import Study, StudyFolder, StudyStopped
from penstock.spmv import InputError


class ListFolder(StudyFolder):
    is_list: ClassVar[bool] = True


class Squares(Study):
    """Squares numbers; ``before`` is called with each number first."""

    refusals = (ZeroDivisionError,)

    def __init__(self, folder, before=lambda number: None):
        super().__init__(folder)
        self.before, self.measured, self.reports = before, [], 0

    def points(self):
        return [1, 2, 3, 4]

    def is_done(self, point):
        return any(record["n"] == point for record in self.records)

    def header(self):
        return {"unit": "one"}

    def measure(self, point):
        self.before(point)
        self.measured.append(point)
        return [{"n": point, "square": point**2}]

    def refused(self, point, error):
        return [{"n": point, "refused": str(error)}]

    def report(self):
        self.reports += 1


def at(number, action):
    def before(point):
        if point == number:
            action()

    return before


def fail(error):
    def action():
        raise error

    return action


@pytest.fixture(params=[StudyFolder, ListFolder])
def folder(request, tmp_path):
    return request.param(tmp_path)


def numbers(folder):
    return [record["n"] for record in folder.read()["records"]]


def test_all_points_are_measured_recorded_and_reported(folder):
    study = Squares(folder)

    assert study.run()

    assert folder.read()["records"] == [{"n": n, "square": n * n} for n in (1, 2, 3, 4)]
    assert study.reports == 1


def test_the_header_stands_before_the_records(tmp_path):
    Squares(StudyFolder(tmp_path)).run()

    assert list(json.loads((tmp_path / "records.json").read_text())) == ["unit", "records"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no disk")])
def test_an_interrupt_or_an_error_keeps_what_was_measured_and_the_rest_is_measured_later(error, folder):
    with pytest.raises(type(error)):
        Squares(folder, at(3, fail(error))).run()
    assert numbers(folder) == [1, 2]

    again = Squares(folder)

    assert again.run()
    assert again.measured == [3, 4]
    assert numbers(folder) == [1, 2, 3, 4]


def test_a_finished_study_is_only_reported_again(folder):
    Squares(folder).run()
    again = Squares(folder)

    assert again.run()
    assert (again.measured, again.reports) == ([], 1)


def test_a_refused_point_is_recorded_with_its_reason(folder):
    assert Squares(folder, at(2, fail(ZeroDivisionError("by zero")))).run()

    assert folder.read()["records"][1] == {"n": 2, "refused": "by zero"}
    assert numbers(folder) == [1, 2, 3, 4]


def test_a_signal_stops_the_study_after_the_point_being_measured(folder):
    study = Squares(folder, at(2, lambda: signal.raise_signal(signal.SIGINT)))

    assert not study.run()
    assert numbers(folder) == [1, 2]
    assert study.reports == 0


def test_a_signal_during_the_last_point_stops_nothing(folder):
    study = Squares(folder, at(4, lambda: signal.raise_signal(signal.SIGINT)))

    assert study.run()
    assert study.reports == 1


def test_a_second_signal_stops_at_once(folder):
    def twice():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Squares(folder, at(2, twice)).run()
    assert numbers(folder) == [1]


def test_a_point_that_stops_on_request_stays_to_be_measured(folder):
    assert not Squares(folder, at(2, fail(StudyStopped()))).run()

    assert numbers(folder) == [1]


def test_resources_are_released_however_the_study_ends(folder):
    closed = []
    for before in (lambda number: None, at(1, fail(KeyboardInterrupt()))):
        folder.records.unlink(missing_ok=True)
        study = Squares(folder, before)
        study.prepare = lambda missing, study=study: study.resources.callback(closed.append, True)
        with contextlib.suppress(KeyboardInterrupt):
            study.run()

    assert closed == [True, True]


@pytest.mark.parametrize("content", ["{", "3", "{}", '{"records": 3}'])
def test_damaged_records_are_refused(content, folder):
    folder.records.write_text(content)

    with pytest.raises(InputError, match=r"cannot read .*records\.json.*start the study anew"):
        Squares(folder).run()


def test_a_folder_in_use_is_refused_with_advice(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")

    with pytest.raises(InputError, match="is not an empty folder; choose another --output"):
        BaseFolder(tmp_path).made().__enter__()
    with pytest.raises(InputError, match="is not an empty folder; take another"):
        BaseFolder(tmp_path / "mine.txt").made("take another").__enter__()
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


def test_a_configuration_keeps_its_order(tmp_path):
    folder = BaseFolder(tmp_path / "new" / "folder")
    folder.make_parents()
    folder.write_configuration({"b": 1, "a": [1, 2]})

    assert folder.configuration.read_text().index("b:") < folder.configuration.read_text().index("a:")
