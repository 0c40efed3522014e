"""The whole executor: all options give the same loss and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some
from small_models import DENSE, arbitrary_params, assert_same, tables_of, tokens_of
from small_models import EACH_KIND as MODEL

from sparse_dataflow.compile import traced
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.model.stacks import weights_of


def run(config=MODEL, micro_batches=1, traced_tables=False):
    """Returns (loss, gradients) of a fixed batch and fixed params."""
    static = tables_of(config)

    @jax.jit
    def step(params, tables, tokens):
        tables = tables if traced_tables else static
        metrics, gradients = whole.loss_and_gradients(
            config,
            params,
            tables,
            Batch.from_windows(tokens),
            whole.Accumulation(micro_batches),
        )
        return metrics["loss"].total, gradients

    return step(arbitrary_params(config), static, tokens_of(config))


@pytest.fixture(scope="module")
def result():
    """Reference loss and gradients."""
    return run()


def test_gradients_are_those_of_the_plain_loss(result):
    """Cross-entropy of the full logits, differentiated by jax alone."""
    tables = tables_of(MODEL)

    def plain(params, tokens):
        logits = whole.logits(MODEL, weights_of(MODEL, params, tables), tokens[:, :-1])
        target = tokens[:, 1:, None]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), target, axis=-1))

    plain_result = jax.jit(jax.value_and_grad(plain))(arbitrary_params(MODEL), tokens_of(MODEL))
    assert_same(result, plain_result)


@pytest.mark.slow
def test_accumulation_equals_one_batch(result):
    assert_same(result, run(micro_batches=2))


@pytest.mark.slow
def test_sub_batches_change_nothing():
    """Also where tokens attend within their document, and where a block is offloaded."""
    config = dataclasses.replace(DENSE, mask_documents=True, remat="offload+none:1")
    params, tokens = arbitrary_params(config), tokens_of(config)
    tokens[[1, 2, 3], [3, 5, 7]] = config.vocab_size - 1
    whole_batch, halves = (
        jax.jit(functools.partial(whole.loss_and_gradients, config, rank=rank))(
            params, (), Batch.from_windows(tokens)
        )
        for rank in (whole.SINGLE_RANK, whole.Rank(sub_batches=2))
    )
    (metrics, gradients), (halves_metrics, expected) = whole_batch, halves
    assert metrics["loss"].number() == pytest.approx(halves_metrics["loss"].number(), rel=1e-5)
    assert_same(gradients, expected)


@pytest.mark.parametrize("remat", some(["keep", "full"], "full"))
def test_remat_changes_nothing(result, remat):
    assert_same(result, run(dataclasses.replace(MODEL, remat=remat)))


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [True, False])
def test_blocks_of_different_remat_change_nothing(unrolled, monkeypatch):
    """A repeated pattern, then a pattern that is another."""
    deep = dataclasses.replace(DENSE, num_layers=3 if unrolled else 5)
    plan = dataclasses.replace(deep, remat="offload+none:1,full:1" if unrolled else MIXED)
    monkeypatch.setattr(whole, "UNROLL_LAYERS", 5 if unrolled else 1)
    assert_same(run(plan), run(deep))


@pytest.mark.parametrize("remat", some(["none", "keep", "full:2,none:3"], "full:2,none:3"))
@pytest.mark.parametrize(
    "layer_types", some(["sliding+full", "full+sliding+sliding"], "full+sliding+sliding")
)
def test_scanned_layers_keep_their_windows(remat, layer_types, monkeypatch):
    local = dict(window=2, layer_types=layer_types, rotary_local_base=20.0)
    deep = dataclasses.replace(DENSE, num_layers=5, positions="rotary", remat=remat, **local)
    unrolled = run(dataclasses.replace(deep, remat="none"))
    monkeypatch.setattr(whole, "UNROLL_LAYERS", 1)
    assert_same(run(deep), unrolled)


MIXED = "offload+none:2,keep:1"


@pytest.mark.parametrize(("remat", "copies"), [("offload", True), (MIXED, True), ("keep", False)])
def test_offloaded_blocks_are_copied_to_pinned_host_memory(remat, copies, monkeypatch):
    """In the program for a TPU, before its compiler."""
    monkeypatch.setattr(whole, "UNROLL_LAYERS", 1)
    config = dataclasses.replace(DENSE, num_layers=5, remat=remat)
    step = jax.jit(
        lambda p, t: whole.loss_and_gradients(config, p, tables_of(config), Batch.from_windows(t))
    )
    traced = step.trace(arbitrary_params(config), tokens_of(config))
    program = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ('_xla_buffer_placement = "pinned_host"' in program) == copies


@pytest.mark.parametrize("remat", some(["none", "full"], "full"))
@pytest.mark.parametrize("unrolled", some([True, False], False))
def test_traced_tables_change_nothing(result, remat, unrolled, monkeypatch):
    monkeypatch.setattr(whole, "UNROLL_CHANGING_LAYERS", 2 if unrolled else 1)
    assert_same(result, run(dataclasses.replace(MODEL, remat=remat), traced_tables=True))


def loss_alone(jit=True):
    tables, tokens = tables_of(MODEL), tokens_of(MODEL)
    weights = np.full((4, 10), 1 / 40, np.float32)

    def loss(params):
        return whole.loss(
            MODEL, weights_of(MODEL, params, tables), Batch.from_windows(tokens, weights)
        )

    loss = jax.jit(loss) if jit else loss
    return loss(jax.tree.map(jnp.asarray, arbitrary_params(MODEL)))


def test_scanning_concrete_tables_changes_nothing(result, monkeypatch):
    monkeypatch.setattr(whole, "UNROLL_LAYERS", 1)
    assert not whole.unrolls(MODEL, tables_of(MODEL))
    np.testing.assert_allclose(loss_alone(), result[0], rtol=1e-5)


@pytest.mark.slow
def test_jit_changes_nothing(result):
    np.testing.assert_allclose(loss_alone(jit=False), result[0], rtol=1e-5)


def test_shallow_models_unroll_on_a_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("only CPU programs unroll")
    unrolls = whole.unrolls
    assert unrolls(MODEL, tables_of(MODEL)) and unrolls(DENSE, {})
    deep = dataclasses.replace(MODEL, num_layers=whole.UNROLL_LAYERS + 1)
    assert not unrolls(deep, tables_of(deep))
    for layers in (whole.UNROLL_CHANGING_LAYERS, whole.UNROLL_CHANGING_LAYERS + 1):
        deep, traced = dataclasses.replace(MODEL, num_layers=layers), []
        jax.eval_shape(lambda t, m=deep, to=traced: to.append(unrolls(m, t)), tables_of(deep))
        assert traced == [layers <= whole.UNROLL_CHANGING_LAYERS]


def test_a_program_for_changing_layouts_does_not_grow_with_depth(array_sizes):
    def length(layers):
        config = dataclasses.replace(MODEL, num_layers=layers)

        def step(params, tables, tokens):
            batch = Batch.from_windows(tokens)
            return whole.loss_and_gradients(config, params, tables, batch)

        return len(
            array_sizes(step, arbitrary_params(config), tables_of(config), tokens_of(config))
        )

    deepest = whole.UNROLL_CHANGING_LAYERS
    assert length(deepest + 1) == length(deepest + 6)


def test_each_layer_uses_its_weights_and_layouts():
    """Compares with a loop over the layers."""
    params, tables, tokens = arbitrary_params(MODEL), tables_of(MODEL), tokens_of(MODEL)
    blocks = merged(params["blocks"], tables["blocks"])
    assert len(set(model_layouts.layouts(MODEL)["attn_out"])) > 1

    def by_hand(params, tokens):
        x = gpt.embed(MODEL, params["embed"], tokens)
        for i in range(MODEL.num_layers):
            layer = jax.tree.map(lambda a, i=i: a[i], blocks)
            x = gpt.block(MODEL, layer_weights(MODEL, layer), x)[0]
        return gpt.logits(MODEL, params, x)

    logits = jax.jit(lambda p, t: whole.logits(MODEL, weights_of(MODEL, p, tables), t))(
        params, tokens
    )
    np.testing.assert_allclose(jax.jit(by_hand)(params, tokens), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "unrolled"), some([("sparse", True), ("experts", False)], "sparse")
)
def test_the_gradient_of_a_shared_block_is_the_sum_over_the_layers(kind, unrolled, monkeypatch):
    """Compares with a model whose layers have equal weights of their own."""
    monkeypatch.setattr(whole, "unrolls", lambda *_: unrolled)
    spec = LinearSpec("block_sparse", "monarch", density=0.25, block=4, rank=2)
    unshared = dataclasses.replace(DENSE, num_layers=3, linears={"qkv": spec})
    if kind == "experts":
        unshared = dataclasses.replace(DENSE, num_layers=3, experts=4)
    config = dataclasses.replace(unshared, shared_layers=True)
    params, tables, tokens = arbitrary_params(config), tables_of(config), tokens_of(config)
    copies = {**params, "blocks": jax.tree.map(lambda a: a.repeat(3, 0), params["blocks"])}
    shared, apart = (
        jax.jit(
            lambda p, model=model: whole.loss_and_gradients(
                model,
                p,
                tables,
                Batch.from_windows(tokens),
                whole.Accumulation(1),
            )
        )(p)
        for model, p in ((config, params), (unshared, copies))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), shared[0], apart[0])
    blocks = jax.tree.map(lambda a: a.sum(0, keepdims=True), apart[1]["blocks"])
    assert_same({**shared[1]}, {**apart[1], "blocks": blocks})


def test_loss_weights_select_tokens():
    params, tables, tokens = arbitrary_params(MODEL), tables_of(MODEL), tokens_of(MODEL)
    jitted = jax.jit(
        lambda p, t, w: whole.loss(MODEL, weights_of(MODEL, p, tables), Batch.from_windows(t, w))
    )
    loss = lambda tokens, weights: jitted(params, tokens, weights)  # noqa: E731
    each = []
    for row in range(2):
        weights = np.zeros((4, 10), np.float32)
        weights[row, 3] = 1
        each.append(loss(tokens, weights))
        changed = tokens.copy()
        changed[row, 5:] = 0  # Later tokens do not matter.
        np.testing.assert_allclose(loss(changed, weights), each[-1], rtol=1e-6)
    weights = np.zeros((4, 10), np.float32)
    weights[0, 3], weights[1, 3] = 2, 0.5
    np.testing.assert_allclose(loss(tokens, weights), 2 * each[0] + 0.5 * each[1], rtol=1e-5)


@pytest.mark.slow
def test_the_initial_loss_is_that_of_a_uniform_guess():
    tables, tokens = tables_of(MODEL), tokens_of(MODEL)
    weights = np.full((4, 10), 1 / 40, np.float32)
    loss = jax.jit(
        lambda key: whole.loss(
            MODEL,
            weights_of(MODEL, gpt.init(MODEL, key), tables),
            Batch.from_windows(tokens, weights),
        )
    )(jax.random.key(0))
    assert float(loss) == pytest.approx(np.log(MODEL.vocab_size), rel=0.05)


@pytest.mark.slow
def test_bfloat16_compute_stays_near_float32_and_keeps_float32_masters(result):
    loss, gradients = result
    narrow_loss, narrow = run(dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    assert narrow_loss.dtype == np.float32
    np.testing.assert_allclose(narrow_loss, loss, rtol=0.01)
    for gradient, exact in zip(jax.tree.leaves(narrow), jax.tree.leaves(gradients)):
        assert gradient.dtype == np.float32
        difference = np.linalg.norm(gradient - exact)
        assert difference < 0.1 * np.linalg.norm(exact)


@pytest.mark.parametrize("remat", some(["none", "full"], "full"))
def test_masked_documents_have_the_loss_of_each_alone(remat):
    """Rotary positions are relative, so a document's place in the window changes nothing."""
    config = dataclasses.replace(MODEL, positions="rotary", mask_documents=True, remat=remat)
    params, tables, eot = arbitrary_params(config), tables_of(config), config.vocab_size - 1
    tokens = tokens_of(config, batch=1) % eot
    tokens[0, 4] = eot
    weights = np.ones((1, tokens.shape[1] - 1), np.float32)
    together = whole.loss(
        config, weights_of(config, params, tables), Batch.from_windows(tokens, weights)
    )
    alone = sum(
        whole.loss(
            config,
            weights_of(config, params, tables),
            Batch.from_windows(part, np.ones((1, part.shape[1] - 1), np.float32)),
        )
        for part in (tokens[:, :6], tokens[:, 5:])
    )
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    plain = dataclasses.replace(config, mask_documents=False)
    assert (
        abs(
            whole.loss(
                plain, weights_of(plain, params, tables), Batch.from_windows(tokens, weights)
            )
            - together
        )
        > 1e-3
    )


@pytest.mark.parametrize("masked", [False, True])
def test_loss_scores_and_logits_are_of_one_model(masked):
    """Also where the tokens are of several documents."""
    config = dataclasses.replace(MODEL, positions="rotary", mask_documents=masked)
    weights = weights_of(config, arbitrary_params(config), tables_of(config))
    tokens = tokens_of(config) % config.vocab_size
    tokens[:, 3] = config.vocab_size - 1
    batch = Batch.from_windows(tokens, np.full(tokens[:, 1:].shape, 1 / tokens[:, 1:].size))
    logs = jax.nn.log_softmax(whole.logits(config, weights, batch.tokens))
    losses = -np.take_along_axis(np.asarray(logs), batch.targets[..., None], axis=-1).ravel()
    everywhere = np.arange(batch.targets.size), batch.targets.reshape(-1)
    scores, _ = whole.token_scores(config, weights, Batch(batch.tokens), *everywhere)
    np.testing.assert_allclose(scores, losses, rtol=1e-5)
    np.testing.assert_allclose(whole.loss(config, weights, batch), losses.mean(), rtol=1e-5)


KEPT = {
    "dense": {},
    "gated": {"gated_mlp": True, "activation": "silu", "biases": ()},
    "separate": {"fused_qkv": False},
    "sparse": {"linears": {}},
}


@pytest.mark.parametrize("traced_tables", some([False, True], False))
@pytest.mark.parametrize("name", KEPT)
def test_keep_repeats_no_product_but_the_scores(name, traced_tables):
    """Of dense and of block-sparse weights alike; a softmax without a kernel needs its scores."""
    config = dataclasses.replace(DENSE, num_layers=3, **KEPT[name])
    if name == "sparse":
        config = config.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 4))
    tokens = tokens_of(config)
    scores = 2 * config.num_layers * tokens[:, 1:].size * config.d_model * (tokens.shape[1] - 1)

    def flops(remat):
        model = dataclasses.replace(config, remat=remat)
        tables = tables_of(model)

        def step(params, tables):
            rest = tables
            return whole.loss_and_gradients(model, params, rest, Batch.from_windows(tokens))[1]

        if not traced_tables:
            jaxpr = jax.make_jaxpr(lambda p: step(p, tables))(arbitrary_params(model))
        else:
            jaxpr = jax.make_jaxpr(step)(arbitrary_params(model), tables)
        return traced.count(jaxpr.jaxpr, {}).flops

    assert flops("keep") == flops("none") + scores
    assert flops("full") > flops("keep")


EOT = 39
ROWS = np.array([[EOT, 5, 6, EOT, 7, EOT, EOT, EOT], [1, EOT, EOT, 2, 3, 4, 5, 6]], np.int32)


def test_padding_is_an_end_of_text_before_another():
    """The end of a text is one of its tokens, also as the first of a row."""
    config = dataclasses.replace(DENSE, experts=2, top_k=1, vocab_size=EOT + 1)
    real = whole.local_batch(config, Batch.from_windows(ROWS), padded=True).real
    expected = [[1, 1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1, 1]]
    np.testing.assert_array_equal(real, np.array(expected, bool))
    assert whole.local_batch(config, Batch.from_windows(ROWS)).real is None
    assert whole.routed_tokens(config, Batch.from_windows(ROWS), padded=True) == 11
    assert whole.routed_tokens(config, Batch.from_windows(ROWS)) == 14


def test_documents_are_those_of_the_inputs():
    config = dataclasses.replace(DENSE, mask_documents=True, vocab_size=EOT + 1)
    documents = whole.local_batch(config, Batch.from_windows(ROWS)).documents
    expected = [[0, 1, 1, 1, 2, 2, 3], [0, 0, 1, 2, 2, 2, 2]]
    np.testing.assert_array_equal(documents, expected)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_weights_of_a_mean_add_up_over_the_shards(shards):
    weights = Batch.from_windows(ROWS).weighted(shards).token_weights
    assert weights.sum() * shards == pytest.approx(1)
