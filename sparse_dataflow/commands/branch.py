"""Another end of a run's plateau: a new run that begins with a checkpoint of the level part.

With training.schedule=wsd the learning rate is level after warm-up, so what is trained until it
falls does not depend on when it falls.  `--resume=RUN --out=NEW` copies the newest checkpoint of
each model before both falls, the old run's and the new one's, and goes on in the new folder.  So
the new run has the bits of one that had its settings from the beginning, and the old one stays.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

from sparse_dataflow.core.checkpoint import named_arrays
from sparse_dataflow.core.training.saved_state import identity
from sparse_dataflow.evaluation import run_files
from sparse_dataflow.files import json_files, manifest, storage
from sparse_dataflow.files.addresses import is_address
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring.metrics import read_metrics
from sparse_dataflow.runs.run_config import RunConfig


def with_same_warmup(folder: str | Path, config: RunConfig) -> RunConfig:
    """Returns a config in which each model is warmed up as in the run in a folder.

    Raises:
      UserError: the run has no plateau that a new end could begin at, or is at an address.
    """
    if is_address(str(folder)) or is_address(config.run.out):
        raise UserError(
            "--resume with --out copies a checkpoint between folders; legal: folders, no addresses."
        )
    saved = run_files.read_config(folder)
    wrong = ""
    if saved.training.schedule != "wsd":
        wrong = f"training.schedule={saved.training.schedule}"
    elif saved.evolution.method != "static":
        wrong = f"--evolution={saved.evolution.method}"
    elif saved.training.new_rows_first:
        wrong = "training.new_rows_first"
    if wrong:
        raise UserError(
            f"--out with --resume gives another end to a level learning rate, and {folder} was "
            f"trained with {wrong}; legal: training.schedule=wsd, a static layout. To resume the "
            "run itself leave --out out."
        )
    before = run_files.read_variants(saved, run_files.read_record(folder, saved))
    warmups = {name: v.training.warmup_stop for name, v in before.items()}
    for name, warmup in warmups.items():
        if 0 < config.training.steps <= warmup:
            raise UserError(
                f"--steps={config.training.steps} ends within the warm-up of {name} in {folder}; "
                f"legal: more than {max(warmups.values())}."
            )
    return config.change(training__warmup_steps=tuple(warmups.values()))


def make(source: str | Path, config: RunConfig, command: tuple[str, ...]) -> None:
    """Makes the run folder `config.run.out` with checkpoints of the plateau of another run.

    The folder appears with all of its files at once.

    Args:
      config: of the new run, from `with_same_warmup`.
      command: words of the command line.

    Raises:
      UserError: the folder exists, or a model has no checkpoint before both falls.
    """
    source, out = Path(source).expanduser(), Path(config.run.out).expanduser().absolute()
    if out.exists():
        raise UserError(f"--out={out} exists already; legal: a new folder.")
    saved = run_files.read_config(source)
    record = run_files.read_record(source, saved)
    planned = dict(record.steps)
    if config.training.steps:
        planned = dict.fromkeys(planned, config.training.steps)
    new_record = dataclasses.replace(record, command=command, steps=planned, id=run_files.new_id())
    before = run_files.read_variants(saved, record)
    after = run_files.read_variants(config, new_record)
    steps = {}
    for name, v in after.items():
        # After the fall of either run the rate is no longer that of the plateau.
        falls = min(before[name].training.plateau_stop, v.training.plateau_stop)
        steps[name] = _newest_until(source / name / "checkpoints", falls, name)
    try:
        storage.make_folder(out.parent)
        # In the same folder, as only a rename inside of one file system is atomic.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as around:
            begun = Path(around) / out.name
            for name, v in after.items():
                made_with = identity(v.model, v.training, v.evolution, record.tokenizer)
                _copy(source / name, begun / name, steps[name], made_with)
            for file, content in (
                (run_files.TOKENIZER, json_files.read_bytes(source / run_files.TOKENIZER)),
                (run_files.RECORD, run_files.to_bytes(new_record.to_json())),
                (run_files.CONFIG, run_files.to_bytes(config.to_json())),
            ):
                storage.replace(begun / file, content)
            os.rename(begun, out)
            storage.flush_folder(out.parent)
    except OSError as error:
        raise UserError(f"The run folder {out} cannot be made: {error.strerror}.") from error


def _newest_until(checkpoints: Path, last: int, name: str) -> int:
    steps = named_arrays.saved_steps(checkpoints)
    level = [step for step in steps if step <= last]
    if not level:
        raise UserError(
            f"{checkpoints} has no checkpoint of {name} until step {last}, where a learning rate "
            f"falls; it has {', '.join(map(str, sorted(steps))) or 'none'}. Legal: more steps, or "
            "a shorter training.decay."
        )
    return max(level)


def _copy(source: Path, target: Path, step: int, made_with: dict) -> None:
    """Copies a verified checkpoint as one of another config, and the metrics until its step."""
    path, copy = source / "checkpoints" / str(step), target / "checkpoints" / str(step)
    try:
        facts = manifest.verify(path)
    except manifest.Damaged as damage:
        raise UserError(f"The checkpoint {path} is damaged: {damage}.") from None
    shutil.copytree(path, copy)
    about = json_files.load(copy / "extra.json")
    about["extra"]["config"] = made_with
    (copy / "extra.json").write_text(json.dumps(about))
    (copy / manifest.NAME).unlink()
    manifest.write(copy, facts)
    rows = [row for row in read_metrics(source / "metrics.jsonl") if row.get("step", 0) <= step]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    storage.replace(target / "metrics.jsonl", lines.encode())
