"""Text to tokens to rows to batches: complete, bounded, in an order that follows from numbers."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest

from train.corpus import Recipe, TokenCache, build, cache_key, documents, token_cache
from train.data import (
    HostBatch,
    PackedRows,
    PackedWindows,
    PaddedRows,
    ShuffledBatches,
    local_rows,
    on_mesh,
)
from wide_jax import partition


def cache_of(lengths):
    """Documents of these lengths; ids count up from 0 over all of them."""
    ends = np.cumsum(lengths)
    return TokenCache(np.arange(ends[-1], dtype=np.uint32), ends.astype(np.int64), "key")


def encode(texts):
    return [[ord(letter) for letter in text] for text in texts]


def test_a_cache_holds_every_document_in_order(tmp_path):
    texts = [f"document {number}" for number in range(1000)]  # more than one batch
    build(tmp_path / "c", "c", iter(texts), encode, 7)
    cache = TokenCache.open(tmp_path / "c")
    assert len(cache.ends) == 1000
    starts = np.concatenate([[0], cache.ends[:-1]])
    for number in (0, 1, 255, 256, 999):
        row = cache.tokens[starts[number] : cache.ends[number]]
        assert "".join(map(chr, row[:-1])) == texts[number]
        assert row[-1] == 7
    assert isinstance(cache.tokens, np.memmap)


def test_a_cache_that_failed_leaves_nothing_behind(tmp_path):
    def broken():
        yield "one"
        raise OSError("the stream broke")

    with pytest.raises(OSError, match="the stream broke"):
        build(tmp_path / "c", "c", broken(), encode, None)
    with pytest.raises(ValueError, match="no tokens"):
        build(tmp_path / "c", "c", iter([""]), encode, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.txt", "d.parquet"])
def test_documents_of_every_kind_of_file(tmp_path, name):
    texts = ["first document", "second one", "third"]
    file = tmp_path / name
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines.encode()))
    elif name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    else:
        file.write_text(lines if name.endswith(".jsonl") else "\n\n".join(texts))
    assert [text.strip() for text in documents(Recipe((str(file),)))] == texts


def test_wrong_data_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl: no such file"):
        list(documents(Recipe((str(tmp_path / "nowhere.jsonl"),))))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"unknown kind '\.csv'"):
        list(documents(Recipe((str(tmp_path / "a.csv"),))))
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match=r"no text in field 'text'; its fields are \['body'\]"):
        list(documents(Recipe((str(tmp_path / "a.jsonl"),))))
    with pytest.raises(ValueError, match="no data"):
        Recipe(())


def test_a_hub_id_is_streamed_with_its_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(*names, **options):
        asked.append((names, options))
        return [{"body": "one"}, {"body": "two"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    recipe = Recipe(("owner/name:some",), split="validation", text_field="body")
    assert list(documents(recipe)) == ["one", "two"]
    assert asked == [(("owner/name", "some"), {"split": "validation", "streaming": True})]
    with pytest.raises(ValueError, match="one hub id at a time"):
        list(documents(Recipe(("owner/name", "owner/other"))))


def test_tokenising_holds_a_few_documents_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("train.corpus.DOCUMENTS_AT_ONCE", 4)
    seen = []
    tracemalloc.start()
    try:
        build(
            tmp_path / "cache", "key", ("x" * 4000 for _ in range(400)),
            encode, None,
            progress=lambda documents, tokens: seen.append((documents, tokens)),
        )  # fmt: skip
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = (tmp_path / "cache" / "tokens.bin").stat().st_size
    assert size == 4 * 4000 * 400
    assert peak < size / 10
    assert (len(seen), seen[-1]) == (100, (400, 1_600_000))


def test_a_cache_is_made_once_and_again_when_its_source_changes(tmp_path, model_folder):
    from wide_jax.hf.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_folder)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "w0 w1"}\n{"text": "w2 nonsense"}\n')
    recipe = Recipe((str(file),), end_token=tokenizer.eos_token_id)
    seen = []
    cache = token_cache(
        recipe, tokenizer, tmp_path / "cache", progress=lambda d, t: seen.append((d, t))
    )
    assert cache.tokens.tolist() == [2, 3, 1, 4, 0, 1]
    assert seen == [(2, 6)]
    token_cache(recipe, tokenizer, tmp_path / "cache", progress=lambda d, t: seen.append((d, t)))
    assert len(seen) == 1
    other = Recipe((str(file),), end_token=None)
    assert cache_key(other, tokenizer) != cache_key(recipe, tokenizer)
    file.write_text('{"text": "w3"}\n')
    assert token_cache(recipe, tokenizer, tmp_path / "cache").tokens.tolist() == [5, 1]


def test_content_is_named_alike_wherever_its_text_lies(tmp_path):
    """So that a run goes on after its text was fetched again, or moved with the run's folder."""

    def content(folder, texts, end_token=None):
        build(tmp_path / folder, folder, iter(texts), encode, end_token)
        return TokenCache.open(tmp_path / folder).content

    first = content("a", ["one", "two"])
    assert content("b", ["one", "two"]) == first
    others = [
        content("c", ["two", "one"]),
        content("d", ["onetwo"]),  # the same tokens, one document
        content("e", ["one", "two"], 7),
    ]
    assert len({first, *others}) == 4


def test_packed_rows_use_every_token_once_and_separate_documents_on_request():
    cache = cache_of([3, 1, 9, 2])
    rows = PackedRows(cache, 5)
    ids = np.concatenate([rows[n][0] for n in range(len(rows))])
    assert ids.tolist() == list(range(15))
    assert all((rows[n][1] == 1).all() for n in range(3))
    apart = PackedRows(cache, 5, separate=True)
    assert [apart[n][1].tolist() for n in range(3)] == [
        [1, 1, 1, 2, 3],
        [1, 1, 1, 1, 1],
        [1, 1, 1, 2, 2],
    ]
    batch = HostBatch.of(*(np.stack([apart[n][part] for n in range(3)]) for part in (0, 1)))
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4], [0, 1, 2, 0, 1]]


def test_padded_rows_keep_documents_apart_and_lose_nothing():
    rows = PaddedRows(cache_of([3, 0, 9, 4, 5]), 4)
    assert len(rows) == 1 + 0 + 3 + 1 + 2
    kept = [rows[n][0][rows[n][1] > 0].tolist() for n in range(len(rows))]
    assert kept == [
        [0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11], [12, 13, 14, 15], [16, 17, 18, 19], [20],
    ]  # fmt: skip


def test_too_short_a_text_is_refused_with_its_size():
    with pytest.raises(ValueError, match="7 tokens make no row of sequence_length=8"):
        PackedRows(cache_of([7]), 8)


@pytest.mark.parametrize("kind", ["grain", "windows"])
def test_batches_follow_from_their_number_and_cover_every_epoch(kind):
    tokens = np.arange(10 * 4, dtype=np.uint32)

    def make(seed=0):
        if kind == "windows":
            return PackedWindows(tokens, 4, 5, seed)
        return ShuffledBatches(PackedRows(TokenCache(tokens, np.array([40]), ""), 4), 5, seed)

    batches = make()
    seen = [batches.batch(update).input_ids for update in range(6)]
    firsts = [ids[:, 0] // 4 for ids in seen]
    epochs = [np.concatenate(firsts[2 * n : 2 * n + 2]).tolist() for n in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # Any number, in any order, from a fresh start: resuming needs nothing else.
    fresh = make()
    for update in (4, 5, 1, 0, 3):
        assert np.array_equal(fresh.batch(update).input_ids, seen[update])
    assert not np.array_equal(make(seed=1).batch(0).input_ids, seen[0])


def test_a_process_reads_only_its_rows_of_the_same_order():
    class Counted:
        def __init__(self):
            self.read = set()

        def __len__(self):
            return 40

        def __getitem__(self, index):
            self.read.add(int(index))
            return np.full(4, index, np.int32), np.ones(4, np.int32)

    whole = ShuffledBatches(Counted(), 8, seed=3)
    counted = Counted()
    mine = ShuffledBatches(counted, 8, seed=3, local=(2, 3, 6, 7))
    for update in (0, 1, 9, 4):
        expected = whole.batch(update).input_ids[[2, 3, 6, 7]]
        assert np.array_equal(mine.batch(update).input_ids, expected)
    fresh = Counted()
    first = ShuffledBatches(fresh, 40, seed=3, local=(5, 7)).batch(0)
    # Read-ahead may have begun the next epochs: nothing but two rows of each.
    assert first.input_ids.shape == (2, 4)
    assert len(fresh.read) <= 2 * 6


def test_a_mesh_takes_all_rows_or_this_process_s():
    mesh = partition.make_mesh(2, 2, 2)
    assert local_rows(mesh, 8) == tuple(range(8))  # one process holds every device
    batch = HostBatch.of(np.arange(32).reshape(8, 4), np.ones((8, 4), int))
    assert np.array_equal(on_mesh(batch, mesh, count=8).input_ids, batch.input_ids)
    with pytest.raises(ValueError, match="8 rows of a batch of 16: this process's devices hold 16"):
        on_mesh(batch, mesh, count=16)


def test_rows_are_split_over_data_and_fsdp():
    mesh = partition.make_mesh(2, 2, 2)
    batch = HostBatch.of(np.arange(32).reshape(8, 4), np.ones((8, 4), int))
    placed = on_mesh(batch, mesh)
    assert placed.input_ids.sharding.shard_shape((8, 4)) == (2, 4)
    assert np.array_equal(placed.input_ids, batch.input_ids)
