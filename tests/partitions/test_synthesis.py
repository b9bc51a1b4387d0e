"""Synthesised speech by hand: each part of an utterance's spectrum alone, in dB.

A generator whose draws are known takes the jitter away; then the levels of two voices that differ
in one number differ by what that number does, whatever the source's spectrum is."""

import numpy as np
import pytest

from partitions.datasets import voices
from partitions.datasets.voices import BINS, FLOOR, RATE, SETS, VOWELS, Voice, spectrogram, text

FRAMES, HOP, HZ = 75, 800, 40  # of 3.75 s at 16 kHz; Hz of a bin
PLAIN = {
    "pitch": 400.0, "span": 0.0, "tract": 1.0, "tilt": -3.0, "breath": -300.0, "bandwidth": 4.0,
    "tempo": 3.7, "declination": 0.0,
}  # fmt: skip
HARMONICS = 400 * np.array([1, 2, 3, 5, 7])
CLOSURES = np.zeros(14, int)  # the first of the consonants, silence


class Known:
    """Draws without chance: middles of intervals but for the contour's phase, and as noise a click
    in the middle of each frame, whose spectrum is the same at all frequencies."""

    def __init__(self, phase=0.5):
        self.phase, self.asked = phase, []

    def uniform(self, low=0.0, high=1.0):
        self.asked.append((low, high))
        return self.phase if (low, high) == (0.0, 1.0) else (low + high) / 2

    def normal(self, mean, deviation):
        self.asked.append(("normal", mean, deviation))
        return mean

    def standard_normal(self, size):
        return (np.arange(size) % HOP == 0).astype(float)


def spoken(vowel=0, consonants=CLOSURES, phase=0.5, **changes):
    """dB (BINS, FRAMES) of a text of one vowel."""
    words = np.full(14, vowel), np.asarray(consonants)
    return spectrogram(Voice(**{**PLAIN, **changes}), words, FRAMES, Known(phase))


def two_poles(center, width, at):
    """|H| of 1 / (1 − 2 r cos θ z⁻¹ + r² z⁻²), r = e^(−π B/f_s), θ = 2π F/f_s, 1 at 0 Hz."""
    r, theta = np.exp(-np.pi * width / RATE), 2 * np.pi * center / RATE
    z = np.exp(2j * np.pi * np.array([0.0, *at]) / RATE)
    h = 1 / (1 - 2 * r * np.cos(theta) / z + r**2 / z**2)
    return np.abs(h[1:]) / np.abs(h[0])


def test_a_text_takes_its_time_and_closures_are_silent():
    """Frame k is at 0.05 k s, in the text at p = (0.05 k − 0.15) · 3.7 syllables: speech where
    0 ≤ p < 14, without the first quarter of each syllable. 14 syllables end at 3.93 s, so at 4.3
    syllables per second, at 3.41 s."""
    for tempo in (3.7, 4.3):
        place = (0.05 * np.arange(FRAMES) - 0.15) * tempo
        voiced = (place >= 0) & (place < 14) & (place % 1 >= 0.25)
        level = spoken(tempo=tempo)
        assert ((level > FLOOR).any(0) == voiced).all()
        assert level.max() == 0


def test_tilt_is_so_many_db_an_octave_above_the_pitch():
    """Between 400 and 1600 Hz lie two octaves: −9 dB an octave less −3 make −12 dB there; below
    the pitch nothing changes."""
    steep, flat = (spoken(tilt=tilt)[:, 40] for tilt in (-9.0, -3.0))
    difference = steep - flat
    assert difference[[10, 20, 40]] - difference[10] == pytest.approx([0, -6, -12])
    assert difference[5] == pytest.approx(difference[10])


@pytest.mark.parametrize(("tract", "bandwidth"), [(1.0, 30.0), (1.2, 20.0)])
def test_a_vowel_is_four_resonances_of_the_voices_tract(tract, bandwidth):
    """F1 … F3 of the vowel and 3500 Hz times the tract, 60, 90, 120, 180 Hz times the bandwidth;
    less the plain voice's, whose source is the same."""
    expected = np.zeros(len(HARMONICS))
    for sign, t, b in ((1, tract, bandwidth), (-1, 1.0, 20.0)):
        for f, width in zip([*VOWELS[4], 3500.0], (60, 90, 120, 180), strict=True):
            expected += sign * 20 * np.log10(two_poles(f * t, width * b, HARMONICS))
    this, plain = (
        spoken(vowel=4, tilt=0.0, tract=t, bandwidth=b)[HARMONICS // HZ, 40]
        for t, b in ((tract, bandwidth), (1.0, 20.0))
    )
    found = this - plain
    assert found - found[0] == pytest.approx(expected - expected[0], abs=1e-6)


def test_formants_move_from_syllable_to_syllable():
    """Their centres are 0.6 into a syllable. Frame 10 is at p = 0.35 · 3.7 = 1.295, 0.695 of the
    way from the first vowel's centre to the second's."""
    voice = Voice(**{**PLAIN, "bandwidth": 20.0, "tilt": 0.0})
    words = np.array([0, *[4] * 13]), CLOSURES
    between = spectrogram(voice, words, FRAMES, Known())[HARMONICS // HZ, 10]
    second = spoken(vowel=4, bandwidth=20.0, tilt=0.0)[HARMONICS // HZ, 10]
    expected = np.zeros(len(HARMONICS))
    for sign, share in ((1, 0.695), (-1, 1.0)):
        for k, width in enumerate((60, 90, 120)):
            f = (1 - share) * VOWELS[0, k] + share * VOWELS[4, k]
            expected += sign * 20 * np.log10(two_poles(f, width * 20, HARMONICS))
    found = between - second
    assert found - found[0] == pytest.approx(expected - expected[0], abs=1e-6)


def test_a_burst_is_a_band_of_noise_scaled_by_the_tract():
    """Around 1500 Hz · 1.2 = 1800 Hz, bin 45: e⁻¹ in amplitude, 20 / ln 10 = 8.686 dB less, at
    900 Hz from it. Breath of −20 dB at 0 Hz, where the tract's gain is 1, is 0.1 of the noise to
    0.5 in a burst's middle: 20 log10(0.1 / 0.5) = −13.98 dB."""
    bursts = np.ones(14, int)
    level = spoken(consonants=bursts, tract=1.2, pitch=1e-3, tilt=0.0, breath=-20.0)
    place = (0.05 * np.arange(FRAMES) - 0.15) * 3.7
    burst = int(np.flatnonzero((place > 5) & (place % 1 < 0.25))[0])
    vowel = int(np.flatnonzero((place > 5) & (place % 1 > 0.25))[0])
    middle = level[45, burst]
    assert level[:, burst].argmax() == 45
    assert level[45 + 22, burst] - middle == pytest.approx(-((880 / 900) ** 2) * 20 / np.log(10))
    assert level[0, vowel] - middle == pytest.approx(20 * np.log10(0.2))


@pytest.mark.parametrize(
    ("voice", "at"),
    [
        # −12 semitones each second: 800 Hz has become 400 after one
        ({"pitch": 800.0, "declination": -12.0, "tempo": 3.4}, 20),
        # the contour is at its top where syllable/3 + φ = 1/4: 12 semitones above 200 Hz are 400;
        # at 0.2 syllables per second, p = 0.6 at 3.15 s, so φ = 0.05
        ({"pitch": 200.0, "span": 12.0, "tempo": 0.2, "phase": 0.05}, 63),
    ],
)
def test_pitch_moves_by_semitones(voice, at):
    """400 Hz: the spectrum repeats every 10 bins, and is opposite after 5."""
    loud = spoken(tilt=0.0, bandwidth=20.0, **voice)[:80, at]
    centred = loud - np.convolve(loud, np.full(11, 1 / 11), "same")
    lag = [float((centred[:-k] * centred[k:]).mean()) for k in (5, 10)]
    assert lag[1] > 0 > lag[0]


def test_what_an_utterance_draws():
    """Tempo by a tenth, start within 0.3 s, the contour's phase, half a semitone of pitch."""
    known = Known()
    spectrogram(Voice(**PLAIN), text(0), FRAMES, known)
    assert known.asked == [(0.9, 1.1), (0.0, 0.3), (0.0, 1.0), ("normal", 0, 0.5)]


def test_voices_are_drawn_by_the_seed_around_the_sets():
    """Weights ~ Dir(0.3) of eight sets: a weighted sum varies by 1/(8 · 0.3 + 1) of the sets' own
    variance. Texts differ from each other, and by seed."""
    pitch = [voice.pitch for voice in voices.voices(4000, 3)]
    sets = SETS[:, 0]
    assert np.mean(pitch) == pytest.approx(sets.mean(), rel=0.02)
    assert np.var(pitch) == pytest.approx(sets.var() / 3.4, rel=0.06)
    assert voices.voices(1, 3) != voices.voices(1, 4)
    vowels = [text(number, seed)[0].tolist() for number, seed in ((0, 0), (1, 0), (0, 1))]
    assert vowels[0] not in vowels[1:]


def test_a_set_has_every_voice_say_the_texts_in_turn(monkeypatch):
    """Two voices, three utterances of two texts; the fourth bins of 40 are means over five of 200:
    row r at −(r mod 5) · 8 dB has mean −16 dB, which is stored as (80 − 16)/80 · 255 = 204; the
    second half at −50 dB as 95.6."""
    said = []

    def level(voice, words, frames, generator):
        said.append((voice, words[0].tolist(), float(generator.uniform())))
        found = np.repeat(-8.0 * (np.arange(BINS) % 5)[:, None], frames, 1)
        found[BINS // 2 :] = -50.0
        return found + len(said)  # each one its own

    monkeypatch.setattr(voices, "spectrogram", level)
    monkeypatch.setattr(voices, "TEXTS", 2)
    raw = voices.generate(40, FRAMES, 2, 3, 5)
    both = voices.voices(2, 5)
    texts = [text(number, 5)[0].tolist() for number in range(2)]
    assert [one[:2] for one in said] == [(v, texts[u % 2]) for v in both for u in range(3)]
    assert len({one[2] for one in said}) == 6  # a generator each
    steps = 255 / 80  # of one dB
    expected = [round(204 + (n + 1) * steps) for n in range(6)]
    assert raw.x[:, 0, 3, 7].tolist() == expected
    assert raw.x[:, 0, 39, 7].tolist() == [round((30 + n + 1) * steps) for n in range(6)]
    assert raw.y.tolist() == [0, 0, 0, 1, 1, 1]
