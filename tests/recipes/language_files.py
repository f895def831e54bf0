"""Small files in the formats of GLUE and SQuAD, a task that a tiny model can learn, and runs that learned it."""

import atexit
import io
import json
import random
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from bayesattn.cli import main

TINY = ["encoder=tiny", "training.steps=200", "training.learning_rate=2e-3", "max_length=24", "training.batch_size=16"]

# one row each is enough for a format; quotation marks do not match, as in the originals
GLUE = {
    "CoLA/train.tsv": 'gj04\t1\t\tHe "left early.\ngj04\t0\t*\tLeft he early.\ngj04\t1\t\tShe stayed.\n',
    "CoLA/dev.tsv": "gj04\t0\t*\tStayed she.",
    "MRPC/train.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    '1\t7\t8\t" Fine , he said .\tHe said it was fine .\n0\t9\t10\tA dog ran .\tA cat sat .\n1\t1\t2\tUp .\tUpward .\n',
    "MRPC/dev.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t3\t4\tOne \" two .\tThree .\n",
    "RTE/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tentailment\n1\tC.\tD.\tnot_entailment\n",
    "RTE/dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\tG.\tH.\tnot_entailment\n",
    "STS-B/train.tsv": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    "0\tg\tf\t2012\t1\tn\tn\tA.\tB.\t5.000\n1\tg\tf\t2012\t2\tn\tn\tC.\tD.\t0.250\n",
    "STS-B/dev.tsv": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    "0\tg\tf\t2012\t1\tn\tn\tE.\tF.\t3.8\n",
    "SST-2/train.tsv": "sentence\tlabel\nso good \t1\nso bad \t0\nso so \t0\n",
    "SST-2/dev.tsv": "sentence\tlabel\nnot bad \t1\n",
    "QNLI/train.tsv": "index\tquestion\tsentence\tlabel\n0\tWho?\tHe did.\tentailment\n1\tWhen?\tHe did.\tnot_entailment\n",
    "QNLI/dev.tsv": "index\tquestion\tsentence\tlabel\n0\tWhere?\tHere.\tentailment\n",
    "QQP/train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    "1\t2\t3\tHow old?\tWhat age?\t1\n4\t5\t6\tcut in the middle\n7\t8\t9\tHow far?\tWhat age?\t0\n",
    "QQP/dev.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tWhy?\tHow come?\t1\n",
    "MNLI/train.tsv": "index\tpairID\tsentence1\tsentence2\tlabel1\tgold_label\n0\tp\tA.\tB.\tneutral\tneutral\n"
    "1\tq\tC.\tD.\tcontradiction\tcontradiction\n",
    "MNLI/dev_matched.tsv": "index\tpairID\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n"
    "0\tp\tE.\tF.\tneutral\tneutral\tentailment\n",
    "WNLI/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n1\tC.\tD.\t0\n",
    "WNLI/dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\tE.\tF.\t0\n",
}  # fmt: skip


def write_glue(folder, files=GLUE):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def write_archive(path, files=GLUE):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def sentiment_rows(count, seed):
    """Rows whose class is told by one word among fillers; 60 % are bad."""
    draw = random.Random(seed)
    good, bad = ["lovely", "great", "fine", "superb", "warm"], ["awful", "dull", "poor", "weak", "cold"]
    filler = ["the", "film", "a", "plot", "with", "scene", "actor", "and", "music", "of", "story", "it", "was"]
    rows = []
    for _ in range(count):
        is_good = draw.random() < 0.4
        words = draw.choices(filler, k=draw.randint(4, 11))
        words.insert(draw.randrange(len(words)), draw.choice(good if is_good else bad))
        rows.append(f"{' '.join(words)}\t{'good' if is_good else 'bad'}\n")
    return rows


def write_sentiment(folder, train=600, dev=101):
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 1), ("dev", dev, 2)):
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(sentiment_rows(count, seed)))
    return folder


def squad_article(title, numbers, *, impossible=()):
    """Paragraphs that each tell which color a numbered box has."""
    paragraphs = []
    for number in numbers:
        color = ("red", "dark blue", "green")[number % 3]
        context = f"In {title} the box {number} is {color} and it is heavy."
        question = {"id": f"{title}-{number}", "question": f"What color is box {number}?"}
        if number in impossible:
            question |= {"is_impossible": True, "answers": []}
        else:
            question |= {"is_impossible": False, "answers": [{"text": color, "answer_start": context.index(color)}]}
        paragraphs.append({"context": context, "qas": [question]})
    return {"title": title, "paragraphs": paragraphs}


def write_squad(folder, version="1.1", articles=17, paragraphs=2, *, impossible=()):
    folder.mkdir(parents=True, exist_ok=True)
    data = [squad_article(f"Town{i}", range(paragraphs), impossible=impossible) for i in range(articles)]
    (folder / f"dev-v{version}.json").write_text(json.dumps({"version": version, "data": data}))
    return folder


def call(*arguments):
    """Run the command line and return its exit code."""
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    return exited.value.code


@cache
def shared_folder():
    """A folder for what several files of tests look at, removed when Python ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def sentiment_data():
    return write_sentiment(shared_folder() / "data")


@cache
def trained(variant):
    """A run of 200 steps of a tiny model on the sentiments, trained once, through the command line."""
    folder = shared_folder() / variant
    options = [f"--set={setting}" for setting in (*TINY, f"attention.variant={variant}")]
    assert call("train", "language", "--config", "own", "--data", sentiment_data(), "--out", folder, *options) == 0
    return folder
