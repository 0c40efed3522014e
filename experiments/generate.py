"""Continues a prompt with a trained model.

    python -m experiments.generate --run=runs/NAME --prompt="def main("
    python -m experiments.generate --run=runs/NAME --interactive --temperature=0.8 --top_p=0.95

Without --variant the sparse model writes, where the run has one.  --interactive continues each line
of the input; Ctrl-C stops the text being written, Ctrl-D, or Ctrl-C at the prompt, ends it.
"""

from experiments import flags, run_models
from experiments.command_line import A_FRACTION, AT_LEAST_ONE, AT_LEAST_ZERO, Flag, Group
from sparse_dataflow.files.errors import UserError

WRITING = Group(
    "Writing",
    "what it continues, and how",
    (
        Flag("prompt", "text", "", "Text to continue; empty begins a document."),
        Flag("interactive", "switch", "no", "Continue each line of the input."),
        Flag(
            "max_new_tokens",
            "integer",
            64,
            "Tokens to write at most.",
            legal=AT_LEAST_ONE,
        ),
        Flag(
            "temperature",
            "number",
            0.0,
            "What logits are divided by; 0 takes the most likely token.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "top_k",
            "integer",
            0,
            "Draws among that many tokens; 0 is all.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "top_p",
            "number",
            1.0,
            "Draws among the fewest tokens of this total probability.",
            legal=A_FRACTION,
        ),
        Flag("stop", "text", "", "Text that ends the continuation; \\n is a line break."),
        Flag("seed", "integer", 0, "Of the draws.", legal=AT_LEAST_ZERO),
    ),
)
GROUPS = (run_models.MODEL, WRITING)


def main(values):
    """Writes to the output as the text comes; see the module docstring."""
    model = run_models.load(values)
    if values.interactive == "yes":
        _converse(model, values)
    else:
        _write(model, values.prompt, values)


def _converse(model, values):
    """Continues line after line until the input ends."""
    import sys

    asks = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if asks else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        try:
            _write(model, line, values)
        except KeyboardInterrupt:
            print()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def _write(model, prompt, values):
    from sparse_dataflow.evaluation.generate import check_prompts, generate

    tokens = model.tokenizer.encode(prompt).tolist() or [model.tokenizer.eot_id]
    check_prompts([tokens], model.model.vocab_size, model.context)
    print(prompt, end="", flush=True)
    generate(
        model,
        [tokens],
        max_new_tokens=values.max_new_tokens,
        temperature=values.temperature,
        top_k=values.top_k,
        top_p=values.top_p,
        stop=[values.stop.replace("\\n", "\n")] if values.stop else [],
        seed=values.seed,
        on_token=lambda number, text: print(text, end="", flush=True),
    )
    print()


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
