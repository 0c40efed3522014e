"""A fit reads this process's rows of batches."""

from eight_devices import on_eight_devices


def test_a_fit_reads_its_rows_of_batches_on_a_mesh():
    equal = on_eight_devices("pruning/placed_batches.py")
    assert equal and all(equal.values())
