"""The figures of `waveform bench` as tables for a terminal; docs/performance.md says what they mean."""

from typing import Any

from waveform.system.console import counted, table


def format_figures(content: dict[str, Any]) -> str:
    """Return the figures of `bench` as tables."""
    machine = content["machine"]
    hardware = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    lines = [f"{hardware}; torch {machine['torch']}, waveform {machine['waveform']}"]
    measured = [figures for figures in content["models"] if "error" not in figures]
    prepared = [figures for figures in content["preparation"] if "error" not in figures]
    cases = [(figures, case) for figures in measured for case in figures["sampling"]]
    lines += ["", *table(["training", "", "", "samples/s (min to max)", "real time", "FLOP use", "peak memory"],
                         [_training_row(figures) for figures in measured])]  # fmt: skip
    lines += ["", *table(["one update", "", "operations", "in them", "between them"],
                         [_profile_row(figures) for figures in measured])]  # fmt: skip
    lines += ["", *table(["sampling", "", "", "samples/s (min to max)", "real time", "of bound", "bytes per step"],
                         [_sampling_row(figures, case) for figures, case in cases])]  # fmt: skip
    if prepared:
        lines += ["", *table(["preparation", "", "real time (min to max)", "of limit", "decode", "resample",
                              "peak memory"], [_preparation_row(figures) for figures in prepared])]  # fmt: skip
    return "\n".join(lines)


def _training_row(figures: dict[str, Any]) -> list[str]:
    training, rate = figures["training"], figures["training"]["matrix_flops_per_second"]["median"]
    return [
        figures["preset"],
        figures["model"],
        f"{figures['num_parameters'] / 1e6:.1f} M x {figures['batch_size']}",
        *_speed(training["tokens_per_second"], figures),
        f"{training['model_flop_utilisation']:.0%} of {rate / 1e9:,.0f} G/s",
        f"{figures['training_memory']['peak_bytes'] / 1e6:,.0f} MB",
    ]


def _profile_row(figures: dict[str, Any]) -> list[str]:
    profiled = figures["training"]["profile"]
    inside_s, between_s = profiled["seconds_in_operations"], profiled["seconds_between_operations"]
    return [
        figures["preset"],
        figures["model"],
        f"{profiled['num_operations']:,}",
        f"{1e3 * inside_s:,.1f} ms",
        f"{1e3 * between_s:,.1f} ms ({between_s / (inside_s + between_s):.0%})",
    ]


def _sampling_row(figures: dict[str, Any], case: dict[str, Any]) -> list[str]:
    share, rate = case["share_of_bound"], case["memory_bytes_per_second"]["median"]
    several = len({other["decoder"] for other in figures["sampling"]}) > 1
    streams = counted(case["num_streams"], "stream")
    return [
        figures["preset"],
        figures["model"],
        f"{streams}, {case['decoder']}" if several else streams,
        *_speed(case["samples_per_second"], figures),
        "-" if share is None else f"{share:.0%} of {rate / 1e9:,.0f} GB/s",
        "-" if case["bytes_per_step"] is None else f"{case['bytes_per_step'] / 1e6:,.1f} MB",
    ]


def _preparation_row(figures: dict[str, Any]) -> list[str]:
    return [
        f"{figures['audio_seconds'] / 60:g} min FLAC",
        "mono" if figures["channels"] == 1 else "stereo",
        _with_range(figures["times_real_time"]),
        f"{figures['share_of_limit']:.0%} of {figures['limit_times_real_time']:,.0f} x",
        f"{figures['decode_times_real_time']['median']:,.0f} x",
        f"{figures['resample_times_real_time']['median']:,.0f} x",
        f"{figures['peak_bytes'] / 1e6:,.0f} MB",
    ]


def _speed(samples_per_second: dict[str, float], figures: dict[str, Any]) -> list[str]:
    real_time = samples_per_second["median"] / figures["sample_rate_hz"]
    return [_with_range(samples_per_second), f"{real_time:.3g} x"]


def _with_range(values: dict[str, float]) -> str:
    return f"{_number(values['median'])} ({_number(values['min'])} to {_number(values['max'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
