"""A folder of text, Markdown, HTML and JSON Lines as documents: a title and paragraphs of plain
text, and passages cut from them at the ends of sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlflow.errors import DataError, install_command, needing
from rlflow_environments.common.jsonl import BadRow, parse_object, records, refuse, text_of
from rlflow_environments.retrieval.corpus import Passage, make_contents, title_of

_NOT_TEXT = ("script", "style", "noscript", "template", "nav", "footer", "form")
_FRONT_MATTER = re.compile(r"\A---\n(?=[\w-]+[ \t]*:).*?\n---\n", re.DOTALL)
_PARAGRAPHS = re.compile(r"\n[ \t]*\n")
# Of a manual page: a short line above a deeper one is a heading or the name of an entry; a hyphen
# that is none of the keyboard breaks a word
_ENTRY = re.compile(
    r"^([ \t]*)(?![*•o+-][ \t])\S[^\n]{0,60}(?<![.,;])\n(?=\1[ \t]+\S)", re.MULTILINE
)
_BROKEN_WORD = re.compile(r"(?<=\w)[\u2010\u00ad][ \t]*\n[ \t]*(?=\w)")
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_OTHER_BLOCKS = ("p", "div", "br", "li", "tr", "blockquote", "pre", "table", "section", "dt", "dd")
_BLOCKS = (*_HEADINGS, *_OTHER_BLOCKS)
_LONGEST_TITLE = 120
MAX_CHARACTERS = 1000
_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]?[^\W_a-z])|(?<=[。！？])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Prof|Sr|Jr|vs|No|Vol|Fig|cf|ca|approx|e\.g|i\.e|etc))\.$"
)


@dataclass(frozen=True)
class Document:
    """name: its path in the folder, for JSON Lines with `#line`. paragraphs: plain text, white
    space collapsed. url: where the row of a JSON Lines file has one, else `doc://name`."""

    name: str
    title: str
    paragraphs: tuple[str, ...]
    url: str

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


def read_documents(
    folder: str | Path, *, skip_bad: bool = False
) -> tuple[list[Document], dict[str, int]]:
    """(the documents in the order of their names, {suffix, or "empty" or "links out of it": number
    of files that are no documents}).

    Hidden files are left alone, and links that lead out of the folder, which may be a download:
    documents are shown to a policy. Raises DataError: nothing to read; files or rows that cannot be
    read, unless `skip_bad`.
    """
    root = Path(folder).expanduser()
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    documents: list[Document] = []
    others: dict[str, int] = {}
    bad: list[tuple[str, str]] = []
    for path in files:
        name = path.name if path == root else path.relative_to(root).as_posix()
        if any(part.startswith(".") for part in Path(name).parts):
            continue
        reader = READERS.get(path.suffix.lower())
        leads_out = path != root and not path.resolve().is_relative_to(root.resolve())
        if reader is None or leads_out:
            kind = "links out of it" if leads_out else path.suffix.lower() or path.name
            others[kind] = others.get(kind, 0) + 1
            continue
        for where, found in reader(path, name):
            if isinstance(found, BadRow):
                bad.append((where, str(found)))
            elif found.paragraphs:
                documents.append(found)
            else:
                others["empty"] = others.get("empty", 0) + 1
    if not documents and not bad:
        seen = ", ".join(f"{count} {suffix}" for suffix, count in others.items()) or "nothing"
        raise DataError(f"{root}: expected documents ({', '.join(READERS)}), found {seen}.")
    refuse(root, "documents", bad, len(documents), skip=skip_bad)
    return documents, others


Found = Iterator[tuple[str, "Document | BadRow"]]


def _one(read: Callable[[bytes, str], tuple[str, list[str]]]) -> Callable[[Path, str], Found]:
    """A reader of files that hold one document each. read: (content, name without suffix) ->
    (title, paragraphs)."""

    def reader(path: Path, name: str) -> Found:
        try:
            title, paragraphs = read(path.read_bytes(), path.stem)
        except UnicodeDecodeError as problem:
            yield name, BadRow(f"not UTF-8 ({problem.reason} at byte {problem.start})")
            return
        except BadRow as problem:
            yield name, problem
            return
        title = _clean(title)[:_LONGEST_TITLE]
        yield name, Document(name, title, _cleaned(paragraphs), f"doc://{name}")

    return reader


def _decoded(content: bytes) -> str:
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def _plain(content: bytes, stem: str) -> tuple[str, list[str]]:
    """A first line that stands alone and is no sentence is the title."""
    text = _BROKEN_WORD.sub("", _decoded(content))
    text = _ENTRY.sub(r"\g<0>\n", text)
    paragraphs = [one.strip() for one in _PARAGRAPHS.split(text) if one.strip()]
    first = paragraphs[0] if paragraphs else ""
    if first and "\n" not in first and len(first) <= _LONGEST_TITLE and first[-1] not in ".!?:;,":
        return first, paragraphs[1:]
    return _readable(stem), paragraphs


def _markdown(content: bytes, stem: str) -> tuple[str, list[str]]:
    """The first heading is the title; code blocks are no text."""
    with needing(".md documents", install_command("search")):
        from markdown_it import MarkdownIt
    text = _FRONT_MATTER.sub("", _decoded(content))
    page = MarkdownIt("commonmark").enable("table").render(text)
    return _html(page, stem, headings=_HEADINGS, left_out=("pre",))


def _html(
    content: bytes | str,
    stem: str,
    headings: Sequence[str] = _HEADINGS[:1],
    left_out: Sequence[str] = (),
) -> tuple[str, list[str]]:
    """The first h1, else the title, is the title; a page may declare an encoding of its own."""
    with needing(".html documents", install_command("search")):
        import bs4
    try:
        page = bs4.BeautifulSoup(content, "html.parser")
    except bs4.exceptions.ParserRejectedMarkup as problem:
        raise BadRow(f"no HTML ({' '.join(str(problem.args[-1]).split())})") from None
    heading = page.find(headings)
    titles = [found.get_text(" ") for found in (heading, page.title) if found]
    for tag in [*page([*_NOT_TEXT, *left_out, "title"]), heading]:
        if tag is not None:
            tag.decompose()
    for tag in page(_BLOCKS):
        tag.insert_before("\n\n")
        tag.insert_after("\n\n")
    body = page.find("main") or page.find("article") or page.body or page
    title = next(filter(str.strip, titles), "") or _readable(stem)
    return title, _PARAGRAPHS.split(body.get_text())


def _json_lines(path: Path, name: str) -> Found:
    """Rows of a corpus: `contents`, or `text`, with `title` and `url` where they have them."""
    for line, _, record in records(path.read_bytes()):
        where = f"{name}#{line}"
        try:
            row = parse_object(record)
            if row.get("contents") is not None:
                contents = text_of(row, "contents")
                title = str(row.get("title") or title_of(contents))
                body = Passage("", title, contents, "").body
                text = body if body.strip() else contents
            else:
                title, text = str(row.get("title") or ""), text_of(row, "text")
        except BadRow as problem:
            yield where, problem
            continue
        title, url = _clean(title) or _readable(path.stem), str(row.get("url") or f"doc://{where}")
        yield where, Document(where, title, _cleaned(_PARAGRAPHS.split(text)), url)


READERS: dict[str, Callable[[Path, str], Found]] = {
    ".txt": _one(_plain),
    ".md": _one(_markdown),
    ".html": _one(_html),
    ".htm": _one(_html),
    ".jsonl": _json_lines,
}


CONVERT = {
    ".pdf": "pdftotext FILE.pdf",
    ".docx": "pandoc FILE.docx -o FILE.md",
    ".doc": "soffice --convert-to txt FILE.doc",
    ".odt": "pandoc FILE.odt -o FILE.md",
    ".epub": "pandoc FILE.epub -o FILE.md",
    ".rtf": "pandoc FILE.rtf -o FILE.md",
    ".pptx": "soffice --convert-to pdf FILE.pptx, then pdftotext",
    ".tex": "pandoc FILE.tex -o FILE.md",
}
"""Documents that are not read here, and what makes text of them."""


def _clean(text: str) -> str:
    return " ".join(text.split())


def _cleaned(paragraphs: list[str]) -> tuple[str, ...]:
    return tuple(cleaned for paragraph in paragraphs if (cleaned := _clean(paragraph)))


def _readable(stem: str) -> str:
    """The title of a document that has none: its file's name with blanks."""
    return re.sub(r"[_\-]+", " ", stem).strip() or stem


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; an abbreviation or an initial ends none."""
    sentences: list[list[str]] = []
    for piece in filter(None, map(str.strip, _END.split(paragraph))):
        if sentences and _ABBREVIATION.search(sentences[-1][-1][-12:]):  # longer than any of them
            sentences[-1].append(piece)
        else:
            sentences.append([piece])
    return [" ".join(pieces) for pieces in sentences]


def cut_passages(
    documents: Sequence[Document], max_characters: int = MAX_CHARACTERS
) -> tuple[list[Passage], list[int]]:
    """(passages in the order of the documents, the document's number of each passage).

    A passage has the title and the URL of its document and at most `max_characters` of its text:
    whole sentences, and only a longer sentence is cut itself.
    """
    passages: list[Passage] = []
    owners: list[int] = []
    for number, document in enumerate(documents):
        for text in _pieces(document, max_characters):
            contents = make_contents(document.title, text)
            passages.append(
                Passage(f"p{len(passages):06d}", document.title, contents, document.url)
            )
            owners.append(number)
    return passages, owners


def _pieces(document: Document, limit: int) -> Iterator[str]:
    piece = ""
    for paragraph in document.paragraphs:
        for index, sentence in enumerate(_parts(paragraph, limit)):
            joint = "" if not piece else "\n" if index == 0 else " "
            if len(piece) + len(joint) + len(sentence) > limit:
                yield piece
                piece, joint = "", ""
            piece += joint + sentence
    if piece:
        yield piece


def _parts(paragraph: str, limit: int) -> Iterator[str]:
    for sentence in split_sentences(paragraph):
        yield from (sentence[start : start + limit] for start in range(0, len(sentence), limit))
