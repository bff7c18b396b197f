"""The errors a user can cause, as one tree; `stage.py` and `cli.py` print them as one line.

    LadderError              exit 1
    |-- UserError            exit 2   something the user wrote or gave
    |   |-- ConfigError               params.yaml or a profile
    |   |-- DataError                 a raw file, a formatted or packed set
    |   |-- ModelError                a base model, a checkpoint, an export
    |   `-- LaunchError               ranks, devices, launcher
    |-- GateFailed           exit 3   a gate measured something outside its limit
    |-- RunFailed            exit 1   ranks ended without a result
    `-- Resumable            exit 75  stopped on request after a save (EX_TEMPFAIL of sysexits.h)

A message names the value, the rule and the way out, in this order.
"""

from __future__ import annotations

from typing import ClassVar


class LadderError(Exception):
    """Anything the product itself reports; never shown with a traceback."""

    exit_code: ClassVar[int] = 1


class UserError(LadderError):
    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    pass


class DataError(UserError):
    pass


class ModelError(UserError):
    pass


class LaunchError(UserError):
    pass


class GateFailed(LadderError):
    exit_code: ClassVar[int] = 3


class RunFailed(LadderError):
    pass


class Resumable(LadderError):
    exit_code: ClassVar[int] = 75
