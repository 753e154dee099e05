"""Claims about encoders: what transformers computes by the rules of the model's card, in any batch."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModel, AutoTokenizer

from rlflow.errors import ConfigError, ModelError
from rlflow_environments.retrieval.building import BuildRequest, build_index
from rlflow_environments.retrieval.corpus import Corpus, Passage, write_corpus
from rlflow_environments.retrieval.encoders import encoder_family, make_encoder
from rlflow_environments.retrieval.encoders.rules import FAMILIES
from rlflow_environments.retrieval.encoders.transformer import pool
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.retrieval.indices.folder import read_meta
from tests.unit.environments.retrieval.search_models import WORDS, write_bert, write_modules


def sentences(count, longest=60):
    generator = random.Random(0)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, longest))) for _ in range(count)]


TEXTS = [*sentences(20), "", "river " * 400, "北京", "\ud800 stone", "Harbour\nKING"]
PASSAGES = [Passage(str(row), "t", text, "") for row, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose name says E5, as `intfloat/e5-base-v2` does."""
    return write_bert(tmp_path_factory.mktemp("models") / "e5-tiny-v2")


def by_transformers(folder, texts, prefix, pooling="mean", normalize=True, max_length=256):
    """The model card's arithmetic, one text at a time: prefix, truncation with it, pooling, normalization."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    vectors = []
    for text in texts:
        legal = (prefix + text).encode("utf-8", "replace").decode()
        ids = tokenizer(legal)["input_ids"]
        ids = ids if len(ids) <= max_length else [*ids[: max_length - 1], tokenizer.sep_token_id]
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        vector = hidden[0] if pooling == "cls" else hidden.sum(0) / len(ids)
        vectors.append(vector / vector.norm() if normalize else vector)
    return torch.stack(vectors).numpy()


@pytest.fixture(scope="module")
def expected(folder):
    return by_transformers(folder, TEXTS, "query: ")


def test_e5_is_prefix_truncation_masked_mean_and_length_one(folder, expected):
    encoder = make_encoder(str(folder))
    assert encoder.rules == FAMILIES["e5"] and encoder.dimensions == 32
    assert np.abs(encoder.encode_queries(TEXTS) - expected).max() < 1e-5
    passages = by_transformers(folder, TEXTS, "passage: ")
    assert np.abs(encoder.encode_passages(PASSAGES) - passages).max() < 1e-5
    assert np.abs(passages - expected).max() > 0.01, "the prefix matters to this model, so the test can fail"


def test_truncation_at_256_tokens_counts_the_prefix(folder):
    encoder = make_encoder(str(folder))
    tokens = encoder._tokens(["query: " + "river " * 400])[0]
    assert len(tokens) == 256
    same, other = (
        encoder.encode_queries([" ".join(["river"] * n) for n in (252, 251)]),
        encoder.encode_queries(["river " * 400]),
    )
    assert np.array_equal(same[0], other[0]) and not np.array_equal(same[1], other[0])


@pytest.mark.parametrize("query_batch", [1, 4])
def test_e5_agrees_with_transformers_in_any_batch_composition(folder, expected, query_batch):
    encoder = make_encoder({"name": str(folder), "query_batch": query_batch})
    alone = np.concatenate([encoder.encode_queries([text]) for text in TEXTS])
    assert np.abs(alone - expected).max() < 1e-5

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=40))
    def check(chosen):
        assert np.array_equal(encoder.encode_queries([TEXTS[place] for place in chosen]), alone[chosen]), "bit for bit"

    check()


def test_passages_do_not_depend_on_their_batch_beyond_rounding(folder):
    encoders = [make_encoder({"name": str(folder), "passage_batch": batch}) for batch in (1, 3, 64)]
    first, *others = [encoder.encode_passages(PASSAGES) for encoder in encoders]
    assert all(np.abs(other - first).max() < 1e-5 for other in others)


def test_bge_is_its_instruction_for_queries_alone_and_the_first_token(folder, tmp_path):
    model = write_bert(tmp_path / "bge-tiny-en")
    encoder = make_encoder(str(model))
    instruction = "Represent this sentence for searching relevant passages: "
    assert np.abs(encoder.encode_queries(TEXTS) - by_transformers(model, TEXTS, instruction, "cls")).max() < 1e-5
    assert np.abs(encoder.encode_passages(PASSAGES) - by_transformers(model, TEXTS, "", "cls")).max() < 1e-5


def test_a_family_may_leave_vectors_as_they_are(folder):
    encoder = make_encoder({"name": str(folder), "family": "dpr"})
    assert (
        np.abs(encoder.encode_queries(TEXTS) - by_transformers(folder, TEXTS, "", "cls", normalize=False)).max() < 1e-5
    )
    assert not encoder.unit_vectors


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("e5", "e5"),
        ("e5-base", "e5"),
        ("intfloat/e5-base-v2", "e5"),
        ("intfloat/multilingual-E5-large", "e5"),
        ("models/my_e5/", "e5"),
        ("/data/e5/model", "e5"),
        ("hub/models--intfloat--e5-base-v2/snapshots/1c4f", "e5"),
        ("BAAI/bge-base-en-v1.5", "bge"),
        ("/data/e5_and_others/bge-small", "bge"),
        ("facebook/dpr-question_encoder-single-nq-base", "dpr"),
        ("facebook/contriever", "contriever"),
        ("sentence-transformers/all-MiniLM-L6-v2", "sentence-transformers"),
        ("/home/re5earch/my-model", "sentence-transformers"),
    ],
)
def test_one_function_decides_the_family(name, family):
    assert encoder_family(name) == family


def test_the_builder_and_the_server_ask_the_same_function(folder, tmp_path):
    """The prefix trap of the field: an index built as `e5-base` whose passages lack their prefix."""
    corpus = Corpus(
        write_corpus(
            tmp_path / "corpus.jsonl", [Passage(str(i), "t", text, "") for i, text in enumerate(sentences(40))]
        )
    )
    build_index(corpus, tmp_path / "index", BuildRequest("torch", str(folder)), lambda *_: None)
    stored = np.fromfile(tmp_path / "index" / "embeddings.f32", "<f4").reshape(40, 32)
    passages = by_transformers(folder, [passage.contents for passage in corpus], "passage: ")
    assert np.abs(stored - passages).max() < 1e-5
    queries = sentences(10, 8)
    found = make_retriever({"name": "torch", "path": str(tmp_path / "index")}, corpus).search(queries, 3)
    best = np.argsort(-(by_transformers(folder, queries, "query: ") @ passages.T), axis=1)[:, :3]
    assert [[hit.id for hit in hits] for hits in found] == [[str(row) for row in rows] for rows in best]
    assert read_meta(tmp_path / "index").encoder["family"] == "e5"


def test_another_model_behind_the_same_folder_name_is_refused(folder, tmp_path):
    from rlflow.errors import DataError

    corpus = Corpus(
        write_corpus(tmp_path / "corpus.jsonl", [Passage(str(i), "t", text, "") for i, text in enumerate(sentences(9))])
    )
    build_index(corpus, tmp_path / "index", BuildRequest("Flat", str(folder)), lambda *_: None)
    other = write_bert(tmp_path / "e5-tiny-v2", seed=1)
    with pytest.raises(DataError, match=r"built with another encoder .*other weights"):
        make_retriever({"name": "faiss", "path": str(tmp_path / "index"), "encoder": str(other)}, corpus)
    with pytest.raises(DataError, match="max_length: 256 then, 64 now"):
        component = {
            "name": "faiss",
            "path": str(tmp_path / "index"),
            "encoder": {"name": str(folder), "max_length": 64},
        }
        make_retriever(component, corpus)


def test_a_prebuilt_faiss_file_of_the_field_loads_as_it_is(folder, tmp_path):
    """Search-R1's e5_Flat.index beside corpus.jsonl: float16 arithmetic at build time, no meta.json."""
    import faiss

    corpus = Corpus(
        write_corpus(
            tmp_path / "corpus.jsonl", [Passage(str(i), "t", text, "") for i, text in enumerate(sentences(60))]
        )
    )
    vectors = (
        by_transformers(folder, [passage.contents for passage in corpus], "passage: ")
        .astype(np.float16)
        .astype(np.float32)
    )
    for factory in ("Flat", "SQfp16"):
        index = faiss.index_factory(32, factory, faiss.METRIC_INNER_PRODUCT)
        index.add(vectors)
        faiss.write_index(index, str(tmp_path / f"e5_{factory}.index"))
    path, encoder = str(tmp_path / "e5_Flat.index"), str(folder)
    queries = sentences(12, 8)
    found = [
        make_retriever({"name": name, "path": path, "encoder": encoder}, corpus).search(queries, 3)
        for name in ("faiss", "torch")
    ]
    best = np.argsort(-(by_transformers(folder, queries, "query: ") @ vectors.T), axis=1)[:, :3]
    assert found[0] == found[1]
    assert [[hit.id for hit in hits] for hits in found[0]] == [[str(row) for row in rows] for rows in best]
    half = make_retriever({"name": "faiss", "path": str(tmp_path / "e5_SQfp16.index"), "encoder": encoder}, corpus)
    assert [[hit.id for hit in hits] for hits in half.search(queries, 3)] == [
        [hit.id for hit in hits] for hits in found[0]
    ]


@pytest.mark.parametrize("name", ["faiss", "torch"])
def test_a_prebuilt_file_of_another_encoder_or_corpus_is_refused(name, folder, tmp_path):
    import faiss

    from rlflow.errors import DataError

    corpus = Corpus(
        write_corpus(
            tmp_path / "corpus.jsonl", [Passage(str(i), "t", text, "") for i, text in enumerate(sentences(20))]
        )
    )
    unprefixed = by_transformers(folder, [passage.contents for passage in corpus], "")
    index = faiss.IndexFlatIP(32)
    index.add(unprefixed)
    path = str(tmp_path / "e5-base_Flat.index")
    faiss.write_index(index, path)
    with pytest.raises(DataError, match="Another model, prefix, pooling, length or corpus"):
        make_retriever({"name": name, "path": path, "encoder": str(folder)}, corpus)
    make_retriever({"name": name, "path": path, "encoder": {"name": str(folder), "passage_prefix": ""}}, corpus)
    make_retriever({"name": name, "path": path, "encoder": str(folder), "verify": False}, corpus)
    with pytest.raises(ConfigError, match="does not say how it was encoded"):
        make_retriever({"name": name, "path": path}, corpus)
    with pytest.raises(DataError, match="holds 20 vectors, the corpus 19"):
        shorter = Corpus(write_corpus(tmp_path / "short.jsonl", corpus[:19]))
        make_retriever({"name": name, "path": path, "encoder": str(folder)}, shorter)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "max"}, "max"),
    ],
)
def test_a_sentence_transformers_folder_says_how_it_pools(config, pooling, tmp_path):
    model = write_bert(tmp_path / "my-model")
    torch.manual_seed(1)
    weight, bias = torch.randn(16, 32), torch.randn(16)
    prompts = {"query": "query : ", "document": "passage : "}
    write_modules(
        model, pooling=config, normalize=True, dense=(weight, bias, "torch.nn.modules.activation.Tanh"), prompts=prompts
    )
    encoder = make_encoder(str(model))
    assert encoder.rules.pooling == pooling and encoder.rules.max_length == 40 and encoder.dimensions == 16
    tokenizer, bert = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    for text, vector in zip(TEXTS[:12], encoder.encode_queries(TEXTS[:12])):
        batch = tokenizer("query : " + text, truncation=True, max_length=40, return_tensors="pt")
        with torch.no_grad():
            hidden = bert(**batch).last_hidden_state[0]
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1], "max": hidden.amax(0)}[pooling]
        projected = torch.tanh(weight @ pooled + bias)
        assert np.abs(vector - (projected / projected.norm()).numpy()).max() < 1e-5
    assert not np.allclose(encoder.encode_passages(PASSAGES[:1]), encoder.encode_queries(TEXTS[:1]))


def test_pooling_by_hand():
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]]])
    mask = torch.tensor([[1, 1, 0]])
    expected = {
        "mean": [2, 4],
        "cls": [1, 2],
        "last": [3, 6],
        "max": [3, 6],
        "mean_sqrt_length": [4 / 2**0.5, 8 / 2**0.5],
    }
    for pooling, value in expected.items():
        assert pool(hidden, mask, pooling)[0].tolist() == pytest.approx(value)


def write_onnx(folder, tables):
    """A graph whose hidden states are sums of table rows: of the token, of its type and, where attended to, of row 0 of a
    third."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    names = ["input_ids", "token_type_ids", "attention_mask"]
    gathers = [
        helper.make_node("Gather", [f"table{place}", name], [f"rows{place}"]) for place, name in enumerate(names)
    ]
    total = helper.make_node("Sum", ["rows0", "rows1", "rows2"], ["last_hidden_state"])
    graph = helper.make_graph(
        [*gathers, total],
        "tables",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in names],
        [
            helper.make_tensor_value_info(
                "last_hidden_state", TensorProto.FLOAT, ["batch", "length", tables[0].shape[1]]
            )
        ],
        [numpy_helper.from_array(table, f"table{place}") for place, table in enumerate(tables)],
    )
    (folder / "onnx").mkdir()
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        folder / "onnx" / "model.onnx",
    )


def test_an_onnx_model_goes_through_the_same_rules(folder, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model = tmp_path / "e5-onnx"
    shutil.copytree(folder, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    generator = np.random.default_rng(0)
    tables = [generator.standard_normal((size, 16)).astype(np.float32) for size in (len(tokenizer), 2, 2)]
    write_onnx(model, tables)
    encoder = make_encoder({"name": str(model), "backend": "onnx", "query_batch": 4})
    for text, vector in zip(TEXTS[:20], encoder.encode_queries(TEXTS[:20])):
        ids = tokenizer("query: " + text, truncation=True, max_length=256)["input_ids"]
        mean = tables[0][ids].mean(axis=0) + tables[1][0] + tables[2][1]
        assert np.abs(vector - mean / np.linalg.norm(mean)).max() < 1e-5
    assert encoder.description["sha256"] == make_encoder(str(model)).description["sha256"], (
        "an index of one serves the other"
    )


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_cpu(folder):
    on_gpu = make_encoder({"name": str(folder), "device": "cuda"})
    assert np.abs(on_gpu.encode_queries(TEXTS) - make_encoder(str(folder)).encode_queries(TEXTS)).max() < 1e-4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pooling": "maen"}, ConfigError, "Did you mean 'mean'"),
        ({"family": "bgee"}, ConfigError, "Did you mean 'bge'"),
        ({"max_length": 0}, ConfigError, "max_length: expected a whole number above 0"),
        ({"query_batch": 0}, ConfigError, "query_batch: expected a whole number above 0"),
        ({"backend": "onx"}, ConfigError, "Did you mean 'onnx'"),
        ({"dtype": "float23"}, ConfigError, "encoder.dtype"),
        ({"device": "gpu"}, ConfigError, "expected cpu, cuda"),
        ({"poling": "mean"}, ConfigError, "Did you mean 'pooling'"),
        ({"backend": "onnx"}, ModelError, "model.onnx or onnx/model.onnx"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options, error, message, folder):
    if options.get("backend") == "onnx":
        pytest.importorskip("onnxruntime")
    with pytest.raises(error, match=message):
        make_encoder({"name": str(folder), **options})


def test_unsupported_modules_are_refused(tmp_path):
    model = write_bert(tmp_path / "strange")
    write_modules(model, pooling={"pooling_mode": "mean"}, normalize=True)
    (model / "modules.json").write_text(
        json.dumps([{"path": "", "type": "sentence_transformers.models.WordEmbeddings"}])
    )
    with pytest.raises(ModelError, match="WordEmbeddings' is not supported"):
        make_encoder(str(model))
    write_modules(model, pooling={"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, normalize=True)
    with pytest.raises(ModelError, match="expected one pooling"):
        make_encoder(str(model))
