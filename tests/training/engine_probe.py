"""One process that gives rendered configurations to real DeepSpeed engines on the CPU and says what they do.

Reads a JSON list of configurations from stdin, prints one JSON object a line: the optimizer DeepSpeed chose, formats seen in
the forward pass, the norm of a gradient summed over micro-batches, and what its converter reads of a checkpoint.

Command: python -m tests.training.engine_probe < CASES.json
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import sys
import tempfile
from typing import Any

with socket.socket() as _free:
    _free.bind(("127.0.0.1", 0))
    _PORT = _free.getsockname()[1]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_PORT)}
os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}

import deepspeed  # noqa: E402 - reads the environment
import torch  # noqa: E402
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # noqa: E402

MICRO_BATCHES = (1.0, 2**-8, 2**-8, 2**-8)
"""Gradients whose quarters sum to 0.25 + 3/1024; in bf16 each 1/1024 is lost beside 0.25. Scaled by 2^16 they fit in fp16."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(2, 1)
        self.linear = torch.nn.Linear(1, 1, bias=False)
        self.seen: list[str] = []

    def forward(self, scale: Any) -> Any:
        hidden = self.embedding(torch.zeros(1, dtype=torch.long))
        out = self.linear(torch.ones_like(hidden))
        self.seen = [str(hidden.dtype), str(out.dtype)]
        return (out.float() * scale).sum() + 0.0 * hidden.float().sum()


def probe(config: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)  # pyright: ignore[reportArgumentType]
        for scale in MICRO_BATCHES:
            engine.backward(engine(scale))
            engine.step()
    except Exception as error:  # what is asked is whether it works
        return {"error": f"{type(error).__name__}: {error}"}
    norm = engine.get_global_grad_norm()
    said = {"optimizer": type(engine.optimizer).__name__, "norm": None if norm is None else float(norm), "seen": model.seen}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        engine.save_checkpoint(folder, tag="t")
        try:
            state: Any = get_fp32_state_dict_from_zero_checkpoint(folder, tag="t")
            said["exported"] = sorted({str(tensor.dtype) for tensor in state.values()})
        except Exception as error:  # as above
            said["exported"] = f"{type(error).__name__}: {error}"
    return said


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as sft.py does: it would be compiled
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    for case in json.load(sys.stdin):
        print(json.dumps(probe(case)), flush=True)
