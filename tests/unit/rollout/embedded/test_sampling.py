from __future__ import annotations

import pytest
import tokenizers
import torch
from fixtures import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from rlflow.errors import RolloutError
from rlflow.rollout.embedded.sampling import (
    END_TOKEN,
    KEPT_ROWS,
    MAY_END_STRING,
    StopTable,
    sample,
    uniforms,
)
from rlflow.rollout.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def stops(tokenizer: Tokenizer) -> StopTable:
    return StopTable(400, lambda: tokenizer, torch.device("cpu"))


def splitmix64(state: int) -> int:
    """The published algorithm in plain integers, as the oracle."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_splitmix_gives_the_published_first_number() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("seed, counter", [(0, 0), (1, 5), (-3, 7), (2**62 + 12345, 4095)])
def test_uniforms_are_splitmix64(seed: int, counter: int) -> None:
    expected = splitmix64((splitmix64(seed % 2**64) + counter) % 2**64) >> 32
    assert uniforms(torch.tensor([seed]), torch.tensor([counter])).item() == expected / 2**32


def test_uniforms_are_uniform_and_unrelated_between_seeds_and_counters() -> None:
    seeds, counters = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    numbers = uniforms(seeds.reshape(-1), counters.reshape(-1)).view(200, 200)
    assert abs(numbers.mean() - 0.5) < 4 * (1 / 12 / 40000) ** 0.5
    assert abs(numbers.var() - 1 / 12) < 0.002
    for shifted in (numbers.roll(1, 0), numbers.roll(1, 1)):
        assert (
            abs(torch.corrcoef(torch.stack((numbers.reshape(-1), shifted.reshape(-1))))[0, 1])
            < 0.02
        )


def test_sampled_shares_are_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, float("-inf")])
    count, temperature = 40000, 0.7
    uniform = uniforms(torch.arange(count), torch.zeros(count, dtype=torch.int64))
    tokens, logprobs = sample(logits.expand(count, 5), torch.full((count,), temperature), uniform)
    expected = torch.softmax(logits / temperature, -1)
    shares = torch.bincount(tokens, minlength=5) / count
    assert (shares - expected).abs().max() < 4 * (0.25 / count) ** 0.5
    assert shares[4] == 0
    torch.testing.assert_close(logprobs, expected.log()[tokens])


@pytest.mark.parametrize("vocab", [128, 129, 1000])
def test_a_sample_is_where_the_cumulative_distribution_passes_the_uniform_number(
    vocab: int,
) -> None:
    logits = 4 * torch.randn(500, vocab, generator=torch.Generator().manual_seed(vocab))
    uniform = uniforms(torch.arange(500), torch.zeros(500, dtype=torch.int64))
    tokens, _ = sample(logits, torch.ones(500), uniform)
    shares = logits.double().softmax(-1)
    upto = shares.cumsum(-1).gather(-1, tokens[:, None])[:, 0]
    assert (upto > uniform - 1e-6).all()
    assert (upto - shares.gather(-1, tokens[:, None])[:, 0] < uniform + 1e-6).all()


def test_a_token_of_no_share_is_never_sampled_however_the_blocks_fall() -> None:
    logits = torch.full((2000, 1000), float("-inf"))
    possible = torch.randint(0, 1000, (2000, 3), generator=torch.Generator().manual_seed(0))
    logits.scatter_(1, possible, torch.randn(2000, 3, generator=torch.Generator().manual_seed(1)))
    edges = torch.tensor([0.0, 1 - 2**-32, 0.5, 2**-32], dtype=torch.float64).repeat(500)
    tokens, logprobs = sample(logits, torch.ones(2000), edges)
    assert (tokens[:, None] == possible).any(-1).all()
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("uniform, token", [(0.0, 1), (0.2499, 1), (0.25, 2), (1 - 2**-32, 2)])
def test_the_ends_of_the_unit_interval_never_pick_an_impossible_token(
    uniform: float, token: int
) -> None:
    logits = torch.tensor([[float("-inf"), 0.25, 0.75, 0.0]])
    logits[0, 1:3] = logits[0, 1:3].log()
    logits[0, 3] = float("-inf")
    tokens, _ = sample(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert tokens.item() == token


def test_temperature_zero_is_greedy_with_the_log_probs_of_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    tokens, logprobs = sample(
        logits, torch.tensor([0.0, 1.0]), torch.tensor([0.999, 0.999], dtype=torch.float64)
    )
    assert tokens.tolist() == [1, 2]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 2]])


def ends(stops: StopTable, tokens: list[int], strings: tuple[str, ...]) -> list[int]:
    """Positions at which the table says that a completion ends."""
    row = stops.row(strings, ())
    flags = [int(stops.flags[row, token]) for token in tokens]
    return [
        at
        for at, flag in enumerate(flags)
        if flag == END_TOKEN
        or (flag == MAY_END_STRING and stops.completes(tokens[: at + 1], strings))
    ]


@pytest.mark.parametrize("string", ["</search>", "h>", "é", "☃", "a ☃", "\n\n"])
def test_a_stop_string_ends_with_the_token_that_completes_it(
    stops: StopTable, tokenizer: Tokenizer, string: str
) -> None:
    for text in (f"find{string}", string, f"é☃ \n{string}"):
        tokens = tokenizer.encode(text)
        (*_, last) = [0, *ends(stops, tokens, (string,))]
        assert last == len(tokens) - 1
        assert ends(stops, tokens, (string,))[0] == first_completion(tokenizer, tokens, string)


@pytest.mark.parametrize("string", ["Answer: ", "a ", " ", "b c"])
@pytest.mark.parametrize("text", ["Answer: b c", "a b Answer:  c"])
def test_a_stop_string_that_ends_in_a_space_is_found_on_metaspace_tokenizers(
    string: str, text: str
) -> None:
    """Their tokens carry the space in front (`\u2581b`), and decoding a token alone drops it."""
    vocab = {
        token: number
        for number, token in enumerate(["<unk>", "\u2581", *"Answer:abc", "\u2581b", "\u2581A"])
    }
    merges = [("\u2581", "b"), ("\u2581", "A")]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(split=False)
    inner.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    stops = StopTable(len(vocab), lambda: tokenizer, torch.device("cpu"))
    expected = [at for at in range(len(tokens)) if string in tokenizer.decode(tokens[: at + 1])]
    assert ends(stops, tokens, (string,))[:1] == expected[:1]


def first_completion(tokenizer: Tokenizer, tokens: list[int], string: str) -> int:
    """By brute force: decode every prefix."""
    return next(at for at in range(len(tokens)) if string in tokenizer.decode(tokens[: at + 1]))


def test_single_bytes_complete_a_stop_string_like_merged_tokens(
    stops: StopTable, tokenizer: Tokenizer
) -> None:
    by_byte = [tokenizer.encode(character)[0] for character in "<search>x</search> and more"]
    assert ends(stops, by_byte, ("</search>",))[0] == len("<search>x</search>") - 1


def test_most_tokens_need_no_decoding(stops: StopTable) -> None:
    row = stops.row(("</search>", "</answer>"), ())
    assert (stops.flags[row] == MAY_END_STRING).float().mean() < 0.05


def test_a_special_token_as_stop_string_ends_by_its_id(
    stops: StopTable, tokenizer: Tokenizer
) -> None:
    (end,) = tokenizer.eos_ids
    row = stops.row(("<|im_end|>",), ())
    assert stops.flags[row, end] == END_TOKEN


def test_special_tokens_have_no_text(stops: StopTable, tokenizer: Tokenizer) -> None:
    start = tokenizer.inner.convert_tokens_to_ids("<|im_start|>")
    split = [*tokenizer.encode("</search"), start, *tokenizer.encode(">")]
    assert ends(stops, split, ("</search>",)) == [len(split) - 1]
    far = [*tokenizer.encode("</search"), *[start] * 50, *tokenizer.encode(">")]
    assert ends(stops, far, ("</search>",)) == [len(far) - 1]
    assert ends(stops, [start], ("|>",)) == []


def test_equal_stops_share_a_row_and_wrong_ones_are_refused(stops: StopTable) -> None:
    assert stops.row(("a",), (2,)) == stops.row(("a",), (2,)) != stops.row(("a",), ())
    with pytest.raises(RolloutError, match="empty"):
        stops.row(("",), ())
    with pytest.raises(RolloutError, match="outside the model's vocabulary of 400"):
        stops.row((), (400,))


def test_rows_of_finished_requests_are_used_again(stops: StopTable) -> None:
    running = stops.row(("</a>",), ())
    flags = stops.flags[running].clone()
    for number in range(2 * KEPT_ROWS):
        row = stops.row((f"<{number}{chr(97 + number % 26)}",), (), lambda: {running})
        fresh = stops._make_row((f"<{number}{chr(97 + number % 26)}",), ())
        assert row != running and torch.equal(stops.flags[row], fresh)
    assert len(stops.flags) == KEPT_ROWS and torch.equal(stops.flags[running], flags)
    every = set(range(KEPT_ROWS))
    assert (
        stops.row(("new",), (), lambda: every) == KEPT_ROWS and stops.row(("</a>",), ()) == running
    )
