"""Evaluation and generation with trained models."""

import importlib.util

from sparse_dataflow.files.errors import UserError


def refuse_without_lm_eval() -> None:
    """UserError where the package lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "Evaluation needs the package lm-eval: pip install 'sparse_dataflow[eval]', or "
            "pip install lm-eval."
        )
