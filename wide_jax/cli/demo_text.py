"""The demo's text: the language reference that every Python carries for its `help()`.

About half a megabyte of English technical prose. Some of its topics repeat others' paragraphs, so
the two parts are kept apart by paragraph: nothing that is evaluated was trained on.
"""

import dataclasses

HELD_OUT_EVERY = 8


@dataclasses.dataclass(frozen=True)
class DemoText:
    """Documents to calibrate on, and held-out ones for the figures."""

    source: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]


def python_reference() -> DemoText:
    """Split the reference's topics, in alphabetical order: every eighth one is held out.

    Raises:
        RuntimeError: this Python was installed without `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data (the text of help()): give a text with --data"
        ) from error
    held_out = [topics[name] for name in sorted(topics)[::HELD_OUT_EVERY]]
    train = [topics[name] for name in sorted(topics) if topics[name] not in held_out]
    return split_documents("Python's language reference (pydoc_data.topics)", train, held_out)


def split_documents(source: str, train: list[str], held_out: list[str]) -> DemoText:
    """Drop from both parts every paragraph that an earlier document or the other part has."""
    seen: set[str] = set()
    fresh_held_out = [_new_paragraphs(document, seen) for document in held_out]
    fresh_train = [_new_paragraphs(document, seen) for document in train]
    return DemoText(
        source,
        tuple(document for document in fresh_train if document),
        tuple(document for document in fresh_held_out if document),
    )


def _new_paragraphs(document: str, seen: set[str]) -> str:
    """The paragraphs that are not in `seen` yet; puts them there."""
    kept = []
    for paragraph in document.split("\n\n"):
        key = " ".join(paragraph.split())
        if key and key not in seen:
            seen.add(key)
            kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept)
