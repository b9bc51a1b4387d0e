"""What a run of auto says before it begins, and what its clients' messages may hold."""

import re
from dataclasses import replace

import pytest
import torch
from auto_clients import X, Y, network
from small_runs import SMALL, share
from torch import nn
from torch.nn import functional as F

import partitions
from clients.core.decision.changes import EVERY, named_changes
from clients.core.decision.inner_values import note_on_size
from clients.methods.auto import AutoClient
from clients.models.head import headed


def test_layers_too_wide_for_a_message_are_refused():
    """2²⁷ numbers are allowed: 4² + 11583² + 3² + 4² products, 3 · 11594 sums, 3² + 3 counts, and
    not those of 11584. With batch normalisation the channels count, whatever the head's width."""
    info = partitions.task(SMALL)
    candidates = {"candidates": "bbse", "changes": EVERY}
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 11583), nn.ReLU())
    flat.head = nn.Linear(11583, 3)
    assert AutoClient.build(flat, info, **candidates) is flat
    flat.head = nn.Linear(11584, 3)
    words = (
        "one layer has 11584 of them, and sums of all 11595 for each of 3 classes: 1074 MB a "
        "client, over 1074 MB; take a network with narrower layers, or one with batch "
        "normalisation, where auto reads means of channels"
    )
    with pytest.raises(ValueError, match=words):
        AutoClient.build(flat, info, **candidates)
    flat.norm = nn.BatchNorm1d(20)
    assert AutoClient.build(flat, info, **candidates) is flat
    flat.norm = nn.BatchNorm1d(11584)
    with pytest.raises(ValueError, match=r"take a network with narrower layers$"):
        AutoClient.build(flat, info, **candidates)


def test_sums_of_many_classes_are_counted_among_those_of_a_message():
    """5000 classes and 30000 channels in narrow layers: 5000² + 300 · 100² + 4² products, and
    5000 · (1 + 5000 + 35004) sums and counts."""
    wide = nn.Sequential(*[nn.BatchNorm2d(100) for _ in range(300)])
    wide.head = nn.Linear(4, 5000)
    words = (
        r"all 35004 for each of 5000 classes: 1824 MB a client, over 1074 MB; take fewer classes"
    )
    with pytest.raises(ValueError, match=words):
        AutoClient.build(wide, partitions.task(SMALL), candidates="bbse", changes=EVERY)


def caveats_of(sizes, **settings):
    """What is said of training clients with so many samples each, at α = 0.2."""
    shares = [share(torch.zeros(n, 1, 8, 8), [0] * n) for n in sizes]
    given = {"model": "convnet-bn", "candidates": "bbse", "plays": 5, "shape": (1, 8, 8)}
    return AutoClient.caveats(network(), **given | {"alpha": 0.2, "shares": shares} | settings)


def test_too_few_players_for_alpha_are_said_before_a_run():
    """Of 100 samples 20 are held out, of 97 no more than 19. Four players certify no less than
    1/5."""
    assert caveats_of([100] * 4 + [97]) == []
    (line,) = caveats_of([100] * 3 + [97] * 2)
    assert line == (
        "3 of 5 training clients play newcomers, which takes 20 held-out samples; no choice of so "
        "few keeps auto.alpha=0.2, so all clients keep FedAvg's model; raise auto.held-out, write "
        "auto.alpha=0.25, or take more samples"
    )
    assert caveats_of([100] * 3 + [97] * 2, alpha=0.25) == []


@pytest.mark.parametrize(("held_out", "lines"), [(0.0, 1), (0.012, 1), (0.013, 0)])
def test_newcomers_of_trained_samples_are_said_before_a_run(held_out, lines):
    """Of 40 samples 0.48 is none and 0.52 is one, which plays nothing. All four clients with 40
    play with these, the others with 2000 play with 24 or more, or with all."""
    said = caveats_of([40] * 4 + [2000] * 4, held_out=held_out)
    assert len(said) == lines
    for line in said:
        count = 4 if held_out else 8
        assert f"{count} of 8 training clients play newcomers with samples that the network" in line


def test_changes_of_other_inputs_are_said_before_a_run():
    assert caveats_of([100] * 4, changes="rotation") == []
    (line,) = caveats_of([100] * 4, changes="rotation,column-noise")
    assert line == "auto.changes: column-noise left out, since the inputs have the shape (1, 8, 8)"


def test_that_tokens_have_no_changes_is_said_before_a_run():
    numbers = share(torch.zeros(100, 1, 8, 8, dtype=torch.long), [0] * 100)
    tokens = [replace(numbers, train=replace(numbers.train, whole=True))] * 4
    (line,) = caveats_of([], shares=tokens)
    assert line.startswith("inputs are whole numbers, and auto.changes has no change for them")
    assert caveats_of([], shares=tokens, plays=0)[1:] == []
    assert caveats_of([], shares=[numbers] * 4) == []


def test_a_change_that_is_named_twice_is_one():
    assert named_changes("blur, salt,blur", 4) == named_changes("blur,salt", 4)


def test_what_the_answers_hold_is_said_before_a_run_and_counted_in_its_memory():
    """4² + 3000² + 3² + 4² products and 3 · (4 + 3011) sums and counts of each of 20 clients."""
    network = nn.Sequential(nn.Flatten())
    network.head = nn.Linear(3000, 3)
    settings = {"model": "my-network", "candidates": "bbse", "shape": (3000,)}
    settings["shares"] = [share(X, Y)] * 20
    (line,) = AutoClient.caveats(network, plays=5, **settings)
    assert "sends 72 MB twice" in line and line.endswith(
        "MB of 20 clients; the network has 0.036 MB"
    )
    assert "at once: 1441 MB of" in line
    assert not any("MB" in line for line in AutoClient.caveats(network, plays=0, **settings))
    # 1000² + 1001² + 4² products and 1001 · (1 + 1001 + 2005) sums and counts are many for a
    # network of 6010 numbers, and few for one of a million more.
    small = nn.Sequential(nn.BatchNorm1d(1000), nn.Linear(6, 1))
    small.head = nn.Linear(1, 1001)
    assert "sends 40 MB twice" in note_on_size(small, small.head, 20)
    small.other = nn.Linear(1000, 1000)
    assert note_on_size(small, small.head, 20) == ""
    numbers = 9000041 + 3 * 3015
    held = AutoClient.bytes_after_rounds(network, 20, plays=5)
    # 12 sums, and 16 fits, which have twice as many products each.
    assert held == 8 * ((20 + 12) * numbers + 16 * 2 * 9000041)
    assert AutoClient.bytes_after_rounds(network, 20, plays=0) == 0


class Steps(nn.Module):
    """Normalises each row of an image of 8 rows by itself, as a sample of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.norm(x.reshape(-1, 8)).reshape(len(x), 64))


class ChannelsLast(nn.BatchNorm1d):
    """Batch normalisation of inputs (n, …, channels)."""

    def forward(self, x):
        return F.batch_norm(x.flatten(0, -2), self.running_mean, self.running_var).reshape(x.shape)


class Rows(nn.Module):
    """Normalises images of 8 rows, which have four values each."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 4), ChannelsLast(4)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.norm(self.first(x[:, 0])).flatten(1))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(Steps, r"\(16, 8\) for 2 inputs and 8 channels"), (Rows, r"\(2, 8, 4\) for 2 .* 4 channels")],
)
def test_layers_whose_inputs_are_not_read_are_said_before_a_run(kind, shape):
    """φ has zeros there, see `test_a_layer_that_sees_no_batch_says_nothing_of_a_client`, and its
    width is that which the server knows."""
    settings = {"model": "my-network", "candidates": "bbse,bn16", "plays": 5, "shape": (1, 8, 8)}
    network = kind()
    (line,) = AutoClient.caveats(network, **settings)
    assert re.match(f"what enters norm of my-network has the shape {shape}, so it is not", line)
    client = AutoClient(headed(network, "auto", (1, 8, 8), 3), share(X, Y))
    phi, _ = client.inner_values(X)
    assert phi.shape == (40, client.blocks.width) and not phi[:, : client.blocks.sizes[0]].any()
