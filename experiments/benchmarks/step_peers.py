"""The dense training step of others: torch.compile with flash attention, to be timed beside ours.

The same GPT, from the same parameters: pre-norm blocks, tied embeddings, AdamW behind clipping by
the global norm.  With float32 state the masters are float32 under autocast; with bfloat16 state
torch has no masters of another dtype, so parameters, gradients and moments are bfloat16, 8 bytes a
parameter against our 10.  torch is optional: the extra `peers`.

Shapes in names: B batch, T tokens, D d_model, H heads, K head width, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from sparse_dataflow.core.config.model import REMATS, ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.optim.optimizers import learning_rate_multipliers, weight_decays
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.relay.host_state import fresh_state, view

from . import paired
from .benchmark import Program
from .kernels.peers import Pending

NAME = "torch_compile"


class Report(NamedTuple):
    """The report of a step, as `core.step_metrics.StepReport`: `loss` converts to float."""

    loss: Pending


@dataclasses.dataclass(frozen=True)
class Step(Program):
    """A compiled training step on its own state; `run` returns a report with its loss.

    Attributes:
      step_bytes: memory of a step (`paired.program_bytes`; of a peer the peak of its
        allocator); None where it is not known.
      stored_parameters: trained parameters.
      state_bytes: bytes of parameters, gradients and moments.
    """

    step_bytes: int | None
    stored_parameters: int
    state_bytes: int


def peer_refusal(model: ModelConfig, training: TrainingConfig) -> str:
    """Why there is no peer of this training; empty where there is one."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install 'sparse_dataflow[peers]')"
    if model.sparse_projections or model.supar or model.positions != "learned":
        return "the peer has dense weights, the standard parametrization and learned positions"
    if model.family_fields():
        return f"the peer is a GPT-3, without model.{', model.'.join(model.family_fields())}"
    if model.remat not in REMATS:
        return f"the peer treats all blocks alike, legal: --set model.remat={', '.join(REMATS)}"
    if training.optimizer != "adamw":
        return "the peer has AdamW, legal: --set training.optimizer=adamw"
    if training.state_dtype == "bfloat16" and model.compute_dtype != "bfloat16":
        return "the peer with bfloat16 state computes in bfloat16"
    return ""


def maker(
    model: ModelConfig, training: TrainingConfig, tokens: np.ndarray, learning_rate: float
) -> dict[str, Callable[[], Step]]:
    """{NAME: function that makes its step}; empty, after printing why, where there is none."""
    if why := peer_refusal(model, training):
        print(f"{NAME} is left out: {why}")
        return {}
    return {NAME: functools.partial(torch_step, model, training, tokens, learning_rate)}


def attempt(name: str, make: Callable[[], Any]) -> Any:
    """The result of `make`; None, after printing why, where a peer does not run here."""
    try:
        return make()
    except UserError as error:
        if name != NAME:
            raise
        print(f"{name} is left out: {error}")
        return None


def compared(seconds: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Peer's time over ours, printed: {peer: {"over_dense", "over_sparse" (medians)}}.

    Args:
      seconds: of "dense", "sparse" and the peers that ran, as `paired.paired_seconds` gives.
    """
    if NAME not in seconds:
        return {}
    ratios = {n: paired.paired_ratio(seconds[NAME], seconds[n]) for n in ("dense", "sparse")}
    words = (f"{NAME} / {n}: {paired.ratio_text(ratio)}" for n, ratio in ratios.items())
    print(", ".join(words))
    return {NAME: {f"over_{n}": ratio["ratio"] for n, ratio in ratios.items()}}


def torch_step(
    model: ModelConfig,
    training: TrainingConfig,
    tokens: np.ndarray,
    learning_rate: float,
    compiled: bool = True,
) -> Step:
    """The whole training step in torch, on a CUDA device where there is one.

    Args:
      model: one whose `peer_refusal` is empty.
      training: the same; batch, micro-batches, clipping, decay, seed and dtype of the state.
      tokens: int32 [batch, sequence + 1].
      learning_rate: of every step.
      compiled: whether through torch.compile.

    Raises:
      UserError: it does not run here, because memory or a compiler is missing.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as XLA multiplies there.
        torch.cuda.reset_peak_memory_stats()
    try:
        return _compiled(model, training, tokens, learning_rate, compiled, device)
    except (RuntimeError, OSError) as error:
        lines = str(error).strip().splitlines()
        hint = ""
        if isinstance(error, torch.OutOfMemoryError):
            hint = "; XLA_PYTHON_CLIENT_PREALLOCATE=false keeps jax from taking the memory first"
        raise UserError(f"{lines[0][:300] if lines else type(error).__name__}{hint}.") from error


def release() -> None:
    """Gives the memory of steps that nothing refers to any more back to the device."""
    gc.collect()
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.cuda.empty_cache()


def _compiled(model, training, tokens, learning_rate, compiled, device):
    import torch

    dtype = getattr(torch, training.state_dtype)
    params, kinds = _parameters(model, training, dtype, device)
    leaves = jax.tree.leaves(params)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [leaf for leaf, kind in zip(leaves, kinds) if kind == (decay, rate)],
                "weight_decay": decay,
                "lr": rate * learning_rate,
            }
            for decay, rate in dict.fromkeys(kinds)
        ],
        betas=(training.b1, training.b2),
        eps=training.epsilon,
        fused=True,
    )
    loss_of = functools.partial(_loss, model)
    loss_of = torch.compile(loss_of) if compiled else loss_of
    parts = torch.tensor(tokens, dtype=torch.int64, device=device).chunk(training.micro_batches)
    # Autocast would round what has the compute dtype already.
    narrow = training.state_dtype == "float32" and model.compute_dtype == "bfloat16"

    def gradients():
        total = torch.zeros((), device=device)
        for part in parts:
            with _attention(device), torch.autocast(device, torch.bfloat16, enabled=narrow):
                loss = loss_of(params, part) / len(parts)
            loss.backward()
            total += loss.detach()
        return total

    def run():
        total = gradients()
        torch.nn.utils.clip_grad_norm_(leaves, training.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Report(Pending(total, torch.cuda.synchronize if device == "cuda" else None))

    start = time.perf_counter()
    float(gradients())
    seconds = time.perf_counter() - start
    optimizer.zero_grad(set_to_none=True)
    count = sum(leaf.numel() for leaf in leaves)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return Step(run, seconds, peak, count, 4 * dtype.itemsize * count)


def _parameters(model, training, dtype, device) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    """({"embed", "blocks" (a list of layers), "head"}, (its weight decay, its learning rate over
    the schedule's) of each leaf): our own initial parameters, of which torch's product wants the
    transpose."""
    import torch

    ours = fresh_state(model, training).params

    def tensor(path, leaf):
        leaf = np.array(leaf.T if path[-1].key == "kernel" else leaf, order="C")
        return torch.from_numpy(leaf).to(device, dtype).requires_grad_()

    layers = range(model.num_layers)
    params = jax.tree_util.tree_map_with_path(
        tensor, ours | {"blocks": [view(ours, layer) for layer in layers]}
    )
    # A dense model's layers are one group, whose leaves are stacked: each has one kind.
    kinds = (
        jax.tree.leaves(kind | {"blocks": [kind["blocks"] for _ in layers]})
        for kind in (
            weight_decays(model, training, ours),
            learning_rate_multipliers(model, training, ours),
        )
    )
    return params, list(zip(*kinds, strict=True))


def _loss(model, params, tokens_BxT):
    """Mean negative log-likelihood, in nats, of the tokens that follow; float32 []."""
    import torch
    from torch.nn import functional as F

    dtype = getattr(torch, model.compute_dtype)
    inputs, targets = tokens_BxT[:, :-1], tokens_BxT[:, 1:]
    embedding_VxD = params["embed"]["tokens"]
    x_BxTxD = F.embedding(inputs, embedding_VxD).to(dtype)
    x_BxTxD = x_BxTxD + params["embed"]["positions"][: inputs.shape[1]].to(dtype)
    block = functools.partial(_block, model)
    for layer in params["blocks"]:
        x_BxTxD = _rematerialised(model, block, layer, x_BxTxD)
    x_BxTxD = _norm(model, params["head"]["norm"], x_BxTxD)
    logits = F.linear(x_BxTxD, embedding_VxD)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _block(model, layer, x_BxTxD):
    from torch.nn import functional as F

    B, T, D = x_BxTxD.shape
    qkv = _linear(layer["qkv"], _norm(model, layer["norm1"], x_BxTxD))
    q, k, v = qkv.view(B, T, model.num_heads, 3, -1).permute(3, 0, 2, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x_BxTxD = x_BxTxD + _linear(layer["attn_out"], attended.transpose(1, 2).reshape(B, T, D))
    hidden = _linear(layer["mlp_in"], _norm(model, layer["norm2"], x_BxTxD))
    hidden = F.relu(hidden) if model.activation == "relu" else F.gelu(hidden, approximate="tanh")
    return x_BxTxD + _linear(layer["mlp_out"], hidden)


def _rematerialised(model, block, layer, x):
    """The block under the model's remat: "keep" keeps the outputs of products."""
    import torch
    from torch.utils import checkpoint

    if model.remat == "none":
        return block(layer, x)
    options = {}
    if model.remat == "keep":
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        options["context_fn"] = functools.partial(
            checkpoint.create_selective_checkpoint_contexts, products
        )
    return checkpoint.checkpoint(block, layer, x, use_reentrant=False, **options)


def _linear(weights, x):
    from torch.nn import functional as F

    return F.linear(x, weights["kernel"], weights["bias"])


def _norm(model, weights, x):
    """In the dtype of the weights, as autocast has it, and back."""
    from torch.nn import functional as F

    wide, scale = x.to(weights["scale"].dtype), weights["scale"]
    if model.norm == "rmsnorm":
        return F.rms_norm(wide, scale.shape, scale, eps=1e-5).to(x.dtype)
    return F.layer_norm(wide, scale.shape, scale, weights["bias"], eps=1e-5).to(x.dtype)


def _attention(device):
    """Fused attention alone, whichever has an engine for the shape, cuDNN's first."""
    if device == "cpu":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fused = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    return sdpa_kernel([*fused, SDPBackend.EFFICIENT_ATTENTION], set_priority=True)
