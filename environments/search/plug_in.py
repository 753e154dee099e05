"""Additions of the search plug-in to the core's commands: options of train and eval, and jobs of
doctor. Imports nothing heavy."""

from __future__ import annotations

from rlflow.commands.arguments import Option
from rlflow.commands.doctor import Job
from rlflow.errors import install_command

OPTIONS = (
    Option("--train-data", "environment.train", "training questions, jsonl", commands=("train",)),
    Option("--val-data", "environment.val", "validation questions, jsonl", commands=("train",)),
    Option("--corpus", "environment.corpus", "passages to search, jsonl"),
    Option("--pages", "environment.pages", "whole pages for the tool access, jsonl"),
)

JOBS = (
    Job(
        "search environment",
        ("faiss-cpu|faiss-gpu-cu12", "bm25s"),
        install_command("search"),
        tested={"faiss-cpu": "1.15.1", "bm25s": "0.3.16"},
    ),
    Job(
        "retrieval server",
        ("faiss-cpu|faiss-gpu-cu12", "bm25s", "aiohttp", "uvicorn", "uvloop", "prometheus-client"),
        install_command("search"),
        tested={"aiohttp": "3.14.5", "uvicorn": "0.54.0"},
    ),
    Job("search with Qdrant", ("qdrant-client", "qdrant-edge-py"), install_command("qdrant")),
)
