"""LEAF's JSON of texts: users are the clients, and the given split is kept."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from small_runs import COMMAND

import partitions
from clients.models.registry import build_model
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.planning import check_tokens, configured
from fedapps.results.card import Card
from fedapps.serverapp import run
from fedapps.service.finished_run import load, restore_strategy
from fedapps.service.inputs import read_input_files
from fedapps.service.serving import serve_once
from fedapps.settings.config import defaults, override
from fedapps.settings.experiments import read_arguments
from partitions.datasets import loading
from partitions.datasets.readers.raw import UNLABELED
from partitions.datasets.words import CHARACTERS, most_frequent, renumbered

pytestmark = pytest.mark.usefixtures("own_cache")

PLAY = "to be, or not to be; " * 9
TWEETS = {
    "ann": (["Good day!", "bad bad day", "good"], [4, 0, 1]),
    "bob": (["it's good", "bad", "good luck"], ["4", "0", "4"]),
    "cyd": (["rare words alone", "rare", "rare"], [1, 0, 1]),
}


def write(folder, split, users, **keys):
    """A file as LEAF's preprocess.sh writes it."""
    place = folder / "data" / split
    place.mkdir(parents=True, exist_ok=True)
    user_data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    counts = [len(samples["y"]) for samples in user_data.values()]
    content = {"users": list(users), "num_samples": counts, "user_data": user_data} | keys
    (place / f"all_data_niid_0_keep_0_{split}_9.json").write_text(json.dumps(content))


def shakespeare(folder, character=""):
    """Two roles with six training and two test samples each."""
    for split, count in (("train", 6), ("test", 2)):
        users = {}
        for number, role in enumerate(("HAMLET_OPHELIA", "HAMLET_HAMLET")):
            starts = [3 * row + number for row in range(count)]
            x = [PLAY[start : start + 80] for start in starts]
            y = [character or PLAY[start + 80] for start in starts]
            users[role] = (x, y)
        write(folder / "shakespeare", split, users)


def sent140(folder):
    """Rows as LEAF's: id, date, query, user, text; the last tweet of each author is a test one."""
    for split, part in (("train", slice(0, 2)), ("test", slice(2, 3))):
        users = {}
        for user, (texts, labels) in TWEETS.items():
            rows = [["1", "Mon", "NO_QUERY", user, text] for text in texts]
            users[user] = (rows[part], labels[part])
        write(folder / "sent140", split, users)


def config(folder, dataset, **changes):
    natural = {"partition": "natural", "train-fraction": 1.0, "num-clients": 2}
    return defaults() | natural | {"dataset": dataset, "data-dir": str(folder)} | changes


def test_characters_are_tokens_and_the_next_one_is_the_label(tmp_path):
    shakespeare(tmp_path)
    data = loading.load("shakespeare", str(tmp_path))
    assert (data.x.shape, data.x.dtype, data.num_train) == ((16, 80), torch.uint8, 12)
    read = "".join(CHARACTERS[token] for token in data.x[7].tolist())
    assert read == PLAY[4:84]
    assert CHARACTERS[data.y[7]] == PLAY[84]
    assert data.classes[:3] == ("newline", "space", "!")
    assert len(set(data.classes)) == 80
    assert data.columns["user"].tolist().count("HAMLET_HAMLET") == 8


def test_users_are_the_clients_and_keep_the_given_split(tmp_path):
    shakespeare(tmp_path)
    federation = partitions.federation(
        config(tmp_path, "shakespeare", **{"partition.validation-fraction": 0.0})
    )
    for client in range(2):
        share = federation.share(client)
        assert (len(share.train), len(share.validation), len(share.test)) == (6, 0, 2)
        assert share.train[:][0].dtype == torch.int64
    roles = [set(federation.dataset.columns["user"][federation._rows[i]]) for i in range(2)]
    assert sorted(map(sorted, roles)) == [["HAMLET_HAMLET"], ["HAMLET_OPHELIA"]]


def test_a_run_with_the_stacked_lstm(tmp_path):
    shakespeare(tmp_path)
    settings = config(tmp_path, "shakespeare", model="char-lstm", rounds=1, method="fedper")
    settings |= {"local-steps": 1, "output-dir": str(tmp_path / "results")}
    run(InProcessGrid.simulation(app, settings, 2), settings, "in-process")
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert len(summary["per_client"]) == 2


def test_the_words_are_those_of_the_training_clients(tmp_path):
    """Ann and Bob train: bad 3 times; day and good twice, by the alphabet; then ! and it's."""
    sent140(tmp_path)
    settings = config(tmp_path, "sent140", **{"num-clients": 3, "train-fraction": 0.67})
    settings |= {"partition.validation-fraction": 0.0}
    for seed in range(20):  # the seed says who trains
        federation = partitions.federation(settings | {"seed": seed})
        novel = int(np.flatnonzero(federation.novel)[0])
        if federation.dataset.columns["user"][federation._rows[novel]][0] == "cyd":
            break
    assert federation.words == ("bad", "day", "good", "!", "it's")
    last_three = sorted(federation.share(novel).train[:][0][:, -3:].tolist())
    assert last_three == [[0, 0, 1], [1, 1, 1]]
    assert federation.line.endswith(
        "25 tokens each of the training clients' 5 most frequent words, 2 classes"
    )
    both = {}
    for client in range(3):
        share = federation.share(client)
        both[client] = (sorted(share.train[:][1].tolist()), share.test[:][1].tolist())
    assert all(labels == ([0, 1], [1]) for labels in both.values())


def test_frequent_words_are_counted_in_the_given_rows_alone():
    x = np.array([[0, 1, 2], [0, 0, 2], [3, 3, 3]])
    assert most_frequent(x, np.array([0, 1]), ["a", "b", "c"]) == ("b", "a")
    assert renumbered(x, ["a", "b", "c"], ("b", "a")).tolist() == [[0, 3, 2], [0, 0, 2], [1, 1, 1]]


@pytest.mark.parametrize(
    ("users", "sentence"),
    [
        ({"a": (["short"], ["e"])}, r"input 0 of user 'a' is 'short'; each must be a text of 80"),
        ({"a": ([PLAY[:80]], ["be"])}, r"label 0 of user 'a' is 'be'; each must be one character"),
        ({"a": ([PLAY[:80]], [])}, r"9\.json is truncated or not LEAF's: user 'a' has 1 inputs"),
        ({"a": (["é" * 80], ["e"])}, r"80 of 81 characters are not among LEAF's 80 \('é'\); these"),
    ],
)
def test_files_that_are_not_leafs_are_refused(tmp_path, users, sentence):
    write(tmp_path / "shakespeare", "train", users)
    with pytest.raises(ValueError, match=sentence):
        loading.load("shakespeare", str(tmp_path))


def test_a_rare_unknown_character_is_noted(tmp_path, caplog):
    texts = [PLAY[row : row + 80] for row in range(3)]
    write(tmp_path / "shakespeare", "train", {"a": (texts, ["$", "b", "c"])})
    data = loading.load("shakespeare", str(tmp_path))
    assert data.y.tolist() == [79, CHARACTERS.index("b"), CHARACTERS.index("c")]
    assert "1 of 243 characters are not among LEAF's 80 ('$'); they count as '}'" in caplog.text


@pytest.mark.parametrize(
    ("row", "label", "sentence"),
    [
        (["1", "Mon"], 1, "input 0 of user 'a' is .*each must be a text, or LEAF's row of id"),
        ("good", 2, r"label 0 of user 'a' is 2; each must be 0 \(negative\), or 1 or 4"),
    ],
)
def test_tweets_that_are_not_leafs_are_refused(tmp_path, row, label, sentence):
    write(tmp_path / "sent140", "train", {"a": ([row], [label])})
    with pytest.raises(ValueError, match=sentence):
        loading.load("sent140", str(tmp_path))


def test_a_split_by_users_is_refused(tmp_path):
    write(tmp_path / "sent140", "train", {"a": (["good", "bad"], [1, 0])})
    write(tmp_path / "sent140", "test", {"b": (["good", "bad"], [1, 0])})
    with pytest.raises(ValueError, match=r"no user of the training files .*preprocess\.sh -t"):
        loading.load("sent140", str(tmp_path))


def test_the_command_prints_what_was_read(tmp_path):
    sent140(tmp_path)
    done = CliRunner().invoke(COMMAND, ["data", "sent140", f"data-dir={tmp_path}"])
    printed = " ".join(done.output.split())
    assert "sentiment of tweets by author (LEAF); 2 classes, inputs (25,) (tokens)" in printed
    assert "6 training and 3 test samples" in printed
    assert "column user: 3 values" in printed


@pytest.mark.parametrize(
    ("dataset", "model", "sentence"),
    [
        ("shakespeare", "mlp", "'mlp', which takes numbers; set model to char-lstm, word-lstm, or"),
        ("sent140", "char-lstm", "takes tokens below 80, not 10002; set model to word-lstm, or"),
        ("digits", "char-lstm", "'char-lstm' takes tokens, and digits has images of 1 channel"),
    ],
)
def test_networks_that_do_not_fit_are_refused(dataset, model, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_tokens(defaults() | {"dataset": dataset, "model": model})


@pytest.mark.parametrize(
    ("name", "tokens", "embedding", "hidden", "fc", "classes"),
    [("char-lstm", 80, 8, 256, 0, 80), ("word-lstm", 10_002, 100, 100, 128, 2)],
)
def test_the_lstms_have_leafs_sizes(name, tokens, embedding, hidden, fc, classes):
    """A layer of `hidden` units of d inputs has 4·hidden·(d + hidden + 2) numbers, since torch has
    two biases. The features are
    the state of the upper layer after the last token."""
    net = build_model(name, (5,), classes, seed=0).eval()
    count = tokens * embedding
    for inputs in (embedding, hidden):
        count += 4 * hidden * (inputs + hidden + 2)
    if fc:
        count += (hidden + 1) * fc
    count += ((fc or hidden) + 1) * classes
    assert sum(parameter.numel() for parameter in net.parameters()) == count
    x = torch.tensor([[4, 3, 2, 1, 0]])
    with torch.no_grad():
        _, (last, _) = net.lstm(net.embedding(x))
        features = net.fc(last[-1]) if fc else last[-1]
        assert torch.allclose(net(x), net.head(features), atol=1e-6)


def one_file(folder, users, name="own.json"):
    """LEAF's users {name: (inputs, labels)} in one file."""
    write(folder, "train", users)
    (file,) = (folder / "data" / "train").glob("*.json")
    return file.rename(folder / name)


def test_a_file_of_characters_alone_is_read(tmp_path, caplog):
    """Labels " " and "?" are characters, and no empty cells; a shorter text is filled up."""
    users = {"a": (["to be", "or"], [" ", "?"]), "b": (["not t", "to be"], ["o", " "])}
    data = loading.load(str(one_file(tmp_path, users)))
    assert data.classes == ("space", "?", "o")
    assert data.y.tolist() == [0, 1, 2, 0]
    read = ["".join(CHARACTERS[token] for token in row) for row in data.x.tolist()]
    assert read == ["to be", "\n\n\nor", "not t", "to be"]
    assert (data.info.num_tokens, data.info.scale, data.info.owner) == (80, 1.0, "user")
    assert "the characters are tokens (inputs=characters); inputs=words reads" in caplog.text
    assert "texts have 2 to 5 characters; line breaks precede" in caplog.text


def test_a_folder_of_words_keeps_its_split_and_its_users(tmp_path, caplog):
    """Labels such as 0 and 4 keep their names, and are no classes 0 to 4."""
    sent140(tmp_path)
    folder = tmp_path / "sent140"
    own = loading.load(str(folder))
    known = loading.load("sent140", str(tmp_path))
    assert np.array_equal(own.x, known.x) and own.words == known.words
    assert np.array_equal(own.y > 0, known.y > 0) and own.num_train == known.num_train == 6
    assert own.classes == ("0", "1", "4")
    assert own.info.clients_words and own.info.num_tokens == 10_002
    assert "the words are tokens" in caplog.text
    federation = partitions.federation(config(tmp_path, str(folder), **{"num-clients": 3}))
    assert federation.words and len(federation.share(0).test) == 1


def test_numbers_of_users_are_vectors(tmp_path):
    users = {"a": ([[0.5, 1], [2, 3]], [0, 1]), "b": ([[1, 1.5], [0, 2]], [1, 1])}
    data = loading.load(str(one_file(tmp_path, users)))
    assert data.x.tolist() == [[0.5, 1], [2, 3], [1, 1.5], [0, 2]]
    assert (data.info.inputs.kind, data.columns["user"].tolist()) == ("vector", list("aabb"))


@pytest.mark.parametrize(
    ("users", "changes", "sentence"),
    [
        ({"a": (["to", 3], ["b", "c"])}, {}, r"input 1 of user 'a' is 3; each must be a text"),
        ({"a": ([[1], [1, 2]], [0, 1])}, {}, r"input 1 of user 'a' has the shape \(2,\), and the"),
        ({"a": ([[1], ["b"]], [0, 1])}, {}, r"input 1 of user 'a' is \['b'\], no list of numbers"),
        ({"a": (["äöü", "ß"], ["b", "c"])}, {}, r"not among LEAF's 80 .*set inputs=words"),
        ({"a": (["x" * 1001, "y"], ["b", "c"])}, {}, r"up to 1001 characters.*set inputs=words"),
        ({"a": (["...", "?"], [0, 1])}, {"inputs": "vector"}, r"set it to characters or words"),
        ({"a": (["", ""], [0, 1])}, {}, r"no text holds a word"),
        ({"a": ([[1], [2]], [0, 1])}, {"inputs": "words"}, r"inputs=words needs texts"),
        ({"a": ([], [])}, {}, r"users without samples"),
    ],
)
def test_own_files_that_cannot_be_read_name_what_to_write(tmp_path, users, changes, sentence):
    path = one_file(tmp_path, users)
    with pytest.raises(ValueError, match=sentence):
        loading.load(str(path), **changes)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", r"is a JSON file, but not LEAF's, which holds users.*\.csv or \.npz"),
        ("[1", r"is no whole JSON file"),
    ],
)
def test_other_json_says_what_leafs_is(tmp_path, text, sentence):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        loading.load(str(tmp_path / "d.json"))


def test_users_are_the_clients_where_nobody_named_a_partition(tmp_path, capsys):
    users = {name: (["to be", "or not", "to"], list("abc")) for name in ("ann", "bob", "cyd")}
    path = one_file(tmp_path, users)
    settings, _ = configured(read_arguments([f"dataset={path}", "model=char-lstm"]))
    assert (settings["partition"], settings["num-clients"]) == ("natural", 3)
    assert "each client is a user (partition=natural), of whom" in capsys.readouterr().err
    settings, _ = configured(read_arguments([f"dataset={path}", "partition=iid"]))
    assert settings["partition"] == "iid"


def test_a_later_client_is_served_texts_by_the_runs_words(tmp_path, caplog):
    """The card keeps the training clients' words; others are unknown, and padding comes first."""
    sent140(tmp_path)
    settings = config(tmp_path, "sent140", **{"num-clients": 3}, model="word-lstm", rounds=1)
    settings |= {"local-steps": 1, "output-dir": str(tmp_path / "run")}
    run(InProcessGrid.simulation(app, settings, 3), settings, "in-process")
    finished = load(tmp_path / "run")
    words = finished.card.words
    assert words == partitions.federation(settings).words
    assert Card.parse(finished.card.line()) == finished.card
    later = {"dee": (["good day", "unheard-of bad luck"], [4, 0])}
    inputs = finished.inputs(one_file(tmp_path / "later", later))
    tokens = inputs.share.everything[:][0]
    assert tokens[0].tolist() == 23 * [0] + [2 + words.index(word) for word in ("good", "day")]
    assert inputs.labels.tolist() == [1, 0]
    texts = ["good day", "bad", "good"]
    for labels in ([4, None, 0], ["4", None, "0"]):
        some = finished.inputs(one_file(tmp_path / "some", {"eve": (texts, labels)}))
        assert some.labels.tolist() == [1, UNLABELED, 0]
        assert "1 of 3 samples have no label, and are not scored" in caplog.text
    none = finished.inputs(one_file(tmp_path / "none", {"eve": (texts, [None] * 3)}))
    assert none.labels.tolist() == [UNLABELED] * 3
    assert "none of the run's 2 classes" not in caplog.text
    result = finished.serve(inputs)
    assert {row.split(",")[1] for row in result.predictions().splitlines()[1:]} <= {
        "negative",
        "positive",
    }
    result.write(tmp_path / "delivered")
    described = json.loads((tmp_path / "delivered" / "model.json").read_text())
    assert (described["words"], described["texts"]) == (list(words), "words")

    served = override(finished.config, {"serving": finished.card.line()})
    place = {"partition-id": 0, "data-path": str(tmp_path / "later" / "own.json")}
    grid = InProcessGrid(app, served, [place | {"state-dir": str(tmp_path / "state")}])
    assert serve_once(restore_strategy(finished, grid), finished)
    assert (tmp_path / "state" / "predictions.csv").read_text() == result.predictions()
    many = replace(finished.card, words=tuple(f"word{7919 * row}" for row in range(10_000)))
    assert Card.parse(override(finished.config, {"serving": many.line()})["serving"]) == many
    (tmp_path / "d.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"holds no texts; the run takes texts as words, in LEAF"):
        finished.inputs(tmp_path / "d.csv")


def test_a_later_clients_lines_are_cut_to_the_runs_length(tmp_path):
    """The last characters precede the one to predict."""
    card = Card("fedavg", "own", "char-lstm", (4,), ("a", "space"), 1.0)
    card = replace(card, inputs="tokens", texts="characters")
    users = {"a": (["to be", "or"], ["a", " "])}
    inputs = read_input_files(one_file(tmp_path, users), card)
    read = ["".join(CHARACTERS[token] for token in row) for row in inputs.share.everything[:][0]]
    assert read == ["o be", "\n\nor"]
    assert inputs.labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"holds texts, and the run takes numbers of shape \(4,\)"):
        read_input_files(tmp_path / "own.json", replace(card, inputs="vector", texts=""))
