"""Errors of a conversion: one line of text, and an exit code of its kind."""

from __future__ import annotations

from functools import partial

from rlflow.errors import ConversionError, ExitCode

missing = partial(ConversionError, exit_code=ExitCode.MISSING)
damaged = partial(ConversionError, exit_code=ExitCode.DAMAGED)
other_layout = partial(ConversionError, exit_code=ExitCode.OTHER_LAYOUT)
unknown_model = partial(ConversionError, exit_code=ExitCode.UNKNOWN_MODEL)
other_model = partial(ConversionError, exit_code=ExitCode.OTHER_MODEL)
disk_full = partial(ConversionError, exit_code=ExitCode.DISK_FULL)
output_exists = partial(ConversionError, exit_code=ExitCode.OUTPUT_EXISTS)
unsupported = partial(ConversionError, exit_code=ExitCode.UNSUPPORTED)
hostile = partial(ConversionError, exit_code=ExitCode.HOSTILE)
