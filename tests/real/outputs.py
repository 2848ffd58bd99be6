"""What a real model gives on one of our kernels, against what it gives on SDPA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.real import inputs
from tests.real.captured import forward
from tests.real.hook import running_on


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one forward.

    Attributes:
        values: logits or last hidden state, fp32, without rows of padding.
        calls: attention calls that the model made.
        kernel_calls: calls of the package's own torch op among them: 0 on the host's attention.
        perplexity: of the text, `None` for models without logits.
    """

    values: torch.Tensor
    calls: int
    kernel_calls: int
    perplexity: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an output is from another.

    Attributes:
        rel_l1: sum of absolute differences over the sum of absolute values.
        cosine: of the flattened outputs.
        worst_row_cosine: of the token whose output has changed its direction most.
        top1: share of the rows whose largest value is at the same place.
    """

    rel_l1: float
    cosine: float
    worst_row_cosine: float
    top1: float


class _OpCounter(TorchDispatchMode):
    """Counts calls of the package's ops, however they were reached."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "sage_plugin"
        return func(*args, **(kwargs or {}))


def output(
    model: str, network: Any, tokenizer: Any, kernel: str, *, tokens: int = inputs.TOKENS
) -> Output:
    """Run a model with all its attention on one kernel."""
    with running_on(network, kernel) as hook, _OpCounter() as ops:
        values = forward(model, network, tokenizer, tokens=tokens)
    perplexity = None
    if model == "smollm2":
        ids = inputs.token_ids(tokenizer, tokens).to(values.device)
        loss = torch.nn.functional.cross_entropy(values[0, :-1], ids[0, 1:])
        perplexity = loss.exp().item()
    return Output(values, hook.calls, ops.calls, perplexity)


def difference(values: torch.Tensor, reference: torch.Tensor) -> Difference:
    """Compare two outputs of one shape.

    Example:
        >>> one = torch.tensor([[1.0, 2.0]])
        >>> difference(2 * one, one).rel_l1
        1.0
    """
    ours, theirs = values.double(), reference.double()
    rows = torch.cosine_similarity(ours, theirs, dim=-1)
    return Difference(
        rel_l1=((ours - theirs).abs().sum() / theirs.abs().sum()).item(),
        cosine=torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0).item(),
        worst_row_cosine=rows.min().item(),
        top1=(ours.argmax(-1) == theirs.argmax(-1)).double().mean().item(),
    )
