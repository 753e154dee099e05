"""Whether a retrieval server, anybody's, keeps the wire format that clients of the field rely
on."""

from __future__ import annotations

from rlflow_environments.retrieval.conformance.checks import CHECKS, Check
from rlflow_environments.retrieval.conformance.runner import Verdict, check_server

__all__ = ["CHECKS", "Check", "Verdict", "check_server"]
