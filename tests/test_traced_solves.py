"""What a reader must follow from ``penstock.solve`` to the result does not grow."""

import traced_solves


def test_a_matrix_in_memory_passes_few_files_and_classes():
    files, classes = traced_solves.in_memory()

    assert len(files) <= 57, sorted(files)
    assert len(classes) <= 36, sorted(classes)


def test_a_streamed_matrix_passes_few_files_and_classes():
    files, classes = traced_solves.streamed()

    assert len(files) <= 96, sorted(files)
    assert len(classes) <= 72, sorted(classes)
