"""The masks of training.objective=masked: their shares, and that they are a function of place."""

import dataclasses

import numpy as np
import pytest

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.data.batches import MaskedEvalBatches, TokenMixture, TrainBatches
from sparse_dataflow.data.masking import Masking
from sparse_dataflow.data.tokenizer import Tokenizer, byte_tokenizer
from sparse_dataflow.files.errors import UserError

TEXT, MASK, END = 60, 60, 61
LENGTH = 40
TRAINING = TrainingConfig(1, 4, LENGTH, objective="masked", seed=3)
MASKING = Masking(TEXT, MASK, END, TRAINING)


def drawn(count, seed=0):
    """Tokens of text, in which about one in nine is an end of text."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(TEXT, size=count)
    return np.where(rng.random(count) < 1 / 9, END, tokens).astype(np.uint16)


def batches(rows=4, masking=MASKING):
    return TrainBatches(drawn(4001), rows, LENGTH, 3, masking=masking)


def fields(batch):
    return batch.tokens, batch.targets, batch.token_weights > 0


def assert_equal(mine, right):
    for a, b in zip(mine, right, strict=True):
        np.testing.assert_array_equal(a, b)


def test_each_window_hides_its_share_of_text_and_nothing_else():
    batch = batches(rows=50)[0]
    tokens, targets, hidden = fields(batch)
    assert (hidden.sum(axis=1) == round(0.15 * LENGTH)).all()
    assert batch.token_weights.sum() == pytest.approx(1)
    np.testing.assert_array_equal(tokens[~hidden], targets[~hidden])
    assert (targets[hidden] < TEXT).all() and (tokens[hidden] != END).all()


def test_hidden_tokens_are_masked_random_or_kept_by_their_shares():
    inputs = drawn(100 * 400).reshape(100, 400).astype(np.int32)
    tokens, targets, hidden = fields(MASKING.training_batch(inputs, range(100), 100))
    masked = (tokens == MASK)[hidden].mean()
    kept = (tokens == targets)[hidden].mean()
    assert masked == pytest.approx(0.8, abs=0.02)
    # One in TEXT of the random tokens is the token itself.
    assert kept == pytest.approx(0.1 + 0.1 / TEXT, abs=0.02)
    shares = dataclasses.replace(TRAINING, mask_share=0.5, mask_replaced=0.25, mask_random=0.75)
    other = dataclasses.replace(MASKING, training=shares)
    tokens, targets, hidden = fields(other.training_batch(inputs, range(100), 100))
    assert (hidden.sum(axis=1) == 200).all()
    assert (tokens == MASK)[hidden].mean() == pytest.approx(0.25, abs=0.02)
    assert (tokens == targets)[hidden].mean() == pytest.approx(0.75 / TEXT, abs=0.01)


def test_masks_are_the_same_for_any_batch_size():
    small, large = batches(rows=4), batches(rows=12)
    together = [fields(small[step]) for step in range(6)]
    assert_equal(
        [np.concatenate(each) for each in zip(*together)],
        [np.concatenate(each) for each in zip(fields(large[0]), fields(large[1]))],
    )


def test_each_process_has_its_rows_of_the_masks():
    whole = batches(rows=8)[5]
    part = dataclasses.replace(batches(rows=8), rows=(1, 6))[5]
    assert_equal(fields(part), [each[[1, 6]] for each in fields(whole)])
    np.testing.assert_array_equal(part.token_weights, whole.token_weights[[1, 6]])


def test_a_resumed_run_has_the_same_masks_and_each_epoch_others():
    data = batches()
    resumed = data.iterate(start_step=7, threads=0)
    assert_equal(fields(next(resumed)), fields(data[7]))
    assert_equal(fields(next(resumed)), fields(data[8]))
    epoch = 100 // 4
    first, second = (
        {window.tobytes(): mask for step in steps for _, window, mask in zip(*fields(data[step]))}
        for steps in (range(epoch), range(epoch, 2 * epoch))
    )
    assert first.keys() == second.keys()
    assert sum((first[key] != second[key]).any() for key in first) > 90


def test_other_seeds_have_other_masks_of_the_same_windows():
    other = dataclasses.replace(MASKING, training=dataclasses.replace(TRAINING, seed=4))
    (_, windows, masks), (_, same, others) = (
        fields(batches(masking=masking)[0]) for masking in (MASKING, other)
    )
    np.testing.assert_array_equal(windows, same)
    assert (masks != others).any(axis=1).all()


def test_mixtures_have_masks_too():
    mixture = TokenMixture((drawn(2001, 1), drawn(2001, 2)), (0.5, 0.5))
    batch = TrainBatches(mixture, 4, LENGTH, 3, masking=MASKING)[2]
    assert (fields(batch)[2].sum(axis=1) == round(0.15 * LENGTH)).all()


def held_out(masking=MASKING, rows=3, **changes):
    return MaskedEvalBatches(drawn(501), rows, LENGTH, masking=masking, **changes)


def test_held_out_masks_are_those_of_every_evaluation_of_any_run():
    first = [fields(batch) for batch in held_out()]
    other = Masking(TEXT, MASK, END, dataclasses.replace(TRAINING, seed=9))
    for mine, right in zip((fields(batch) for batch in held_out(other)), first, strict=True):
        assert_equal(mine, right)
    rows = [np.concatenate(each) for each in zip(*first)]
    more = [np.concatenate(each) for each in zip(*(fields(b) for b in held_out(rows=5)))]
    assert_equal([each[:13] for each in more], [each[:13] for each in rows])
    spread = held_out(max_windows=4, spread=True)
    places = [spread.place(number) for number in range(4)]
    few = [np.concatenate(each) for each in zip(*map(fields, spread))]
    assert_equal([each[:4] for each in few], [each[places] for each in rows])


def test_the_counts_are_those_of_the_hidden_tokens_of_all_processes():
    data = held_out(rows=3)
    hidden = np.concatenate([batch.targets[batch.token_weights > 0] for batch in data])
    part = dataclasses.replace(data, rows=(1,))
    assert data.total_tokens == part.total_tokens == len(hidden)
    token_bytes = np.arange(62, dtype=np.int32)
    assert data.total_bytes(token_bytes) == part.total_bytes(token_bytes) == hidden.sum()


def test_ends_of_text_follow_a_last_shorter_window():
    tokens = drawn(LENGTH + 11)
    last = MaskedEvalBatches(tokens, 2, LENGTH, masking=MASKING)[0]
    np.testing.assert_array_equal(last.targets[1, :11], tokens[LENGTH:])
    assert (last.tokens[1, 11:] == END).all() and (last.targets[1, 11:] == END).all()
    assert last.token_weights[1].sum() == round(0.15 * 10)
    assert not last.token_weights[1, 10:].any()


def test_a_tokenizer_without_a_mask_token_gets_one_more_id():
    bytes_alone = byte_tokenizer(257)
    assert bytes_alone.mask_id is None
    masked = bytes_alone.with_mask()
    assert (masked.vocab_size, masked.mask_id, masked.eot_id) == (258, 256, 257)
    assert masked.with_mask() is masked
    np.testing.assert_array_equal(masked.encode("mask"), bytes_alone.encode("mask"))
    assert masked.decode(masked.encode("mask")) == "mask"
    # An id that no token has is taken first.
    assert byte_tokenizer(300).with_mask().vocab_size == 300


def test_the_mask_token_is_the_one_of_an_imported_tokenizer():
    original = _word_level(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "mask"])
    words = [5, 6, 1]
    ids = (*words, 0, 2, 4, 3)
    tokenizer = Tokenizer(("the", "mask", "?"), (), 7, original, ids)
    assert tokenizer.mask_id == ids.index(4) and tokenizer.with_mask() is tokenizer
    without = _word_level(["[SEP]", "[UNK]", "the", "mask"])
    plain = Tokenizer(("the", "mask", "?"), (), 4, without, (2, 3, 1, 0)).with_mask()
    assert (plain.mask_id, plain.eot_id, plain.vocab_size) == (3, 4, 5)
    assert plain.original_ids == (2, 3, 1, 4, 0)
    np.testing.assert_array_equal(plain.encode("mask the"), [1, 0])


def _word_level(words):
    import tokenizers

    engine = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    engine.add_special_tokens([word for word in words if word[0] == "["])
    return engine.to_str()


def test_weights_whose_tokenizer_has_no_mask_token_are_refused():
    with pytest.raises(UserError, match="needs a mask token, and"):
        Masking.of(TRAINING, byte_tokenizer(257))
    assert Masking.of(TrainingConfig(1), byte_tokenizer(257)) is None


def test_shares_of_more_than_all_hidden_tokens_are_refused():
    with pytest.raises(UserError, match="more than all hidden tokens; legal: up to 1 together"):
        TrainingConfig(1, mask_replaced=0.9, mask_random=0.2)
