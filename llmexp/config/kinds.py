"""The kinds of refusals, one word each: what a program can tell apart, however a text is worded."""

from __future__ import annotations

import typing
from typing import Literal

Kind = Literal[
    "unknown_key", "unknown_option", "unknown_file", "unknown_row", "missing_value",
    "missing_package", "wrong_type", "out_of_range", "conflict", "idle_knob", "unsupported",
    "not_allowed", "secret", "bad_data", "damaged_file", "too_little_data", "too_large",
    "wrong_tokenizer", "wrong_weights", "not_finite", "no_device", "wrong_ranks", "exists",
    "busy", "not_a_run", "no_checkpoint", "other_run", "other_format", "finished_run",
    "cannot_compare", "cannot_fit", "cannot_verify", "bad_own_part", "network", "disk",
    "interrupted", "failed",
]  # fmt: skip

MEANING: dict[Kind, str] = {
    "unknown_key": "there is no such key, argument, flag or command",
    "unknown_option": "the key, flag or group does not know the value",
    "unknown_file": "there is no such file or folder, or none that matches",
    "unknown_row": "no row of the runs has this figure",
    "missing_value": "a value is needed and is not given",
    "missing_package": "a package or program is not installed, or too old",
    "wrong_type": "the value has another form than is needed: a number, a list, a name",
    "out_of_range": "the value is too small, too large, or no multiple or divisor of another",
    "conflict": "two values that are given contradict each other",
    "idle_knob": "the key exists, and does nothing beside the other values or in this command",
    "unsupported": "valid elsewhere, but not in this command, model, optimizer or layout",
    "not_allowed": "would run or read what is not trusted; only the user can allow it",
    "secret": "a secret would be saved or shown",
    "bad_data": "records, ids, labels or columns of the data are not as they must be",
    "damaged_file": "a file is truncated, damaged, or holds something else than it should",
    "too_little_data": "the data hold fewer tokens or documents than this needs",
    "too_large": "does not fit into memory, or into a limit of this machine or model",
    "wrong_tokenizer": "the tokenizer does not fit the data, the weights or the task",
    "wrong_weights": "weights do not fit the model",
    "not_finite": "weights or figures are not finite",
    "no_device": "the machine, or the one that is planned for, has no such device or unit",
    "wrong_ranks": "ranks or hosts are too few, too many, or do not see the same folder",
    "exists": "what would be written is there already",
    "busy": "another process is at work in the folder",
    "not_a_run": "the path holds no run or sweep",
    "no_checkpoint": "the run has no such checkpoint, or no whole one",
    "other_run": "the folder holds a run or sweep of other values, data or code",
    "other_format": "another version of llmexp wrote the file",
    "finished_run": "the run has come to its end, and this would change nothing",
    "cannot_compare": "there are no runs that can be compared",
    "cannot_fit": "no law can be fitted to these runs",
    "cannot_verify": "a proof could not be made",
    "bad_own_part": "a model, optimizer, tokenizer, source or hook of the user's fails or misfits",
    "network": "a server does not answer, or refuses",
    "disk": "a file or folder cannot be read or written",
    "interrupted": "a signal stopped it",
    "failed": "a step or a process that was started failed",
}  # fmt: skip


def kind_of_error(error: BaseException, otherwise: Kind = "failed") -> Kind:
    """Return the kind of an error: its own, else that of a fault of files, else `otherwise`."""
    if hasattr(error, "kind"):
        return typing.cast(Kind, error.kind)
    if isinstance(error, FileNotFoundError):
        return "unknown_file"
    return "disk" if isinstance(error, OSError) else otherwise
