"""Prints as JSON what a compiled sparse training step has on an AMD GPU that is not there.

python rocm_step.py mi300x
"""

import dataclasses
import json
import re
import sys

from sparse_dataflow.compile import topologies
from sparse_dataflow.compile.programs import compile_step
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.runs.run_config import SIZES

[kind] = sys.argv[1:]
[device] = topologies.gpu_devices(kind)
report = {}
for pattern in ("monarch", "random"):
    model = dataclasses.replace(
        SIZES["13b"], num_layers=2, d_model=512, d_ff=2048, num_heads=4, vocab_size=512,
        remat="full", compute_dtype="bfloat16",
    ).with_linears(LinearSpec("block_sparse", pattern, 1 / 4, 64))  # fmt: skip
    training = TrainingConfig(steps=1, batch=1, sequence=256)
    step = compile_step(model, training, SINGLE_DEVICE, device, changing=pattern == "random")
    text = step.program.as_text()
    report[pattern] = {
        "bytes": step.bytes.total,
        "products": len(re.findall(r"triton_nested_gemm_fusion|__cublas|__triton_gemm", text)),
        "calls": sorted(set(re.findall(r'custom_call_target="([^"]*)"', text))),
    }
print(json.dumps(report))
