"""What a model is scored on: held-out rows as packing left them.

Would catch: a loss over text that no sequence holds, an answer asked for whose end was cut off, a fragment without its row, rows
that packing dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pyarrow
import pytest

from pipeline.config.params import FormatParams, PackParams
from pipeline.config.schema import load_params
from pipeline.dataset.manifest import read_packed_of
from pipeline.dataset.masking import IGNORED, load_tokenizer, tokenise, truncated
from pipeline.evaluation.held_out import HeldOut, read_held_out
from stages.format import format
from stages.pack import pack
from tests.workspace import ROOT, write_rows

pytestmark = pytest.mark.unit

pa: Any = pyarrow
LENGTH = 48


def _chat(number: int, *words: int) -> dict[str, Any]:
    """A conversation whose turns, question and answer in turn, have so many words."""
    said: list[dict[str, str]] = []
    for turn, count in enumerate(words):
        role = "assistant" if turn % 2 else "user"
        said.append({"role": role, "content": f"{role} {number} " + "word " * count})
    return {"messages": said}


def _held_out(
    folder: Path, model: Path, policy: Literal["drop", "truncate", "split"], supervise: str = "every_turn", limit: int = 1000
) -> tuple[list[HeldOut], list[list[str]]]:
    """The rows that are scored, and the parts of every held-out row."""
    short = [_chat(number, 1, 2) for number in range(30)]
    long_answers = [_chat(number, 1, 60) for number in range(30, 50)]
    many_turns = [_chat(number, *[2] * 8) for number in range(50, 70)]
    write_rows(folder / "rows.jsonl", [*short, *long_answers, *many_turns])
    shipped = load_params(ROOT / "params.yaml").format.model_dump()
    source = {"files": ["rows.jsonl"], "record": "auto", "columns": {}, "weight": 1.0, "limit": None}
    params = FormatParams.model_validate(shipped | {"sources": [source], "validation_share": 0.5, "supervise": supervise})
    formatted, packed = folder / "formatted", folder / "packed"
    format(params, raw=folder, model=model, formatted=formatted)
    pack(PackParams(max_length=LENGTH, long_documents=policy), formatted=formatted, model=model, packed=packed)
    facts = read_packed_of(packed, formatted, model)
    with pa.memory_map(str(formatted / "validation.arrow")) as file:
        parts = pa.ipc.open_stream(file).read_all().column("parts").to_pylist()
    return read_held_out(packed, formatted, limit, facts.stop_token_id), parts


def test_rows_that_fit_are_scored_whole_and_asked(base_model: Path, tmp_path: Path) -> None:
    found, parts = _held_out(tmp_path, base_model, "drop")
    documents = tokenise(parts, load_tokenizer(base_model))
    fitting = [n for n, document in enumerate(documents) if len(document.input_ids) <= LENGTH]
    assert 0 < len(fitting) < len(parts)
    assert [row.documents for row in found] == [(documents[n],) for n in fitting]
    assert [row.asked for row in found] == [(parts[n][0], parts[n][1]) for n in fitting]
    first, _ = _held_out(tmp_path, base_model, "drop", limit=3)
    assert first == found[:3]


def test_of_a_row_that_was_cut_the_loss_is_of_what_is_left(base_model: Path, tmp_path: Path) -> None:
    found, parts = _held_out(tmp_path, base_model, "truncate")
    documents = [truncated(document, LENGTH) for document in tokenise(parts, load_tokenizer(base_model))]
    assert [row.documents for row in found] == [(document,) for document in documents if document.supervised]
    cut = [row for row in found if row.asked is None]
    assert cut
    assert all(len(row.documents[0].input_ids) == LENGTH for row in cut)
    # A conversation may be cut in a later answer: its first one is still there to its end.
    assert any(row.asked and len(row.documents[0].input_ids) == LENGTH for row in found)


def test_a_split_row_is_all_its_fragments(base_model: Path, tmp_path: Path) -> None:
    found, parts = _held_out(tmp_path, base_model, "split")
    tokenizer = load_tokenizer(base_model).tokenizer
    several = [row for row in found if len(row.documents) > 1]
    assert several
    asked = {row.asked[0]: row for row in found if row.asked}
    for text in parts:
        row = asked.get(text[0])
        if row is not None:
            ids = [label for document in row.documents for label in document.labels if label != IGNORED]
            assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(text[1::2])
    assert all(len(document.input_ids) <= LENGTH for row in found for document in row.documents)


def test_without_prompts_nothing_is_asked(base_model: Path, tmp_path: Path) -> None:
    found, _ = _held_out(tmp_path, base_model, "drop", supervise="all_text")
    assert found
    assert [row.asked for row in found] == [None] * len(found)
