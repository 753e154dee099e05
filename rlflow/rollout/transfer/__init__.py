"""How the trainer's weights get to engines in other processes and on other machines: published
once, pulled by who is ready.

`base` is the protocol and what a version holds; `store` keeps versions in memory that processes
share; `shared_memory` and `tcp` are the two ways to them."""

from __future__ import annotations

BUILT_IN = {
    "auto": "rlflow.rollout.transfer.readers:fitting_publisher",
    "shared_memory": "rlflow.rollout.transfer.shared_memory:SharedMemoryPublisher",
    "tcp": "rlflow.rollout.transfer.signed_tcp:TcpPublisher",
}
"""Publishers: name -> `module:Name`."""
