"""The command line of lm-eval with the model "sparse_dataflow".

python -m sparse_dataflow.commands.lm_eval --model sparse_dataflow --model_args run=DIR --tasks piqa
"""

import sys

from sparse_dataflow.evaluation import refuse_without_lm_eval
from sparse_dataflow.files.errors import UserError


def main() -> None:
    """Runs lm-eval on the arguments of this process."""
    refuse_without_lm_eval()
    from lm_eval.__main__ import cli_evaluate

    from sparse_dataflow.commands import lm_eval_model  # noqa: F401 (registers the model)

    cli_evaluate()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
