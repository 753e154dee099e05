"""Numbers that the search environment reports, its scores among them."""

from __future__ import annotations

from rlflow.report.metrics import Metric
from rlflow_environments.search.rewards import RULE_SCORES

METRICS = {
    "exact_match": Metric(
        "share",
        "of questions whose normalized answer is a gold answer",
        score=True,
        shown="EM {:.3f}",
    ),
    "f1": Metric("share", "mean token F1 with the best gold answer", score=True, shown="F1 {:.3f}"),
    "searches": Metric("per episode", "searches", shown="searches {:.2f}"),
    "accesses": Metric("per episode", "pages opened; above 0 only with the tool access"),
    "answered": Metric("share", "of episodes that came to an answer"),
    "invalid_actions": Metric(
        "per episode", "responses that were no action of the protocol, or a search too many"
    ),
    "gold_in_results": Metric("share", "of episodes that were shown a passage with a gold answer"),
    "rewarded_without_evidence": Metric(
        "share",
        "of episodes with a reward above 0 that were shown no passage with a gold answer",
        alarm=0.2,
        advice="Answers are rewarded without evidence: the policy may know or guess them. Evaluate "
        "with environment.retriever.name=random; if the score stays, take other questions, or a "
        "reward that asks for evidence.",
    ),
    "hops": Metric("count", "`hops` of the question's row; only where it has them"),
    "judge_asked": Metric(
        "share", "of answers that the judge was asked about; only with that reward, as the next one"
    ),
    "judge_cached": Metric("share", "of answers whose verdict was known"),
    **{
        name: Metric("reward", f"what the rule {name.removeprefix('score_')} gives")
        for name in RULE_SCORES
    },
    "search/searches": Metric(
        "count", "answered in the step, those of aborted episodes included", reduction="sum"
    ),
    "search/hit_rate": Metric(
        "share", "of searches that the client's cache answered; only where there is one"
    ),
    "search/empty_rate": Metric(
        "share",
        "of searches that found nothing",
        alarm=0.5,
        advice="Check that the retriever answers (rlflow search query) and that the index is that "
        "of the corpus.",
    ),
    "search/duplicate_rate": Metric("share", "of searches that their episode had made before"),
    "search/gold_in_top_k": Metric("share", "of searches that found a passage with a gold answer"),
    "time/search_s": Metric("s", "of the rollout, with at least one search under way"),
    "time/search_wait_s": Metric("s", "per search, until its episode could go on"),
    "time/search_share": Metric(
        "share", "of the whole step, with at least one search under way", share_of="time/search_s"
    ),
}
