"""Runs the checks against a server and says what came out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlflow.http import Session
from rlflow_environments.retrieval.client.servers import server_url
from rlflow_environments.retrieval.conformance.checks import CHECKS, Check
from rlflow_environments.retrieval.conformance.probe import Broken, Probe, Skipped

SEEDS = ("capital city", "history", "river", "first", "what is the name of the town", "water", "1")
"""Queries that find something in most corpora; what they find gives the queries of the checks."""
QUERIES = 12
TITLE_CHARACTERS = 80


@dataclass(frozen=True)
class Verdict:
    """What came out of one check. outcome: pass, fail, missing (of something that is not required)
    or skip."""

    check: Check
    outcome: str
    reason: str = ""


def check_server(
    url: str,
    *,
    seeds: Sequence[str] = SEEDS,
    timeout_s: float = 60.0,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """The verdicts of all checks, in order. seeds: queries to begin with. timeout_s: of one
    request.

    Raises Broken where the server does not answer a plain search at all, ConfigError for an address
    that is none.
    """
    return asyncio.run(_check(server_url(url), seeds, timeout_s, on_verdict))


async def _check(
    url: str, seeds: Sequence[str], timeout_s: float, on_verdict: Callable[[Verdict], None]
) -> list[Verdict]:
    verdicts = []
    # A connection per request: uvicorn closes one on which a request failed, and the check after it would be blamed.
    session = Session(keepalive_s=0, timeout_s=timeout_s)
    try:
        probe = Probe(session, url)
        await _sample(probe, seeds)
        for check in CHECKS:
            verdict = await _verdict(check, probe)
            on_verdict(verdict)
            verdicts.append(verdict)
    finally:
        await session.close()
    return verdicts


async def _verdict(check: Check, probe: Probe) -> Verdict:
    try:
        await check.run(probe)
    except Broken as problem:
        return Verdict(check, "fail" if check.required else "missing", str(problem))
    except Skipped as reason:
        return Verdict(check, "skip", str(reason))
    return Verdict(check, "pass")


async def _sample(probe: Probe, seeds: Sequence[str]) -> None:
    """Finds queries that find something: the seeds, then the first lines of what they find. Raises
    Broken."""
    found: dict[str, None] = {}
    for seed in seeds:
        documents = await probe.documents(seed, 5)
        if documents:
            found.setdefault(seed)
        for document in documents:
            probe.sample.append(document)
            first_line = str(document.get("contents") or "").partition("\n")[0]
            found.setdefault(first_line.strip().strip('"')[:TITLE_CHARACTERS])
    probe.queries = [query for query in found if query.strip()][:QUERIES]
    if not probe.queries:
        raise Broken(
            f"finds nothing for any of {', '.join(map(repr, seeds))}; name a query that finds "
            "something with --query"
        )
