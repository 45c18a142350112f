"""A store takes its name only if that is free at the end, replaces nothing but a store, and clears what the dead have left."""

import os
import threading
import time
from pathlib import Path

import pytest
import scipy.sparse

from penstock.spmv import InputError
from penstock.streaming import FileStore
from penstock.streaming.stores import store_place


def slabs(factor=1):
    return [factor * scipy.sparse.eye_array(10, 40, k=10 * k, format="csr") for k in range(4)]


def names(folder):
    return sorted(str(entry.relative_to(folder)) for entry in folder.rglob("*"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_appears_while_a_store_is_built_stays(overwrite, tmp_path):
    def building():
        yield from slabs()[:2]
        (tmp_path / "beam").mkdir()
        (tmp_path / "beam" / "thesis.txt").write_text("the only copy")
        yield from slabs()[2:]

    with pytest.raises(InputError, match="was made by another process meanwhile"):
        FileStore.create(tmp_path / "beam", building(), overwrite=overwrite)

    assert names(tmp_path) == ["beam", "beam/thesis.txt"]


def test_of_two_builders_the_second_to_end_is_refused(tmp_path):
    def building():
        yield from slabs()[:2]
        FileStore.create(tmp_path / "s", slabs(), label="first").close()
        yield from slabs()[2:]

    with pytest.raises(InputError, match="was made by another process meanwhile"):
        FileStore.create(tmp_path / "s", building(), label="second")

    assert FileStore(tmp_path / "s").label == "first"
    assert names(tmp_path) == ["s", "s/index.json", "s/slabs.bin"]


def test_builders_in_a_hurry_leave_one_store(tmp_path):
    outcomes, start = [], threading.Barrier(6)

    def build(number):
        start.wait()
        try:
            FileStore.create(tmp_path / "s", slabs(number), label=str(number)).close()
            outcomes.append(str(number))
        except InputError:
            outcomes.append(None)

    threads = [threading.Thread(target=build, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    [label] = filter(None, outcomes)
    assert FileStore(tmp_path / "s").label == label
    assert names(tmp_path) == ["s", "s/index.json", "s/slabs.bin"]


def test_through_a_link_the_store_that_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    FileStore.create(tmp_path / "disk" / "real", slabs(), label="old").close()
    (tmp_path / "s").symlink_to(tmp_path / "disk" / "real")

    with pytest.raises(InputError, match="exists"):
        FileStore.create(tmp_path / "s", slabs())
    FileStore.create(tmp_path / "s", slabs(2), overwrite=True, label="new").close()

    assert (tmp_path / "s").is_symlink()
    assert FileStore(tmp_path / "s").label == "new"
    assert names(tmp_path) == ["disk", "disk/real", "disk/real/index.json", "disk/real/slabs.bin", "s"]


def test_a_link_that_leads_nowhere_is_a_taken_name(tmp_path):
    (tmp_path / "s").symlink_to(tmp_path / "nowhere")

    with pytest.raises(InputError, match=r"exists; choose another name or replace it \(overwrite=True"):
        FileStore.create(tmp_path / "s", slabs())


def test_a_store_with_other_files_in_it_is_not_replaced(tmp_path):
    FileStore.create(tmp_path / "s", slabs()).close()
    (tmp_path / "s" / "notes.txt").write_text("mine")

    with pytest.raises(InputError, match="exists; choose another name"):
        FileStore.create(tmp_path / "s", slabs(), overwrite=True)

    assert (tmp_path / "s" / "notes.txt").read_text() == "mine"


def test_what_builds_have_left_whose_process_has_ended_is_cleared(tmp_path, monkeypatch):
    for name in ("s.partial-dead", "s.partial-young", "other.partial-dead"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "slabs.bin").write_bytes(b"half")
        if "dead" in name:
            os.utime(tmp_path / name, (0, 0))

    def building():
        """Another build of this name is at work, for longer than folders are young."""
        monkeypatch.setattr(store_place, "_LOCKED_AFTER_SECONDS", -time.time())
        yield from slabs()[:2]
        [other] = tmp_path.glob("s.partial-*")
        os.utime(other, (0, 0))
        with pytest.raises(InputError):
            FileStore.create(tmp_path / "s", [*slabs(), scipy.sparse.eye_array(1, format="csr")])
        assert other.exists()
        yield from slabs()[2:]

    (tmp_path / "s.partial-young").rename(tmp_path / "t.partial-young")
    FileStore.create(tmp_path / "s", building()).close()

    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["other.partial-dead", "s", "t.partial-young"]


def test_a_young_folder_that_is_not_locked_yet_stays(tmp_path):
    (tmp_path / "s.partial-young").mkdir()
    FileStore.create(tmp_path / "s", slabs()).close()

    assert (tmp_path / "s.partial-young").exists()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_while_a_store_is_replaced_leaves_one_of_the_two(at, tmp_path, monkeypatch):
    """At the first rename, at the folder for the new one, and at the second rename; after it has been done."""
    FileStore.create(tmp_path / "A", slabs()).close()
    steps = []
    real = {"rename": Path.rename, "mkdir": Path.mkdir}

    def interrupting(name):
        def step(self, *arguments, **options):
            result = real[name](self, *arguments, **options)
            if (self.name.startswith("A") and name == "rename") or self.name == "A":
                steps.append(name)
                if len(steps) == at:
                    raise KeyboardInterrupt
            return result

        return step

    with monkeypatch.context() as patch:
        for name in real:
            patch.setattr(Path, name, interrupting(name))
        with pytest.raises(KeyboardInterrupt):
            FileStore.create(tmp_path / "A", slabs(2), overwrite=True)
    with FileStore(tmp_path / "A") as store:
        assert len(store.index.subdivisions) == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["A"]
    FileStore.create(tmp_path / "A", slabs(2), overwrite=True).close()
