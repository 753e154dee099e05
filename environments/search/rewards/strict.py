"""A stricter exact match of our own: it distinguishes what Search-R1's takes for equal although it
is not.

Search-R1 deletes punctuation and articles, so that "1.5" equals "15", "-5" equals "5", "C++" equals
"C" and "the" equals "an"; and it knows neither Unicode forms nor numbers, so that "1,000" differs
from "one thousand".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal

from rlflow_environments.common.transcript import Transcript
from rlflow_environments.search.rewards import scoring

_UNITS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *(
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ),
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL = {word: number for number, word in enumerate(_UNITS)} | {
    word: 10 * number for number, word in enumerate(_TENS, 2)
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"), "-")
_QUOTES = dict.fromkeys(map(ord, "\u2018\u2019\u201b\u02bc"), "'") | dict.fromkeys(
    map(ord, "\u201c\u201d\u201e"), '"'
)
_INITIALS = re.compile(r"\b(?:[^\W\d_]\.){2,}")
_TOKEN = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w])"  # a number; a sign counts where nothing precedes it
    r"|[^\W_]+(?:'[^\W_]+)*"  # a word
    r"|[+#%$\u20ac\u00a3\u00a5\u00b0&@=<>*/^~]"  # a symbol that means something
)
_ARTICLES = ("a", "an", "the")


def strict_em(transcript: Transcript) -> float:
    """1 if the last answer and a gold answer are the same tokens, else 0; see `strict_tokens`.
    Nothing equals nothing is 0, and so is an answer among more than ten answer tags."""
    text = transcript.model_text
    answer = scoring.extract_answer(text)
    if (
        answer is None
        or max(text.count("<answer>"), text.count("</answer>")) > scoring.MAX_ANSWER_TAGS
    ):
        return 0.0
    tokens = strict_tokens(answer)
    return float(bool(tokens) and any(tokens == strict_tokens(gold) for gold in transcript.golds))


def strict_tokens(text: str) -> list[str]:
    """The tokens of an answer that count: NFKC, case folded, one article in front dropped.

    Numbers are values: "1,000.50", "1000.5" are one token, and so are "twenty-one" and "21", "two
    thousand" and "2000". A sign counts in front of a number, signs such as % and + as tokens of
    their own. Other punctuation only separates; "U.S.A." is "usa".
    """
    folded = unicodedata.normalize("NFKC", text).casefold().translate(_DASHES | _QUOTES)
    folded = unicodedata.normalize("NFC", folded)
    folded = _INITIALS.sub(lambda match: match[0].replace(".", ""), folded)
    tokens = list(_numbers([_value(token) for token in _TOKEN.findall(folded)]))
    return tokens[1:] if len(tokens) > 1 and tokens[0] in _ARTICLES else tokens


def _value(token: str) -> str:
    """A number in its shortest form, any other token as it stands."""
    digits = token.replace(",", "")
    if not re.fullmatch(r"[-+]?[0-9]+(\.[0-9]+)?", digits):
        return token
    number = Decimal(digits)
    return f"{number.normalize() + 0:f}" if number else "0"


def _numbers(tokens: list[str]) -> Iterator[str]:
    """The tokens with number words replaced by their value, as far as they go together."""
    place = 0
    while place < len(tokens):
        used, value = _spelled(tokens, place)
        yield str(value) if used else tokens[place]
        place += max(1, used)


def _spelled(tokens: list[str], start: int) -> tuple[int, int]:
    """(how many tokens from `start` on spell a number, the number); (0, 0) if there is no number
    word there.

    "two hundred and five thousand" is (5, 205000); "twenty one" is 21, but "one two" is two
    numbers.
    """
    total = group = used = 0
    last = None  # the last small number word, which only a unit after tens may follow
    for place in range(len(tokens) - start):
        token = tokens[start + place]
        if token in _SMALL:
            joins = last is None or (last >= 20 and last % 10 == 0 and 0 < _SMALL[token] < 10)
            if not joins:
                break
            group, last, used = group + _SMALL[token], _SMALL[token], place + 1
        elif token in _SCALES and used == place and group:
            scale = _SCALES[token]
            if (
                scale == 100 and group >= 100
            ):  # "hundred hundred hundred": no number, and one of any length
                break
            if scale == 100:
                group *= 100
            else:
                total, group = total + group * scale, 0
            last, used = None, place + 1
        elif not (
            token == "and" and used == place and used and tokens[start + place - 1] in _SCALES
        ):
            break
    return used, total + group
