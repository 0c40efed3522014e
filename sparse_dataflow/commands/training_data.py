"""The batches of a run: training windows of its corpus or mixture, and held-out windows."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training import programs
from sparse_dataflow.core.training.cost import parameter_count
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import HeldOut, TrainingData
from sparse_dataflow.data import cache
from sparse_dataflow.data.answers import AnswerBatches, AnswerEvalBatches, AnswerRows
from sparse_dataflow.data.batches import EvalBatches, MaskedEvalBatches, TokenMixture, TrainBatches
from sparse_dataflow.data.cache import TokenArray
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.corpus.names import refuse_other_tokenizer
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.examples import encode
from sparse_dataflow.data.masking import Masking
from sparse_dataflow.data.stream_batches import NO_TOKENS, StreamBatches
from sparse_dataflow.data.streamed import Stream
from sparse_dataflow.data.tokenizer import KINDS, Tokenizer, load_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens, split_tokens
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.named_tokenizers import named_tokenizer
from sparse_dataflow.runs.run_config import DataConfig, RunConfig

EVALUATION_WINDOWS = 64
"""Windows of each corpus in a periodic evaluation, at most, at equal distances over the split."""

FINAL_WINDOWS = 2048
"""Windows of a corpus that the command `evaluate` and studies read, at most: the first ones."""

SAMPLE_WINDOWS = 512
"""Windows of each corpus in the evaluation after the last step, at most, at equal distances."""


def corpus_of(data: DataConfig, name: str = "") -> Corpus:
    """Returns the corpus of a config; `name` is that of a run's record, with its revisions."""
    answers = data.loss == "answers"
    return load_corpus(name or data.corpus, cache.FOLDER, answers, data.column, data.validation)


def tokenizer_of(config: RunConfig, corpus: Corpus) -> Tokenizer:
    """Returns the tokenizer that a config names, which may be trained on the corpus."""
    name, size = config.data.tokenizer, config.model.vocab_size
    has_ids = any(source.ids for source in (corpus, *(s for _, s, _ in corpus.mixture)))
    refuse_other_tokenizer(name, corpus.name, has_ids)
    if not config.training.hides_tokens:
        return _tokenizer(name, corpus, size)
    if name == "bpe":  # The mask token is one of the vocabulary.
        return dataclasses.replace(_tokenizer(name, corpus, size - 1), vocab_size=size)
    return _tokenizer(name, corpus, size).with_mask()


def _tokenizer(name, corpus, size):
    if name in KINDS:
        return load_tokenizer(name, corpus, size, cache.FOLDER)
    return named_tokenizer(name)


def training_data(
    config: RunConfig,
    variant: Variant,
    corpus: Corpus,
    tokenizer: Tokenizer,
    executor: Executor = SINGLE_DEVICE,
    rounded_weights: bool = False,
) -> TrainingData:
    """The batches of a variant's shape, drawn by `training.seed`, and the held-out windows.

    Args:
      rounded_weights: see `TokenMixture`.
    """
    if config.data.loss == "answers":
        return _answers(config, variant, corpus, tokenizer, executor)
    shape = variant.training.batch, variant.training.sequence
    rows = executor.local_rows(variant.training.batch)
    masking = Masking.of(variant.training, tokenizer)
    sources = corpus.mixture or (("", corpus, 1.0),)
    weights = tuple(weight for _, _, weight in sources)
    # What cannot be measured is refused before the training text is tokenised.
    held_out, lines = [], []
    for name, source, weight in (("", corpus, 1.0),) if corpus.own_validation else sources:
        split = split_tokens(source, "validation", tokenizer, cache.FOLDER)
        lines.append(f"  held-out documents{' of ' * bool(name)}{name}: {split.documents:,}")
        kind = eval_batches(masking)
        periodic = kind(split.tokens, *shape, EVALUATION_WINDOWS, rows, True)
        most = SAMPLE_WINDOWS if config.run.evaluate == "part" else None
        final = kind(split.tokens, *shape, most, rows, True)
        sizes = [windows.total_bytes(tokenizer.token_bytes) for windows in (periodic, final)]
        _refuse_without_text(name or corpus.name, sizes)
        held_out.append(HeldOut(name, weight, periodic, sizes[0], final, sizes[1]))
    train = [_training_source(*source, tokenizer) for source in sources]
    for line in lines:
        say(line)
    if any(isinstance(source, Stream) for source in train):
        batches: TrainBatches = StreamBatches(
            NO_TOKENS,
            *shape,
            config.training.seed,
            rows,
            tuple(train),
            weights,
            tokenizer=tokenizer,
            masking=masking,
        )
    else:
        tokens = train[0]
        if corpus.mixture:
            tokens = TokenMixture(tuple(train), weights, rounded_weights)
        batches = TrainBatches(tokens, *shape, config.training.seed, rows, masking=masking)
    first = held_out[0]
    return TrainingData(
        batches,
        first.validation,
        first.validation_bytes,
        first.final,
        first.final_bytes,
        tokenizer.content_hash,
        tuple(held_out) if len(held_out) > 1 else (),
    )


def eval_batches(masking: Masking | None) -> Callable[..., EvalBatches]:
    """Returns the class of held-out windows, of which `masking` hides tokens."""
    return functools.partial(MaskedEvalBatches, masking=masking) if masking else EvalBatches


def _refuse_without_text(name, sizes):
    """Refuses held-out text of which bits per byte cannot be counted."""
    if not min(sizes):
        raise UserError(
            f"The tokenizer has no text for any held-out token of {name}: all are unknown to it; "
            "legal: data.tokenizer of text like the corpus, such as bpe."
        )


MOST_EPOCHS = 10
"""Passes over a corpus above which a run says so; more than 4 add little (arXiv 2305.16264)."""


def thin_data(
    corpus: Corpus, train: programs.TrainBatches, variants: Sequence[Variant]
) -> list[str]:
    """Returns a sentence for each model that the corpus is too small for.

    Args:
      train: its batches; the tokens of a stream are at most about the bytes of its files.
      variants: the models, with the steps, batch and sequence by which they read the corpus.
    """
    if isinstance(train, AnswerBatches):
        return []
    assert isinstance(train, TrainBatches)
    named = [(name or source.name, weight) for name, source, weight in corpus.mixture]
    named = named or [(corpus.name, 1.0)]
    tokens = train.tokens
    sources_read: Sequence = tokens.sources if isinstance(tokens, TokenMixture) else (tokens,)
    sources_read = train.sources if isinstance(train, StreamBatches) else sources_read
    counts = [
        source.file_bytes if isinstance(source, Stream) else len(source) for source in sources_read
    ]
    most = "at most " if isinstance(train, StreamBatches) else ""
    advice = "take more text, such as --corpus=hf:allenai/c4/en"
    sentences = []
    for v in variants:
        drawn = v.training.steps * v.training.batch * v.training.sequence
        for (name, weight), count in zip(named, counts, strict=True):
            if drawn * weight > MOST_EPOCHS * count:
                sentences.append(
                    f"{v.name} reads {name} {drawn * weight / count:,.0f} times over, as it has "
                    f"{most}{count:,} training tokens; {advice}"
                )
        size = parameter_count(v.phases[-1].model)
        # Text that is read once cannot be memorised.
        if size > sum(counts) and drawn > sum(counts):
            sentences.append(
                f"{v.name} has {size:,} parameters and {corpus.name} {most}{sum(counts):,} "
                f"training tokens, which it can memorise; {advice}"
            )
    return sentences


def _training_source(name: str, source: Corpus, weight: float, tokenizer: Tokenizer):
    """Returns the stream or the tokens of a corpus, and says how large it is."""
    share = f"  {weight:.1%} of the windows: {name}" if name else f"corpus {source.name}"
    if source.stream:
        stream = source.stream
        column = f", column {stream.column}" if stream.column != "text" else ""
        size = f"{len(stream.shards):,} shards, {stream.file_bytes:,} bytes"
        say(f"{share}, streamed{column}: {size}")
        return stream
    split = split_tokens(source, "train", tokenizer, cache.FOLDER)
    say(f"{share}: {split.documents:,} documents, {len(split.tokens):,} training tokens")
    if sentence := _without_ends(source.name, split, tokenizer):
        say(f"note: {sentence}")
    return split.tokens


_IDS_READ = 2**22


def _without_ends(name, split, tokenizer):
    """Returns a sentence where no token ends a document; "" where one does."""
    if split.documents > 1 or int(split.tokens[-1:][0]) == tokenizer.eot_id:
        return ""
    head = f"no token of {name} is the end of text, id {tokenizer.eot_id}, so it is one document"
    if tokenizer.has_text:
        return f"{head}; if it has several, data.tokenizer must name the tokenizer that wrote it"
    largest = int(split.tokens[:_IDS_READ].max())
    return (
        f"{head}; the last id of model.vocab_size is taken for it, and the largest id here is "
        f"{largest}: if that one ends documents, pass --set model.vocab_size={largest + 1}"
    )


def answer_rows(
    corpus: Corpus, tokenizer: Tokenizer, sequence: int, pack: bool
) -> list[AnswerRows]:
    """Returns the rows of both splits of a corpus of examples, and says how many do not fit.

    Args:
      corpus: of examples; see `data.examples`.
      tokenizer: renders and encodes them.
      sequence: targets per row.
      pack: whether rows hold several examples.

    Raises:
      UserError: an example cannot be rendered, or divided in a packed row.
    """
    if tokenizer.chat_template is None:
        say("the tokenizer has no chat template: an answer follows its prompt directly")
    splits = [encode(split, tokenizer) for split in (corpus.train, corpus.validation)]
    end = tokenizer.eot_id
    rows = [AnswerRows.of(examples, sequence, end, pack) for examples in splits]
    for name, split in zip(("training", "held-out"), rows, strict=True):
        say(
            f"corpus {corpus.name}: {len(split.examples.starts) - 1:,} {name} examples in "
            f"{len(split):,} rows, {split.examples.answers.sum():,} tokens of answers"
        )
        for count, words in (
            (split.truncated, f"examples lost their end, after {sequence} tokens"),
            (split.skipped, f"examples are left out: no answer within {sequence} tokens"),
            (split.examples.skipped, "examples are left out: the template changes them"),
            (split.examples.changed, "answers are not trained: the template changes them later"),
            (
                split.examples.unprompted,
                "answers follow another prompt than `generate --chat` makes, such as <think>",
            ),
        ):
            if count:
                say(f"  {count:,} {name} {words}")
    return rows


def refuse_changed(corpus: Corpus, trained: Model) -> None:
    """Raises UserError where the run was trained on other documents of this name."""
    advice = ", so the documents that it held out are not known; put it back as it was."
    if trained.record:
        trained.record.refuse_other_corpus(trained.folder, corpus, advice)


def corpus_tokens(
    corpus: Corpus, trained: Model, answers: bool
) -> tuple[TokenArray, TokenArray | AnswerRows]:
    """Returns the training tokens, and the held-out tokens or rows of answers."""
    if not answers:
        tokens = prepare_tokens(corpus, trained.tokenizer, cache.FOLDER)
        return tokens.train.tokens, tokens.validation.tokens
    sequence, pack = trained.training.sequence, trained.model.mask_documents
    train, held_out = answer_rows(corpus, trained.tokenizer, sequence, pack)
    return train.examples.tokens, held_out


def _answers(config, variant, corpus, tokenizer, executor):
    training = variant.training
    shape, local = (training.batch, training.sequence), executor.local_rows(training.batch)
    pack = config.model.mask_documents
    train, held_out = answer_rows(corpus, tokenizer, training.sequence, pack)
    periodic = AnswerEvalBatches(held_out, *shape, EVALUATION_WINDOWS, local, True)
    most = SAMPLE_WINDOWS if config.run.evaluate == "part" else None
    final = AnswerEvalBatches(held_out, *shape, most, local, True)
    sizes = [windows.total_bytes(tokenizer.token_bytes) for windows in (periodic, final)]
    _refuse_without_text(corpus.name, sizes)
    return TrainingData(
        AnswerBatches(train, *shape, config.training.seed, local),
        periodic,
        sizes[0],
        final,
        sizes[1],
        tokenizer.content_hash,
    )
