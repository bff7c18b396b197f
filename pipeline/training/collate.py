"""Packed rows to a batch: everything a forward pass needs, worked out once, on the loader's side.

Contract: a batch is one row of T tokens, the micro-batch's sequences end to end. `PackedCollator` gives

    input_ids, position_ids   (1, T) int64; positions restart at each document
    targets                   (T,) int64: the token that position t is to predict, IGNORED where nothing is trained on
    supervised                (n,) int64: the positions with a target; n is known here, on the device it would cost a sync
    cu_seq_lens_q             (documents + 1,) int32: bounds of the documents, which end at T
    max_length_q              int: no document is longer
    documents                 row numbers of the documents, for gates
    tokens, attended          tokens, and pairs of a token with one it attends to, for throughput; on the first of several
                              ranks that share the row, zero on the others; without filling

The last token of a document predicts nothing, whatever follows it. With `fixed_tokens` the row is filled up to that many
tokens with one document that trains nothing, so that compiled kernels see one shape; positions past the end cost
(1 - fill) of the work, less than a thousandth on packed data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.dataset.manifest import IGNORED


class PackedCollator:
    """See the module. `longest`: tokens of the longest document there can be; `share`: (index, count) of the part of each
    sequence that this rank computes, where ranks share sequences."""

    def __init__(self, *, longest: int, fixed_tokens: int | None, share: tuple[int, int] = (0, 1)) -> None:
        self._longest, self._fixed_tokens, self._share = longest, fixed_tokens, share

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        lengths = np.concatenate([np.asarray(row["seq_lengths"], np.int64) for row in rows])
        ids = np.concatenate([np.asarray(row["input_ids"], np.int64) for row in rows])
        labels = np.concatenate([np.asarray(row["labels"], np.int64) for row in rows])
        index, count = self._share
        tokens, attended = len(ids), int((lengths * (lengths + 1) // 2).sum())
        filling = (self._fixed_tokens or -(-len(ids) // count) * count) - len(ids)
        if filling:
            lengths = np.append(lengths, filling)
            ids = np.append(ids, np.zeros(filling, np.int64))
            labels = np.append(labels, np.full(filling, IGNORED, np.int64))
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        targets = np.append(labels[1:], IGNORED)
        targets[bounds[1:] - 1] = IGNORED
        positions = np.arange(len(ids)) - np.repeat(bounds[:-1], lengths)
        part = slice(index * len(ids) // count, (index + 1) * len(ids) // count)
        return {
            "input_ids": torch.from_numpy(ids[part])[None],
            "position_ids": torch.from_numpy(positions[part])[None],
            "targets": torch.from_numpy(targets[part]),
            "supervised": torch.from_numpy(np.flatnonzero(targets[part] != IGNORED)),
            "cu_seq_lens_q": torch.from_numpy(bounds.astype(np.int32)),
            "max_length_q": max(self._longest, filling),
            "documents": [int(number) for row in rows for number in row["documents"]],
            "tokens": tokens if index == 0 else 0,
            "attended": attended if index == 0 else 0,
        }
