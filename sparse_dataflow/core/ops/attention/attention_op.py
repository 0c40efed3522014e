"""Causal self-attention: one function that dispatches to one implementation per platform."""

import importlib

import jax

from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.ops.attention import dot_product
from sparse_dataflow.core.ops.attention import plain_attention as reference
from sparse_dataflow.files.errors import UserError

IMPLEMENTATIONS = ("reference", "xla", "cudnn", "splash")


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    implementation: str | None = None,
    *,
    window: int = 0,
    cap: float = 0.0,
) -> jax.Array:
    """Compute softmax(q kᵀ / sqrt(head_dim)) v with a causal mask; differentiable.

    Args:
      query: float [batch, tokens, heads, head_dim].
      key: [batch, tokens, kv heads, head_dim]; query head h reads the key/value head
        h // (heads / kv heads), which no implementation but "reference" repeats in memory.
      value: like key.
      implementation: one of IMPLEMENTATIONS, or None to choose: cuDNN on a GPU, splash attention on
        a TPU, else XLA.  XLA is also the fallback; a refusal is logged once.
      window: tokens that each query sees, itself and those before it; 0 is all.
      cap: the scores s become cap * tanh(s / cap) before the softmax; 0 leaves them.

    Returns:
      [batch, tokens, heads, head_dim] in query's dtype; the softmax runs in float32.

    Raises:
      UserError: if shapes or dtypes disagree, or a named implementation cannot run.
    """
    _check(query, key, value, window)
    name = implementation or _choose(query, key, window, cap)
    if implementation and (reason := _refusal(name, query, key, window, cap)):
        raise UserError(f"Attention implementation {name!r} cannot run: {reason}")
    if name == "reference":
        return reference.causal_attention(query, key, value, window, cap)
    if name == "splash":
        return _splash().causal_attention(query, key, value, window, cap)
    return dot_product.causal_attention(query, key, value, window, cap, implementation=name)


def _check(query, key, value, window):
    alike = {(a.shape[:2], a.shape[3:], str(a.dtype)) for a in (query, key, value)}
    fits = query.ndim == 4 and key.shape == value.shape and query.shape[2] % key.shape[2] == 0
    if len(alike) > 1 or not fits:
        shapes = ", ".join(f"{a.dtype} {list(a.shape)}" for a in (query, key, value))
        raise UserError(
            "query, key and value must share one shape [batch, tokens, heads, head_dim] and one "
            "dtype, but key and value may have fewer heads, of which the query's are a multiple; "
            f"got {shapes}."
        )
    if window < 0:
        raise UserError(f"window is {window}; legal: 1 or more tokens, or 0 for all.")


def _choose(query, key, window=0, cap=0.0):
    fastest = {"gpu": "cudnn", "tpu": "splash"}.get(dispatch.platform(), "xla")
    reason = _refusal(fastest, query, key, window, cap)
    name = "xla" if reason else fastest
    dispatch.log_choice("causal_attention", name, dispatch.platform(), reason)
    return name


def _refusal(name, query, key, window, cap=0.0):
    """Return why a named implementation cannot run here; empty if it can."""
    if name not in IMPLEMENTATIONS:
        return f"the name is unknown; legal: {', '.join(IMPLEMENTATIONS)}."
    platform = dispatch.platform()
    required = {"cudnn": "gpu", "splash": "tpu"}.get(name, platform)
    if required != platform:
        return f"it runs on {required}, and this is {platform}; legal here: reference, xla."
    if name == "cudnn" and cap:
        return "cuDNN has no soft cap of scores."
    if name == "cudnn":
        return dot_product.cudnn_refusal(query, key, window)
    if name == "splash":
        return _splash().refusal(query) or dispatch.sharding_refusal()
    return ""


def _splash():
    """Import lazily: the module imports the TPU compiler."""
    return importlib.import_module(f"{__package__}.splash")
