"""Formatted rows to packed files, without the stages around.

Would catch: bytes that depend on workers, on batches of the file or on the engine; a token that is not accounted for; a
conversation cut inside an answer, or a fragment that is not what its row and first part say; a document with nothing to
learn that survives; memory that grows with the file.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

from pipeline.artifact import digest_folder
from pipeline.config.errors import DataError
from pipeline.config.params import PackParams
from pipeline.dataset import batches
from pipeline.dataset import spool as spooling
from pipeline.dataset.engine import Engine, choose_engine
from pipeline.dataset.fragments import Cuts, fragment
from pipeline.dataset.manifest import packed_files
from pipeline.dataset.masking import IGNORED, PartTokenizer, load_tokenizer, tokenise
from pipeline.dataset.packing import best_fit_decreasing, write_packed
from pipeline.dataset.preparing import SCHEMA
from pipeline.dataset.spool import fill_spool, in_order, read_pieces, sample_rows
from tests.workspace import rows

pytestmark = pytest.mark.unit

pa: Any = pyarrow
STOP = "<|end|>"
USER = "<|user|>"


def _turn(question: str, answer: str) -> tuple[str, str]:
    return f"{USER}{question}{STOP}<|assistant|>", answer + STOP


def _chats(count: int) -> list[list[str]]:
    """Conversations of one to six turns in four languages."""
    chance = random.Random(count)
    found: list[list[str]] = []
    for row in rows(count):
        turns = [
            _turn(row["instruction"] + str(i), row["output"] * chance.choice([1, 2, 4, 20]))
            for i in range(chance.choice([1, 1, 2, 6]))
        ]
        found.append([part for turn in turns for part in turn])
    return found


@pytest.fixture(scope="module")
def tokenizer(base_model: Path) -> PartTokenizer:
    return load_tokenizer(base_model)


@pytest.fixture(scope="module")
def engine(tokenizer: PartTokenizer) -> Engine:
    return choose_engine(tokenizer, [])


def _formatted(path: Path, chats: Sequence[Sequence[str]], rows_per_batch: int = 1024) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for start in range(0, len(chats), rows_per_batch):
            batch = chats[start : start + rows_per_batch]
            places = [f"rows.jsonl:{start + i + 1}" for i in range(len(batch))]
            cuts = [_cuts(parts) for parts in batch]
            columns = (batch, places, places, [c.parts for c in cuts], [c.head for c in cuts], [c.gap for c in cuts])
            arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
    return path


def _cuts(parts: Sequence[str]) -> Cuts:
    """Before each question but the first; what stands before the first one is repeated."""
    head = parts[0].find(USER) + len(USER) if parts and USER in parts[0] else 0
    return Cuts(
        tuple(n for n in range(2, len(parts), 2) if parts[n].startswith(USER) == bool(head)), head, len(USER) if head else 0
    )


class Packer:
    def __init__(self, folder: Path, tokenizer: PartTokenizer, engine: Engine) -> None:
        self.folder, self.tokenizer, self.engine = folder, tokenizer, engine

    def __call__(
        self,
        chats: Sequence[Sequence[str]],
        max_length: int,
        policy: str,
        *,
        workers: int = 2,
        rows_per_batch: int = 1024,
        name: str = "out",
    ) -> Counter[str]:
        source = _formatted(self.folder / "train.arrow", chats, rows_per_batch)
        params = PackParams.model_validate({"max_length": max_length, "long_documents": policy})
        (self.folder / name).mkdir()
        with fill_spool(source, len(chats), self.folder, self.tokenizer, self.engine, params, workers) as (spool, counts):
            plan = best_fit_decreasing(spool.lengths, max_length)
            write_packed(self.folder / name, "train", spool, plan, max_length, workers=workers, shard_bytes=1 << 16)
        assert counts["tokens_in"] == counts["tokens_kept"] + counts["tokens_truncated"] + counts["tokens_dropped"]
        assert counts["documents"] == len(chats)
        return counts

    def documents(self, name: str = "out") -> list[tuple[int, int, list[int], list[int]]]:
        """Row, first part, ids and labels of every packed document, in row order."""
        found: list[tuple[int, int, list[int], list[int]]] = []
        for path in packed_files(self.folder / name, "train"):
            for sequence in datasets.Dataset.from_file(path):
                row: Any = sequence
                start = 0
                for document, first, length in zip(row["documents"], row["first_parts"], row["seq_lengths"], strict=True):
                    end = start + length
                    found.append((document, first, row["input_ids"][start:end], row["labels"][start:end]))
                    start = end
        return sorted(found)


@pytest.fixture
def pack(tmp_path: Path, tokenizer: PartTokenizer, engine: Engine) -> Packer:
    return Packer(tmp_path, tokenizer, engine)


@pytest.mark.parametrize("policy", ["drop", "truncate", "split"])
def test_same_bytes_for_any_workers_batches_and_engine(
    policy: str, pack: Packer, tokenizer: PartTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = _chats(3000)
    due = pack(chats, 96, policy, workers=1)
    assert due["tokens_in"] > due["tokens_kept"]
    expected = digest_folder(pack.folder / "out")
    assert len(expected) > 2
    for workers, rows_per_batch, piece in ((2, 1024, 1 << 22), (4, 7, 1 << 22), (3, 3000, 1000), (2, 500, 1)):
        monkeypatch.setattr(spooling, "PIECE_BYTES", piece)
        name = f"{workers}-{rows_per_batch}"
        assert pack(chats, 96, policy, workers=workers, rows_per_batch=rows_per_batch, name=name) == due
        assert digest_folder(pack.folder / name) == expected
    monkeypatch.setitem(sys.modules, "fastokens", None)
    pack.engine = choose_engine(tokenizer, [])
    assert pack.engine.name == "tokenizers"
    assert pack(chats, 96, policy, name="slow") == due
    assert digest_folder(pack.folder / "slow") == expected


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_few_rows(count: int, pack: Packer, tokenizer: PartTokenizer) -> None:
    chats = _chats(count)
    pack(chats, 1024, "drop", workers=4)
    found = pack.documents()
    assert [row for row, _, _, _ in found] == list(range(count))
    for (_, first, ids, labels), document, parts in zip(found, tokenise(chats, tokenizer), chats, strict=True):
        assert (first, ids, labels) == (0, document.input_ids, document.labels)
        assert tokenizer.tokenizer.decode([i for i in labels if i != IGNORED], skip_special_tokens=False) == "".join(parts[1::2])


def test_split_cuts_after_answers_and_loses_nothing_that_fits(pack: Packer, tokenizer: PartTokenizer) -> None:
    chats = _chats(400)
    limit = 96
    counts = pack(chats, limit, "split")
    whole = tokenise(chats, tokenizer)
    found = pack.documents()
    by_row: dict[int, list[int]] = {}
    for row, first, ids, labels in found:
        by_row.setdefault(row, []).append(first)
        assert first % 2 == 0
        (due,) = (
            d
            for end in range(first + 2, len(chats[row]) + 1, 2)
            for d in tokenise([fragment(chats[row], first, end, len(USER), len(USER))], tokenizer)
            if d.input_ids == ids
        )
        assert due.labels == labels
        assert labels[0] == IGNORED
        assert labels[-1] == ids[-1] == tokenizer.id_of(STOP)
    long = {row for row, document in enumerate(whole) if len(document.input_ids) > limit}
    assert long
    assert counts["documents_split"] == sum(len(chats[row]) > 2 for row in long)
    assert all(by_row[row] == [0] for row in range(len(chats)) if row not in long)
    turns = [
        (row, part, len(tokenise([chat[part : part + 2]], tokenizer)[0].input_ids))
        for row, chat in enumerate(chats)
        for part in range(0, len(chat), 2)
    ]
    too_long = [length for _, _, length in turns if length > limit]
    assert too_long
    assert counts["tokens_dropped"] == sum(too_long)
    assert counts["documents_dropped"] == len(chats) - len(by_row)
    # Greedy: the next fragment's first turn would not have fitted.
    for row, firsts in by_row.items():
        sizes = {part: length for r, part, length in turns if r == row}
        for first, following in pairwise(firsts):
            head = int(first > 0)  # a later fragment's head counts beside the gap in the place of which it stands
            assert head + sum(sizes[p] for p in range(first, following + 1, 2)) > limit


def test_fragments_repeat_the_system_turn_and_begin_with_a_question(pack: Packer, tokenizer: PartTokenizer) -> None:
    """A call, its result and the answer stay together, and each fragment says who the model is."""
    system = f"<|system|>You count.{STOP}"
    exchange = [*_turn("how many?" * 2, "call"), f"<|tool|>7{STOP}<|assistant|>", "seven" + STOP]
    chat = [system + exchange[0], *exchange[1:], *exchange * 5]
    assert _cuts(chat).parts == tuple(range(4, 24, 4))
    (alone,) = tokenise([[system + exchange[0], *exchange[1:]]], tokenizer)
    limit = 3 * len(alone.input_ids)
    counts = pack([chat, *_chats(20)], limit, "split")
    fragments = [(first, ids, labels) for row, first, ids, labels in pack.documents() if row == 0]
    assert len(fragments) > 1
    text = tokenizer.tokenizer
    assert [text.decode(ids, skip_special_tokens=False).startswith(system + exchange[0]) for _, ids, _ in fragments] == [
        True
    ] * len(fragments)
    said = "".join(text.decode([i for i in labels if i != IGNORED], skip_special_tokens=False) for _, _, labels in fragments)
    assert said == "".join(chat[1::2])
    whole = len(tokenise([chat], tokenizer)[0].input_ids)
    assert counts["tokens_repeated"] == sum(len(ids) for _, ids, _ in fragments) - whole > 0
    assert max(len(ids) for _, ids, _ in fragments) <= limit


def test_a_long_row_without_a_cut_is_dropped(pack: Packer) -> None:
    chat = ["<|tool|>1" + STOP, "a" * 30 + STOP] * 4
    chat[0] = USER + chat[0]
    assert _cuts(chat).parts == ()
    counts = pack([chat, [*_turn("q", "a")]], 60, "split")
    assert [row for row, _, _, _ in pack.documents()] == [1]
    assert (counts["documents_split"], counts["documents_dropped"]) == (0, 1)


def test_a_split_text_gets_its_own_start_token(pack: Packer, tokenizer: PartTokenizer) -> None:
    start = tokenizer.id_of("<|system|>")
    pack.tokenizer = PartTokenizer(tokenizer.tokenizer, (start,), None)
    pack([["q" * 20 + STOP, "a" * 20 + STOP] * 5], 50, "split")
    found = pack.documents()
    assert len(found) > 1
    assert all(ids[0] == start and ids.count(start) == 1 and len(ids) <= 50 for _, _, ids, _ in found)


def test_truncate_keeps_the_beginning(pack: Packer, tokenizer: PartTokenizer) -> None:
    chats = _chats(300)
    counts = pack(chats, 40, "truncate")
    whole = tokenise(chats, tokenizer)
    for row, first, ids, labels in pack.documents():
        assert first == 0
        assert (ids, labels) == (whole[row].input_ids[:40], whole[row].labels[:40])
    kept = {row for row, _, _, _ in pack.documents()}
    assert kept == {row for row, d in enumerate(whole) if any(label != IGNORED for label in d.labels[1:40])}
    assert counts["tokens_in"] == sum(len(d.input_ids) for d in whole)
    assert counts["supervised_tokens"] == sum(sum(x != IGNORED for x in labels[1:]) for _, _, _, labels in pack.documents())
    assert counts["tokens_truncated"] == sum(max(0, len(whole[row].input_ids) - 40) for row in kept) > 0


@pytest.mark.parametrize("policy", ["drop", "truncate", "split", "error"])
def test_nothing_to_learn_never_survives(policy: str, pack: Packer) -> None:
    good = [*_turn("q", "a")]
    counts = pack([["only context"], [""], ["", ""], ["context", ""], good, ["x", "", "y"]], 64, policy)
    assert [row for row, _, _, _ in pack.documents()] == [4]
    assert counts["documents_dropped"] == 5


def test_error_names_row_and_place(pack: Packer) -> None:
    with pytest.raises(
        DataError, match=r"train\.arrow: row 1 \(rows\.jsonl:2\): \d+ tokens, pack.max_length is 16; raise it or set"
    ):
        pack([[*_turn("q", "a")], [*_turn("q" * 40, "a")]], 16, "error")


def test_merged_borders_are_counted(pack: Packer) -> None:
    merging = [["Name the col", "our of snow" + STOP]]
    assert pack(merging * 3 + _chats(20), 512, "drop")["merged_borders"] == 3


def test_pieces_are_bounded_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "PIECE_BYTES", 100)
    monkeypatch.setattr(spooling, "PIECE_ROWS", 8)
    monkeypatch.setattr(batches, "FORGET_BYTES", 1)
    chats = [["字" * (i % 11), "a" * (i * 7 % 90)] for i in range(200)] + [["x" * 1000, ""]] + [["", "b"]] * 20
    pieces = list(read_pieces(_formatted(tmp_path / "train.arrow", chats, 33)))
    assert [row for piece in pieces for row in piece.rows] == chats
    assert [piece.places[0] for piece in pieces] == [f"rows.jsonl:{piece.first + 1}" for piece in pieces]
    assert max(len(piece.rows) for piece in pieces) == 8
    assert all(len(p.rows) == 1 or sum(len(t.encode()) for row in p.rows for t in row) <= 100 for p in pieces)


def test_the_sample_has_ends_spread_and_longest(tmp_path: Path) -> None:
    chats = [[f"q{i}", f"a{i}"] for i in range(5000)]
    chats[3333][1] = "long" * 2000
    chats[441][1] = "huge" * 20_000  # more than the slower engine should be made to read
    found = sample_rows(_formatted(tmp_path / "train.arrow", chats, 700))
    assert chats[0] in found
    assert chats[-1] in found
    assert chats[3333] in found
    assert chats[441] not in found
    assert 1000 < len(found) < 1600
    numbers = [int(row[0][1:]) for row in found]
    assert numbers == sorted(numbers)
    assert max(b - a for a, b in pairwise(numbers)) < 30


def test_the_sample_of_long_rows_is_smaller(tmp_path: Path) -> None:
    chats = [["q" * 20_000, "a"] for _ in range(1000)]
    assert 16 <= len(sample_rows(_formatted(tmp_path / "train.arrow", chats))) < 50


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_small_set_is_its_own_sample(count: int, tmp_path: Path) -> None:
    chats = _chats(count)
    assert sample_rows(_formatted(tmp_path / "train.arrow", chats)) == chats


@pytest.mark.parametrize("workers", [1, 3])
def test_order_survives_threads_and_looking_ahead_is_bounded(workers: int) -> None:
    taken: list[int] = []

    def items() -> Any:
        for i in range(50):
            taken.append(i)
            yield i

    for done, value in enumerate(in_order(lambda i: i * i, items(), workers)):
        assert value == done * done
        assert len(taken) <= done + 2 * workers
    assert done == 49


def test_a_failing_item_ends_the_map() -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda i: 1 // (3 - i), range(100), 2))
