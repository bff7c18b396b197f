"""Near duplicates and shared passages.

Would catch: a hash of a window that depends on what stands around it, a result that depends on batch or process, distinct
Chinese rows taken for one, an edited copy that passes, a chain of copies of which all are dropped.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.dataset.dedup import Passages, Signatures, normal, signatures, window_hashes
from tests.workspace import ROOT

pytestmark = pytest.mark.unit

WORDS = [
    "the",
    "of",
    "fox",
    "river",
    "猫",
    "三匹",
    "检查",
    "学习",
    "数据",
    "モデル",
    "です",
    "😀",
    "light",
    "window",
    "paper",
    "seven",
    "green",
    "engine",
]


def _text(rng: random.Random, words: int = 60) -> str:
    return " ".join(rng.choice(WORDS) + str(rng.randint(0, 99)) for _ in range(words))


def _edited(text: str, rng: random.Random, changes: int) -> str:
    words = text.split()
    for _ in range(changes):
        words[rng.randrange(len(words))] = "改动"
    return " ".join(words)


def _found(folder: Path, texts: list[str], threshold: float, batch: int, shingle: int = 5) -> list[int]:
    file = Signatures(folder / "s")
    for start in range(0, len(texts), batch):
        file.add(signatures(texts[start : start + batch], shingle))
    file.add(signatures([], shingle))
    found = file.near_duplicates(threshold).tolist()
    file.remove()
    assert list(folder.iterdir()) == []
    return found


def _jaccard(a: str, b: str, width: int) -> float:
    one, two = ({t[i : i + width] for i in range(len(t) - width + 1)} for t in (normal(a), normal(b)))
    return len(one & two) / len(one | two)


def test_a_window_s_hash_is_its_own() -> None:
    texts = ["abcdefgh", "xx", "", "zzabcdezz", "三匹の猫がいます", "a" * 400]
    hashes, offsets = window_hashes(texts, 5)
    assert offsets.tolist() == np.cumsum([0, 4, 1, 1, 5, 4, 396]).tolist()
    assert len(hashes) == offsets[-1]
    by_window: dict[str, set[int]] = {}
    for number, text in enumerate(texts):
        padded = text.ljust(5, "\0")
        for at, found in enumerate(hashes[offsets[number] : offsets[number + 1]].tolist()):
            by_window.setdefault(padded[at : at + 5], set()).add(found)
    assert all(len(found) == 1 for found in by_window.values())
    assert len({next(iter(found)) for found in by_window.values()}) == len(by_window)
    assert window_hashes([], 5)[0].tolist() == []


@pytest.mark.parametrize("threshold", [0.6, 0.8, 0.95])
def test_copies_are_found_and_others_are_not(threshold: float, tmp_path: Path) -> None:
    rng = random.Random(1)
    texts = [_text(rng) for _ in range(300)]
    copies = [_edited(text, rng, changes) for text, changes in zip(texts[:100], [0, 1, 2, 8, 30] * 20, strict=True)]
    found = _found(tmp_path, texts + copies, threshold, 128)
    assert found[:300] == list(range(300))
    for number, copy in enumerate(copies):
        alike = _jaccard(texts[number], copy, 5)
        if abs(alike - threshold) > 0.14:  # three standard errors of the estimate
            assert (found[300 + number] == number) == (alike > threshold), alike


def test_the_same_whatever_the_batch_and_the_process(tmp_path: Path) -> None:
    rng = random.Random(2)
    texts = [_text(rng, 20) for _ in range(60)]
    texts += [_edited(text, rng, 1) for text in texts]
    wanted = _found(tmp_path, texts, 0.7, 1000)
    assert wanted != list(range(120))
    assert _found(tmp_path, texts, 0.7, 7) == wanted
    script = (
        "import random, pathlib\nfrom tests.dataset.test_dedup import _text, _edited, _found\n"
        "rng = random.Random(2); texts = [_text(rng, 20) for _ in range(60)]; texts += [_edited(t, rng, 1) for t in texts]\n"
        f"print(_found(pathlib.Path({str(tmp_path)!r}), texts, 0.7, 50))"
    )
    other = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(wanted)


def test_who_is_kept_is_no_copy_and_every_copy_has_one_that_is_kept(tmp_path: Path) -> None:
    """A chain of small changes: the first stays, and with it the first that is too far from it."""
    rng = random.Random(3)
    chain = [_text(rng, 40)]
    for _ in range(30):
        chain.append(_edited(chain[-1], rng, 1))
    found = _found(tmp_path, chain, 0.8, 100)
    assert found[0] == 0
    kept = {number for number, target in enumerate(found) if target == number}
    assert 1 < len(kept) < len(chain)
    assert set(found) == kept


def test_case_and_space_do_not_count_and_short_rows_are_compared_whole(tmp_path: Path) -> None:
    assert _found(tmp_path, ["Name  a\nCOLOUR", "name a colour", "猫", "犬", "猫", "", ""], 1.0, 10) == [0, 0, 2, 3, 2, 5, 5]
    assert _found(tmp_path, [], 0.8, 10) == []


def test_passages() -> None:
    held = "The mitochondria is the powerhouse of the cell, 线粒体是细胞的动力工厂。"
    passages = Passages(24)
    passages.add([held, "short", ""])
    passages.add([])
    passages.close()
    others = [
        "Say: the   MITOCHONDRIA is the powerhouse!",
        held[:23] + "#" + held[24:40],
        "线粒体是细胞的动力工厂。",
        "short",
        "",
        "cell, 线粒体是细胞的动力工厂。 and powerhouse of the cell, 线粒体是细胞的动力",
    ]
    assert passages.shared(others).tolist() == [True, False, False, False, False, True]
    assert passages.shared([]).tolist() == []
    none = Passages(24)
    none.close()
    assert none.shared([held]).tolist() == [False]
