import numpy as np
import pytest
from scipy.signal import freqz
from sklearn.linear_model import LogisticRegression

from partitions import datasets
from partitions.datasets import load
from partitions.voices import RATE, SETS, generate, resonance, spectrogram, text, voices


def test_voices_lie_between_the_eight_sets():
    found = np.array([list(vars(voice).values()) for voice in voices(20)])
    assert found.shape == (20, SETS.shape[1])
    assert (found >= SETS.min(0)).all()
    assert (found <= SETS.max(0)).all()
    assert len(np.unique(found[:, 0])) == 20


def test_resonance_is_that_of_a_two_pole_filter():
    """1 − 2 r cos θ z⁻¹ + r² z⁻² with r = e^(−π B / f_s), θ = 2π F / f_s, gain 1 at 0 Hz."""
    frequency = np.array([0.0, 300.0, 500.0, 2500.0])
    r, theta = np.exp(-np.pi * 60 / RATE), 2 * np.pi * 500 / RATE
    _, h = freqz([1], [1, -2 * r * np.cos(theta), r * r], worN=frequency, fs=RATE)
    expected = np.abs(h) / np.abs(h[0])
    assert resonance(frequency, np.float64(500), 60.0) == pytest.approx(expected)


def test_pitch_is_heard_as_the_spacing_of_harmonics():
    """A level voice of 400 Hz at 40 Hz a bin: its spectrum repeats every 10 bins, not every 5."""
    voice = voices(1)[0]
    level = dict(vars(voice)) | {"pitch": 400.0, "span": 0.0, "declination": 0.0, "breath": -80.0}
    one = type(voice)(**level)

    class Still:  # no jitter: the contour of the voice alone
        def uniform(self, low=0.0, high=1.0):
            return (low + high) / 2

        def normal(self, mean, deviation):
            return mean

        def standard_normal(self, size):
            return np.zeros(size)

    loud = spectrogram(one, text(0), 75, Still()).mean(1)[:80]
    centred = loud - np.convolve(loud, np.full(11, 1 / 11), "same")
    lag = [float((centred[:-k] * centred[k:]).mean()) for k in (5, 10)]
    assert lag[1] > 0 > lag[0]


def test_same_seed_same_speech_and_every_voice_says_every_text():
    one, two, other = (generate(40, 75, 3, 4, seed) for seed in (0, 0, 1))
    assert (one.x == two.x).all()
    assert (one.x != other.x).any()
    assert one.x.shape == (12, 1, 40, 75)
    assert one.x.dtype == np.uint8
    assert one.y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert one.x.reshape(12, -1).max(1).min() > 100
    assert len(np.unique(one.x.reshape(12, -1), axis=0)) == 12


def test_voices_can_be_told_apart_whatever_they_say():
    """Mean spectra of 8 texts name the voice of 8 other texts far above chance, 1 in 6."""
    raw = generate(40, 75, 6, 16)
    features = raw.x[:, 0].astype(float).mean(2) / 255
    even = np.arange(len(raw.y)) % 16 < 8
    model = LogisticRegression(max_iter=500, C=100).fit(features[even], raw.y[even])
    assert model.score(features[~even], raw.y[~even]) > 0.5


def test_sizes_must_divide_the_spectrogram():
    with pytest.raises(ValueError, match="30 × 75"):
        generate(30, 75, 1, 1)


def test_small_set_is_registered_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path))
    raw, sizes = generate(40, 75, 20, 1), []  # bins, frames, voices, utterances
    monkeypatch.setattr("partitions.voices.generate", lambda *n: sizes.append(n) or raw)
    data = load("voices-small")
    assert sizes == [(40, 75, 20, 60)]
    assert data.x.shape == (20, 1, 40, 75)
    assert data.y.tolist() == list(range(20))
    assert any(tmp_path.iterdir())
    datasets._load.cache_clear()
