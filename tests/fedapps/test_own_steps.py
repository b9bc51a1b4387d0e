"""A network that trains itself, as a LightningModule does, against the same steps by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from component_runs import run_components
from flwr.app import Context, RecordDict
from text_networks import Classifier, padded, sentences
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fedapps
from clients.core.arrays import from_record
from fedapps.common import once
from fedapps.common.seeds import drawing
from fedapps.methods import METHODS

X = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)) - 0.5
Y = torch.arange(12) % 2
LOADER = DataLoader(TensorDataset(X, Y), batch_size=12, shuffle=True)
STEPS = 4
LENGTHS = {"input_ids": (7,), "attention_mask": (7,)}


class Module(nn.Module):
    """The interface of a LightningModule, with a loss that no setting has."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return {"logits": self.out(torch.tanh(self.body(x)))}

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x)["logits"], y, label_smoothing=0.3)
        return {"loss": loss * (1 + batch_idx)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def changed(**methods):
    return type("Changed", (Module,), methods)


def trained(method="fedavg", model=Module, data=(LOADER, LOADER), rounds=2, **settings):
    settings = {"local_steps": STEPS, "batch_size": 12, "optimizer": None} | settings
    return run_components(method, model, data, (3,), rounds=rounds, **settings)[0]


def by_hand(rounds=2, schedule=None, every=1):
    """Full batches: their order in an epoch has no effect but rounding."""
    with drawing(0):
        module = Module()
    for _ in range(rounds):
        optimizer = module.configure_optimizers()
        scheduler = schedule(optimizer) if schedule else None
        for step in range(STEPS):
            optimizer.zero_grad()
            module.training_step((X, Y), step)["loss"].backward()
            optimizer.step()
            if scheduler and (step + 1) % every == 0:
                scheduler.step()
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def close(found, expected):
    for name, array in found.items():
        known = expected[{"head.weight": "out.weight", "head.bias": "out.bias"}.get(
            name, name.removeprefix("body.") if name.startswith("body.body") else name
        )]  # fmt: skip
        np.testing.assert_allclose(array, known, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("method", ["fedavg", "local", "fedper", "lg-fedavg"])
def test_its_steps_are_those_of_a_node(method):
    """One node is trained as by hand: each method leaves the steps as they are, also those of the
    head, which FedPer keeps and moves out of the network."""
    settings = {"fedavg_rounds": 2} if method == "lg-fedavg" else {}
    found = trained(method, **settings)
    close(found, by_hand())
    counts = {"local": 0, "fedper": 2}
    assert len(found) == counts.get(method, 4)


def test_a_head_that_is_kept_is_trained_with_the_body():
    """FedPer's second round continues from the head of the first: the body shows it."""
    close(trained("fedper", rounds=3), by_hand(rounds=3))


def test_batches_are_those_of_the_loader():
    """A collate function makes dicts, which nothing else reads."""
    seen = []

    class Reader(Classifier):
        def training_step(self, batch):
            seen.append(sorted(batch))
            z = self(batch["input_ids"], batch["attention_mask"]).logits
            return F.cross_entropy(z, batch["labels"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    loader = DataLoader(sentences(), batch_size=8, shuffle=True, collate_fn=padded)

    def run(model, **settings):
        given = {"batch_size": 8, "optimizer": None} | settings
        return run_components("fedavg", model, (loader, loader), LENGTHS, **given)[0]

    found = run(Reader)
    assert seen == [["attention_mask", "input_ids", "labels"]] * 3
    expected = run(Classifier, lr=0.5, optimizer="sgd")
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("data", [(X, Y), (X.numpy(), Y.numpy()), TensorDataset(X, Y)])
def test_other_forms_give_pairs(data):
    close(trained(data=(data, data)), by_hand())


def test_a_table_gives_its_column_of_labels():
    """Values (n,) as the column has them: (n, 1) would be broadcast against outputs (n,)."""
    shapes = []

    class Regression(nn.Linear):
        def __init__(self):
            super().__init__(1, 1)

        def training_step(self, batch):
            x, y = batch
            shapes.append((tuple(x.shape), tuple(y.shape)))
            return F.mse_loss(self(x)[:, 0], y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    table = pd.DataFrame({"age": [1.0, 2.0, 3.0], "label": [2.0, 4.0, 6.0]})
    run_components(
        "fedavg", Regression, (table, table), (1,), task="values", batch_size=3, optimizer=None
    )
    assert shapes == [((3, 1), (3,))] * 3


def halved(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def by_step(self):
    optimizer = Module.configure_optimizers(self)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": halved(optimizer), "interval": "step", "frequency": 2},
    }


def by_epoch(self):
    optimizer = Module.configure_optimizers(self)
    return [optimizer], [halved(optimizer)]


def test_a_schedule_moves_after_steps_or_epochs():
    found = trained(model=changed(configure_optimizers=by_step))
    close(found, by_hand(schedule=halved, every=2))
    # An epoch is one step: of 12 samples in batches of 12.
    found = trained(model=changed(configure_optimizers=by_epoch), local_epochs=STEPS)
    close(found, by_hand(schedule=halved))


def test_the_servers_decay_scales_the_rates():
    """By 0.5 to the power r - 1 in round r = 1 and 2: SGD takes steps of 0.1 and 0.05."""

    def of_rate(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    data = (LOADER, LOADER)
    ended = []
    model = changed(configure_optimizers=of_rate)
    client = fedapps.client_app(
        "fedavg", model=model, data=lambda _: data, local_steps=1, batch_size=12
    )
    server = fedapps.server_app(
        "fedavg", model=model, shape=(3,), rounds=2, min_available_nodes=1,
        lr_decay=0.5, lr_decay_rounds=1, then=lambda *result: ended.extend(result),
    )  # fmt: skip
    server(
        fedapps.InProcessGrid(client, {}, [{"partition-id": 0}]),
        Context(1, 0, {}, RecordDict(), {}),
    )
    with drawing(0):
        module = model()
    for rate in (0.1, 0.05):
        optimizer = torch.optim.SGD(module.parameters(), lr=rate)
        optimizer.zero_grad()
        module.training_step((X, Y), 0)["loss"].backward()
        optimizer.step()
    close(
        from_record(ended[0].arrays), {n: p.detach().numpy() for n, p in module.named_parameters()}
    )


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "fedsr", "fedala", "fedtta"])
def test_methods_with_a_loss_or_steps_refuse_by_name(method):
    assert not METHODS[method].client.takes_own_steps()
    with pytest.raises(
        ValueError, match=f"{method} has a loss or steps of its own.*fedavg.*fedper"
    ):
        trained(method)


def test_what_is_not_called_is_said(monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    trained(model=changed(validation_step=lambda self, batch, batch_idx: None), rounds=1)
    assert any("of Changed validation_step is not called" in text for text in once._said)


def nothing(self, *arguments):
    return None


def two(self):
    return [torch.optim.SGD(self.parameters(), 0.1)] * 2


def plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


def of_trainer(self, *arguments):
    raise RuntimeError("Changed is not attached to a `Trainer`.")


@pytest.mark.parametrize(
    ("methods", "settings", "words"),
    [
        ({"on_after_backward": nothing}, {}, "has on_after_backward, which Lightning's Trainer"),
        ({"automatic_optimization": False}, {}, "automatic_optimization=False"),
        ({"training_step": nothing}, {}, "returned None; it must return the mean loss"),
        ({"training_step": lambda self, b: self(b[0])["logits"]}, {}, r"a tensor \(12, 2\)"),
        ({"training_step": lambda self, a, b, c: 0}, {}, "takes a, b, c; it must take batch"),
        ({"configure_optimizers": nothing}, {}, "returned no optimizer; it must return one"),
        ({"configure_optimizers": two}, {}, "returned SGD, SGD; it must return one optimizer"),
        ({"configure_optimizers": plateau}, {}, "ReduceLROnPlateau, which follows a score"),
        ({"configure_optimizers": by_epoch}, {}, "give client_app local_epochs=…"),
        ({"training_step": of_trainer}, {}, "training_step reads self.trainer, but clients"),
        ({}, {"lr": 0.1}, "lr is a setting of SGD, and Changed has configure_optimizers"),
        ({}, {"optimizer": "adam"}, "and client_app was given optimizer=; leave it out"),
        ({}, {"loss": nn.CrossEntropyLoss()}, "and client_app was given loss=; leave it out"),
    ],
)
def test_what_is_not_honoured_is_refused(methods, settings, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        trained(model=changed(**methods), **settings)


@pytest.mark.slow
def test_lightnings_own_class_trains_alike():
    """With hyperparameters and a log, which need no Trainer; needs the group examples."""
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self, rate=0.05):
            super().__init__()
            self.save_hyperparameters()
            self.body = nn.Linear(3, 4)
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            return {"logits": self.out(torch.tanh(self.body(x)))}

        def training_step(self, batch, batch_idx):
            loss = Module.training_step(self, batch, batch_idx)
            self.log("train_loss", loss["loss"])
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)

        def validation_step(self, batch, batch_idx):
            raise AssertionError("clients are scored by the outputs")

    class Scheduled(Lit):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.trainer.estimated_stepping_batches)

    close(trained(model=Lit), by_hand())
    close(trained("fedper", model=Lit), by_hand())
    with pytest.raises((ValueError, RuntimeError), match="reads self\\.trainer"):
        trained(model=Scheduled)
