"""A folder of text, Markdown, HTML and JSON Lines as documents: a title and paragraphs of plain
text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import DataError, install_command, needing
from rlflow_environments.common.jsonl import BadRow, parse_object, records, refuse, text_of

_BLOCKS = re.compile("p|div|br|li|tr|h[1-6]|blockquote|pre|table|section|dt|dd")
_NOT_TEXT = ("script", "style", "noscript", "template", "nav", "footer", "form")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_LONGEST_TITLE = 120


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
    """(the documents in the order of their names, {suffix, or "empty": number of files that are no
    documents}).

    Hidden files are left alone. Raises DataError: nothing to read; files or rows that cannot be
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
        if reader is None:
            kind = path.suffix.lower() or path.name
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
        yield (
            name,
            Document(name, _clean(title)[:_LONGEST_TITLE], _cleaned(paragraphs), f"doc://{name}"),
        )

    return reader


def _decoded(content: bytes) -> str:
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def _plain(content: bytes, stem: str) -> tuple[str, list[str]]:
    """A first line that stands alone and is no sentence is the title."""
    paragraphs = [
        paragraph.strip()
        for paragraph in re.split(r"\n[ \t]*\n", _decoded(content))
        if paragraph.strip()
    ]
    first = paragraphs[0] if paragraphs else ""
    if first and "\n" not in first and len(first) <= _LONGEST_TITLE and first[-1] not in ".!?:;,":
        return first, paragraphs[1:]
    return _readable(stem), paragraphs


def _markdown(content: bytes, stem: str) -> tuple[str, list[str]]:
    """The first heading is the title; code blocks are no text."""
    with needing(".md documents", install_command("search")):
        from markdown_it import MarkdownIt
    title, paragraphs, heading = "", [], False
    for token in (
        MarkdownIt("commonmark").enable("table").parse(_FRONT_MATTER.sub("", _decoded(content)))
    ):
        if token.type in ("heading_open", "heading_close"):
            heading = token.type == "heading_open"
        elif token.type == "inline":
            line = "".join(_inline(child) for child in token.children or [])
            if heading and not title:
                title = line
            else:
                paragraphs.append(line)
    return title or _readable(stem), paragraphs


def _inline(token: Any) -> str:
    return (
        " "
        if token.type in ("softbreak", "hardbreak")
        else ""
        if token.type == "html_inline"
        else token.content
    )


def _html(content: bytes, stem: str) -> tuple[str, list[str]]:
    """The first h1, else the title, is the title; a page may declare an encoding of its own."""
    with needing(".html documents", install_command("search")):
        import bs4
    page = bs4.BeautifulSoup(content, "html.parser")
    heading = page.find("h1")
    title = next(
        (
            found.get_text(" ")
            for found in (heading, page.title)
            if found and found.get_text().strip()
        ),
        "",
    )
    for tag in page([*_NOT_TEXT, "title"]):
        tag.decompose()
    if heading is not None:
        heading.decompose()
    for tag in page(_BLOCKS):
        tag.insert_before("\n\n")
        tag.insert_after("\n\n")
    body = page.find("main") or page.find("article") or page.body or page
    return title or _readable(stem), re.split(r"\n[ \t]*\n", body.get_text())


def _json_lines(path: Path, name: str) -> Found:
    """Rows of a corpus: `contents`, or `text`, with `title` and `url` where they have them."""
    for line, _, record in records(path.read_bytes()):
        where = f"{name}#{line}"
        try:
            row = parse_object(record)
            contents = row.get("contents")
            if contents is not None:
                first, _, text = text_of(row, "contents").partition("\n")
                title = str(row.get("title") or first.strip().strip('"'))
                text = text if text.strip() else first
            else:
                title, text = str(row.get("title") or ""), text_of(row, "text")
        except BadRow as problem:
            yield where, problem
            continue
        paragraphs = _cleaned(re.split(r"\n[ \t]*\n", text))
        yield (
            where,
            Document(
                where,
                _clean(title) or _readable(path.stem),
                paragraphs,
                str(row.get("url") or f"doc://{where}"),
            ),
        )


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
