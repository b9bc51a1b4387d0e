"""docs/how-to/lora.md: only LoRA's factors travel, and a client without labels gets an adapter."""

import numpy as np
import pytest
import torch
from documented_code import FEDSA, LORA, written
from small_runs import SMALL, Watched

import fedapps
import partitions
from clients.core.arrays import model_arrays, num_bytes
from clients.core.protocol import SAVE_STATE
from fedapps.building import method_model
from fedapps.clientapp import app
from fedapps.serverapp import run
from fedapps.settings.config import defaults

pytestmark = pytest.mark.slow  # transformers alone takes a quarter of a minute to import


@pytest.fixture(autouse=True)
def outside(tmp_path):
    with written(tmp_path):
        yield


def trained(method, folder):
    """A run of two rounds with the page's network, and the arrays in its messages."""
    config = defaults() | SMALL | {"model": LORA, "method": method, "output-dir": str(folder)}
    config |= {"rounds": 2, "evaluate-every": 2, "local-steps": 2}
    grid = Watched.simulation(app, config, int(config["num-clients"]))
    run(grid, config)
    assert not any(message.has_error() for message in grid.seen)
    seen = [m for m in grid.seen if m.metadata.message_type != SAVE_STATE]  # for the checkpoint
    records = [r for m in seen for r in m.content.array_records.values()]
    return config, [record for record in records if record]


def backbone_of(config):
    network, _ = method_model("fedavg", config, partitions.task(config))
    return network.backbone


def test_a_message_has_two_percent_of_the_backbone_at_most(tmp_path):
    config, records = trained("fedavg", tmp_path / "run")
    whole = num_bytes(model_arrays(backbone_of(config).get_base_model()).values())
    assert whole > 2_000_000 and len(records) > 10
    for record in records:
        assert all("lora_" in name or name.startswith("head.") for name in record)
        assert sum(a.numpy().nbytes for a in record.values()) <= 0.02 * whole


def test_b_stays_on_the_client(tmp_path):
    _, records = trained(FEDSA, tmp_path / "run")
    names = {name for record in records for name in record}
    assert any("lora_A" in name for name in names) and not any("lora_B" in n for n in names)


@pytest.mark.parametrize("method", ["odpfl-hn", "flowdup"])
def test_an_unseen_client_gets_an_adapter_that_peft_loads(method, tmp_path):
    from peft import PeftModel

    config, records = trained(method, tmp_path / "run")
    names = {name for record in records for name in record}
    assert not [n for n in names if "backbone" in n and "lora_" not in n]
    x = torch.rand(9, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    saved = fedapps.load(tmp_path / "run", allow=[LORA])
    model, other = saved.personalize(x), saved.personalize(1 - x)
    model.network.backbone.save_pretrained(tmp_path / "adapter")
    base = backbone_of(config).unload()  # the backbone without factors
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        got = model.network.head(adapted(pixel_values=x).last_hidden_state[:, 0])
        torch.testing.assert_close(got, model(x))
        assert not torch.allclose(other(x), model(x))  # the inputs decide the adapter
    frozen = model.network.backbone.get_base_model().embeddings.cls_token.numpy()
    np.testing.assert_array_equal(frozen, base.embeddings.cls_token.detach().numpy())
