"""`waveform demo`: prepares bundled speech, trains three models, compares them, samples and plots, in minutes."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waveform.audio.audio_format import AudioFormat
from waveform.audio.corpus.prepare import prepare
from waveform.audio.demo_speech import demo_speech_dir
from waveform.audio.files import read_audio
from waveform.audio.plots import save_demo_panel
from waveform.audio.wav import write_wav
from waveform.engine.dataset import is_dataset
from waveform.engine.metrics import read_metrics
from waveform.engine.sampler import SamplingConfig
from waveform.runs.folder import read_config
from waveform.runs.named import bundled_names
from waveform.runs.settings import given_by, typed
from waveform.speech.config import SpeechTrainConfig, compose_config
from waveform.speech.domain import Speech
from waveform.speech.report import ALONE, SoundContents
from waveform.system.console import say
from waveform.system.errors import UserError
from waveform.system.output import write_json
from waveform.verbs.report import report
from waveform.verbs.sample import sample
from waveform.verbs.train import train_all

_SAMPLE_SECONDS = 2.0
_REPORT_SECONDS = 2.0
_TEMPERATURE = 1.0
_RATE_HZ = AudioFormat.sample_rate_hz


def demo(out_dir: Path | str = "waveform-demo", *, overrides: Sequence[str] = (), show_progress: bool = True) -> None:
    """Train the three models of preset `demo` for equal time on the bundled speech, into `out_dir`.

    Writes data/, one run folder per model, report.html, comparison.json, samples/*.wav and demo.png. There are also
    sounds of the bundled runs, which learned for longer, and, on the page, of linear prediction alone. After an
    interruption, calling it again continues.

    overrides: settings for the training of all three. Raises UserError if one names a model, and if `out_dir` contains
    files that are not of a demo.
    """
    out_dir = Path(out_dir)
    others = out_dir.exists() and (not out_dir.is_dir() or any(path.name != "data" for path in out_dir.iterdir()))
    if others and not is_dataset(out_dir / "data"):
        raise UserError(f"--out {out_dir} is not empty; give a new folder")
    for override in overrides:
        if "model" in given_by([override]):
            raise UserError(f"{override}: the demo trains {', '.join(Speech.race_models)}; leave it out")
    runs = {out_dir / model: [f"model={model}", "preset=demo", *overrides] for model in Speech.race_models}
    for settings in runs.values():
        device = typed(SpeechTrainConfig, compose_config(settings)["train"], section="train").device
    began = time.perf_counter()
    say(f"1/5 preparing 2.5 minutes of bundled speech into {out_dir / 'data'}")
    prepare(demo_speech_dir(), out_dir / "data", show_progress=show_progress)

    run_dirs, bundled = list(runs), [name for name in bundled_names() if name.startswith("speech-en")]  # this voice
    say("2/5 training three models for equal time, in turn")
    train_all(out_dir / "data", runs, show_progress=show_progress)

    say(f"3/5 comparing them on the held-out recordings, and writing {out_dir / 'report.html'}")
    heard = (ALONE, *bundled)
    page = SoundContents(num=1, seconds=_REPORT_SECONDS, real=2, temperatures=(_TEMPERATURE,), listen=heard)
    where: dict[str, Any] = {"device": device, "show_progress": show_progress}
    figures = report(run_dirs, page, out=out_dir / "report.html", **where)
    write_json(out_dir / "comparison.json", figures["comparison"])

    say(f"4/5 sampling {_SAMPLE_SECONDS} s from each")
    samples_dir = out_dir / "samples"
    clip = read_audio(sorted((demo_speech_dir() / "test").iterdir())[0], sample_rate_hz=_RATE_HZ)
    clips = {"real speech (held out)": clip[: int(_SAMPLE_SECONDS * _RATE_HZ)]}
    write_wav(samples_dir / "real_speech.wav", clip, sample_rate_hz=_RATE_HZ)
    for run_dir in (*run_dirs, *map(Path, bundled)):
        for old in samples_dir.glob(f"{run_dir.name}_step*_seed0_0.wav"):  # of an earlier demo in the same folder
            old.unlink()
        (path,) = sample(
            run_dir, samples_dir, seconds=_SAMPLE_SECONDS, sampling=SamplingConfig(temperature=_TEMPERATURE), **where
        )
        clips[f"{run_dir.name} (sampled, temperature {_TEMPERATURE})"] = read_audio(path, sample_rate_hz=_RATE_HZ)

    say(f"5/5 drawing {out_dir / 'demo.png'}")
    curves = {
        run_dir.name: [(r["seconds"], r["nll_nats"]) for r in read_metrics(run_dir) if r["kind"] == "train"]
        for run_dir in run_dirs
    }
    save_demo_panel(out_dir / "demo.png", clips, curves, sample_rate_hz=_RATE_HZ)
    minutes = (time.perf_counter() - began) / 60
    num_layers = read_config(run_dirs[0])["model"]["num_layers"]
    print(
        f"""
done in {minutes:.1f} minutes. Open {out_dir / "report.html"} in a browser: it has the sounds and the figures.
The sounds are also in {samples_dir}/*.wav, and a picture is in {out_dir / "demo.png"}.
These models have {num_layers} layers and a minute of training: expect bursts of noise as loud as speech, or silence.
The page also has {", ".join(bundled)}, which came with waveform and learned for hours.

On your own recordings:
    waveform train YOUR_AUDIO_DIR runs/ct preset=ten_minutes     # Compressive Transformer
    waveform train YOUR_AUDIO_DIR runs/wavenet preset=ten_minutes model=wavenet
    waveform report runs/ct runs/wavenet
    waveform sample runs/ct --out samples --num 4 --seconds 2
    waveform train YOUR_AUDIO_DIR runs/paper preset=speech_paper # the paper's 40M model, on a GPU"""
    )
