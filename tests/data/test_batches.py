import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import some

from sparse_dataflow.core.training.held_out import bits_per_byte
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.files.errors import UserError


@st.composite
def shapes(draw):
    """(tokens, rows of the global batch, sequence length, processes)."""
    processes = draw(st.integers(1, 4))
    rows = processes * draw(st.integers(1, 4))
    length = draw(st.integers(1, 9))
    count = draw(st.integers(length + 1, 400))
    return np.arange(count, dtype=np.uint16), rows, length, processes


def local_rows(rows, process, processes):
    """Returns the batch rows of a process."""
    count = rows // processes
    return tuple(range(process * count, (process + 1) * count))


@settings(max_examples=60)
@given(shapes(), st.integers(0, 2**32 - 1), st.integers(0, 10**6))
def test_rows_are_windows_of_the_split(shape, seed, step):
    tokens, rows, length, _ = shape
    batch = TrainBatches(tokens, rows, length, seed)[step]
    assert set(batch.rows) == {"tokens", "targets"}
    assert batch.tokens.shape == batch.targets.shape == (rows, length)
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
    np.testing.assert_array_equal(np.diff(batch.tokens), 1)
    np.testing.assert_array_equal(batch.targets, batch.tokens + 1)
    assert np.all(batch.tokens[:, 0] % length == 0)


@settings(max_examples=60)
@given(shapes(), st.integers(0, 2**32 - 1), st.integers(0, 10**6))
def test_local_batches_concatenate_to_the_global_batch(shape, seed, step):
    tokens, rows, length, processes = shape
    global_batch = TrainBatches(tokens, rows, length, seed)[step].tokens
    local_batches = [
        TrainBatches(tokens, rows, length, seed, local_rows(rows, p, processes))[step].tokens
        for p in range(processes)
    ]
    np.testing.assert_array_equal(np.concatenate(local_batches), global_batch)


@settings(max_examples=60)
@given(shapes(), st.integers(0, 2**32 - 1))
def test_every_token_but_the_first_is_predicted_once_per_epoch(shape, seed):
    tokens, _, length, _ = shape
    batches = TrainBatches(tokens, 1, length, seed)
    for epoch in (0, 3):
        windows = (len(tokens) - 1) // length
        rows = [batches[epoch * windows + i].targets[0] for i in range(windows)]
        targets = np.sort(np.concatenate(rows))
        np.testing.assert_array_equal(targets, tokens[1 : len(targets) + 1])
        assert len(tokens) - 1 - len(targets) < length


def test_order_differs_between_epochs_and_seeds():
    tokens = np.arange(1001)

    def order(seed, epoch):
        batches = TrainBatches(tokens, 100, 10, seed)
        return tuple(batches[epoch].tokens[:, 0])

    orders = [order(0, 0), order(0, 1), order(0, 2), order(7, 0), tuple(range(0, 1000, 10))]
    assert len(set(orders)) == 5
    assert order(0, 1) == order(0, 1)


@pytest.mark.parametrize("threads", some([0, 2], 2))
@settings(max_examples=20)
@given(start=st.integers(0, 40))
def test_a_resumed_run_reads_the_tail_of_an_uninterrupted_run(threads, start):
    batches = TrainBatches(np.arange(500, dtype=np.uint16), 4, 7, seed=3)
    uninterrupted = list(itertools.islice(batches.iterate(threads=threads), start + 5))
    resumed = list(itertools.islice(batches.iterate(start, threads=threads), 5))
    for step, (left, right) in enumerate(zip(uninterrupted[start:], resumed, strict=True)):
        np.testing.assert_array_equal(left.tokens, right.tokens)
        np.testing.assert_array_equal(left.tokens, batches[start + step].tokens)


def test_resuming_on_another_number_of_processes_reads_the_same_rows():
    def take(start, steps, processes):
        streams = [
            TrainBatches(np.arange(999), 12, 5, 1, local_rows(12, p, processes)).iterate(start)
            for p in range(processes)
        ]
        local_batches = itertools.islice(zip(*streams), steps)
        return [np.concatenate([b.tokens for b in step]) for step in local_batches]

    uninterrupted = take(0, 30, 1)
    np.testing.assert_array_equal(uninterrupted, take(0, 10, 3) + take(10, 12, 4) + take(22, 8, 2))


def test_a_process_with_prefetching_threads_exits_cleanly():
    code = (
        "import numpy as np\n"
        "from sparse_dataflow.data.batches import TrainBatches\n"
        "print(next(TrainBatches(np.arange(99), 2, 4).iterate(5)).tokens.shape)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert (process.stdout, process.stderr) == ("(2, 4)\n", "")


def test_importing_batches_is_cheap():
    code = (
        "import sys, sparse_dataflow.data.batches\n"
        "print({'jax', 'grain', 'tensorflow_datasets', 'tokenizers'} & set(sys.modules))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "set()\n"


@settings(max_examples=60)
@given(shapes(), st.none() | st.integers(1, 30))
def test_evaluation_scores_every_token_once_in_order(shape, max_windows):
    tokens, rows, length, _ = shape
    batches = EvalBatches(tokens, rows, length, max_windows)
    scored = []
    for batch in batches:
        assert set(batch.rows) == {"tokens", "targets", "token_weights"}
        assert {array.shape for array in batch.rows.values()} == {(rows, length)}
        assert batch.tokens.dtype == np.int32 and batch.token_weights.dtype == np.float32
        assert batch.token_weights.any()
        counted = batch.token_weights == 1
        assert np.all(counted | (batch.token_weights == 0))
        targets = batch.targets[counted]
        np.testing.assert_array_equal(batch.tokens[counted] + 1, targets)
        scored.extend(targets)
    limit = len(tokens) - 1
    if max_windows is not None:
        limit = min(limit, max_windows * length)
    np.testing.assert_array_equal(scored, tokens[1 : limit + 1])
    assert batches.total_tokens == len(scored)
    lengths = np.random.default_rng(0).integers(0, 9, len(tokens)).astype(np.int32)
    assert batches.total_bytes(lengths) == lengths[scored].sum()


@settings(max_examples=60)
@given(shapes(), st.none() | st.integers(1, 30))
def test_local_evaluation_batches_concatenate_to_the_global_batch(shape, max_windows):
    tokens, rows, length, processes = shape
    global_batches = EvalBatches(tokens, rows, length, max_windows)
    local_batches = [
        EvalBatches(tokens, rows, length, max_windows, local_rows(rows, p, processes))
        for p in range(processes)
    ]
    assert {len(batches) for batches in local_batches} == {len(global_batches)}
    for index, batch in enumerate(global_batches):
        for key, value in batch.rows.items():
            local_values = [batches[index].rows[key] for batches in local_batches]
            np.testing.assert_array_equal(np.concatenate(local_values), value)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=50),
    st.integers(2, 100_000),
)
def test_bits_per_byte_of_a_uniform_distribution(byte_lengths, vocab_size):
    nats = len(byte_lengths) * math.log(vocab_size)
    bits = len(byte_lengths) * math.log2(vocab_size)
    assert bits_per_byte(nats, sum(byte_lengths)) == pytest.approx(bits / sum(byte_lengths))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"tokens": np.arange(8)}, "8 tokens, too few for one window of 8"),
        ({"tokens": np.arange(0)}, "too few"),
        ({"batch_size": 0}, "1 or more"),
        ({"sequence_length": 0}, "1 or more"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**32}, "seed"),
    ],
)
def test_invalid_training_batches_raise(changed, message):
    legal = {"tokens": np.arange(100), "batch_size": 4, "sequence_length": 8}
    TrainBatches(**legal)
    with pytest.raises(UserError, match=message):
        TrainBatches(**legal | changed)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"tokens": np.arange(1)}, "fewer than two"),
        ({"max_windows": 0}, "legal: 1 or more"),
    ],
)
def test_invalid_evaluation_batches_raise(changed, message):
    legal = {"tokens": np.arange(2), "batch_size": 4, "sequence_length": 8}
    EvalBatches(**legal)
    with pytest.raises(UserError, match=message):
        EvalBatches(**legal | changed)


def test_a_negative_step_raises():
    batches = TrainBatches(np.arange(100), 4, 8)
    with pytest.raises(IndexError):
        batches[-1]


@pytest.mark.parametrize(("count", "most"), [(1001, 10), (1001, 64), (97, 64), (1001, None)])
def test_spread_windows_are_of_the_whole_split_and_counted_right(count, most):
    tokens, length = np.arange(count, dtype=np.int32), 8
    batches = EvalBatches(tokens, 4, length, most, spread=True)
    first = [int(row[0]) for batch in batches for row in batch.tokens][: batches.windows]
    assert len(first) == len(set(first)) == batches.windows
    distances = np.diff(first)
    assert distances.min() >= length and distances.max() - distances.min() <= length
    assert first[0] == 0 and count - first[-1] <= 2 * distances.max()
    counted = sum(int(batch.token_weights.sum()) for batch in batches)
    assert counted == batches.total_tokens
    targets = [t for batch in batches for t in batch.targets[batch.token_weights > 0]]
    sizes = np.arange(count) % 7
    assert batches.total_bytes(sizes) == sizes[targets].sum()
