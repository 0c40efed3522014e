"""Causal self-attention: one function, one implementation chosen per platform."""

import importlib

import jax

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels import dispatch
from sparse_dataflow.kernels.attention import cudnn, reference

IMPLEMENTATIONS = ("reference", "xla", "cudnn", "splash")


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, implementation: str | None = None
) -> jax.Array:
    """softmax(q kᵀ / sqrt(head_dim)) v with a causal mask; differentiable.

    Args:
      query: float [batch, tokens, heads, head_dim].
      key: like query.
      value: like query.
      implementation: one of IMPLEMENTATIONS, or None to choose: cuDNN on a GPU, splash attention
        on a TPU, XLA elsewhere and where those refuse, which is logged once.

    Returns:
      [batch, tokens, heads, head_dim] in query's dtype; the softmax runs in float32.

    Raises:
      UserError: if shapes or dtypes disagree, or a named implementation cannot run.
    """
    alike = {(a.shape, str(a.dtype)) for a in (query, key, value)}
    if len(alike) > 1 or query.ndim != 4:
        raise UserError(
            "query, key and value must share one shape [batch, tokens, heads, head_dim] and one "
            f"dtype; got {', '.join(f'{d} {list(s)}' for s, d in sorted(alike))}."
        )
    name = implementation or _choose(query)
    if implementation and (reason := _refusal(name, query)):
        raise UserError(f"Attention implementation {name!r} cannot run: {reason}")
    if name == "reference":
        return reference.causal_attention(query, key, value)
    if name == "cudnn":
        return cudnn.causal_attention(query, key, value)
    if name == "splash":
        return _splash().causal_attention(query, key, value)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")


def _choose(query):
    fastest = {"gpu": "cudnn", "tpu": "splash"}.get(dispatch.platform(), "xla")
    reason = _refusal(fastest, query)
    name = "xla" if reason else fastest
    dispatch.log_choice("causal_attention", name, dispatch.platform(), reason)
    return name


def _refusal(name, query):
    """Why a named implementation cannot run here; empty where it can."""
    if name not in IMPLEMENTATIONS:
        return f"it is unknown; legal: {', '.join(IMPLEMENTATIONS)}."
    home = {"cudnn": "gpu", "splash": "tpu"}.get(name, dispatch.platform())
    if home != dispatch.platform():
        return f"it runs on {home}, and this is {dispatch.platform()}; legal here: reference, xla."
    if name == "cudnn":
        return cudnn.refusal(query)
    if name == "splash":
        return _splash().refusal(query) or dispatch.partitioned()
    return ""


def _splash():
    """Imported where it runs, with the compiler for TPUs."""
    return importlib.import_module(f"{__package__}.splash")
