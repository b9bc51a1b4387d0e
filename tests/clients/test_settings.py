"""Every setting of a client refuses what its method cannot work with."""

import pytest
import torch
from small_runs import share
from torch import nn

from clients.core.client import Client
from clients.methods.apfl import APFLClient
from clients.methods.ditto import DittoClient
from clients.methods.fedadg import FedADGClient
from clients.methods.fedala import FedALAClient
from clients.methods.fedbabu import FedBABUClient
from clients.methods.fedembed import FedEmbedClient
from clients.methods.fedmd import FedMDClient, HeteroTENTClient
from clients.methods.fedprox import FedProxClient
from clients.methods.fedrep import FedRepClient
from clients.methods.fedsr import FedSRClient
from clients.methods.fedtta import FedTTAClient
from clients.methods.heterofedtta import HeteroFedTTAClient
from clients.methods.odpfl_hn import ODPFLHNClient
from clients.methods.perfedavg import PerFedAvgClient
from clients.methods.pfedme import PFedMeClient
from clients.methods.shot import SHOTClient
from clients.methods.t3a import T3AClient
from clients.methods.tent import TENTClient

REFUSED = {
    APFLClient: {"mixing": 1.5},
    Client: {"lr": -0.1, "momentum": 1.0, "weight_decay": -0.1, "batch_size": 0, "device": "tpu"},
    DittoClient: {"penalty": -1.0},
    FedADGClient: {"alignment": 1.0, "adversarial_lr": -1.0, "feature_dim": 0, "noise_dim": 0},
    FedALAClient: {"mixing_lr": -0.1, "mixing_share": 0.0, "layers": 0},
    FedBABUClient: {"tune_epochs": -1, "part": "tail"},
    FedEmbedClient: {"assignment": "best", "heads": "nobody", "triplet_lr": 0.0},
    FedMDClient: {"digest_loss": "mse", "digest_epochs": 0, "initialization": "random"}
    | {"kl_direction": "up", "public_batch_size": -1},
    FedProxClient: {"mu": -1.0},
    FedRepClient: {"head_epochs": -1},
    FedSRClient: {"l2r": -1.0, "cmi": -1.0, "test_samples": -1, "representation": "wide"},
    FedTTAClient: {"mu": -1.0, "clip_norm": -1.0, "max_steps": 0, "patience": 0, "inner_lr": -0.5}
    | {"adapt_clip_norm": -1.0, "adapt_momentum": -0.1, "inner_loss": "half", "min_agreement": 1.5},
    HeteroFedTTAClient: {"base_weight": -1.0, "adapt_on": "all"},
    HeteroTENTClient: {"clip_norm": -1.0},
    ODPFLHNClient: {"descriptor_epsilon": -1.0, "descriptor_delta": 0.0, "descriptor_answers": 0}
    | {"dp_generator": "none", "encode_batch_size": -1, "encoder": "dss2"},
    PFedMeClient: {"penalty": 0.0, "personal_lr": 0.0, "inner_steps": 0},
    PerFedAvgClient: {"variant": "second", "delta": 0.0, "inner_lr": -1.0},
    SHOTClient: {"diversity": -1.0},
    T3AClient: {"supports": -1},
    TENTClient: {"parameters": "some", "adapt_steps": -1, "adapt_clip_norm": -1.0},
}


@pytest.mark.parametrize(
    ("cls", "setting", "value"),
    [(cls, key, value) for cls, settings in REFUSED.items() for key, value in settings.items()],
)
def test_settings_out_of_range_are_named(cls, setting, value):
    with pytest.raises(ValueError, match=f"{setting.replace('_', '-')}.*{value}"):
        cls.check(**{setting: value})


def test_what_a_client_lacks_is_named():
    with pytest.raises(ValueError, match="Linear has no linear layer named 'head'"):
        T3AClient(nn.Linear(2, 2), share(torch.ones(1, 2), [0]))
    with pytest.raises(ValueError, match=r"partition\.public-samples"):
        FedMDClient(nn.Linear(2, 2), share(torch.ones(1, 2), [0]))
