import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.data.batches import EvalBatches, TrainBatches, bits_per_byte
from sparse_dataflow.files.errors import UserError


@st.composite
def shapes(draw):
    """(tokens, rows of the global batch, sequence length, processes)."""
    processes = draw(st.integers(1, 4))
    rows = processes * draw(st.integers(1, 4))
    length = draw(st.integers(1, 9))
    count = draw(st.integers(length + 1, 400))
    return np.arange(count, dtype=np.uint16), rows, length, processes


def part(rows, process, processes):
    """Rows of one of several processes."""
    each = rows // processes
    return tuple(range(process * each, (process + 1) * each))


@settings(max_examples=60)
@given(shapes(), st.integers(0, 2**32 - 1), st.integers(0, 10**6))
def test_rows_are_windows_of_the_split(shape, seed, step):
    tokens, rows, length, _ = shape
    batch = TrainBatches(tokens, rows, length, seed)[step]
    assert set(batch) == {"tokens"}
    assert batch["tokens"].shape == (rows, length + 1)
    assert batch["tokens"].dtype == np.int32
    np.testing.assert_array_equal(np.diff(batch["tokens"]), 1)
    assert np.all(batch["tokens"][:, 0] % length == 0)


@settings(max_examples=60)
@given(shapes(), st.integers(0, 2**32 - 1), st.integers(0, 10**6))
def test_processes_divide_the_batch_of_one(shape, seed, step):
    tokens, rows, length, processes = shape
    alone = TrainBatches(tokens, rows, length, seed)[step]["tokens"]
    parts = [
        TrainBatches(tokens, rows, length, seed, part(rows, process, processes))[step]["tokens"]
        for process in range(processes)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), alone)


@settings(max_examples=60)
@given(shapes(), st.integers(0, 2**32 - 1))
def test_every_token_but_the_first_is_predicted_once_an_epoch(shape, seed):
    tokens, _, length, _ = shape
    batches = TrainBatches(tokens, 1, length, seed)
    for epoch in (0, 3):
        first = epoch * batches.windows_per_epoch
        rows = [batches[first + i]["tokens"][0] for i in range(batches.windows_per_epoch)]
        targets = np.sort(np.concatenate([row[1:] for row in rows]))
        np.testing.assert_array_equal(targets, tokens[1 : len(targets) + 1])
        assert len(tokens) - 1 - len(targets) < length


def test_epochs_and_seeds_differ_in_order():
    tokens = np.arange(1001)

    def order(seed, epoch):
        batches = TrainBatches(tokens, 100, 10, seed)
        return tuple(batches[epoch]["tokens"][:, 0])

    assert TrainBatches(tokens, 100, 10).windows_per_epoch == 100
    orders = [order(0, 0), order(0, 1), order(0, 2), order(7, 0), tuple(range(0, 1000, 10))]
    assert len(set(orders)) == 5
    assert order(0, 1) == order(0, 1)
    assert TrainBatches(tokens, 100, 10).epoch(3) == 3.0


@pytest.mark.parametrize("threads", [0, 2])
@settings(max_examples=20)
@given(start=st.integers(0, 40))
def test_resuming_is_the_tail_of_an_undisturbed_run(threads, start):
    batches = TrainBatches(np.arange(500, dtype=np.uint16), 4, 7, seed=3)
    undisturbed = list(itertools.islice(batches.iterate(threads=threads), start + 5))
    resumed = list(itertools.islice(batches.iterate(start, threads=threads), 5))
    for step, (left, right) in enumerate(zip(undisturbed[start:], resumed, strict=True)):
        np.testing.assert_array_equal(left["tokens"], right["tokens"])
        np.testing.assert_array_equal(left["tokens"], batches[start + step]["tokens"])


def test_resuming_on_another_number_of_processes_reads_the_same_rows():
    def take(start, steps, processes):
        parts = [
            itertools.islice(
                TrainBatches(np.arange(999), 12, 5, 1, part(12, process, processes)).iterate(start),
                steps,
            )
            for process in range(processes)
        ]
        return [np.concatenate([b["tokens"] for b in step]) for step in zip(*parts)]

    undisturbed = take(0, 30, 1)
    np.testing.assert_array_equal(undisturbed, take(0, 10, 3) + take(10, 12, 4) + take(22, 8, 2))


def test_a_process_that_reads_ahead_can_end():
    code = (
        "import numpy as np\n"
        "from sparse_dataflow.data.batches import TrainBatches\n"
        "print(next(TrainBatches(np.arange(99), 2, 4).iterate(5))['tokens'].shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert (done.stdout, done.stderr) == ("(2, 5)\n", "")


def test_importing_batches_is_cheap():
    code = (
        "import sys, sparse_dataflow.data.batches\n"
        "print({'jax', 'grain', 'tensorflow_datasets', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@settings(max_examples=60)
@given(shapes(), st.none() | st.integers(1, 30))
def test_evaluation_scores_every_token_once_in_order(shape, most):
    tokens, rows, length, _ = shape
    batches = EvalBatches(tokens, rows, length, most)
    scored = []
    for batch in batches:
        assert set(batch) == {"tokens", "weights"}
        assert batch["tokens"].shape == (rows, length + 1) and batch["tokens"].dtype == np.int32
        assert batch["weights"].shape == (rows, length) and batch["weights"].dtype == np.float32
        assert batch["weights"].any()
        counted = batch["weights"] == 1
        assert np.all(counted | (batch["weights"] == 0))
        targets = batch["tokens"][:, 1:][counted]
        np.testing.assert_array_equal(batch["tokens"][:, :-1][counted] + 1, targets)
        scored.extend(targets)
    limit = len(tokens) - 1 if most is None else min(len(tokens) - 1, most * length)
    np.testing.assert_array_equal(scored, tokens[1 : limit + 1])
    assert batches.total_tokens == len(scored)
    lengths = np.random.default_rng(0).integers(0, 9, len(tokens)).astype(np.int32)
    assert batches.total_bytes(lengths) == lengths[scored].sum()


@settings(max_examples=60)
@given(shapes(), st.none() | st.integers(1, 30))
def test_evaluation_divides_among_processes(shape, most):
    tokens, rows, length, processes = shape
    alone = EvalBatches(tokens, rows, length, most)
    parts = [
        EvalBatches(tokens, rows, length, most, part(rows, p, processes)) for p in range(processes)
    ]
    assert {len(part) for part in parts} == {len(alone)}
    for index, batch in enumerate(alone):
        for key, value in batch.items():
            np.testing.assert_array_equal(np.concatenate([p[index][key] for p in parts]), value)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=50),
    st.integers(2, 100_000),
)
def test_a_uniform_guess_costs_the_bits_it_must(byte_lengths, vocab_size):
    nats = len(byte_lengths) * math.log(vocab_size)
    bits = len(byte_lengths) * math.log2(vocab_size)
    assert bits_per_byte(nats, sum(byte_lengths)) == pytest.approx(bits / sum(byte_lengths))


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"tokens": np.arange(8)}, "8 tokens, too few for one window of 8"),
        ({"tokens": np.arange(0)}, "too few"),
        ({"batch_size": 0}, "1 or more"),
        ({"sequence_length": 0}, "1 or more"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**32}, "seed"),
    ],
)
def test_illegal_training_batches_are_refused_in_words(changed, said):
    legal = {"tokens": np.arange(100), "batch_size": 4, "sequence_length": 8}
    TrainBatches(**legal)
    with pytest.raises(UserError, match=said):
        TrainBatches(**legal | changed)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"tokens": np.arange(1)}, "fewer than two"),
        ({"max_windows": 0}, "1 window or more"),
    ],
)
def test_illegal_evaluations_are_refused_in_words(changed, said):
    legal = {"tokens": np.arange(2), "batch_size": 4, "sequence_length": 8}
    EvalBatches(**legal)
    with pytest.raises(UserError, match=said):
        EvalBatches(**legal | changed)


def test_steps_before_the_first_do_not_exist():
    batches = TrainBatches(np.arange(100), 4, 8)
    with pytest.raises(IndexError):
        batches[-1]
