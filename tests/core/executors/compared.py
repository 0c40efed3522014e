"""Runs executor_runs.py on eight devices, and bounds its errors against a single device."""

import executor_runs
from eight_devices import on_eight_devices


def executor_run(task, name, *texts):
    """Returns the JSON output of executor_runs.py; what needs one device runs in this process."""
    if all(text.startswith("relay/") for text in texts):
        return getattr(executor_runs, task)(name, texts)
    return on_eight_devices("core/executors/executor_runs.py", task, name, *texts)


def assert_like_single_device(results, model=""):
    """Bounds the errors of "compare" of a model; texts with fewer bits have wider bounds."""
    for text, errors in results.items():
        losses = max(errors["losses"], errors["eval"])
        if model in ("int8", "fp8"):
            # A shard scales what it holds, so it rounds otherwise.
            assert losses < 2e-3 and max(errors["norms"], errors["metrics"]) < 0.05, (text, errors)
        elif "+bfloat16" in model:
            # Each device's share is rounded by up to 2^-8 and may exceed the sum; a second moment
            # has twice that error, and is rounded too.
            assert losses < 1e-3, (text, errors)
            assert max(errors["norms"], errors["metrics"]) < 2.0**-6, (text, errors)
            assert errors["first moments"] < 2.0**-4, (text, errors)
        else:
            assert losses < 1e-5 and errors["norms"] < 2e-5, (text, errors)
            assert errors["metrics"] < 2e-5, (text, errors)
            assert errors["first moments"] < 1e-4, (text, errors)
            # Adam divides by the root of a square, which amplifies rounding errors.
            assert max(errors["moments"], errors["params"]) < 1e-3, (text, errors)
