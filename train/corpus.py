"""Text to tokens, once: documents streamed through a tokenizer into memory-mapped files.

The cache's folder is named after everything its content depends on: the tokenizer, the recipe and,
for local files, their sizes and times. It appears under that name only when it is complete.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DOCUMENTS_AT_ONCE = 256
_BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which documents, and what becomes of them."""

    data: tuple[str, ...]  # local files, or one hub id (`owner/name` or `owner/name:configuration`)
    split: str = "train"  # of a hub data set
    text_field: str = "text"
    end_token: int | None = None  # put after every document

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("no data was given: name files or a hub id")


@dataclasses.dataclass(frozen=True)
class TokenCache:
    """Token ids of all documents end to end, and where each ends. Memory-mapped, read-only."""

    tokens: np.ndarray  # [N] uint16 or uint32
    ends: np.ndarray  # [documents] int64: index after each document's last token
    content: str  # 24 hex digits over both, wherever and whenever they were made

    @classmethod
    def open(cls, folder: Path) -> "TokenCache":
        """A complete cache."""
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokens = _map(folder / "tokens.bin", np.dtype(meta["dtype"]))
        ends = _map(folder / "ends.bin", np.dtype(np.int64))
        return cls(tokens, ends, meta["content"])


def documents(recipe: Recipe) -> Iterator[str]:
    """The documents' texts, streamed: files in the order given, a paragraph of .txt a document.

    Raises:
        FileNotFoundError: a local file that is not there.
        ValueError: files of several kinds, an unknown kind, or a document without the text field.
    """
    import datasets

    kind = kind_of(recipe.data)
    if kind is None:
        name, _, configuration = recipe.data[0].partition(":")
        stream = datasets.load_dataset(
            name, configuration or None, split=recipe.split, streaming=True
        )
    else:
        options: dict[str, Any] = {"sample_by": "paragraph"} if kind == "text" else {}
        files = [str(Path(path).absolute()) for path in recipe.data]
        stream = datasets.load_dataset(
            kind, data_files=files, split="train", streaming=True, **options
        )
    for number, row in enumerate(stream):
        text = row.get(recipe.text_field)
        if not isinstance(text, str):
            raise ValueError(
                f"document {number} of {recipe.data} has no text in field {recipe.text_field!r}; "
                f"its fields are {sorted(row)}: set text_field"
            )
        yield text


def kind_of(data: Sequence[str]) -> str | None:
    """The builder of `datasets` that reads these files; None for a hub id.

    Raises:
        FileNotFoundError: a local file that is not there.
        ValueError: files of several kinds, an unknown kind, or a hub id beside something else.
    """
    if any(map(_is_hub_id, data)):
        if len(data) > 1:
            raise ValueError(f"one hub id at a time, got {data}")
        return None
    kinds = {_builder(path) for path in data}
    if len(kinds) > 1:
        raise ValueError(f"data files of several kinds {sorted(kinds)}: give one kind a run")
    return kinds.pop()


def token_cache(
    recipe: Recipe,
    tokenizer: Any,
    root: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> TokenCache:
    """The tokens of a recipe, from the cache under `root` or tokenised into it.

    Memory stays at a few hundred documents.

    Args:
        recipe: what to tokenise.
        tokenizer: a `transformers` fast tokenizer.
        root: folder of all caches.
        progress: called with documents and tokens so far.

    Raises:
        ValueError: see `documents`; or no token came out.
    """
    key = cache_key(recipe, tokenizer)
    folder = root / key
    if not (folder / "meta.json").is_file():

        def encode(texts: Sequence[str]) -> list[list[int]]:
            # verbose=False: a document longer than the model's context is no reason to warn.
            encoded = tokenizer(
                list(texts),
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            return encoded["input_ids"]

        build(folder, key, documents(recipe), encode, recipe.end_token, progress=progress)
    return TokenCache.open(folder)


def build(
    folder: Path,
    key: str,
    texts: Iterable[str],
    encode: Callable[[Sequence[str]], list[list[int]]],
    end_token: int | None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a cache folder, whole or not at all.

    Raises:
        ValueError: no token came out.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    tail = [] if end_token is None else [end_token]
    count, done, largest, digest = 0, 0, 0, hashlib.sha256()
    try:
        # uint32 always: a tokenizer's largest id is not known before the last document.
        with (fresh / "tokens.bin").open("wb") as tokens, (fresh / "ends.bin").open("wb") as ends:
            for batch in _batches(texts, DOCUMENTS_AT_ONCE):
                for ids in encode(batch):
                    row = np.asarray([*ids, *tail], np.uint32)
                    tokens.write(row.tobytes())
                    digest.update(len(row).to_bytes(8, "little") + row.tobytes())
                    count += len(row)
                    largest = max(largest, int(row.max(initial=0)))
                    ends.write(np.int64(count).tobytes())
                done += len(batch)
                if progress is not None:
                    progress(done, count)
        if not count:
            raise ValueError(f"the data has no tokens ({done} documents)")
        meta = {
            "format": _FORMAT,
            "key": key,
            "content": digest.hexdigest()[:24],
            "dtype": "uint32",
            "tokens": count,
            "documents": done,
            "largest_id": largest,
        }
        (fresh / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        try:
            os.replace(fresh, folder)
        except OSError:
            if not (folder / "meta.json").is_file():  # else another process was quicker
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def cache_key(recipe: Recipe, tokenizer: Any) -> str:
    """Names a cache: 24 hex digits over the tokenizer, the recipe and the local files' states."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = backend.to_str() if backend is not None else repr(tokenizer)
    files = []
    for path in recipe.data:
        if not _is_hub_id(path):
            state = _local(path).stat()
            files.append([str(Path(path).absolute()), state.st_size, state.st_mtime_ns])
    parts = [_FORMAT, described, dataclasses.asdict(recipe), files]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _builder(path: str) -> str:
    suffixes = [suffix for suffix in _local(path).suffixes if suffix not in (".gz", ".zst", ".xz")]
    kind = suffixes[-1] if suffixes else ""
    if kind not in _BUILDERS:
        raise ValueError(f"{path}: unknown kind {kind!r}; known: {', '.join(_BUILDERS)}, also .gz")
    return _BUILDERS[kind]


def _is_hub_id(text: str) -> bool:
    """`owner/name` without a file's ending, and no such path here."""
    name = text.partition(":")[0]
    return name.count("/") == 1 and not Path(name).suffix and not Path(text).exists()


def _local(path: str) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{path}: no such file, and not of the form of a hub id (owner/name)"
        )
    return Path(path)


def _batches(items: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    iterator = iter(items)
    while batch := tuple(itertools.islice(iterator, size)):
        yield batch


def _map(file: Path, dtype: np.dtype) -> np.ndarray:
    if file.stat().st_size % dtype.itemsize:
        raise ValueError(f"{file} is damaged: delete its folder to tokenise again")
    return np.memmap(file, dtype=dtype, mode="r")
