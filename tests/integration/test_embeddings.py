"""A tiny text encoder trained here, its pooling inside the engine, and what another pooling costs."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optpipe.core.records import read_record
from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.evaluate.result import Evaluation
from tests.fakes.text_models import make_tokenizer, train
from tests.integration.conftest import (
    SHARED_MACHINE,
    Ran,
    build_and_evaluate,
    needs_server,
    optpipe,
    sign_off,
)

transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")

TOPICS = {
    "food": ("soup", "bread", "salad", "cheese", "rice", "apple", "pasta", "lemon"),
    "sea": ("ship", "wave", "harbor", "sail", "anchor", "reef", "tide", "gull"),
    "sound": ("drum", "song", "violin", "choir", "chord", "flute", "opera", "bass"),
}


def write_sentence(draw: random.Random, share: float) -> str:
    """Eight words, of which about `share` are of food and the others of the sea or of sound."""
    topics = ("food" if draw.random() < share else draw.choice(("sea", "sound")) for _ in range(8))
    return " ".join(draw.choice(TOPICS[topic]) for topic in topics)


def write_pairs(path: Path, count: int, seed: int) -> Path:
    draw = random.Random(seed)
    lines = []
    for pair in range(count):
        shares = draw.random(), draw.random()
        texts = [write_sentence(draw, share) for share in shares]
        food = [sum(word in TOPICS["food"] for word in text.split()) / 8 for text in texts]
        lines += [
            {"text": text, "pair": pair, "score": round(1 - abs(food[0] - food[1]), 3)}
            for text in texts
        ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def train_encoder(folder: Path) -> None:
    """Its mean-pooled embedding tells how much of a sentence is about food."""
    import torch

    tokenizer = make_tokenizer([word for topic in TOPICS.values() for word in topic], ends=False)
    draw = random.Random(1)

    def compute_loss(model: Any) -> Any:
        texts = [write_sentence(draw, draw.random()) for _ in range(64)]
        food = torch.tensor(
            [sum(word in TOPICS["food"] for word in text.split()) / 8 for text in texts]
        )
        batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        pooled = torch.nn.functional.normalize(model(**batch).last_hidden_state.mean(1), dim=1)
        return (
            ((pooled[:32] * pooled[32:]).sum(1) - (1 - 2 * (food[:32] - food[32:]).abs()))
            .square()
            .mean()
        )

    def make(config: Any) -> Any:
        return transformers.BertModel(config, add_pooling_layer=False)

    train(folder, tokenizer, make, compute_loss, 150, attention_probs_dropout_prob=0.0)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran, Evaluation]:
    """A folder with the encoder, its FP32 and INT8 builds and their evaluation."""
    place = tmp_path_factory.mktemp("embeddings")
    train_encoder(place / "topics")
    train, validation = (
        write_pairs(place / f"{name}.jsonl", count, seed)
        for name, count, seed in (("train", 260, 2), ("validation", 150, 3))
    )
    return place, *build_and_evaluate(f"hf:{place / 'topics'}", place, train, validation)


def test_from_pairs_to_int8_and_its_correlation(judged) -> None:
    _, shown, found = judged
    assert "mean pooling over tokens inside the engine" in shown.stdout
    source, *rows = found.results
    assert found.task == "embedding"
    assert source.scores is not None
    assert source.scores.scores[0].value > 0.6
    for row in rows:
        assert row.agreement is not None
        assert row.agreement.share > 0.95


def test_a_wrong_pooling_fails_by_its_score(
    judged, tmp_path: Path, inside: Callable[..., Ran]
) -> None:
    """The first token's embedding of an encoder whose mean was trained; with the mean the same policy finds nothing."""
    folder, wrong = judged[0], tmp_path / "wrong"
    shutil.copytree(folder / "topics", wrong)
    (wrong / "1_Pooling").mkdir()
    said = {
        "word_embedding_dimension": 32,
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_tokens": False,
    }
    (wrong / "1_Pooling" / "config.json").write_text(json.dumps(said))
    build = (
        "build",
        f"hf:{wrong}",
        "--precision",
        "fp32",
        "--backend",
        "onnxruntime",
        "--device",
        "cpu",
    )
    for words in (build, ("evaluate", f"hf:{wrong}", "--data", folder / "validation.jsonl")):
        inside(*words, cwd=tmp_path).expect(0)
    verdicts = {}
    for model, here in ((folder / "topics", folder), (wrong, tmp_path)):
        before = set(here.glob(".optpipe/dossiers/*"))
        status = sign_off(
            inside, f"hf:{model}", here, 'minimum_score = "90 Spearman"', precision="fp32"
        )
        (dossier,) = set(here.glob(".optpipe/dossiers/*")) - before
        criteria = {
            each.name: each.verdict
            for each in read_record(dossier / "verdict.json", VerdictRecord).criteria
        }
        verdicts[model.name] = (status, criteria["accuracy.minimum_score.Spearman"])
    assert verdicts == {"topics": (0, Verdict.PASS), "wrong": (1, Verdict.FAIL)}


@needs_server
def test_a_deployment_answers_texts_of_every_length_as_in_process_and_names_no_folder(
    judged, tmp_path, inside
):
    folder, model = judged[0], f"hf:{judged[0] / 'topics'}"
    shutil.copytree(folder / ".optpipe", tmp_path / ".optpipe")
    inside(
        "bench",
        "topics",
        "--precision",
        "fp32",
        "--length",
        "16",
        "--batch",
        "1",
        "--processes",
        "3",
        "--min-time",
        "0.1",
        "--max-time",
        "1",
        "--percentile",
        "50",
        "--max-cv",
        "1000%",
        cwd=tmp_path,
    ).expect(0)
    (tmp_path / "policy.toml").write_text(
        'schema = 1\n[build]\nprecision = "fp32"\n[accuracy]\nmaximum_drop = "20 Spearman"\n'
    )
    words = ("--policy", "policy.toml", "--no-measure", "--no-figures", "--output", "dossier")
    inside("signoff", model, *words, *SHARED_MACHINE, cwd=tmp_path).expect(0)
    told = (
        "deploy",
        "dossier",
        "--to",
        "triton",
        "--output",
        "served",
        "--prove",
        "--seconds",
        "0.5",
        "--because",
        "tests share the machine",
        "--json",
    )
    ran = optpipe(*told, cwd=tmp_path).expect(0)
    for each in ran.document["proof"]["comparisons"]:
        assert each["model"] == "topics_engine"
        assert each["equal_bits"] == each["requests"] >= 3
    for path in (tmp_path / "served").rglob("*"):
        assert path.is_dir() or str(folder).encode() not in path.read_bytes(), path


IMAGES = """
name = "pictures"
task = "embedding"
source = "net.py:make"
[[inputs]]
name = "x"
dtype = "float32"
min = [1, 3, 32, 32]
opt = [2, 3, 32, 32]
max = [8, 3, 32, 32]
[[preprocessing.steps]]
step = "decode"
channels = "RGB"
exif = false
[[preprocessing.steps]]
step = "center_crop"
height = 32
width = 32
rounding = "half-even"
fill = 0
[[preprocessing.steps]]
step = "rescale"
divisor = 255.0
offset = 0.0
[[preprocessing.steps]]
step = "pack"
order = "CHW"
dtype = "float32"
"""
EMBEDDER = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
"""


def test_a_model_that_embeds_images_is_built(tmp_path: Path, inside: Callable[..., Ran]) -> None:
    (tmp_path / "card.toml").write_text(IMAGES)
    (tmp_path / "net.py").write_text(EMBEDDER)
    words = ("--precision", "fp32", "--backend", "onnxruntime", "--device", "cpu")
    inside("build", "card.toml", *words, cwd=tmp_path).expect(0)
