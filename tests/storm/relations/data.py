"""Relations of text and its ids: formats, caches, and held-out text."""

import collections
import itertools

import numpy as np

from sparse_dataflow.commands import training_data
from sparse_dataflow.data import cache, tokens
from sparse_dataflow.data.corpora import corpus_of_texts, load_corpus
from sparse_dataflow.data.lanes import BlockStarts, Lane
from sparse_dataflow.data.shards import Skipped
from sparse_dataflow.data.streamed import streamed_corpus
from sparse_dataflow.files.errors import UserError
from storm import drawing, writing
from storm.places import files_of
from storm.relations import relation
from storm.scene import TABLE
from storm.world import World, check, need


def _split_ids(world, config):
    """Returns the tokenizer, and the ids of both splits, as a run makes them."""
    corpus, tokenizer = world.corpus(config), world.tokenizer(config)
    prepared = tokens.prepare_tokens(corpus, tokenizer, cache.FOLDER)
    return tokenizer, [np.array(each.tokens[:]) for each in (prepared.train, prepared.validation)]


def _documents(ids, tokenizer):
    """Returns the documents of ids, without ends, as a multiset."""
    ends = np.flatnonzero(ids == tokenizer.eot_id)
    pieces = np.split(ids, ends + 1)
    return collections.Counter(tuple(p[p != tokenizer.eot_id].tolist()) for p in pieces if len(p))


def _text_alone(world):
    need(world.config.data.loss == "all", "examples")
    need("@ids" not in world.case.values.get("data.corpus", ""), "ids")


@relation(2)
def warm_cache_is_cold_cache(world: World):
    """The ids of a corpus: cold, again, and after a run with other settings of the data."""
    _text_alone(world)
    config, draw = world.config, world.draw("cache")
    try:
        tokenizer, cold = _split_ids(world, config)
    except UserError as error:
        need(False, f"refused: {error}")
    others = []
    for _ in range(4):
        path = draw.choice([p for p in TABLE if p.startswith("data.") or p == "model.vocab_size"])
        text = drawing.value(draw, TABLE[path])
        if text is None or path == "data.corpus":
            continue
        case = world.case.with_change(path, text)
        try:
            others.append((case, case.config(world.places)))
        except UserError:
            continue
    cache.FOLDER = world.folder / "other cache"
    for _, other in others:
        try:
            _split_ids(world, other)
        except UserError:
            continue
    for name in ("other cache", "cache"):
        cache.FOLDER = world.folder / name
        again, warm = _split_ids(world, config)
        words = f"in the {name} after {[str(case) for case, _ in others]}"
        check(again.content_hash == tokenizer.content_hash, f"another tokenizer {words}")
        for split, before, now in zip(("training", "held-out"), cold, warm, strict=True):
            check(np.array_equal(before, now), f"other {split} ids {words}")


@relation(2)
def formats_have_the_same_ids(world: World):
    """A folder, JSON lines, Parquet, a saved dataset and `texts=`: the same documents, id by id."""
    _text_alone(world)
    config = world.config
    try:
        tokenizer = world.tokenizer()
    except UserError as error:
        need(False, f"refused: {error}")
    need(tokenizer.has_text, "no text")
    texts = [text for text in world.places.texts("folder") if text.strip()]
    corpora = {"texts=": corpus_of_texts(texts)}
    column = "text" if config.data.column else ""
    for name in writing.TEXT_FORMATS:
        place = str(world.places.path(name))
        try:
            corpora[name] = load_corpus(
                place, cache.FOLDER, column="" if name == "folder" else column
            )
        except UserError as error:
            check(False, f"{name}: {error}")
    expected = None
    for name, corpus in corpora.items():
        prepared = tokens.prepare_tokens(corpus, tokenizer, cache.FOLDER)
        ids = [np.array(each.tokens[:]) for each in (prepared.train, prepared.validation)]
        documents = _documents(np.concatenate(ids), tokenizer)
        expected = expected or documents
        missing, added = expected - documents, documents - expected
        check(
            not missing and not added,
            f"{name}: {sum(missing.values())} documents of texts= are missing and "
            f"{sum(added.values())} are others, such as {[*missing][:1]} and {[*added][:1]}",
        )


@relation(2)
def held_out_text_is_not_trained(world: World):
    """No held-out document is among the training documents, nor its ids among the trained ids."""
    _text_alone(world)
    try:
        corpus, tokenizer = world.corpus(), world.tokenizer()
        _, (train, held_out) = _split_ids(world, world.config)
    except UserError as error:
        need(False, f"refused: {error}")
    trained_texts = {document.text for document in corpus.train}
    both = [d.id for d in corpus.validation if d.text in trained_texts and len(d.text) > 20]
    check(not both, f"{len(both)} held-out documents are trained too, such as {both[:2]}")
    trained_ids = _documents(train, tokenizer)
    # A tokenizer that does not know a text may give it the ids of another.
    texts = {document.text for document in corpus.validation}
    both_ids = [ids for ids in _documents(held_out, tokenizer) if ids in trained_ids]
    ids = [each for each in both_ids if len(each) > 4 and tokenizer.decode(each) in texts]
    check(not ids, f"the ids of {len(ids)} held-out documents are trained too")


@relation(1)
def texts_are_encoded_alike(world: World):
    """A batch, one by one, and decoded again."""
    need(world.config.data.loss == "all", "examples")
    try:
        tokenizer = world.tokenizer()
    except UserError as error:
        need(False, f"refused: {error}")
    need(tokenizer.has_text, "no text")
    texts = world.places.texts("folder")[:8]
    batch = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, batch, strict=True):
        alone = tokenizer.encode(text)
        check(np.array_equal(alone, ids), f"{text[:60]!r} has other ids in a batch")
        placed, _ = tokenizer.encode_with_places(text)
        check(np.array_equal(placed, ids), f"{text[:60]!r} has other ids with places")
        # The tokenizer that is learned here has every byte.
        if "data.tokenizer" not in world.case.values and not world.config.run.init_from:
            again = tokenizer.decode(ids)
            check(again == text, f"{text[:60]!r} comes back as {again[:60]!r}")


@relation(2)
def batches_do_not_depend_on_their_history(world: World):
    """A batch by its number is that of the iteration, from any step on."""
    config = world.config
    need(not config.run.init_from, "given weights")
    from sparse_dataflow.runs.variants import variants

    try:
        corpus, tokenizer = world.corpus(), world.tokenizer()
        model = variants(config, tokenizer.vocab_size)[0]
        data = training_data.training_data(config, model, corpus, tokenizer)
    except UserError as error:
        need(False, f"refused: {error}")
    stop = world.scene.stop
    whole = data.train.iterate(0)
    batches = [next(whole) for _ in range(stop + 2)]
    later = next(data.train.iterate(stop))
    for name, array in batches[stop].rows.items():
        check(
            np.array_equal(array, later.rows[name]), f"{name} of step {stop} depends on the start"
        )
        single = data.train[stop].rows[name]
        check(np.array_equal(array, single), f"{name} of step {stop} depends on the iteration")


@relation(2)
def streamed_documents_are_stored_documents(world: World):
    """Whole documents in the windows of a stream: ids of the stored corpus, and all of them."""
    _text_alone(world)
    try:
        tokenizer = world.tokenizer()
    except UserError as error:
        need(False, f"refused: {error}")
    need(tokenizer.has_text, "no text")
    name = world.draw("stream").choice(["jsonl", "zipped", "parquet"])
    texts = [text for text in world.places.texts(name) if text.strip()]
    prepared = tokens.prepare_tokens(corpus_of_texts(texts), tokenizer, cache.FOLDER)
    stored = np.concatenate(
        [np.array(each.tokens[:]) for each in (prepared.train, prepared.validation)]
    )
    originals = set(_documents(stored, tokenizer))
    stream = streamed_corpus(
        "stream", {"train": files_of(world.places.path(name))}, whole=True
    ).stream
    sequence = 16
    windows = 2 * len(stored) // sequence + 2
    lane = Lane(
        stream,
        0,
        1,
        tokenizer,
        world.scene.choice,
        sequence,
        windows,
        BlockStarts(),
        Skipped(),
        "a",
    )
    read = lane.block(0)
    ids = np.concatenate([read[0], read[1:, 1:].reshape(-1)])
    ends = np.flatnonzero(ids == tokenizer.eot_id)
    read_back = {tuple(ids[: ends[0]].tolist())}
    read_back |= {tuple(ids[a + 1 : b].tolist()) for a, b in itertools.pairwise(ends)}
    other = [(tokenizer.decode(each)[:80], each[:9]) for each in read_back - originals - {()}]
    check(
        not other,
        f"{len(other)} of {len(read_back)} documents of {name} differ, such as {other[:2]}",
    )
    lost = originals - read_back - {()}
    check(not lost, f"{len(lost)} of {len(originals)} documents of {name} are not streamed")
