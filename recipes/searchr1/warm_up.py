"""Makes the demo's starting policy: a tiny random Qwen2, fine-tuned on demonstrations through the
Megatron trainer.

The shipped recipes/searchr1/starting_policy/ came from the defaults. Stopped in the middle, the
same command goes on.
"""

from __future__ import annotations

from recipes.warming import parser_of, warm_up
from rlflow.models.tiny import write_random_model, write_tokenizer
from rlflow_environments.search.world.warm_up import (
    LEARNED_ON,
    TAGS,
    VOCABULARY,
    Curriculum,
    tokenizer_texts,
)


def main() -> None:
    args = parser_of(__doc__, steps=3200, lr=3e-3, out="runs/warm-up").parse_args()
    start = args.out / "random"
    if not (start / "config.json").exists():
        write_tokenizer(
            start, tokenizer_texts(), vocabulary=VOCABULARY, tags=TAGS, learned_on=LEARNED_ON
        )
        write_random_model(start, seed=args.seed)
    print(f"wrote {warm_up(start, Curriculum().row, args)}")


if __name__ == "__main__":
    main()
