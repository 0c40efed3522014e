"""The flags that say where a model lies, and which process this is."""

from experiments.command_line import ABOVE_ZERO, AT_LEAST_ZERO, Flag, Group

DEVICES = Group(
    "Devices",
    "where the model lies; none of it changes the results, and a resumed run may have others",
    (
        Flag(
            "mesh",
            "text",
            "auto",
            "Devices along each axis, as in data:2,fsdp:4,tensor:8; one size may be left out. data "
            "copies the model, stage cuts it by layers, fsdp deals out what --zero says, tensor "
            "cuts every layer. auto is fsdp over all devices.",
            fixed=False,
        ),
        Flag(
            "zero",
            "integer",
            3,
            "What fsdp deals out: 0 nothing, 1 moments, 2 gradients too, 3 parameters too.",
            legal=("0 to 3", lambda level: 0 <= level <= 3),
            fixed=False,
        ),
        Flag(
            "executor",
            "choice",
            "auto",
            "whole has all layers in one program; pipeline streams micro-batches (--accumulation) "
            "through the stages of the mesh; relay brings one block at a time to the device, from "
            "parameters in host memory; auto is pipeline where the mesh has stages, else whole.",
            ("auto", "whole", "pipeline", "relay"),
            fixed=False,
        ),
        Flag(
            "schedule",
            "text",
            "1f1b",
            "What the stages of a pipeline do when: gpipe, 1f1b, interleaved:V with V parts of the "
            "model on each, zero_bubble. zero_bubble idles least, interleaved less than 1f1b, "
            "gpipe as much as 1f1b while it keeps the activations of all micro-batches.",
            fixed=False,
        ),
        Flag(
            "describe",
            "switch",
            "no",
            "Print every array with its shape, sharding and bytes a chip, and train nothing.",
            ("yes", "no"),
            fixed=False,
        ),
        Flag(
            "coordinator",
            "text",
            "",
            "host:port of process 0, in a run of several; else JAX_COORDINATOR_ADDRESS.",
            fixed=False,
        ),
        Flag(
            "processes",
            "integer",
            0,
            "How many processes the run has; 0 is JAX_NUM_PROCESSES, or 1.",
            legal=AT_LEAST_ZERO,
            fixed=False,
        ),
        Flag(
            "process",
            "integer",
            -1,
            "Number of this process, from 0; -1 is JAX_PROCESS_ID.",
            legal=("-1 or more", lambda n: n >= -1),
            fixed=False,
        ),
        Flag(
            "join_timeout",
            "number",
            300.0,
            "Seconds that processes wait for the last one.",
            legal=ABOVE_ZERO,
            fixed=False,
        ),
        Flag(
            "heartbeat",
            "number",
            30.0,
            "Seconds of silence, or of a step that does not end, after which every process names "
            "whose it is, by host and phase; ten times as long, a silent process is taken for lost "
            "and all end, with status 75.",
            legal=ABOVE_ZERO,
            fixed=False,
        ),
    ),
)
