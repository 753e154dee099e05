"""Claims about encoders: what transformers computes by the rules of the model's card, in any batch."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel, AutoTokenizer

from rlflow.errors import ConfigError, ModelError
from rlflow_environments.retrieval.building import BuildRequest, build_index
from rlflow_environments.retrieval.corpus import Corpus, Passage, write_corpus
from rlflow_environments.retrieval.encoders import encoder_family, make_encoder
from rlflow_environments.retrieval.encoders.rules import FAMILIES, encoder_rules
from rlflow_environments.retrieval.encoders.transformer import pool
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.retrieval.indices.folder import read_meta
from tests.unit.environments.retrieval.search_models import WORDS, write_bert, write_modules


def sentences(count, longest=60):
    generator = random.Random(0)
    return [
        " ".join(generator.choices(WORDS, k=generator.randint(1, longest))) for _ in range(count)
    ]


TEXTS = [*sentences(20), "", "river " * 400, "北京", "\ud800 stone", "Harbour\nKING"]
PASSAGES = [Passage(str(row), "t", text, "") for row, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose name says E5, as `intfloat/e5-base-v2` does."""
    return write_bert(tmp_path_factory.mktemp("models") / "e5-tiny-v2")


def by_transformers(folder, texts, prefix, pooling="mean", normalize=True, max_length=256):
    """The model card's arithmetic, one text at a time: prefix, truncation with it, pooling, normalization."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModel.from_pretrained(folder).eval(),
    )
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
    assert np.abs(passages - expected).max() > 0.01, (
        "the prefix matters to this model, so the test can fail"
    )


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
        assert np.array_equal(
            encoder.encode_queries([TEXTS[place] for place in chosen]), alone[chosen]
        ), "bit for bit"

    check()


def test_passages_do_not_depend_on_their_batch_beyond_rounding(folder):
    encoders = [make_encoder({"name": str(folder), "passage_batch": batch}) for batch in (1, 3, 64)]
    first, *others = [encoder.encode_passages(PASSAGES) for encoder in encoders]
    assert all(np.abs(other - first).max() < 1e-5 for other in others)


def test_bge_is_its_instruction_for_queries_alone_and_the_first_token(folder, tmp_path):
    model = write_bert(tmp_path / "bge-tiny-en")
    encoder = make_encoder(str(model))
    instruction = "Represent this sentence for searching relevant passages: "
    assert (
        np.abs(
            encoder.encode_queries(TEXTS) - by_transformers(model, TEXTS, instruction, "cls")
        ).max()
        < 1e-5
    )
    assert (
        np.abs(encoder.encode_passages(PASSAGES) - by_transformers(model, TEXTS, "", "cls")).max()
        < 1e-5
    )


def test_a_family_may_leave_vectors_as_they_are(folder):
    encoder = make_encoder({"name": str(folder), "family": "dpr"})
    assert (
        np.abs(
            encoder.encode_queries(TEXTS)
            - by_transformers(folder, TEXTS, "", "cls", normalize=False)
        ).max()
        < 1e-5
    )


def test_a_dpr_encoder_of_passages_is_read_as_one(folder, tmp_path):
    from transformers import DPRConfig, DPRContextEncoder

    torch.manual_seed(0)
    config = DPRConfig(**AutoConfig.from_pretrained(folder).to_dict())
    model = DPRContextEncoder(config).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "dpr-ctx_encoder")
    with torch.no_grad():
        expected = model(**tokenizer("river town", return_tensors="pt")).pooler_output
    found = make_encoder(str(tmp_path / "dpr-ctx_encoder")).encode_passages(
        [Passage("1", "", "river town", "")]
    )
    assert np.abs(found - expected.numpy()).max() < 1e-5


def test_a_file_that_lacks_weights_is_refused_but_for_the_pooler(tmp_path):
    from safetensors.torch import load_file, save_file

    file = write_bert(tmp_path / "e5-half") / "model.safetensors"
    for left_out in ("pooler.", "encoder.layer.1."):
        held = {
            name: tensor
            for name, tensor in load_file(file).items()
            if not name.startswith(left_out)
        }
        save_file(held, file, metadata={"format": "pt"})
        if left_out == "pooler.":
            make_encoder(str(file.parent))
    with pytest.raises(
        ModelError, match=r"expected all weights of a BertModel, found none for 16 .*layer\.1\."
    ):
        make_encoder(str(file.parent))


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
        ("models/stage5-encoder", "sentence-transformers"),
        ("BAAI/bge-m3", "bge-m3"),
        ("hub/models--BAAI--bge-base-zh-v1.5/snapshots/1c4f", "bge-zh"),
    ],
)
def test_one_function_decides_the_family(name, family):
    assert encoder_family(name) == family


def test_the_builder_and_the_server_ask_the_same_function(folder, tmp_path):
    """The prefix trap of the field: an index built as `e5-base` whose passages lack their prefix."""
    corpus = Corpus(
        write_corpus(
            tmp_path / "corpus.jsonl",
            [Passage(str(i), "t", text, "") for i, text in enumerate(sentences(40))],
        )
    )
    build_index(corpus, tmp_path / "index", BuildRequest("Flat", str(folder)), lambda *_: None)
    stored = np.fromfile(tmp_path / "index" / "index.faiss", "<f4", offset=45).reshape(40, 32)
    passages = by_transformers(folder, [passage.contents for passage in corpus], "passage: ")
    assert np.abs(stored - passages).max() < 1e-5
    queries = sentences(10, 8)
    found = make_retriever({"name": "faiss", "path": str(tmp_path / "index")}, corpus).search(
        queries, 3
    )
    best = np.argsort(-(by_transformers(folder, queries, "query: ") @ passages.T), axis=1)[:, :3]
    assert [[hit.id for hit in hits] for hits in found] == [
        [str(row) for row in rows] for rows in best
    ]
    assert read_meta(tmp_path / "index").encoder["family"] == "e5"


def test_another_model_behind_the_same_folder_name_is_refused(folder, tmp_path):
    from rlflow.errors import DataError

    corpus = Corpus(
        write_corpus(
            tmp_path / "corpus.jsonl",
            [Passage(str(i), "t", text, "") for i, text in enumerate(sentences(9))],
        )
    )
    build_index(corpus, tmp_path / "index", BuildRequest("Flat", str(folder)), lambda *_: None)
    other = write_bert(tmp_path / "e5-tiny-v2", seed=1)
    with pytest.raises(DataError, match=r"built with another encoder .*other weights"):
        make_retriever(
            {"name": "faiss", "path": str(tmp_path / "index"), "encoder": str(other)}, corpus
        )
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
            tmp_path / "corpus.jsonl",
            [Passage(str(i), "t", text, "") for i, text in enumerate(sentences(60))],
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
    found = make_retriever({"name": "faiss", "path": path, "encoder": encoder}, corpus).search(
        queries, 3
    )
    best = np.argsort(-(by_transformers(folder, queries, "query: ") @ vectors.T), axis=1)[:, :3]
    assert [[hit.id for hit in hits] for hits in found] == [
        [str(row) for row in rows] for rows in best
    ]
    half = make_retriever(
        {"name": "faiss", "path": str(tmp_path / "e5_SQfp16.index"), "encoder": encoder}, corpus
    )
    assert [[hit.id for hit in hits] for hits in half.search(queries, 3)] == [
        [hit.id for hit in hits] for hits in found
    ]


def test_a_prebuilt_file_of_another_encoder_or_corpus_is_refused(folder, tmp_path):
    import faiss

    from rlflow.errors import DataError

    corpus = Corpus(
        write_corpus(
            tmp_path / "corpus.jsonl",
            [Passage(str(i), "t", text, "") for i, text in enumerate(sentences(20))],
        )
    )
    unprefixed = by_transformers(folder, [passage.contents for passage in corpus], "")
    index = faiss.IndexFlatIP(32)
    index.add(unprefixed)
    path = str(tmp_path / "e5-base_Flat.index")
    faiss.write_index(index, path)
    with pytest.raises(DataError, match="Another model, prefix, pooling, length or corpus"):
        make_retriever({"name": "faiss", "path": path, "encoder": str(folder)}, corpus)
    make_retriever(
        {"name": "faiss", "path": path, "encoder": {"name": str(folder), "passage_prefix": ""}},
        corpus,
    )
    make_retriever({"name": "faiss", "path": path, "encoder": str(folder), "verify": False}, corpus)
    with pytest.raises(ConfigError, match="does not say how it was encoded"):
        make_retriever({"name": "faiss", "path": path}, corpus)
    with pytest.raises(DataError, match="holds 20 vectors, the corpus 19"):
        shorter = Corpus(write_corpus(tmp_path / "short.jsonl", corpus[:19]))
        make_retriever({"name": "faiss", "path": path, "encoder": str(folder)}, shorter)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_a_sentence_transformers_folder_says_how_it_pools(config, pooling, tmp_path):
    model = write_bert(tmp_path / "my-model")
    prompts = {"query": "query : ", "document": "passage : "}
    write_modules(model, pooling=config, normalize=True, prompts=prompts)
    encoder = make_encoder(str(model))
    assert encoder.rules.pooling == pooling and encoder.rules.max_length == 40
    tokenizer, bert = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    for text, vector in zip(TEXTS[:12], encoder.encode_queries(TEXTS[:12])):
        batch = tokenizer("query : " + text, truncation=True, max_length=40, return_tensors="pt")
        with torch.no_grad():
            hidden = bert(**batch).last_hidden_state[0]
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        assert np.abs(vector - (pooled / pooled.norm()).numpy()).max() < 1e-5
    assert not np.allclose(encoder.encode_passages(PASSAGES[:1]), encoder.encode_queries(TEXTS[:1]))


LAST, MEAN, NONE = (
    {"pooling_mode": "lasttoken"},
    {"pooling_mode": "mean"},
    {"query": "", "document": ""},
)


@pytest.mark.parametrize(
    ("name", "pooling", "prompts", "rules"),
    [
        (
            "e5-mistral-7b-instruct",
            LAST,
            {"web_search_query": "Query: ", "sts_query": "s"},
            ("last", "Query: ", ""),
        ),
        ("my-e5", LAST, {"query": "q: ", "document": "d: "}, ("last", "q: ", "d: ")),
        ("multilingual-e5-base", MEAN, None, ("mean", "query: ", "passage: ")),
        ("e5-base-v2", MEAN, NONE, ("mean", "query: ", "passage: ")),
        ("bge-m3", {"pooling_mode": "cls"}, None, ("cls", "", "")),
    ],
)
def test_what_a_folder_states_holds_over_its_name(name, pooling, prompts, rules, tmp_path):
    (model := tmp_path / name).mkdir()
    write_modules(model, pooling=pooling, normalize=False, prompts=prompts)
    found = encoder_rules(model, name)
    assert (found.pooling, found.query_prefix, found.passage_prefix) == rules
    assert (found.normalize, found.max_length) == (False, 256)
    assert encoder_rules(model, name, family="e5") == FAMILIES["e5"]


def test_pooling_by_hand():
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]]])
    mask = torch.tensor([[1, 1, 0]])
    expected = {"mean": [2, 4], "cls": [1, 2], "last": [3, 6]}
    for pooling, value in expected.items():
        assert pool(hidden, mask, pooling)[0].tolist() == pytest.approx(value)


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_cpu(folder):
    on_gpu = make_encoder({"name": str(folder), "device": "cuda"})
    assert (
        np.abs(on_gpu.encode_queries(TEXTS) - make_encoder(str(folder)).encode_queries(TEXTS)).max()
        < 1e-4
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pooling": "maen"}, ConfigError, "Did you mean 'mean'"),
        ({"family": "bgee"}, ConfigError, "Did you mean 'bge'"),
        ({"max_length": 0}, ConfigError, "max_length: expected a whole number above 0"),
        ({"query_batch": 0}, ConfigError, "query_batch: expected a whole number above 0"),
        ({"dtype": "float23"}, ConfigError, "encoder.dtype"),
        ({"device": "gpu"}, ConfigError, "expected cpu, cuda"),
        ({"poling": "mean"}, ConfigError, "Did you mean 'pooling'"),
        ({"backend": "onnx"}, ConfigError, "backend"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options, error, message, folder):
    with pytest.raises(error, match=message):
        make_encoder({"name": str(folder), **options})


def test_unsupported_modules_are_refused(tmp_path):
    model = write_bert(tmp_path / "strange")
    write_modules(model, pooling={"pooling_mode": "mean"}, normalize=True)
    for kind in ("WordEmbeddings", "Dense"):
        modules = [{"path": "", "type": f"sentence_transformers.models.{kind}"}]
        (model / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ModelError, match=f"{kind}' is not supported"):
            make_encoder(str(model))
    write_modules(
        model,
        pooling={"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        normalize=True,
    )
    with pytest.raises(ModelError, match="expected one pooling"):
        make_encoder(str(model))
