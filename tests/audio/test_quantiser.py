"""The quantiser, compared with the formula in fp64 and with torchaudio."""

import numpy as np
import pytest
import torch
import torchaudio
from hypothesis import example, given
from hypothesis import strategies as st

from waveform.audio.audio_format import AudioFormat
from waveform.engine.sound_classes import NUM_CLASSES

encode, decode = AudioFormat().encode, AudioFormat().decode

_UNIT = st.floats(min_value=-1, max_value=1, width=32)


def test_agrees_with_the_formula_in_fp64() -> None:
    samples = np.linspace(-1, 1, 1_000_003).astype(np.float32)
    exact = samples.astype(np.float64)
    companded = np.sign(exact) * np.log1p(255 * np.abs(exact)) / np.log1p(255)
    expected = np.floor((companded + 1) / 2 * 255 + 0.5).astype(int)
    distance = np.abs(encode(samples).astype(int) - expected)
    assert distance.max() <= 1 and distance.sum() <= 3  # a sample may fall within fp32 rounding of a boundary


def test_decodes_as_torchaudio_does() -> None:
    classes = torch.arange(NUM_CLASSES)
    expected = torchaudio.functional.mu_law_decoding(classes, NUM_CLASSES)
    torch.testing.assert_close(torch.from_numpy(decode(classes.numpy())), expected)


def test_the_neighbourhood_of_every_boundary_is_exact() -> None:
    companded = (2 * np.arange(1, 256) - 1) / 255 - 1
    boundaries = (np.sign(companded) * np.expm1(np.abs(companded) * np.log1p(255)) / 255).astype(np.float32)
    classes = np.arange(1, 256)
    assert np.array_equal(encode(boundaries), classes)
    below = np.nextafter(boundaries, np.float32(-2))
    assert np.array_equal(encode(below), classes - 1)


@given(st.lists(_UNIT, min_size=1, max_size=50), st.integers(0, 50))
def test_a_sample_gets_its_class_wherever_the_stream_is_cut(values: list[float], cut: int) -> None:
    samples = np.array(values, np.float32)
    assert np.array_equal(encode(samples), np.concatenate([encode(samples[:cut]), encode(samples[cut:])]))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_shapes_and_dtypes(dtype: type[np.integer]) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, (2, 3, 5)).astype(dtype)
    samples = decode(tokens)
    assert samples.shape == (2, 3, 5) and samples.dtype == np.float32
    assert encode(samples.astype(np.float64)).dtype == np.uint8
    assert np.array_equal(encode(samples), tokens)


@example(values=[0.752814531326294])  # near the lower end of its class, where a sample moves furthest
@given(st.lists(_UNIT, min_size=1, max_size=50))
def test_encoding_and_decoding_again_changes_nothing(values: list[float]) -> None:
    samples = np.array(values, np.float32)
    once = encode(samples)
    assert np.array_equal(encode(decode(once)), once)
    # A sample moves by at most half the width of its class, and never to the other side of silence.
    moved = np.abs(decode(once) - samples)
    half_a_class = 256 ** (1 / 255) - 1  # relative to |x| + 1 / 255
    assert (moved <= half_a_class * (np.abs(samples) + 1 / 255) + 1e-6).all()
