"""An engine that says what a function makes of the prompt's text, and a tokenizer for it: rollouts without a model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

from rlflow.models.tiny import write_tokenizer
from rlflow.rollout import Tokenizer
from rlflow.rollout.engine import Completion, FixedEngine, Sampling


def byte_tokenizer() -> Tokenizer:
    """A token per byte."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder, [], vocabulary=257)
        return Tokenizer.from_pretrained(folder)


class Saying(FixedEngine):
    """Answers the prompt `p` with `say(p)` and the end-of-sequence token."""

    def __init__(self, tokenizer: Tokenizer, say: Callable[[str], str]) -> None:
        self.tokenizer = tokenizer
        self.say = say

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        prompt = self.tokenizer.decode(list(tokens))
        said = [*self.tokenizer.encode(self.say(prompt)), self.tokenizer.eos_ids[0]]
        cut = said[: sampling.max_tokens]
        stop = "stop" if cut == said else "length"
        return Completion(cut, [-0.1] * len(cut), [0] * len(cut), stop)
