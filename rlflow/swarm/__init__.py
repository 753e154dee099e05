"""Runs that share what their policies said, as text: each plays it through its own environment and
scores it itself.

A package of its own: it stands on the rollout, and it does what `algorithms` must not, talk to
others. Nothing that comes from a peer is trusted: not its rewards, which are not even sent, not its
length, not its form."""

BUILT_IN = {
    "directory": "rlflow.swarm.shared_folder:DirectoryTransport",
    "tcp": "rlflow.swarm.tcp:TcpTransport",
}
"""Transports: name -> `module:Name`."""
