"""Training clients without labels: which ones, and what is hidden."""

import numpy as np
import pytest
import torch

from partitions.cross_federation import CrossFederation
from partitions.shares import Share


def labels(share):
    parts = (share.train, share.validation, share.test, share.everything)
    return torch.cat([part[:][1] for part in parts if part is not None])


def test_a_share_of_the_training_clients_has_labels(divide):
    """Of 20 clients 12 train; 0.7 of them, 8, have labels. Nothing else differs, and all labels of
    the other 4 are hidden. The seed decides, and at 1 nobody lacks labels."""
    changes = {"train_fraction": 0.6, "partition_test_fraction": 0.2}
    whole, some = (divide(partition_labeled_clients=f, **changes) for f in (1.0, 0.7))
    assert not whole.unlabeled.any()
    assert some.unlabeled.sum() == 4 and not (some.unlabeled & some.novel).any()
    for client in range(20):
        before, after = whole.share(client), some.share(client)
        hidden = bool(some.unlabeled[client])
        assert after.unlabeled == hidden and before.attributes == after.attributes
        assert torch.equal(before.everything[:][0], after.everything[:][0])
        assert torch.equal(before.train.index, after.train.index)
        assert (labels(after) == -1).all() if hidden else torch.equal(labels(before), labels(after))
    of_seeds = (divide(partition_labeled_clients=0.5, train_fraction=1.0, seed=s) for s in (0, 1))
    assert not np.array_equal(*(fed.unlabeled for fed in of_seeds))  # all clients train in both
    least = divide(partition_labeled_clients=0.01, **changes)
    assert least.unlabeled.sum() == 11  # somebody has labels


def test_changed_inputs_and_saved_shares_hide_labels_too(divide, tmp_path):
    changes = {"partition": "rotated", "num_clients": 6, "partition_labeled_clients": 0.4}
    fed = divide(**changes)
    client = int(np.flatnonzero(fed.unlabeled)[0])
    assert (labels(fed.share(client)) == -1).all()
    fed.share(client).save(tmp_path, fed.info)
    loaded, _ = Share.load(tmp_path)
    assert loaded.unlabeled and (labels(loaded) == -1).all()


def test_novel_clients_of_another_dataset_keep_their_labels(divide, monkeypatch):
    """Among themselves they are training clients, which could lose theirs."""
    from fedapps.settings.config import defaults

    changes = {"partition": "cross-dataset", "partition.base-rule": "iid", "num-clients": 6}
    changes |= {"partition.labeled-clients": 0.4, "partition.novel-dataset": "digits"}
    fed = CrossFederation(defaults() | changes)
    hidden = [fed.share(i).unlabeled for i in range(6)]
    assert sum(hidden) == 2 and not any(hidden[i] for i in np.flatnonzero(fed.novel))
    assert all((labels(fed.share(i)) >= 0).all() for i in np.flatnonzero(fed.novel))
    assert fed.unlabeled.tolist() == hidden


def test_users_with_preferences_all_have_labels():
    import partitions
    from fedapps.settings.config import defaults

    changes = {"partition": "preference", "partition.labeled-clients": 0.5}
    with pytest.raises(ValueError, match=r"labeled-clients is 0\.5; users"):
        partitions.federation(defaults() | changes)
    fed = partitions.federation(defaults() | {"partition": "preference"})
    assert fed.unlabeled.shape == fed.novel.shape and not fed.unlabeled.any()
