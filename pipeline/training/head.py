"""The language-model head and its loss in one step, so that the logits of a whole batch never exist.

Contract: after `install(model)`, `model(..., targets=, supervised=)` returns the sum of -log p(target) over the supervised
positions, in nats, fp32; without them it is what it was. Where head or logits are of another kind (a bias, adapters on the
head), the logits of the supervised positions are built whole.

The gradients of hidden states and head are made in the forward pass, tile by tile (the way of Liger's fused linear
cross-entropy, arXiv:2410.10989): three matrix products where recomputing the logits in the backward pass takes four. On one
H200, 1.5 B parameters with a vocabulary of 152 k, 32 k tokens a pass: 24 ms of 752 (docs/performance.md). Only supervised
positions pass through the head at all.
"""

from __future__ import annotations

import types
from typing import Any

import torch

TILE_BYTES = 2 << 30
"""Of logits that exist at once: 7,000 rows of a 152 k vocabulary in 16 bits. Smaller tiles repeat the fp32 sum of the head's
gradient more often, larger ones gain nothing."""


def install(model: Any) -> None:
    """Give a causal language model the fused head; `model` is the innermost one, without adapters around it."""
    original, head = model.forward, model.get_output_embeddings()
    config = model.config.get_text_config()
    scale, cap = _logit_scale(config), getattr(config, "final_logit_softcapping", None)

    def head_forward(self: Any, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if targets is None:
            return type(self).forward(self, hidden)
        return _summed_loss(self, hidden, targets, scale, cap)

    def forward(
        self: Any, *args: Any, targets: torch.Tensor | None = None, supervised: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        if targets is None or supervised is None:
            return original(*args, **kwargs)
        stated = {key: value for key, value in kwargs.items() if value is not None}  # PEFT names all that a model may take
        hidden = self.base_model(*args, **{**stated, "use_cache": False}).last_hidden_state[0]
        # Through the head's own call: ZeRO-3 gathers a module's weights there.
        return self.get_output_embeddings()(hidden.index_select(0, supervised), targets.index_select(0, supervised))

    head.forward = types.MethodType(head_forward, head)
    model.forward = types.MethodType(forward, model)


def _summed_loss(head: Any, hidden: torch.Tensor, targets: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    plain = type(head) is torch.nn.Linear and head.bias is None and scale == 1.0 and cap is None
    if plain:
        return _FusedHead.apply(hidden, head.weight, targets, torch.is_grad_enabled())
    logits = type(head).forward(head, hidden).float() * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


class _FusedHead(torch.autograd.Function):
    """Sum of the losses; hidden (n, h), weight (v, h), targets (n,)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, training: bool) -> torch.Tensor:
        if torch.is_autocast_enabled(hidden.device.type):
            hidden, weight = (x.to(torch.get_autocast_dtype(hidden.device.type)) for x in (hidden, weight))
        ctx.types = hidden.dtype, weight.dtype
        into_hidden, into_weight = (training and needed for needed in ctx.needs_input_grad[:2])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if into_hidden else None
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if into_weight else None
        rows = max(1, TILE_BYTES // (weight.shape[0] * hidden.element_size()))
        for start in range(0, len(hidden), rows):
            tile = hidden[start : start + rows]
            logits, due = tile @ weight.t(), targets[start : start + rows]
            if not training:
                total += torch.nn.functional.cross_entropy(logits.float(), due, reduction="sum")
                continue
            loss, gradient = _loss_and_gradient(logits, due, len(tile) == rows)
            total += loss
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[start : start + rows])
            if weight_gradient is not None:
                _add_product(weight_gradient, gradient.t(), tile)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (upstream,) = gradients
        made = (
            g.mul_(upstream).to(kind) if g is not None else None for g, kind in zip(ctx.saved_tensors, ctx.types, strict=True)
        )
        return (*made, None, None)


def _loss_and_gradient(logits: torch.Tensor, targets: torch.Tensor, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss, and its gradient by the logits: softmax - one-hot. logits (n, v); whole: n is that of every full tile."""
    if not logits.is_cuda:
        return _softmax_minus_target(logits, targets)
    return (_SAME_SIZE if whole else _ANY_SIZE)(logits, targets)


def _softmax_minus_target(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.float()
    sums = torch.logsumexp(wide, -1, keepdim=True)
    loss = (sums - wide.gather(-1, targets[:, None])).sum()
    is_target = torch.arange(wide.shape[-1], device=wide.device)[None] == targets[:, None]
    return loss, ((wide - sums).exp() - is_target.float()).to(logits.dtype)


_SAME_SIZE, _ANY_SIZE = (torch.compile(_softmax_minus_target, dynamic=dynamic) for dynamic in (False, True))
"""A tile is read twice and written once. Compiled for its size 2.4 ms a tile of 7,000 x 152 k on an H200, for any size 3.6 ms:
full tiles take the one, the last the other."""


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, summed in fp32 whatever the operands' type."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _logit_scale(config: Any) -> float:
    """What the model multiplies its logits by: Cohere's `logit_scale`, Falcon-H1's `lm_head_multiplier`, or one over Granite's
    `logits_scaling`, by which HyperCLOVA X multiplies."""
    for name in ("logit_scale", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None) or 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1.0 / scaling
