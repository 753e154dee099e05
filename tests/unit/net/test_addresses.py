"""Claims about the addresses of this machine."""

from __future__ import annotations

import socket

from rlflow.net.addresses import own_address


def test_the_own_address_is_one_that_the_kernel_would_answer_at() -> None:
    assert own_address("127.0.0.1:6379") == own_address("ray://localhost:10001") == "127.0.0.1"
    with socket.create_server(
        (own_address("auto"), 0)
    ) as server:  # of this machine, or it could not be bound
        assert server.getsockname()[0] == own_address()
