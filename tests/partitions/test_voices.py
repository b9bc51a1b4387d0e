import numpy as np
import pytest

from partitions.datasets import loading
from partitions.datasets.loading import load
from partitions.datasets.voices import SETS, generate, voices


def test_voices_lie_between_the_eight_sets():
    found = np.array([list(vars(voice).values()) for voice in voices(20)])
    assert found.shape == (20, SETS.shape[1])
    assert (found >= SETS.min(0)).all()
    assert (found <= SETS.max(0)).all()
    assert len(np.unique(found[:, 0])) == 20


def test_same_seed_same_speech_and_every_voice_says_every_text():
    one, two, other = (generate(40, 75, 3, 4, seed) for seed in (0, 0, 1))
    assert (one.x == two.x).all()
    assert (one.x != other.x).any()
    assert one.x.shape == (12, 1, 40, 75)
    assert one.x.dtype == np.uint8
    assert one.y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert one.x.reshape(12, -1).max(1).min() > 100
    assert len(np.unique(one.x.reshape(12, -1), axis=0)) == 12


def test_sizes_must_divide_the_spectrogram():
    with pytest.raises(ValueError, match="30 × 75"):
        generate(30, 75, 1, 1)


def test_small_set_is_registered_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path))
    raw, sizes = generate(40, 75, 20, 1), []  # bins, frames, voices, utterances
    monkeypatch.setattr("partitions.datasets.voices.generate", lambda *n: sizes.append(n) or raw)
    data = load("voices-small")
    assert sizes == [(40, 75, 20, 60)]
    assert data.x.shape == (20, 1, 40, 75)
    assert data.y.tolist() == list(range(20))
    assert any(tmp_path.iterdir())
    loading._load.cache_clear()
