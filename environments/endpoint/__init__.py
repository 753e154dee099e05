"""An address at which an agent asks the policy for responses, as it would ask a vendor's model.

A package over the environment's contract: every request of an episode becomes a turn of the
rollout, so that what is trained are the ids that were sampled."""

from rlflow_environments.endpoint.agent_session import AgentSession
from rlflow_environments.endpoint.endpoint import Endpoint
from rlflow_environments.endpoint.requests import ModelReply, ModelRequest, RequestRefused

__all__ = ["AgentSession", "Endpoint", "ModelReply", "ModelRequest", "RequestRefused"]
