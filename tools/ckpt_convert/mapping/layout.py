"""The cut over ranks of a checkpoint to be written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.models.architecture import Architecture

from ..problems import other_layout


@dataclass(frozen=True)
class CheckpointLayout:
    """Ranks per tensor, pipeline and expert group, and model chunks per pipeline rank.

    vocab_multiple: the vocabulary is padded to a multiple of it times the tensor-parallel ranks
    (`make_vocab_size_divisible_by`). fused: names and cuts of Transformer Engine's layers, else of
    Megatron's own. first_layers, last_layers: layers of the first and of the last pipeline rank
    where they are not as many as the others' (`decoder_first_pipeline_num_layers`,
    `decoder_last_pipeline_num_layers`)."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    vocab_multiple: int = 128
    fused: bool = True
    first_layers: int | None = None
    last_layers: int | None = None

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.expert

    def rows(self, vocab: int) -> int:
        """Rows of the embedding, padding included."""
        multiple = self.vocab_multiple * self.tensor
        return -(-vocab // multiple) * multiple

    def heights(self, layers: int) -> list[int]:
        """Layers of each pipeline rank's model chunk. Raises ConversionError (5) where they do not
        come out even."""
        ends = [end for end in (self.first_layers, self.last_layers) if end is not None]
        left, middle = layers - sum(ends), self.pipeline - len(ends)
        if ends and self.pipeline == 1:
            raise other_layout(
                "--first-stage-layers and --last-stage-layers need several pipeline ranks; raise "
                "--pp."
            )
        each = left // middle if middle else 0
        found = [each] * self.pipeline
        found[0] = each if self.first_layers is None else self.first_layers
        found[-1] = found[-1] if self.last_layers is None else self.last_layers
        uneven = any(height < 1 or height % self.virtual for height in found)
        if sum(found) != layers or uneven:
            raise other_layout(
                f"{layers} layers, {sum(ends)} of them by --first-stage-layers and "
                f"--last-stage-layers, do not come out even on --pp {self.pipeline} with "
                f"--vpp {self.virtual}."
            )
        return [height // self.virtual for height in found]


def check_divides(model: Architecture, layout: CheckpointLayout) -> None:
    """Raises ConversionError (5) unless the layout divides the model evenly."""
    for flag, ranks, what, size in _divisions(model, layout):
        if size % ranks:
            possible = [number for number in range(1, min(size, 64) + 1) if size % number == 0]
            raise other_layout(
                f"{flag} {ranks} does not divide the model's {size} {what}; possible: "
                f"{', '.join(map(str, possible))}."
            )
    layout.heights(model.layers)
    if layout.expert > 1 and model.experts is None:
        raise other_layout(
            f"--ep {layout.expert}: the model of family '{model.family}' has no experts; leave it "
            "out."
        )
    if layout.virtual > 1 and layout.pipeline == 1:
        raise other_layout(
            f"--vpp {layout.virtual} needs several pipeline ranks; raise --pp or leave it out."
        )


def _divisions(
    model: Architecture, layout: CheckpointLayout
) -> Iterator[tuple[str, int, str, int]]:
    """(option, ranks, what they divide, its size)."""
    tensor = {"attention heads": model.heads, "intermediate size": model.ffn}
    if model.latent is None and layout.tensor % model.groups:  # else several ranks share a group
        tensor["key-value heads"] = model.groups
    if model.experts is not None:
        tensor["experts' intermediate size"] = model.experts.ffn
        tensor["shared experts' intermediate size"] = model.experts.shared_ffn
        yield "--ep", layout.expert, "experts", model.experts.count
    if model.latent is not None and not layout.fused:
        tensor["compressed queries"] = model.size("query_rank")
        tensor["compressed keys"] = model.size("latent")
    for what, size in tensor.items():
        yield "--tp", layout.tensor, what, size
    if layout.first_layers is None and layout.last_layers is None:
        yield "--pp times --vpp", layout.pipeline * layout.virtual, "layers", model.layers
