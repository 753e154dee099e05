"""Teachers, whose log-probs of the policy's tokens a method imitates: a small file per kind."""

BUILT_IN = {
    "model": "rlflow.algorithms.teachers.frozen_model:ModelTeacher",
    "policy": "rlflow.algorithms.teachers.policy:PolicyTeacher",
    "server": "rlflow.algorithms.teachers.remote_model:ServerTeacher",
}
"""Name -> `module:Name`."""
