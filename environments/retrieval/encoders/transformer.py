"""Encoders that are transformer models: hidden states, pooling, normalization."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rlflow.components import takes
from rlflow.errors import ConfigError, ModelError
from rlflow.values import PositiveInt
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders.rules import EncoderRules, encoder_rules
from rlflow_environments.retrieval.records import file_digest

_QUERY_BATCH = {"cpu": 1, "cuda": 32}
_PASSAGE_BATCH = {"cpu": 32, "cuda": 256}
_LENGTH_STEP = 8  # batches of several texts are padded to a multiple of this many tokens
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER = ("tokenizer.json", "vocab.txt", "sentencepiece.bpe.model", "spiece.model")


@takes(encoder_rules)
class TransformerEncoder:
    """Texts to vectors by the rules of the model's family.

    A text's vector does not depend on the other texts of its batch: the model only ever sees
    batches of one fixed number of texts, all of the same padded length, so that every text goes
    through the same kernels. On a CPU a query is a batch of its own."""

    def __init__(
        self,
        path: str,
        *,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        query_batch: PositiveInt | None = None,
        passage_batch: PositiveInt | None = None,
        **rules: Any,
    ) -> None:
        """path: a model folder, or a hub name. dtype: of the weights. query_batch, passage_batch:
        texts per pass of the model. rules: see encoder_rules. Raises ConfigError, ModelError."""
        from transformers import AutoTokenizer

        folder = model_folder(path)
        self.path = str(folder.resolve()) if Path(path).expanduser().is_dir() else path
        self._folder = folder
        self.rules = encoder_rules(folder, str(path), **rules)
        self._device = _checked_device(device)
        self._query_batch = query_batch or _QUERY_BATCH[self._device.type]
        self._passage_batch = passage_batch or _PASSAGE_BATCH[self._device.type]
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            model = _whole_model(folder, getattr(torch, dtype))
        except (OSError, ValueError) as problem:
            raise ModelError(f"{folder}: cannot be loaded as an encoder: {problem}") from None
        if model.config.is_encoder_decoder:
            raise ModelError(
                f"{folder}: an encoder-decoder model; expected an encoder such as BERT."
            )
        self._model = model.to(self._device).eval()
        projected = getattr(model.config, "projection_dim", 0)  # of DPR
        self.dimensions = int(projected or model.config.hidden_size)

    @property
    def description(self) -> dict[str, Any]:
        """See Encoder. The hash covers weights, tokenizer and rules, not device or dtype."""
        digest = _hash(self._folder, self.rules)
        described = {"path": self.path, "dimensions": self.dimensions, "sha256": digest}
        return {**asdict(self.rules), **described}

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """(N, dimensions) float32."""
        texts = [self.rules.query_prefix + query for query in queries]
        return self._encode(texts, self._query_batch)

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """(N, dimensions) float32, of the passages' contents."""
        texts = [self.rules.passage_prefix + passage.contents for passage in passages]
        return self._encode(texts, self._passage_batch)

    @torch.inference_mode()
    def _encode(self, texts: list[str], batch: int) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        tokens = self._tokens(texts) if texts else []
        for places, length in _batches([len(text_ids) for text_ids in tokens], batch):
            encoded = self._encode_batch([tokens[place] for place in places], batch, length)
            vectors[places] = encoded[: len(places)]  # the rest is padding of the batch
        return vectors

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        # A sampled text may hold lone surrogates, which no tokenizer takes.
        legal = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        encoded = self._tokenizer(legal, truncation=True, max_length=self.rules.max_length)
        return encoded["input_ids"]

    def _encode_batch(self, tokens: list[list[int]], batch: int, length: int) -> np.ndarray:
        """(batch, dimensions): texts of at most `length` tokens, then copies of the first one."""
        ids = torch.full((batch, length), self._tokenizer.pad_token_id or 0, dtype=torch.int64)
        mask = torch.zeros((batch, length), dtype=torch.int64)
        for row, text_ids in enumerate([*tokens, *[tokens[0]] * (batch - len(tokens))]):
            ids[row, : len(text_ids)] = torch.tensor(text_ids)
            mask[row, : len(text_ids)] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        output = self._model(input_ids=ids, attention_mask=mask)
        if getattr(output, "last_hidden_state", None) is None:  # DPR gives pooled vectors only
            vectors = output.pooler_output.float()
        else:
            vectors = pool(output.last_hidden_state.float(), mask, self.rules.pooling)
        if self.rules.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors.cpu().numpy()


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """(B, hidden) from (B, L, hidden) and a (B, L) mask of ones before zeros. mean: masked sum over
    the number of tokens."""
    if pooling == "cls":
        return hidden[:, 0]
    counts = mask.sum(dim=1, keepdim=True)
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), counts.flatten() - 1]
    return hidden.masked_fill(mask[..., None] == 0, 0.0).sum(dim=1) / counts


def model_folder(path: str) -> Path:
    """The local folder of a model: `path` itself, or that of a hub name, downloaded when it is not
    cached. Raises ModelError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, ignore_patterns=["*.h5", "*.msgpack", "*.ot"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        reason = str(problem).partition("\n")[0]
        raise ModelError(
            f"encoder '{path}': no such folder, and the hub does not have it for us ({reason})."
        ) from None


def _whole_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder. Raises ModelError where the files lack weights: transformers draws
    those at random."""
    from transformers import AutoConfig, AutoModel, DPRContextEncoder

    # AutoModel makes a question encoder of every DPR
    of_passages = "DPRContextEncoder" in (AutoConfig.from_pretrained(folder).architectures or ())
    kind: Any = DPRContextEncoder if of_passages else AutoModel
    model, report = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    # The pooler's output is not used here, and many encoders come without one
    missing = sorted(name for name in report["missing_keys"] if "pooler." not in name)
    if missing:
        raise ModelError(
            f"{folder}: expected all weights of a {type(model).__name__}, found none for "
            f"{len(missing)} parameters, the first is {missing[0]}. Download the model again."
        )
    return model


def _checked_device(name: str) -> torch.device:
    """Raises ConfigError for a device that is unknown, or not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, found '{name}'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: '{name}' asked for, but torch sees {torch.cuda.device_count()} GPUs here. "
            "Use cpu."
        )
    return device


def _batches(lengths: list[int], batch: int) -> Iterator[tuple[list[int], int]]:
    """(places, padded length) of each pass of the model: at most `batch` texts of one padded
    length."""
    step = 1 if batch == 1 else _LENGTH_STEP
    groups: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        groups.setdefault(-(-length // step) * step, []).append(place)
    for padded, places in sorted(groups.items()):
        for start in range(0, len(places), batch):
            yield places[start : start + batch], padded


def _hash(folder: Path, rules: EncoderRules) -> str:
    """SHA-256 of the rules, the weights (the first format that is there) and the tokenizer."""
    # The rules as they were written when they knew projections: indices of that time still fit.
    digest = hashlib.sha256(f"{repr(rules)[:-1]}, projections=())".encode())
    formats = (sorted(folder.glob(pattern)) for pattern in _WEIGHTS)
    weights = next((found for found in formats if found), [])
    tokenizer = [folder / name for name in _TOKENIZER if (folder / name).is_file()]
    for path in [*weights, *tokenizer]:
        digest.update(bytes.fromhex(file_digest(path)))
    return digest.hexdigest()
