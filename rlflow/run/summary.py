"""summary.json: how a run ended, what it reached, and what it wrote where."""

from __future__ import annotations

from typing import Any

from rlflow.run.directory import RunDirectory
from rlflow.run.evaluation_schedule import EvaluationSchedule
from rlflow.storage.files import write_json


def write_summary(
    directory: RunDirectory,
    *,
    steps: int,
    seconds: float,
    interrupted: str | None,
    evaluation: EvaluationSchedule,
    export_gap: float | None,
    drawn: bool,
    reported: bool = False,
    takes_questions: bool = False,
) -> dict[str, Any]:
    """Writes the summary into the run directory and returns it.

    interrupted: the signal that ended the run. export_gap: nats between export and trainer; None: nothing was exported.
    drawn, reported: whether there is a picture, and a page. takes_questions: whether the
    environment makes tasks of what somebody types."""
    written = {"run": directory.path, "metrics": directory.metrics, "checkpoint": directory.checkpoint_path(steps)}
    if export_gap is not None:
        written["export"] = directory.export
        if directory.adapter.is_dir():
            written["adapter"] = directory.adapter
    if drawn:
        written["picture"] = directory.picture
    if reported:
        written["report"] = directory.report
    summary = {
        "status": f"interrupted by {interrupted}" if interrupted else "finished",
        "steps": steps,
        "seconds": round(seconds, 1),
        "first_evaluation_step": evaluation.first_step,
        "first_evaluation": evaluation.first,
        "last_evaluation_step": evaluation.last_step,
        "last_evaluation": evaluation.last,
        "export_logprob_difference": export_gap,
        "takes_questions": takes_questions,
        "written": {name: str(path) for name, path in written.items()},
    }
    write_json(directory.summary, summary)
    return summary
