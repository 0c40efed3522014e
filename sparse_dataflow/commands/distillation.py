"""The teacher of a run, read from the folder that the config names."""

from pathlib import Path

from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.teacher import Teacher
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import starting_point
from sparse_dataflow.runs.run_config import RunConfig


def teacher_of(
    config: RunConfig, tokenizer: Tokenizer, record: RunRecord | None, folder: Path
) -> Teacher:
    """Reads the model in `training.teacher`, and says what its forward passes cost.

    Args:
      record: of a run that is resumed, whose teacher must not have changed; None for a new run.
      folder: of the run, for errors.

    Raises:
      UserError: the folder has no model, or has one of another tokenizer or shorter sequences.
    """
    path, sequence = config.training.teacher, config.training.sequence
    if record is None:
        start = starting_point.read(path, preferred=starting_point.DENSE)
    else:
        start = starting_point.read_again(record.teacher or {}, folder, "learn from")
    start.model.refuse_bidirectional(
        f"A student of training.teacher={path}", "a teacher of next tokens"
    )
    same = start.tokenizer.content_hash == tokenizer.content_hash
    if not same or start.model.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"training.teacher={path} has another tokenizer ({start.model.vocab_size} tokens) "
            f"than this run ({tokenizer.vocab_size}); legal: a model of the same tokenizer, such "
            "as a run on the same corpus with the same model.vocab_size."
        )
    if start.model.logit_cap:
        raise UserError(
            f"training.teacher={path} has model.logit_cap={start.model.logit_cap:g}; legal: a "
            "model without one."
        )
    name = f"With training.teacher={path}, training.sequence={sequence}"
    start.model.check_context(sequence, name)
    teacher = Teacher(start.model, start.params, start.provenance)
    flops = teacher.flops_per_token(sequence)
    say(f"teacher: {start.words}, {flops:.3g} FLOPs a token, which count in each step")
    return teacher
