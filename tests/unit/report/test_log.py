"""The log file of a run holds what was said before it had a place, and nothing after the run."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest

from rlflow.report.terminal import RunLog

logger = logging.getLogger("rlflow.anything")


def test_records_from_before_the_file_come_first_and_later_ones_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with RunLog() as log:
        logger.warning("before")
        log.write_to(path)
        assert path.read_text().endswith("WARNING rlflow.anything: before\n")
        logger.warning("after")
        assert path.read_text().endswith("WARNING rlflow.anything: after\n")
    logger.warning("too late")
    assert [line.split(": ")[1] for line in path.read_text().splitlines()] == ["before", "after"]


@pytest.mark.parametrize("module", ["rlflow_environments.mathematics", "rlflow_tools.view.live"])
def test_what_plug_ins_and_tools_say_is_in_the_log_too(tmp_path: Path, module: str) -> None:
    importlib.import_module(module.split(".")[0])
    with RunLog() as log:
        log.write_to(tmp_path / "log.txt")
        logging.getLogger(module).info("so many rows")
    assert f"INFO {module}: so many rows" in (tmp_path / "log.txt").read_text()


def test_a_log_without_a_file_leaves_nothing_behind() -> None:
    handlers = list(logging.getLogger("rlflow").handlers)
    with RunLog():
        logger.warning("to nobody")
    assert logging.getLogger("rlflow").handlers == handlers


def test_a_full_disk_stops_the_run_at_its_end_only(capsys: pytest.CaptureFixture[str]) -> None:
    """A line that is lost says nothing; that the file is not whole is known when it is closed."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError, match="No space left"), RunLog() as log:
        log.write_to(Path("/dev/full"))
        logger.warning("lost")
        logger.warning("lost too")
    assert "Traceback" not in capsys.readouterr().err


def test_the_log_is_whole_in_a_script_that_never_heard_of_logging(tmp_path: Path) -> None:
    parent = logging.getLogger("rlflow")
    before, level = parent.level, logging.getLogger().level
    parent.setLevel(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)
    try:
        with RunLog() as log:
            log.write_to(tmp_path / "log.txt")
            logger.info("a step")
        assert "a step" in (tmp_path / "log.txt").read_text() and parent.level == logging.NOTSET
    finally:
        parent.setLevel(before)
        logging.getLogger().setLevel(level)
