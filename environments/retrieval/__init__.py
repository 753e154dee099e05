"""Retrieval as a service: corpora, encoders, indices, a server and its clients. Of use without any
agent."""
