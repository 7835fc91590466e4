"""Voice activity: silero VAD says in which windows of 32 ms espeak-ng speaks, among noise, hum, and silence.

Each sample is a window with the 64 values before it and the state after all windows of its clip before it, as the FP32 file leaves it;
so an error of INT8 that would build up over a clip is not judged here.
"""

import io
import shutil
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from benchmarks.known.packages import fetch_file
from benchmarks.known.sign_off import Candidate, Tensors, read_target, sign_off

import optpipe as op

NAME = "voice-activity"
RATE, WINDOW, CONTEXT = 16000, 512, 64
PACKAGE = "silero-vad==6.2.3"
FILE = "silero_vad_half.onnx"
SHA256 = "1e0b195ad4806595ef4466f419d16fca7e4afcfc6669b8c0b5f76ea87547c769"
VOICES = ("en-us", "en-gb", "de", "fr", "es", "it", "nl", "pl")
SENTENCES = (
    "The train to the harbor leaves at a quarter past seven.",
    "Please send the second letter before the end of June.",
    "Nobody expected that much rain in the middle of summer.",
    "Turn left behind the bridge, and follow the river.",
    "Our engine is faster than the one of last year.",
    "She counted eleven silver spoons and a broken plate.",
    "The library closes early on the first of the month.",
    "Bring warm clothes, since the evening will be cold.",
)


def speak(sentence: str, voice: str, pitch: int) -> Any:
    """The sentence at 16 kHz, in [-1, 1]."""
    command = ["espeak-ng", "--stdout", "-v", voice, "-p", str(pitch), sentence]
    spoken = subprocess.run(command, capture_output=True, check=True).stdout
    with wave.open(io.BytesIO(spoken)) as file:
        rate = file.getframerate()
        samples = np.frombuffer(spoken[44:], np.int16)[: (len(spoken) - 44) // 2] / 32768
    places = np.arange(0, len(samples) - 1, rate / RATE)
    return np.interp(places, np.arange(len(samples)), samples)


def make_clip(place: int, random: np.random.Generator) -> tuple[Any, Any]:
    """A clip with a sentence between two pauses, over a background; and for each of its samples whether the voice sounds."""
    sentence, voice = SENTENCES[place % 8], VOICES[place // 8 % 8]
    spoken = speak(sentence, voice, int(random.integers(20, 80)))
    pauses = [np.zeros(int(random.uniform(1, 2) * RATE)) for _ in range(2)]
    speech = np.concatenate([pauses[0], spoken, pauses[1]])
    loudness = np.sqrt(np.convolve(speech**2, np.full(800, 1 / 800), "same"))
    count = len(speech)
    hum = np.sin(2 * np.pi * random.uniform(50, 400) * np.arange(count) / RATE)
    backgrounds = (
        np.zeros(count),
        0.01 * random.standard_normal(count),
        0.01 * hum + 0.002 * random.standard_normal(count),
        0.03 * np.cumsum(random.standard_normal(count)) / np.sqrt(count),
    )
    return speech + backgrounds[place % 4], loudness > 0.02


def make_data(path: Path, clips: int, every: int, seed: int) -> Tensors:
    """Windows that are speech throughout, or not at all, from every `every`-th place of the clips."""
    random = np.random.default_rng(seed)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    windows, states, labels, clip_of = [], [], [], []
    for place in range(clips):
        clip, sounds = make_clip(place, random)
        clip = np.concatenate([np.zeros(CONTEXT), clip]).astype(np.float32)
        state = np.zeros((2, 1, 128), np.float32)
        for at in range((len(clip) - CONTEXT) // WINDOW):
            start = at * WINDOW
            window = clip[None, start : start + CONTEXT + WINDOW]
            share = sounds[start : start + WINDOW].mean()
            near = sounds[max(start - 2 * WINDOW, 0) : start + 3 * WINDOW].mean()
            certain = share == near and share in (0, 1)  # a voice's edges have no true window
            if at % every == 0 and certain:
                windows.append(window)
                states.append(state)
                labels.append(int(share))
                clip_of.append(place)
            _, state = session.run(None, {"input": window, "state": state})
    return {
        "input": np.concatenate(windows),
        "state": np.concatenate(states, axis=1),
        "labels": np.array(labels),
        "group": np.array(clip_of),
    }


def is_right(outputs: Any, truth: Any) -> float:
    """Whether the probability of speech is on the right side of one half."""
    return float((float(np.squeeze(outputs.output)) > 0.5) == bool(truth))


def make_candidate() -> Candidate:
    """The model, its data, and its score."""
    if shutil.which("espeak-ng") is None:
        sys.exit("espeak-ng is not installed\non Debian: apt-get install espeak-ng")
    path = fetch_file(PACKAGE, FILE, SHA256, "silero-vad.onnx")
    calibration = make_data(path, clips=8, every=12, seed=7)
    sounds = np.any(calibration["input"] != 0, axis=1)  # silence is the same window in every clip
    calibration = {
        "input": calibration["input"][sounds],
        "state": calibration["state"][:, sounds],
    }
    least, usual, most = ((size, CONTEXT + WINDOW) for size in (1, 8, 64))
    return Candidate(
        name=NAME,
        source=path,
        model=op.Model(path, shape={"input": (least, usual, most)}),
        calibration=calibration,
        held_out=make_data(path, clips=640, every=32, seed=8),
        metric=op.Metric(is_right, range=(0, 1), name="window-accuracy"),
        int8_share="40%",  # the LSTM has no INT8 form in ONNX Runtime
        axes={"state": 1},
    )


def main() -> None:
    sign_off(make_candidate(), read_target(__doc__, NAME))


if __name__ == "__main__":
    main()
