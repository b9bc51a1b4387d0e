"""Synthesised speech of twenty voices (ours; FedEmbed's set, from LibriTTS, is not public).

Source–filter synthesis, frame by frame: a voice is eight numbers (pitch, pitch span, vocal tract,
spectral tilt, breath, bandwidth, syllables per second, declination), interpolated between eight
parameter sets; a text is a row of syllables, a track of three vowel formants with consonants as
noise bursts or closures. An utterance's spectrogram is the short-time spectrum of glottal pulses
and noise times the vocal tract's response, in dB. A seed determines everything."""

from dataclasses import dataclass

import numpy as np
import scipy  # its modules load where they are used

from fedapps.common.seeds import seed_of
from partitions.datasets.readers.raw import Raw

# A change of the synthesis needs a new `partitions.datasets.loading.MADE_VERSION`.
RATE = 16000  # samples per second
SECONDS = 3.75  # length of an utterance
BINS = 200  # frequencies of a spectrum
FLOOR = -80.0  # level in dB, relative to the utterance's maximum, that is stored as 0
TEXTS = 24  # number of different texts
SYLLABLES = 14  # of a text
#        Hz  semitones tract dB/octave breath dB bandwidth syllables/s semitones/s
SETS = np.array(
    [
        [95.0, 2.0, 0.90, -12.0, -34.0, 1.0, 3.2, -0.6],
        [118.0, 4.0, 0.97, -9.0, -28.0, 1.2, 4.2, -1.2],
        [140.0, 1.0, 1.00, -14.0, -22.0, 1.6, 3.6, -0.2],
        [165.0, 5.0, 1.05, -7.0, -36.0, 0.8, 5.0, -1.6],
        [190.0, 3.0, 1.10, -11.0, -18.0, 1.4, 3.0, -0.8],
        [215.0, 6.0, 1.16, -8.0, -30.0, 0.9, 4.6, -2.0],
        [240.0, 2.0, 1.20, -13.0, -25.0, 1.3, 4.0, -0.4],
        [275.0, 4.0, 1.27, -10.0, -32.0, 1.0, 5.4, -1.4],
    ]
)
VOWELS = np.array(  # F1, F2, F3 in Hz (Peterson and Barney, 1952, men)
    [
        [270, 2290, 3010],
        [390, 1990, 2550],
        [530, 1840, 2480],
        [660, 1720, 2410],
        [730, 1090, 2440],
        [570, 840, 2410],
        [440, 1020, 2240],
        [300, 870, 2240],
        [640, 1190, 2390],
        [490, 1350, 1690],
    ],
    float,
)
BANDWIDTHS = np.array([60.0, 90.0, 120.0, 180.0])  # of four formants, in Hz
BURSTS = np.array([0.0, 1500.0, 2600.0, 4200.0, 5600.0])  # noise bands in Hz; 0: a closure


@dataclass(frozen=True)
class Voice:
    """The numbers of `SETS`' columns."""

    pitch: float
    span: float
    tract: float
    tilt: float
    breath: float
    bandwidth: float
    tempo: float
    declination: float


def voices(count: int, seed: int = 0) -> list[Voice]:
    """Convex combinations of the eight sets. Weights ~ Dir(0.3): some voices are close to a set."""
    generator = np.random.default_rng(seed_of(seed, "voices"))
    weights = generator.dirichlet(np.full(len(SETS), 0.3), count)
    return [Voice(*row) for row in weights @ SETS]


def text(number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Vowel and consonant of each syllable (SYLLABLES,) of a text."""
    generator = np.random.default_rng(seed_of(seed, "text", number))
    vowels = generator.integers(0, len(VOWELS), SYLLABLES)
    return vowels, generator.integers(0, len(BURSTS), SYLLABLES)


def spectrogram(
    voice: Voice, words: tuple[np.ndarray, np.ndarray], frames: int, generator: np.random.Generator
) -> np.ndarray:
    """Levels (BINS, frames) of one utterance in dB relative to its maximum, in [FLOOR, 0]."""
    hop = round(RATE * SECONDS / frames)
    count = hop * frames
    time = np.arange(count) / RATE
    tempo = voice.tempo * generator.uniform(0.9, 1.1)
    syllable = (time - generator.uniform(0.0, 0.3)) * tempo  # position in the text
    at = syllable[::hop]
    speaks = (at >= 0) & (at < SYLLABLES)
    contour = voice.span * np.sin(2 * np.pi * (syllable / 3 + generator.uniform()))
    semitones = contour + voice.declination * time + generator.normal(0, 0.5)
    phase = np.cumsum(voice.pitch * 2 ** (semitones / 12) / RATE)
    pulses = np.diff(np.floor(phase), prepend=0.0)
    window = scipy.signal.windows.hann(2 * BINS, sym=False)
    transform = scipy.signal.ShortTimeFFT(window, hop, RATE)
    source, noise = (
        np.abs(transform.stft(signal, p0=0, p1=frames))[:BINS]
        for signal in (pulses, 0.02 * generator.standard_normal(count))
    )
    frequency = np.arange(BINS)[:, None] * RATE / (2 * BINS)
    vowels, consonants = words
    centers = np.arange(SYLLABLES) + 0.6
    tracks = [np.interp(at, centers, VOWELS[vowels, k]) for k in range(3)]
    tracks.append(np.full(frames, 3500.0))
    tract = np.ones((BINS, frames))
    for formant, width in zip(tracks, BANDWIDTHS, strict=True):
        tract = tract * resonance(frequency, formant * voice.tract, width * voice.bandwidth)
    octaves = np.log2(np.maximum(frequency, voice.pitch) / voice.pitch)
    tilt = 10 ** (voice.tilt * octaves / 20)
    burst = BURSTS[consonants[np.clip(at.astype(int), 0, SYLLABLES - 1)]]
    consonant = np.where(speaks & (at % 1 < 0.25), 1.0, 0.0)
    voiced = np.where(speaks, 1.0, 0.0) * (1 - consonant)
    hiss = np.exp(-(((frequency - burst * voice.tract) / 900) ** 2)) * (burst > 0) * consonant
    breath = 10 ** (voice.breath / 20)
    power = (source * tract * tilt * voiced) ** 2
    power += (noise * (tract * breath * voiced + 0.5 * hiss)) ** 2
    level = 10 * np.log10(power + 1e-20)
    return np.clip(level - level.max(), FLOOR, 0.0)


def resonance(frequency: np.ndarray, center: np.ndarray, width: float) -> np.ndarray:
    """|H(f)| of a two-pole resonance at `center` Hz with `width` Hz, 1 at f = 0."""
    radius = np.exp(-np.pi * width / RATE)
    z = np.exp(-2j * np.pi * frequency / RATE)
    cosine = np.cos(2 * np.pi * center / RATE)
    gain = 1 - 2 * radius * cosine + radius**2
    return gain / np.abs(1 - 2 * radius * cosine * z + radius**2 * z**2)


def generate(bins: int, frames: int, count: int, utterances: int, seed: int = 0) -> Raw:
    """`utterances` spectrograms of each of `count` voices, uint8 (1, bins, frames), low frequencies
    first. Labels are the voices. Raises ValueError unless `bins` divides BINS, and `frames` the
    number of samples."""
    if BINS % bins or round(RATE * SECONDS) % frames:
        raise ValueError(f"{bins} × {frames}: they must divide {BINS} and {RATE * SECONDS:.0f}")
    x = np.empty((count * utterances, 1, bins, frames), np.uint8)
    texts = [text(number, seed) for number in range(TEXTS)]
    for v, voice in enumerate(voices(count, seed)):
        for u in range(utterances):
            generator = np.random.default_rng(seed_of(seed, "utterance", v, u))
            level = spectrogram(voice, texts[u % TEXTS], frames, generator)
            pooled = level.reshape(bins, BINS // bins, frames).mean(1)
            x[v * utterances + u, 0] = np.round((pooled - FLOOR) * 255 / -FLOOR)
    return Raw(x, np.repeat(np.arange(count), utterances), count * utterances)


def full_size() -> Raw:
    """The dataset "voices": 150 utterances of each of 20 voices."""
    return generate(200, 375, 20, 150)


def small_size() -> Raw:
    """The dataset "voices-small": 60 utterances, a fifth of the resolution."""
    return generate(40, 75, 20, 60)
