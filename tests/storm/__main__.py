"""Draws combinations of settings, data and commands, and checks relations between their results.

    make storm ARGS="--minutes=30 --seed=7"
    make storm ARGS="--only=resumed_run_is_uninterrupted training.batch=8"
    make storm ARGS="--draw=123"

A few draws share a process, which ends when one of them crashes.  A draw follows from its seed and
number.  Leaves a line for each draw and each fault in the folder, runs/storm-SEED where --folder
names none; the next storm of the folder goes on after them.
"""

import argparse
import re
import shutil
import sys
import time
from pathlib import Path

# What a draw needs is imported, and the runtime of jax not started: draws are in forks.
from storm import checking, machine
from storm.case import Case
from storm.processes import Worker, in_fork
from storm.records import Records, command
from storm.relations import load
from storm.relations.pages import check_words
from storm.shrinking import shrunk
from storm.world import Wrong, check

ENDS = "the_process_ends"
DRAWN = "case.txt"
REFUSED = "refusals_have_words"

MOST_SECONDS = 5.0
"""Of the processor, after which a setting is refused while a case is drawn."""

DRAWS_OF_A_PROCESS = 10
"""A process is warm after its first draw, but may pass something on to the next."""

MOST_ALIKE = 2
"""Faults of a relation with the same words that are shrunk."""

AT_ONCE, EACH_AT_ONCE = "two_at_once_are_the_same", 8
"""The relation of two processes, and of how many draws one is checked so."""


def arguments() -> argparse.Namespace:
    """Returns the flags."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("storm", description=__doc__, formatter_class=layout)
    parser.add_argument("--minutes", type=float, default=0, help="for how long; 0 is no limit")
    parser.add_argument("--draws", type=int, default=0, help="how many; 0 is no limit")
    parser.add_argument("--seed", default="0", help="of the draws")
    parser.add_argument("--draw", type=int, default=-1, help="number of one draw")
    parser.add_argument("case", nargs="*", help="settings of one case: PATH=VALUE ...")
    parser.add_argument("--default", action="store_true", help="the case without any settings")
    parser.add_argument("--only", default="", help="comma list of relations")
    parser.add_argument("--folder", type=Path, help="what is recorded, and what goes on")
    parser.add_argument("--seconds", type=float, default=20, help="of the processor for a draw")
    parser.add_argument("--summary", action="store_true", help="print the summary of the folder")
    return parser.parse_args()


def main() -> int:
    """Runs the storm; returns 1 where a relation does not hold."""
    options = arguments()
    folder = (options.folder or Path("runs") / f"storm-{options.seed}").absolute()
    machine.prepare(str(folder / "programs"))
    load()
    records = Records(folder)
    if options.summary:
        print(records.summary())
        return 0
    shared, work = folder / "shared", folder / "work"
    done = in_fork(lambda: checking.prepare(shared, work / "prepare"), folder / "prepare.log")
    if done.get("error"):
        print(done["error"], file=sys.stderr)
        return 2
    names = [name for name in options.only.split(",") if name]
    if options.case or options.default or options.draw >= 0:
        return single(options, records, shared, work, names)
    return many(options, records, shared, work, names)


def single(options, records, shared, work, names) -> int:
    """Checks one case, and prints what it showed."""

    def checked_case():
        case = Case.of(word.split("=", 1) for word in options.case)
        if options.draw >= 0:
            case, _ = checking.drawn(options.seed, options.draw, shared, work / "drawn")
        return as_row(checking.checked(case, shared, work / "case", names, options.seconds))

    if names == [AT_ONCE]:
        case = Case.of(word.split("=", 1) for word in options.case)
        row = at_once(case, shared, work, records.folder)
    else:
        row = in_fork(checked_case, records.folder / "case.log")
    print(row.get("case", ""))
    for name, result in row.get("results", {}).items():
        words = row["words"].get(name, "")
        print(f"{name}: {result}{': ' * bool(words)}{words}")
    if error := row.get("error"):
        print(error)
    return int(bool(row.get("wrong") or row.get("error")))


def many(options, records, shared, work, names) -> int:
    """Draws cases until the time or the number of draws is over; shrinks and records faults."""
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    first = number = records.next_number
    faults, worker = 0, None

    def check_number(number):
        return checked_number(options, number, records, shared, work, names)

    while time.monotonic() < end and (not options.draws or number < first + options.draws):
        if worker is None or not worker.alive or worker.calls == DRAWS_OF_A_PROCESS:
            if worker:
                worker.end()
            worker = Worker(check_number, records.folder / "draw.log")
        worker.begin(number)
        row = with_ends(worker.result(), records.folder)
        if number % EACH_AT_ONCE == 0 and not names and not row["wrong"]:
            pair = at_once(Case.parsed(row["case"]), shared, work, records.folder)
            for field in ("results", "words"):
                row[field] |= pair[field]
            row["wrong"] += pair["wrong"]
            row["seconds"] += pair["seconds"]
        records.add_draw({"number": number, **row, "words": {}})
        print(f"{number}: {row['seconds']:.0f} s, {len(row['results'])} relations", flush=True)
        for name in row["wrong"]:
            faults += 1
            record_fault(options, number, name, row, records, shared, work)
        number += 1
    if worker:
        worker.end()
    print(records.summary())
    return int(faults > 0)


def checked_number(options, number, records, shared, work, names) -> dict:
    """Draws the case of a number and checks it; returns a row as `as_row`."""
    case, refusals = checking.drawn(options.seed, number, shared, work / "drawn")
    (records.folder / DRAWN).write_text(str(case))
    outcome = checking.checked(case, shared, work / f"{number}", names, options.seconds)
    for refusal in refusals:
        try:
            check_words(refusal.error)
            check(refusal.seconds < MOST_SECONDS, f"refused after {refusal.seconds:.1f} s")
        except Wrong as error:
            outcome.results[REFUSED] = "wrong"
            outcome.words[REFUSED] = f"{refusal.case}: {error}"
    return as_row(outcome)


def with_ends(row: dict, folder: Path) -> dict:
    """Returns the row of a draw, also where its process had an error."""
    if not (error := row.get("error")):
        return row
    case = folder / DRAWN
    return {
        "case": case.read_text() if case.exists() else "",
        "results": {ENDS: "wrong"},
        "words": {ENDS: error},
        "wrong": [ENDS],
        "seconds": 0.0,
    }


def record_fault(options, number, name, row, records, shared, work) -> None:
    """Shrinks the case of a relation that does not hold, and records it with its command."""
    case, words = Case.parsed(row["case"]), row["words"][name]

    def fails(smaller):
        if name == AT_ONCE:
            return bool(at_once(smaller, shared, work, records.folder)["wrong"])
        again = in_fork(
            lambda: as_row(checking.checked(smaller, shared, work / "shrinking", [name])),
            records.folder / "shrinking.log",
        )
        if name == ENDS:
            return bool(again.get("error"))
        same = kind_of(again.get("words", {}).get(name, "")) == kind_of(words)
        return name in again.get("wrong", []) and same

    smallest, tried = case, 0
    alike = [fault for fault in records.faults if kind_of(fault["words"]) == kind_of(words)]
    # A run that ends with an error is a fault of each relation: it is shrunk once.
    is_known = any(fault["number"] == number for fault in alike)
    alike = [fault for fault in alike if fault["relation"] == name]
    if name != REFUSED and not is_known and len(alike) < MOST_ALIKE:
        smallest, tried = shrunk(case, fails)
    fault = {
        "number": number, "seed": options.seed, "relation": name, "words": words,
        "case": str(case), "shrunk": str(smallest), "tried": tried,
        "command": command(name, smallest),
    }  # fmt: skip
    records.add_fault(fault)
    print(f"{name}: {first_line(words)}\n    {fault['command']}", flush=True)


def first_line(words: str) -> str:
    """Returns the first line, without the trace after it."""
    return words.partition("\n")[0][:1000]


def kind_of(words: str) -> str:
    """Returns the beginning of the words of a fault, without numbers."""
    return re.sub(r"[\d.,()-]+|e-\d+", "", words)[:24]


def as_row(outcome) -> dict:
    """An outcome as JSON."""
    return {
        "case": str(outcome.case),
        "results": outcome.results,
        "words": outcome.words,
        "wrong": outcome.wrong,
        "seconds": round(outcome.seconds, 1),
    }


def at_once(case, shared: Path, work: Path, logs: Path) -> dict:
    """Checks that two runs of a case that begin together, with one cold cache, are the same.

    Returns a row as `as_row`.
    """
    folder = work / "at once"
    workers = [
        Worker(
            lambda number=number: checking.results_of(
                case, shared, folder / f"{number}", folder / "cache"
            ),
            logs / f"at once {number}.log",
        )
        for number in range(2)
    ]
    for worker in workers:
        worker.begin()
    results = [worker.result() for worker in workers]
    for worker in workers:
        worker.end()
    seconds = sum(each.pop("seconds", 0.0) for each in results)
    shutil.rmtree(folder, ignore_errors=True)
    name, words = AT_ONCE, ""
    if errors := [each["error"] for each in results if "error" in each]:
        words = errors[0]
    elif different := [key for key in results[0] if results[0][key] != results[1].get(key)]:
        pairs = [(key, *(str(each.get(key))[:200] for each in results)) for key in different]
        words = f"they differ in {pairs}"
    return {
        "case": str(case),
        "results": {name: "wrong" if words else "holds"},
        "words": {name: words} if words else {},
        "wrong": [name] * bool(words),
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
