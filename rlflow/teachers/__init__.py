"""Teachers: whose log-probs of the policy's own tokens a method imitates. One small file per way to ask one."""

from __future__ import annotations

BUILT_IN = {
    "model": "rlflow.teachers.model:ModelTeacher",
    "policy": "rlflow.teachers.policy:PolicyTeacher",
    "server": "rlflow.teachers.server:ServerTeacher",
}
"""Name -> `module:Name`."""
