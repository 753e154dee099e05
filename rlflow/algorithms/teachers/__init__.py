"""Teachers: whose log-probs of the policy's own tokens a method imitates. One small file per way to
ask one."""

from __future__ import annotations

BUILT_IN = {
    "model": "rlflow.algorithms.teachers.frozen_model:ModelTeacher",
    "policy": "rlflow.algorithms.teachers.policy:PolicyTeacher",
    "server": "rlflow.algorithms.teachers.completions:ServerTeacher",
}
"""Name -> `module:Name`."""
