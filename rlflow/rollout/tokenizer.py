"""Text to token ids and back, by the rule that tokens are never made twice: what was fed stays as
it was."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import (
    ConfigError,
    EnvironmentContractError,
    ModelError,
    RolloutError,
    did_you_mean,
)
from rlflow.models.calls import form_of
from rlflow.models.calls.reader import THINKING, CallReader
from rlflow.models.huggingface import read_object
from rlflow.types import Message, Observation

_PLAIN_TAG = re.compile(r"</?[a-z][a-z_]*>")

LONGEST_PART = 32
"""Tokens in which a character must end: noise may have none."""
_USER: Message = {"role": "user", "content": "?"}
_THOUGHT = "<think>\nh\n</think>\n\nw"


@dataclass(frozen=True)
class NextTurn:
    """Ids in front of the next response. again: None where they follow those so far; where they
    are all of a rewritten conversation, how many of them stand for what was in view before."""

    tokens: list[int]
    again: int | None = None


@dataclass(frozen=True)
class TurnFrame:
    """opening: what a template puts between the generation prompt and an assistant's words, where
    control tokens are among it. closing: the control tokens behind them, through the turn's end."""

    opening: str
    closing: tuple[str, ...]


Speech = tuple[str | int, ...]
"""What an assistant said: text, and the ids of the control tokens that the policy sampled."""


class OwnWords(str):
    """An assistant's turn as a chat template may be given it: the control tokens in it are those
    that the policy sampled; whatever only spells one is taken apart."""


class Tokenizer:
    """A HuggingFace tokenizer with the few things that a rollout needs."""

    def __init__(
        self,
        inner: Any,
        eos_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """inner: a transformers tokenizer. eos_ids: further ids that end a response
        (generation_config.json). tools: JSON schemas that the chat template presents. options:
        what else it is rendered with."""
        self.tools = list(tools)
        self.options = dict(options or {})
        own = [] if inner.eos_token_id is None else [inner.eos_token_id]
        self.inner = inner
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *eos_ids]))
        # `all_special_ids` holds those with a role (end, padding) only; decoding strips all that
        # are marked special.
        marked = {token for token, added in inner.added_tokens_decoder.items() if added.special}
        self.special_ids = frozenset(marked | set(inner.all_special_ids))
        """They have no text, but for those of calls: `_silent`."""
        self._control = _control_tokens(inner, self.special_ids)
        self._control_text = re.compile(
            "|".join(sorted(map(re.escape, self._control.values()), key=len, reverse=True))
        )

    @classmethod
    def from_pretrained(cls, path: str | Path, trust_remote_code: bool = False) -> Tokenizer:
        """The tokenizer of a model directory, or by its name on the hub. Raises ModelError where
        there is none that transformers can read."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if not Path(path).is_dir() and str(path).count("/") != 1:  # no OWNER/NAME of the hub
            raise ModelError(f"{path}: no such model directory; expected a tokenizer there.")
        try:
            if (Path(path) / "tokenizer.json").is_file() and not trust_remote_code:
                # As it stands. AutoTokenizer goes by the model's family instead and, for Qwen2
                # among others, exchanges the file's rule of how text is split: another model of
                # that family would then be fed other tokens than it knows.
                inner = PreTrainedTokenizerFast.from_pretrained(str(path))
            else:
                inner = AutoTokenizer.from_pretrained(
                    str(path), trust_remote_code=trust_remote_code
                )
        # transformers and tokenizers raise whatever comes of reading others' files
        except Exception as error:  # noqa: BLE001
            reason = (str(error).strip() or type(error).__name__).split("\n")[0][:300]
            raise ModelError(
                f"{path}: no tokenizer that transformers can read ({reason})."
            ) from None
        if set(inner.get_vocab().values()) <= set(inner.added_tokens_decoder):
            # For some families transformers makes up an empty tokenizer where the files are
            # missing.
            raise ModelError(
                f"{path}: no tokenizer; expected tokenizer.json or the like beside config.json."
            )
        return cls(inner, _generation_eos_ids(Path(path)))

    def __len__(self) -> int:
        return len(self.inner)

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> Tokenizer:
        """This tokenizer with tools in every rendered prompt. Raises ModelError where no chat
        template presents them."""
        equipped = Tokenizer(self.inner, self.eos_ids, tools, self.options)
        if not tools:
            return equipped
        probe = [_USER]
        template = self.inner.chat_template
        if not template or equipped.render(probe) == self.render(probe):
            found = "its chat template has no place for them" if template else "no chat template"
            raise ModelError(
                "tokenizer: the environment's `tools` are shown by a chat template, found "
                f"{found}; take a model that is trained on tool calls, or describe them in the "
                "prompt and leave `tools` empty."
            )
        return equipped

    def with_options(self, options: Mapping[str, Any]) -> Tokenizer:
        """This tokenizer with options of the chat template, beside those it has. Raises ModelError
        for one that the template never reads, or that says what a rollout says."""
        template = self.inner.chat_template or ""
        texts = [template] if isinstance(template, str) else template.values()  # by name
        words = set(re.findall(r"[A-Za-z_]\w*", " ".join(texts)))
        taken = {"messages", *inspect.signature(self.inner.apply_chat_template).parameters}
        for name in options:
            if name in taken - {"tokenizer_kwargs", "kwargs"}:
                problem = f"'{name}' is set by the rollout itself; leave it out."
            elif not words:
                problem = f"'{name}' is for a chat template, and the tokenizer has none."
            elif name not in words:
                problem = f"the chat template never reads '{name}'.{did_you_mean(str(name), words)}"
            else:
                continue
            raise ModelError(
                "options of the chat template (rollout.chat_template_options, or an agent's "
                f"chat_template_kwargs): expected names that it reads; {problem}"
            )
        return Tokenizer(self.inner, self.eos_ids, self.tools, {**self.options, **options})

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone: no special tokens are added. Control tokens in it become what
        they are: for text that the user wrote or a template rendered."""
        return self.inner.encode(_well_formed(text), add_special_tokens=False) if text else []

    def encode_text(self, text: str, follows: bool = True) -> list[int]:
        """The ids of what an environment says, which may quote anybody: no control token is among
        them. follows: behind other text, so that nothing may stand between.

        Control tokens are those that the tokenizer marks as special (but for the one that unknown
        characters become), and added ones that look like it, such as `[INST]` or `<|fim_prefix|>`;
        a plain tag such as `<think>` is a protocol's own word. Where one stands in the text, a
        blank behind its first character keeps it text."""
        encode = self._encode_behind if follows else self.encode
        tokens = encode(_well_formed(text))
        if self._control.keys().isdisjoint(tokens):
            return tokens
        tokens = encode(self.without_control(text))
        # A vocabulary may spell a control token in a way that its text does not show, after
        # normalization for example.
        return [token for token in tokens if token not in self._control]

    def _encode_behind(self, text: str) -> list[int]:
        """The ids of a text that follows another. Metaspace tokenizers put a blank in front of what
        stands alone, so they get a line break in front, which is cut off."""
        if (start := self._in_front) and text:
            tokens = self.encode("\n" + text)
            if tokens[: len(start)] == start:
                return tokens[len(start) :]
        return self.encode(text)

    def encode_piece(self, text: str) -> list[int]:
        """The ids of rendered text behind other text; control tokens in it are such."""
        return self._encode_behind(text)

    @functools.cached_property
    def _in_front(self) -> list[int]:
        """The ids of that line break; [] where no blank is put in front."""
        blank = self.decode(self.encode("a") + self.encode("a")) != "aa"
        return self.encode("\n") if blank else []

    def without_control(self, text: str) -> str:
        """The text with every control token's text taken apart."""
        return self._take_apart(_well_formed(text), {})

    def _take_apart(self, text: str, own: Mapping[int, str]) -> str:
        """The text with control tokens' texts taken apart, but for those at the places `own`."""
        if not self._control:
            return text

        def replaced(match: re.Match[str]) -> str:
            spelled = match[0]
            if own.get(match.start()) == spelled:
                return spelled
            return f"{spelled[:1]} {spelled[1:]}" if len(spelled) > 1 else " "

        return self._control_text.sub(replaced, text)

    @functools.cached_property
    def call_reader(self) -> CallReader:
        """What reads calls of tools as the chat template writes them."""
        template = self.inner.chat_template
        if not template:
            return CallReader()
        in_thought: bool | None = None
        with contextlib.suppress(RolloutError):  # it wants other roles first
            in_thought = self.render([_USER]).rstrip().endswith(THINKING)
        return CallReader(form_of(str(template)), in_thought)

    @functools.cached_property
    def _silent(self) -> frozenset[int]:
        """Special tokens without text: all but those that calls of tools are written with."""
        form = form_of(str(self.inner.chat_template))  # several by name in one
        written = () if form is None else form.tokens
        return frozenset(
            token for token in self.special_ids if self._control.get(token) not in written
        )

    def response_text(self, response: Sequence[int]) -> str:
        """The text of a response, as environments get it: a token that ends the turn is no part of
        it, special or not, and special tokens have none, but for those of calls of tools."""
        tokens = self._without_end(response)
        shown = [token for token in tokens if token not in self._silent]
        if self.special_ids.isdisjoint(shown):
            return self.decode(tokens)
        return self.decode(shown, skip_special_tokens=False)

    def encode_response(self, text: str) -> list[int]:
        """The ids of a response that was read as this text elsewhere: the control tokens of its
        calls are what they are, all others stay text."""
        text = _well_formed(text)
        marks = {self._control[token] for token in self.special_ids - self._silent}
        spelled = self._control_text.finditer(text) if marks else ()
        own = {match.start(): match[0] for match in spelled if match[0] in marks}
        if not own:
            return self.encode_text(text, follows=False)
        return self.encode(self._take_apart(text, own))

    def _without_end(self, response: Sequence[int]) -> Sequence[int]:
        return response[:-1] if response and response[-1] in self.eos_ids else response

    def speech(self, response: Sequence[int]) -> Speech:
        """What a response says, without the token that ends its turn."""
        tokens = self._without_end(response)
        parts: list[str | int] = []
        start = 0
        places = [place for place, token in enumerate(tokens) if token in self._control]
        for stop in [*places, len(tokens)]:
            text = self._decode_behind(
                tokens[start - 1 : start] if start else (), tokens[start:stop]
            )
            parts += [text] if text else []
            parts += tokens[stop : stop + 1]
            start = stop + 1
        return tuple(parts)

    def _decode_behind(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """The text of ids that follow others: alone, some tokenizers drop its first blank."""
        known = self.decode(before, skip_special_tokens=False)
        return self.decode([*before, *tokens], skip_special_tokens=not before)[len(known) :]

    def own_words(self, speech: Speech) -> OwnWords:
        """The speech as text in which its control tokens, and no others, are control tokens."""
        own: dict[int, str] = {}
        length = 0
        texts: list[str] = []
        for part in speech:
            text = _well_formed(part) if isinstance(part, str) else self._control[part]
            if not isinstance(part, str):
                own[length] = text
            length += len(text)
            texts.append(text)
        return OwnWords(self._take_apart("".join(texts), own))

    def spoken(self, speech: Speech) -> str:
        """The text of a speech, as environments get it."""
        return "".join(text for text, _ in self._spans(speech))

    def recognise(self, content: str, said: Mapping[str, Speech]) -> str:
        """The content of an assistant's message; as OwnWords where it is what one of the speeches
        says, or a piece of it that holds control tokens. said: speeches by what is `spoken`."""
        if content and content in said:
            return self.own_words(said[content])
        if self._control and self._control_text.search(content):
            for text, speech in said.items():
                place = text.find(content)
                if place >= 0:
                    stop = place + len(content)
                    return self.own_words(_cut_speech(self._spans(speech), place, stop))
        return content

    def _spans(self, speech: Speech) -> list[tuple[str, str | int]]:
        """(what `decode` shows of it, part) for the parts of a speech."""
        return [
            (part, part)
            if isinstance(part, str)
            else ("" if part in self._silent else self._control[part], part)
            for part in speech
        ]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids, exactly; special tokens are left out unless asked for."""
        return self.inner.decode(
            list(tokens),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def encode_prompt(self, prompt: Observation, chat_template: bool = False) -> list[int]:
        """The ids that an episode starts with. Messages are rendered with the chat template and the
        generation prompt; text is used verbatim, or as one user message where `chat_template` is
        set."""
        if isinstance(prompt, str) and not chat_template:
            return self.encode(prompt)
        return self.encode(self.render(as_messages(prompt)))

    def render(self, messages: Sequence[Message], generation_prompt: bool = True) -> str:
        """The chat template's text. Raises ModelError where the tokenizer has no template,
        RolloutError where it refuses the messages, which may be those of one episode only."""
        from jinja2 import TemplateError

        if not self.inner.chat_template:
            raise ModelError(
                "tokenizer: it has no chat template, but rollout.chat_template is true, or a "
                "prompt or observation consists of messages; leave the option out, or let the "
                "environment give text (environment.messages=text where it has that option)."
            )
        quoted = [
            {key: one if key == "role" else self._quoted(one) for key, one in message.items()}
            for message in messages
        ]
        try:
            return self.inner.apply_chat_template(
                quoted,
                tools=self.tools or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.options,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # Those of Python: a template may take arguments of a call apart, which are any text
            roles = ", ".join(str(message.get("role")) for message in messages[:8])
            raise RolloutError(
                f"tokenizer: the chat template refuses messages of the roles {roles}: "
                f"{' '.join(str(error).split())}; expected roles that the model knows, in its "
                "order (a system text goes into the first user message). Change the environment's "
                "messages, or take a model whose template has these roles."
            ) from None

    def _quoted(self, value: Any) -> Any:
        """Text, or what holds some, as a template may be given it: only the template itself and the
        policy say control tokens."""
        if isinstance(value, OwnWords):
            return self._without_frame(value)
        if isinstance(value, str):
            return self.without_control(value)
        if isinstance(value, dict):
            return {self._quoted(name): self._quoted(one) for name, one in value.items()}
        return [self._quoted(one) for one in value] if isinstance(value, list) else value

    def encode_turn(
        self,
        history: Sequence[Message],
        response: str,
        answer: Sequence[Message],
        closing: int | None,
        exact: bool = False,
    ) -> NextTurn:
        """The ids between a response and the next one: what the template puts behind the response,
        the environment's messages, and the generation prompt. Never the response itself, whose ids
        stay as sampled. A turn ends once: what the policy said of its end is not appended again.

        Where the template rewrites earlier turns (it strips their thinking, trims them, moves
        tools), all of the conversation as it shows it now; with `exact`, what it puts behind a
        response that it leaves alone.

        history: the messages before the response, those of the policy as OwnWords. closing: the
        end-of-turn token that the sampled ids end with, if they do. Raises RolloutError where the
        template would show what was said as something else, EnvironmentContractError where with
        `exact` it does not put the answer behind it."""
        before = self.render(history) + response
        turns: list[Message] = [*history, {"role": "assistant", "content": response}]
        after = self.render([*turns, *answer])
        end = "" if closing is None else self.decode([closing], skip_special_tokens=False)
        known = after[len(before) :] if after.startswith(before) else None
        if known is not None and known.startswith(end):
            return NextTurn(self._encode_rest(known, end, closing))
        rest = self._rest(history, answer, before + after)
        unsaid = self._behind_said(rest, response)
        if unsaid and (exact or unsaid == known):  # the latter: ended by another token than its own
            return NextTurn(self._encode_rest(self._behind_end(unsaid, closing), end, closing))
        if exact:
            raise EnvironmentContractError(
                "chat template: it rewrites earlier turns of the conversation, and does not show "
                "the environment's messages behind the response (expected the render to start with "
                f"{before[-60:]!r}); answer with text instead of messages, or set "
                "rollout.history=template."
            )
        self._check_shown(turns)
        tokens = self.encode(after)
        return NextTurn(tokens, max(0, len(tokens) - len(self._encode_behind(rest))))

    def _behind_said(self, rest: str, response: str) -> str:
        """What the template puts behind a turn, without what the policy said of its end."""
        return rest.removeprefix(self._begun_end(response))

    def _begun_end(self, words: str) -> str:
        """As much of the template's end of a turn as words end with."""
        ends = self._frame.closing
        begun = ("".join(ends[:count]) for count in range(len(ends), 0, -1))
        return next((text for text in begun if words.endswith(text)), "")

    def _behind_end(self, rest: str, closing: int | None) -> str:
        """The rest without the template's own end of the turn, where the policy ended it."""
        if closing is None:
            return rest
        ends = self._frame.closing
        left = ("".join(ends[start:]) for start in range(len(ends)))
        return rest.removeprefix(next((text for text in left if rest.startswith(text)), ""))

    def _encode_rest(self, rest: str, end: str, closing: int | None) -> list[int]:
        """The ids of what stands behind a response and its end. Encoded alone, it may get a blank
        in front, or keep blanks that the end's token takes."""
        rest = rest.removeprefix(end)
        tokens = self.encode(end + rest) if end else []
        return tokens[1:] if tokens[:1] == [closing] else self._encode_behind(rest)

    def _rest(self, history: Sequence[Message], answer: Sequence[Message], taken: str) -> str:
        """What the template puts behind an assistant's turn that is one word, answer and generation
        prompt; "" where the whole answer does not stand there. taken: text without the words that
        stand for turns."""
        said, shown = "said", "shown"
        while said in taken or shown in taken:
            said, shown = said + "x", shown + "x"
        turns: list[Message] = [*history, {"role": "assistant", "content": said}]
        marked = [{**message, "content": shown} for message in answer]
        found = self.render([*turns, *marked]).partition(said)[2].count(shown)
        rest = self.render([*turns, *answer]).partition(said)[2]
        return rest if found >= len(answer) else ""

    @functools.cached_property
    def history_note(self) -> str:
        """What becomes of a turn that holds thinking when the user speaks again, in a sentence; ""
        where the template leaves it as it is, or there is none."""
        turn: Message = {"role": "assistant", "content": _THOUGHT}
        template = self.inner.chat_template
        if not template or self.render([_USER, turn, _USER]).startswith(
            self.render([_USER]) + _THOUGHT
        ):
            return ""
        note = (
            "the chat template rewrites earlier turns, their thinking for one; the policy is "
            "trained on what it will see: an episode starts another segment where an answer of "
            "messages makes it do so (rollout/forks); rollout.history=exact keeps all in view"
        )
        if opening := self._frame.opening:
            note += f", and is needed for calls of tools, as it puts {opening!r} in front of them"
        return note

    @functools.cached_property
    def _frame(self) -> TurnFrame:
        """Control tokens of the template around an assistant's turn."""
        word = "qzxw"
        plain = self.render([_USER], generation_prompt=False)
        asked = self.render([_USER])
        prompt = asked[len(plain) :] if asked.startswith(plain) else ""
        turn: Message = {"role": "assistant", "content": word}
        head, shown, tail = self.render([_USER, turn, _USER]).partition(word)
        if not shown:  # it leaves earlier turns out
            return TurnFrame("", ())
        known = next(size for size in range(len(prompt), -1, -1) if prompt[:size] in head)
        opening = head[head.rfind(prompt[:known]) + known :] if known else ""
        if self._control.keys().isdisjoint(self.encode(opening)):
            opening = ""
        # The user's turn ends with the same token where the sampled end is another (gpt-oss)
        ends = {self.decode([token], skip_special_tokens=False) for token in self.eos_ids}
        asker = self.render([{**_USER, "content": word}], generation_prompt=False)
        ends.update(self._leading_control(asker.partition(word)[2])[:1])
        closing = self._leading_control(tail)
        last = next((place for place, text in enumerate(closing) if text in ends), -1)
        return TurnFrame(opening, tuple(closing[: last + 1]))

    def _leading_control(self, text: str) -> list[str]:
        """The control tokens that a text begins with."""
        texts: list[str] = []
        place = 0
        while self._control and (match := self._control_text.match(text, place)):
            texts.append(match[0])
            place = match.end()
        return texts

    def _without_frame(self, words: OwnWords) -> str:
        """What the policy said, without what the template puts around it: a policy whose generation
        prompt does not open the turn (gpt-oss's channels) does so itself."""
        text = str(words)
        if not (self._control and self._control_text.search(text)):
            return text
        opening = self._frame.opening
        text = text.rpartition(opening)[2] if opening else text
        return text.removesuffix(self._begun_end(text))

    def _check_shown(self, messages: Sequence[Message]) -> None:
        """Raises RolloutError for a turn of the policy that the template would show as another.

        Where it opens turns with control tokens (gpt-oss: the final channel) and a response has
        others in their place (a call), the template would put those behind its own."""
        for message in messages:
            words = message["content"]
            if not isinstance(words, OwnWords) or not self._control_text.search(words):
                continue
            opening = self._frame.opening
            misplaced = opening and opening not in words
            if misplaced and self._control_text.search(self._without_frame(words)):
                raise RolloutError(
                    "chat template: it rewrites earlier turns of the conversation, and puts "
                    f"{opening!r} in front of a response that has other control tokens, "
                    f"{words[:60]!r}; set rollout.history=exact, or answer with text instead of "
                    "messages."
                )


def _cut_speech(spans: Sequence[tuple[str, str | int]], start: int, stop: int) -> Speech:
    """The parts between two places of the text that the spans show. Tokens without text at an end
    of it belong to it only where it is the end of the speech."""
    parts: list[str | int] = []
    length = sum(len(text) for text, _ in spans)
    place = 0
    for text, part in spans:
        first = max(start - place, 0)
        last = min(stop - place, len(text))
        place += len(text)
        if isinstance(part, int) and not text:
            inside = start < place < stop
            outermost = (place == start == 0) or (place == stop == length)
            parts += [part] if inside or outermost else []
        elif first < last:
            whole = last - first == len(text)
            parts.append(part if whole else text[first:last])
    return tuple(parts)


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text, special tokens included; a character that several make up
    stands at the last of them."""
    texts: list[str] = []
    start, known = 0, ""
    for stop in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[start:stop], False)
        whole = not text.endswith("\ufffd") or stop - start > LONGEST_PART or stop == len(tokens)
        texts.append(text[len(known) :] if whole else "")
        if whole:  # blanks depend on the token before
            start, known = stop - 1, tokenizer.decode(tokens[stop - 1 : stop], False)
    return texts


def cut_text(tokenizer: Any, text: str, closing: str, most: int) -> list[int]:
    """The first tokens of an observation with the closing of its frame: `most` in all."""
    encode = tokenizer.encode_text
    if not closing or not text.endswith(closing):
        return encode(text)[:most]
    end = encode(closing)
    return encode(text.removesuffix(closing))[: most - len(end)] + end


def check_frame(frame: tuple[str, str], tokenizer: Tokenizer, limit: int | None) -> None:
    """Raises ConfigError if an observation of the smallest size would be cut to less than its
    frame."""
    if limit is None or not any(frame):
        return
    if (needed := sum(len(tokenizer.encode_text(part)) for part in frame)) >= limit:
        raise ConfigError(
            f"rollout.max_observation_tokens: {limit} tokens hold no content: what stands around "
            f"it in an observation alone takes {needed}. Raise it, or remove it."
        )


def _control_tokens(inner: Any, special: frozenset[int]) -> dict[int, str]:
    """{id: text} of the tokens that only a template or the engine may say."""
    added = {token: entry.content for token, entry in inner.added_tokens_decoder.items()}
    added |= {token: inner.convert_ids_to_tokens(token) for token in special - added.keys()}
    unknown = getattr(inner, "unk_token_id", None)
    ends = inner.eos_token_id, inner.pad_token_id, inner.bos_token_id
    return {
        token: text
        for token, text in added.items()
        if text
        and (token != unknown or token in ends)
        and (token in special or _looks_like_control(text))
    }


def _looks_like_control(text: str) -> bool:
    bracketed = text[0] + text[-1] in ("<>", "[]") and len(text) > 2
    return bracketed and not _PLAIN_TAG.fullmatch(text)


def _well_formed(text: str) -> str:
    """The text with U+FFFD in place of half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def as_messages(prompt: Observation) -> list[Message]:
    """Text is one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _generation_eos_ids(path: Path) -> list[int]:
    file = path / "generation_config.json"
    if not file.is_file():
        return []
    value = read_object(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ModelError(f"{file}: eos_token_id: expected token ids, found {str(value)[:80]}.")
    return ids
