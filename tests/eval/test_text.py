"""Reading texts and counting their words and bytes (case D6)."""

import gzip
import json

import pytest

from eval.text import Text, read_text, tokenize


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_case_D6_words_are_the_raw_pages_split_at_white_space_with_its_empty_ends():
    assert Text((" = T = \n \n a b c \n",)).words == 8
    assert Text((" a b ", "c")).words == 4 + 1


def test_bytes_are_utf8_not_characters():
    assert Text(("éééé", "abcde")).bytes == 8 + 5


def test_pages_join_as_wikitext_was_split(tmp_path):
    path = write_lines(tmp_path / "wiki.jsonl", [{"page": " = A = \n x \n"}, {"page": " = B = \n"}])
    text = read_text(path)
    assert text.joined() == " \n = A = \n x \n\n = B = \n"
    assert text.words == 6 + 5


def test_text_lines_gzip_and_plain_files(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one", "source": "s"}, {"text": "two"}])
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_text(path) == read_text(packed)
    assert read_text(path).joined() == "one\n\ntwo"
    (tmp_path / "b.txt").write_text("three\n", encoding="utf-8")
    assert read_text(tmp_path / "b.txt").documents == ("three\n",)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "{oops"], r"bad\.jsonl:2: not JSON"),
        (['{"text": "a"}', '{"body": "b"}'], r"bad\.jsonl:2: field 'text' is missing"),
        (['{"text": 3}'], r"bad\.jsonl:1: field 'text' is missing or not a string"),
        (['{"body": "b"}'], r"bad\.jsonl:1: expected exactly one of .* text, page, found none"),
        (['{"text": "a", "page": "b"}'], r"bad\.jsonl:1: expected exactly one of"),
        (['["text"]'], r"bad\.jsonl:1: expected exactly one of"),
        (["", " "], r"bad\.jsonl: no documents"),
        (['{"text": ""}'], r"bad\.jsonl: no text"),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_text(path)


def test_a_bad_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"a\.parquet: expected a \.txt or \.jsonl"):
        read_text(tmp_path / "a.parquet")
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 noir")
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8 at byte 3"):
        read_text(tmp_path / "latin.txt")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text")[:-6])
    with pytest.raises(ValueError, match=r"cut\.txt\.gz: damaged gzip"):
        read_text(tmp_path / "cut.txt.gz")


def test_tokenizing_joined_or_by_document():
    text = Text(("ab", "c"), separator="-")
    joined = tokenize(text, lambda s: [ord(c) for c in s], join=True)
    assert [ids.tolist() for ids in joined.documents] == [[97, 98, 45, 99]]
    apart = tokenize(text, lambda s: [ord(c) for c in s], join=False)
    assert [ids.tolist() for ids in apart.documents] == [[97, 98], [99]]
    assert (apart.tokens, apart.words, apart.bytes) == (3, 2, 3)
