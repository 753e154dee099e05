"""A critic's output layer: hidden states -> the value of the state before each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from rlflow.trainer.megatron.logprobs import at_tokens, predicted_here


@dataclass(frozen=True)
class ValueHead:
    """`layer`: hidden -> 1, whole on every tensor-parallel rank of `group`."""

    layer: torch.nn.Linear
    group: ProcessGroup
    sequence_parallel: bool


def token_values(
    hidden: Tensor,
    lengths: Tensor,
    *,
    head: ValueHead,
    places: Tensor,
    context_group: ProcessGroup,
    wanted: Tensor | None = None,
) -> Tensor:
    """(B, T) float32: position t is the value of what stands before token t. Arguments as of
    `token_logprobs`."""
    weight, bias = head.layer.weight.float(), head.layer.bias.float()
    values = F.linear(hidden.float(), weight, bias).squeeze(-1)
    # Numbers cross ranks, not hidden states; each rank's gradient is that of its own tokens
    if head.sequence_parallel:
        values = gather_from_sequence_parallel_region(
            values, tensor_parallel_output_grad=False, group=head.group
        )
    valid = predicted_here(lengths, places, wanted)
    return at_tokens(values.flatten().index_select(0, places[:, :-1][valid]), valid, context_group)
