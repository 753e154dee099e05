"""Asking retrieval servers over HTTP: failover, retries, a cache that replays rollouts."""
