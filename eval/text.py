"""Texts to evaluate on: reading them, counting their words and bytes, turning them into ids."""

import dataclasses
import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

# The text of a JSON line, and how the documents of such a file join into one flat text. WikiText's
# page rule is the inverse of how its flat file was split into pages, byte for byte.
FIELDS = {"text": ("", "\n\n"), "page": (" \n", "\n")}

Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents in file order, and how they join into one text."""

    documents: tuple[str, ...]
    prefix: str = ""
    separator: str = "\n\n"

    @property
    def words(self) -> int:
        """Words of all documents: each split at white space, empty ends included.

        The harness's count for WikiText (`re.split` on the raw page), so that word perplexities
        compare: `" a b "` has 4 words.
        """
        return sum(len(re.split(r"\s+", document)) for document in self.documents)

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(len(document.encode("utf-8")) for document in self.documents)

    def joined(self) -> str:
        """All documents as one flat text."""
        return self.prefix + self.separator.join(self.documents)


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """Ids of a text, with the counts that perplexities per word and byte divide by."""

    documents: tuple[np.ndarray, ...]  # int32 [tokens] each
    words: int
    bytes: int

    @property
    def tokens(self) -> int:
        """Ids of all documents."""
        return sum(len(ids) for ids in self.documents)


def tokenize(text: Text, encode: Encode, *, join: bool) -> TokenizedText:
    """Ids of the joined text (`join`), or of every document by itself.

    Args:
        text: the documents.
        encode: string to ids, without special tokens.
        join: one run of ids over all documents, for the `disjoint` window rule.
    """
    parts = [text.joined()] if join else text.documents
    documents = tuple(np.asarray(encode(part), np.int32) for part in parts)
    return TokenizedText(documents, text.words, text.bytes)


def read_text(path: str | Path) -> Text:
    """Read `.txt` (one document) or `.jsonl` (a document a line, in field `text` or `page`).

    Either may be gzipped (`.gz`).

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown suffix, bad UTF-8 or JSON, a missing or wrongly typed field, or no
            documents; the message names the file, the line and the field.
    """
    path = Path(path)
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    kind = suffixes[-1] if suffixes else ""
    if kind not in (".txt", ".jsonl"):
        raise ValueError(f"{path}: expected a .txt or .jsonl file (or either with .gz)")
    try:
        content = _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}: {error.reason}") from error
    text = Text((content,)) if kind == ".txt" else _from_json_lines(path, content)
    if not any(text.documents):
        raise ValueError(f"{path}: no text in it")
    return text


def _read_bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged gzip file: {error}") from error


def _from_json_lines(path: Path, content: str) -> Text:
    field, documents = None, []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if field is None:
            field = _field_of(path, number, record)
        value = record.get(field) if isinstance(record, dict) else None
        if not isinstance(value, str):
            raise ValueError(f"{path}:{number}: field {field!r} is missing or not a string")
        documents.append(value)
    if field is None:
        raise ValueError(f"{path}: no documents in it")
    prefix, separator = FIELDS[field]
    return Text(tuple(documents), prefix, separator)


def _field_of(path: Path, number: int, record: object) -> str:
    """The text's field, from the first record; it must be the same in all."""
    present = [name for name in FIELDS if isinstance(record, dict) and name in record]
    if len(present) != 1:
        raise ValueError(
            f"{path}:{number}: expected exactly one of the fields {', '.join(FIELDS)}, "
            f"found {', '.join(present) or 'none'}"
        )
    return present[0]
