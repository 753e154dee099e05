"""Runs that share what their policies said, as text: each plays it through its own environment and
scores it itself.

Filters that stand on the rollout and talk to others, which the core's do not. Nothing that comes
from a peer is trusted: not its rewards, which are not even sent, not its length, not its form."""

BUILT_IN = {
    "directory": "rlflow_environments.swarm.shared_folder:DirectoryTransport",
    "tcp": "rlflow_environments.swarm.tcp:TcpTransport",
}
"""Transports: name -> `module:Name`."""
