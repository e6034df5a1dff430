"""The error tree: every error a user can cause, and the exit code it ends with.

AutoplanError
|-- InputError          3   a hardware profile, model file, plan or option is wrong
|   `-- UsageError      2   the command line itself is wrong
|       `-- PlanMismatchError   a plan does not belong to this model or device count
|-- TraceError          4   the model cannot be traced
|-- SolverError         1   the solver failed (a bug, or a broken installation)
|-- InfeasibleError     5   it is proved that nothing fits
|-- StoppedError        6   stopped without a plan (or without the proof asked for)
|-- MeasureError        7   measuring failed
|-- ToleranceError      8   a program is outside what was promised
`-- OutputError         9   the output cannot be written
"""


class AutoplanError(Exception):
    """Root of all errors meant for the user; `exit_code` is what the command line returns."""

    exit_code = 1


class InputError(AutoplanError):
    """A file, field or option holds something that cannot be used.

    The message names file and field, what was found, what was expected and how to fix it.
    """

    exit_code = 3

    @classmethod
    def of(cls, where: str, *, found: object, expected: str, fix: str) -> "InputError":
        """An error in the one form all of them share: where, found, expected, fix."""
        if isinstance(found, list) and any(isinstance(item, dict) for item in found):
            found = f"an array of tables ({len(found)})"  # as [[device]] makes, all of which is long
        return cls(f"{where}: found {found!r}\n  expected: {expected}\n  fix: {fix}")

    @classmethod
    def unreadable(cls, where: str, error: OSError, *, expected: str, fix: str = "check the path") -> "InputError":
        """Likewise of a file that is not there or cannot be read: `gpt.py: no such file`."""
        words = {FileNotFoundError: "no such file", IsADirectoryError: "a folder, not a file"}
        found = words.get(type(error)) or (error.strerror or str(error)).lower()
        return cls(f"{where}: {found}\n  expected: {expected}\n  fix: {fix}")


class UsageError(InputError):
    """The command line is wrong: an unknown name, a missing or impossible option."""

    exit_code = 2


class PlanMismatchError(UsageError):
    """A plan was made for another model or another number of devices: each is good, but not with the other."""


class TraceError(AutoplanError):
    """`torch.export` cannot trace the model; the message holds the user's file and line."""

    exit_code = 4


class SolverError(AutoplanError):
    """The solver failed, or its answer does not pass the independent check."""


class InfeasibleError(AutoplanError):
    """No plan satisfies all limits, and that is proved."""

    exit_code = 5


class StoppedError(AutoplanError):
    """The search stopped before it had a plan, or before it had the proof asked for."""

    exit_code = 6


class MeasureError(AutoplanError):
    """A measurement cannot be made on this machine."""

    exit_code = 7


class ToleranceError(AutoplanError):
    """A program differs from one process, or from its estimate, by more than the tolerance."""

    exit_code = 8


class OutputError(AutoplanError):
    """The output cannot be written; what was there before is untouched."""

    exit_code = 9
