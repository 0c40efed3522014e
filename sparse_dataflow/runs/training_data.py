"""The batches of a run: training windows of its corpus or mixture, and held-out windows."""

from sparse_dataflow.config.run import RunConfig
from sparse_dataflow.data import cache
from sparse_dataflow.data.answers import AnswerBatches, AnswerEvalBatches, AnswerRows
from sparse_dataflow.data.batches import EvalBatches, TokenMixture, TrainBatches
from sparse_dataflow.data.corpora import Corpus
from sparse_dataflow.data.examples import encode
from sparse_dataflow.data.stored import TokenArray
from sparse_dataflow.data.tokenizer import Tokenizer, load_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.parallel.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.training.monitoring.metrics import say
from sparse_dataflow.training.programs import HeldOut, TrainingData
from sparse_dataflow.training.variants import Variant

EVALUATION_WINDOWS = 64
"""Windows of each corpus in a periodic evaluation, at most, at equal distances over the split."""

FINAL_WINDOWS = 2048
"""Windows of each corpus in the evaluation after the last step, at most: the first ones."""


def tokenizer_of(config: RunConfig, corpus: Corpus) -> Tokenizer:
    """Returns the tokenizer that a config names, which may be trained on the corpus."""
    return load_tokenizer(config.data.tokenizer, corpus, config.model.vocab_size, cache.FOLDER)


def training_data(
    config: RunConfig,
    variant: Variant,
    corpus: Corpus,
    tokenizer: Tokenizer,
    executor: Executor = SINGLE_DEVICE,
) -> TrainingData:
    """The batches of a variant's shape, drawn by `training.seed`, and the held-out windows."""
    if config.data.loss == "answers":
        return _answers(config, variant, corpus, tokenizer, executor)
    tokens = prepare_tokens(corpus, tokenizer, cache.FOLDER)
    say(
        f"corpus {corpus.name}: {tokens.train.documents:,} documents, "
        f"{len(tokens.train.tokens):,} training tokens; "
        f"{tokens.validation.documents:,} documents held out"
    )
    shape = variant.training.batch, variant.training.sequence
    rows = executor.local_rows(variant.training.batch)
    mixture, train_tokens = corpus.mixture or (("", corpus, 1.0),), []
    held_out = []
    for name, source, weight in mixture:
        prepared = tokens
        if corpus.mixture:
            prepared = prepare_tokens(source, tokenizer, cache.FOLDER)
            count = len(prepared.train.tokens)
            say(f"  {weight:.1%} of the windows: {name}, {count:,} training tokens")
        train_tokens.append(prepared.train.tokens)
        periodic = EvalBatches(prepared.validation.tokens, *shape, EVALUATION_WINDOWS, rows, True)
        final = EvalBatches(prepared.validation.tokens, *shape, FINAL_WINDOWS, rows)
        sizes = [windows.total_bytes(tokenizer.token_bytes) for windows in (periodic, final)]
        held_out.append(HeldOut(name, weight, periodic, sizes[0], final, sizes[1]))
    weights = tuple(source.weight for source in held_out)
    mixed = TokenMixture(tuple(train_tokens), weights) if corpus.mixture else train_tokens[0]
    first = held_out[0]
    return TrainingData(
        TrainBatches(mixed, *shape, config.training.seed, rows),
        first.validation,
        first.validation_bytes,
        first.final,
        first.final_bytes,
        tokenizer.content_hash,
        tuple(held_out) if corpus.mixture else (),
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
    if trained.record and corpus.content_hash != trained.record.corpus_hash:
        raise UserError(
            f"The corpus {corpus.name} has changed since {trained.folder} was trained on it, "
            "so the documents that it held out are not known; put it back as it was."
        )


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
    final = AnswerEvalBatches(held_out, *shape, FINAL_WINDOWS, local)
    return TrainingData(
        AnswerBatches(train, *shape, config.training.seed, local),
        periodic,
        periodic.total_bytes(tokenizer.token_bytes),
        final,
        final.total_bytes(tokenizer.token_bytes),
        tokenizer.content_hash,
    )
