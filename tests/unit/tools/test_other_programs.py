"""Checkpoints with the argument objects of other programs that train with Megatron."""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import enum
import functools
import json
import pickle
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import to_huggingface
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
from rlflow_tools.ckpt_convert.options import Options
from rlflow_tools.ckpt_convert.readers.formats import open_source

from rlflow.errors import ConversionError
from rlflow.models.huggingface import digest, iterate_weights
from tests.unit.tools.legacy_files import write_checkpoint
from tools.ckpt_convert.command import main

OMEGACONF = (
    "c-n2&XPDGP90u?`IOJHmG(l7p)J5@Bz=lW>6!qZLh`K5mv)S35aM@(vl*0o@K?UzruwzGT*bxhey`b0?yI==wAAB"
    "DDq#vD`%`B5g@5?2-JHL14KP6ex&Gsv#Y}vk7YA!l<BrcqCb|$}^QM*KD>{2u^bj#&?WilDFLL#eZMHaeiO$$~?v"
    "b;fLIUWh-BtOZbk+<!^utzT6#M=g>WJVoTf}S@2=XmApbgv_erhISyrC(S;?5OsAFWWQ=vExRLXPQ~juPm~X@T-y"
    "IdzOpdo%!zkzKwLCPiwvhzbv^{IYeKEe)+7rH3Q#|(7!9+PsWG7+fD-0wrol;z_xwY<(V7|vqe&}VmGQ~4W!v+*w"
    "erunaMM1-5N}r@_qOR#3dEtC4C)2o8m&grzlO;3i!tu+A5owyfTrvAI7j(PWH)*E2e98kRZfxt$LncB%!E9E5FEM"
    "1TWg&3?p;&KPBE>*?str_GQ>FM|;vH+N+iJ?xcO_aLUI&iuUiK1E?It{ss<+3v?)L$Tx~Uwe!-AZt2E*ENV`jVv%"
    "@e=qw@_Lq+a^3<vRCD)@sLa%p~y;KyqGAqEbu@pN>{G_DRxMrlQ2=)AHfB~~%SIH@1T(5&>s8IDNn<Ai>srjIu;p"
    "{_S_eL$ikCP9Z;4*a+pVxpvvVmMmS$1oh5rY8#eIE|iU;P^VN%F)(t+SKwq;)a+k)e{(|D0M2sw6r=|sM9s|L<2M"
    "G>L{-E7Ynh(i=Y*Hrj$=&I9bWF7*0vcGlhJrCZA@Yr7kbw@<1-jrR4cR#U$0xaeWW7r9FqCRoSOAoRPL?3;RsXHV"
    "mAl>{(ORZ~1%8hCf#D2(i>t`dq1>&2Wy=&t=G`^|?YnPt(sgaKUbU*FPINchbL-f(L$N@re{m8}lSSpW#A<n+zAF"
    "@p%HbG`wKIuH(}-cV@&N$NMH-w_InDC6*zIk|zu$#g`dqnlB38(f9=h+7vIhcu)xi3zui?!SBO`PT7r7k+{d;E4<"
    "2pG+q&Spy8o`Na3AHxzT3UCl#?&+Zh%r^<svOv>FR_k)|#-aEY!C<7(9p9k~}tr9g^Be(=_gE+zvmWw=ZQEMZuh4"
    "qzhSaxLHr16S5-(kLg9Q_FbN5Pl=~WU@c&X8@MVpsN@<RZthh)#;$+BIp_|=vo6SR8Uv4`Qwn7BF_wMKDAyME2Vr"
    "L!}UtOf#Jrqyi&+FY4XhmZqem_yO&~>1hzP{S4sC)hTD{TJHs7mca?DO)ZDua++AOdQ~%7U)hLescHg!NwF6+awC"
    "`b9qwISb?n~RNg?+zfKVaZNWw&y31UGqkLq9Mp{HfuJhmXY{XKpQHt;~3c;bE2W2*ac4jI|=;F)ib915eZsnFby*"
    "QY;>)N_eTs|HiD7F;6nAS20g9Je`hNCt{w_VxBdyAr(_QXlfH%3J9=Kd+xbTsNPCu^Go$s@*L0F#PGbx6>k|YFua"
    ")Lrd}RI^DJJfb!DUI%F9|;UNP`09h`39^Y;?GM&)x|c5>K!yq=Q-eS=}M8t9u0Z>0v>k`ekAO@G_KJJQ(12g(<MG"
    "~Q)+PZ{qse2_L8gz=$fd}QEb-5^Q5#5`0&vnV(6Rw;kN@TrnNWB5Eh4O@l$g(iP#;H&yZ9?Hoviz7d<X|psZm0aJ"
    "7CX8qJI$3QM+Yg9o$6@4Gl2g^JO$@eC@shZm;Tts_-!goc<kM`e1KUIgzSlbNgMl9@f2Yz*&G1vcfrnYxA;+|nVV"
    "4@y&kVn$$FxI`ziQ-f27Z^+_S(`4<3b!4n*Rkz<)rx"
)
"""What omegaconf 2.3.0 pickles of `RLINF`, protocol 2, compressed, in base 85."""
RLINF = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 32,
    "ffn_hidden_size": 128,
    "layernorm_epsilon": 1e-6,
    "norm_epsilon": 1e-5,  # Megatron-LM's default, which RLinf does not read
    "rotary_base": 10000.0,
    "normalization": "rmsnorm",
    "swiglu": True,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "group_query_attention": False,  # defaults again, as the next two
    "use_rope_scaling": False,
    "rotary_percent": 1.0,
    "vocab_size": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "no_rope_freq": [0, 0],
    "params_dtype": "${torch.dtype:float32}",
    "mcore_customization_config": {"a": 1},
}


class Colour(enum.Enum):
    RED = 1


@dataclass
class EvalDataset:
    """As slime keeps its evaluations."""

    name: str
    options: dict[str, Any]


BESIDE: dict[str, Any] = {
    "dataclass": [EvalDataset("aime", {"n": 4})],
    "set": {1, 2},
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "enum": Colour.RED,
    "partial": functools.partial(sorted, reverse=True),
    "optimizer": torch.optim.AdamW,
    "activation": torch.nn.functional.silu,
    "datetime": datetime.datetime(2026, 1, 2),
    "timedelta": datetime.timedelta(minutes=10),
    "ordered": collections.OrderedDict(a=1),
    "path": Path("/somewhere"),
    "namespace": argparse.Namespace(deep=argparse.Namespace()),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf/, and its checkpoints torch/ and torch_dist/."""
    root = tmp_path_factory.mktemp("other")
    model = tiny_model(root / "hf", "qwen3", tokenizer=False, vocab_size=101)
    for name in ("torch", "torch_dist"):
        write_checkpoint(model, root / name, name, CheckpointLayout())
    return root


@pytest.fixture
def case(made: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """(legacy checkpoint to change, reference, output)."""
    shutil.copytree(made / "torch", tmp_path / "torch")
    shutil.copytree(made / "hf", tmp_path / "hf")
    return tmp_path / "torch", tmp_path / "hf", tmp_path / "out"


def arguments_file(checkpoint: Path) -> Path:
    return next(file for file in checkpoint.rglob("*.pt"))


@pytest.mark.parametrize("format", ["torch", "torch_dist"])
def test_objects_in_the_arguments_do_not_hinder(
    format: str, made: Path, tmp_path: Path, capsys: Any
) -> None:
    checkpoint, out = tmp_path / format, tmp_path / "out"
    shutil.copytree(made / format, checkpoint)
    file = arguments_file(checkpoint)
    state = torch.load(file, weights_only=False)
    vars(state["args"]).update(BESIDE)
    state["opt_param_scheduler"] = {"class": torch.optim.AdamW}
    torch.save(state, file)
    assert main(["to-hf", str(checkpoint), str(out), "--hf", str(made / "hf")]) == 0
    assert digest(iterate_weights(out)) == digest(iterate_weights(made / "hf"))
    remark = capsys.readouterr().out.splitlines()[-1]
    assert remark.startswith("passed over") and "datetime.datetime" in remark
    assert remark.endswith("more") and len(remark) < 600
    assert main(["inspect", str(checkpoint)]) == 0
    assert remark in capsys.readouterr().out
    arguments = open_source(checkpoint).arguments
    assert arguments["num_layers"] == 2 and "enum" not in arguments


@pytest.mark.slow
def test_logits_are_compared_whatever_the_arguments_hold(made: Path, tmp_path: Path) -> None:
    """torch itself would refuse to load these objects."""
    checkpoint = tmp_path / "torch_dist"
    shutil.copytree(made / "torch_dist", checkpoint)
    file = arguments_file(checkpoint)
    state = torch.load(file, weights_only=False)
    vars(state["args"]).update(BESIDE)
    torch.save(state, file)
    to_huggingface(checkpoint, tmp_path / "out", made / "hf", Options(verify="logits"))


def test_nothing_is_said_where_nothing_was_passed_over(made: Path, tmp_path: Path) -> None:
    assert open_source(made / "torch").remark() == ""
    assert "remark" not in to_huggingface(made / "torch", tmp_path / "out", made / "hf")


def with_arguments(file: Path, arguments: bytes) -> None:
    """Puts a pickle of arguments into a file of torch.save as it is: without the package that it is of."""
    with zipfile.ZipFile(file) as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = next(name for name in content if name.endswith("/data.pkl"))
    assert content[name].endswith(b".") and arguments[:2] == b"\x80\x02"
    content[name] = content[name][:-1] + b"X\x04\x00\x00\x00args" + arguments[2:-1] + b"s."
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def genuine(changes: dict[str, Any]) -> bytes:
    """As the installed omegaconf pickles them."""
    omegaconf = pytest.importorskip("omegaconf")
    return pickle.dumps(omegaconf.OmegaConf.create({**RLINF, **changes}), 2)


def test_arguments_are_read_out_of_an_omegaconf_dictionary(case: Any) -> None:
    checkpoint, reference, out = case
    with_arguments(arguments_file(checkpoint), zlib.decompress(base64.b85decode(OMEGACONF)))
    source = open_source(checkpoint)
    assert source.remark() == "" and source.layout["pipeline_parallel"] == 1
    assert source.described == {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "groups": 2,
        "head_dim": 32,
        "ffn": 128,
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    assert source.arguments["no_rope_freq"] == [0, 0] and "params_dtype" not in source.arguments
    to_huggingface(checkpoint, out, reference)
    assert digest(iterate_weights(out)) == digest(iterate_weights(reference))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("norm_eps", {"rms_norm_eps": 1e-5}),
        ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("groups", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    ],
)
def test_what_contradicts_an_omegaconf_dictionary_is_refused(
    field: str, change: dict[str, Any], case: Any
) -> None:
    """Of changes that no shape tells."""
    checkpoint, reference, out = case
    with_arguments(arguments_file(checkpoint), zlib.decompress(base64.b85decode(OMEGACONF)))
    config = json.loads((reference / "config.json").read_text())
    (reference / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConversionError, match=f"its {field} is") as caught:
        to_huggingface(checkpoint, out, reference)
    assert caught.value.exit_code == 7 and not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"layernorm_epsilon": 1e-3}, 7),
        ({"normalization": "LayerNorm"}, 7),
        ({"use_rope_scaling": True}, 7),
        ({"no_rope_freq": [0, 1]}, 7),
        ({"window_size": [128, 0]}, 7),
        ({"pipeline_model_parallel_size": 2}, 3),
        ({"layernorm_epsilon": "${other}"}, 0),  # to be computed, which is left alone
    ],
    ids=str,
)
def test_arguments_of_the_installed_omegaconf_are_read(
    changes: dict[str, Any], code: int, case: Any
) -> None:
    checkpoint, reference, out = case
    with_arguments(arguments_file(checkpoint), genuine(changes))
    assert main(["to-hf", str(checkpoint), str(out), "--hf", str(reference)]) == code


def shared(count: int) -> bytes:
    """A dictionary of OmegaConf with as many names for one list of as many numbers."""
    node = b"comegaconf.nodes\nAnyNode\n)\x81}X\x04\x00\x00\x00_valK\x01sb"
    listed = b"comegaconf.listconfig\nListConfig\n)\x81}X\x08\x00\x00\x00_content](" + node * count
    names = b"".join(b"X\x06\x00\x00\x00%06dh\xfe" % number for number in range(count))
    content = (
        listed + b"esbq\xfe0comegaconf.dictconfig\nDictConfig\n)\x81}X\x08\x00\x00\x00_content"
    )
    return b"\x80\x02" + content + b"}(" + names + b"usb."


def test_one_list_under_many_names_is_read_once(case: Any) -> None:
    checkpoint, _, _ = case
    with_arguments(arguments_file(checkpoint), shared(3000))
    arguments = open_source(checkpoint).arguments
    assert len(arguments) == 3000 and len({id(value) for value in arguments.values()}) == 1
