"""`report`: shows runs side by side on one page, to read and, if they are on audio, to listen to."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from waveform.analyses.layers import DEFAULT_TOKENS, attention_by_position, observe_layers
from waveform.analyses.nll_by_place import nll_by_place
from waveform.domain import domain_of_runs
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import SCORING_TIMEOUT_S, job
from waveform.report_page.charts import attention_chart, learning_chart, place_chart
from waveform.report_page.contents import ReportContents
from waveform.report_page.page import Page, require_each_once, require_page, settings_tables, write_page
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import ScoredRun, display_names
from waveform.system.output import check_files, write_json
from waveform.verbs.compare import entries_of, open_runs

_FIRST_S, _FIRST_TOKENS = 0.01, 64  # the first bin of NLL by place in an utterance, and in a document


def report(
    run_dirs: Sequence[Path | str] | Path | str,
    contents: ReportContents | None = None,
    *,
    out: Path | str = "report.html",
    data: Path | str | None = None,
    json_file: Path | str | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Write a page on one run or several: samples beside real data, NLL, attention and settings.

    The page is one file that loads nothing. contents: a `SoundContents` for runs on audio, `TextContents` for text;
    None: their defaults. Returns (and writes to `json_file`) its figures: `comparison` as `compare` has them,
    `by_place`, `attention` and, if measured, `quality`. Under torchrun every process calls this and does a share.
    Raises UserError as `compare` does.
    """
    run_dirs, out = [run_dirs] if isinstance(run_dirs, str | Path) else list(run_dirs), Path(out)
    require_page(out)
    check_files(json_file=json_file, page=out)
    domain = domain_of_runs(run_dirs)
    contents = contents or domain.asked["contents"]()
    require_each_once([*run_dirs, *contents.listen])
    options = contents.options
    with job(device=device, timeout_s=SCORING_TIMEOUT_S, show_progress=show_progress) as world:
        opened = open_runs(domain, run_dirs, options, data=data, world=world)
        runs, tokens = opened.runs, opened.tokens
        others = contents.others(runs, device=world.device.type)
        train = runs[0].config["train"]  # the others reset their state at the same places, or were refused
        protocol, max_tokens = domain.protocol(train, options), contents.max_tokens
        chunk = train["chunk"] if protocol == "chunk" else None
        unit_s = runs[0].unit_s
        first = _FIRST_TOKENS if unit_s is None else round(_FIRST_S / unit_s)
        places = [
            nll_by_place(run, tokens, first=first, max_tokens=max_tokens, chunk=chunk, world=world) for run in runs
        ]
        scored = []
        for run, place in zip(runs, places, strict=True):
            if (result := contents.result(tokens, place, protocol=protocol)) is None:
                scored.append(domain.measure(run, tokens, options, world=world))
            else:
                metrics = domain.metrics(run, tokens, options)
                scored.append(ScoredRun(run, result, domain.figures(run, tokens, result, options, metrics)))
        (entries,) = world.share([partial(entries_of, domain, scored)])  # by one rank: it times sampling
        world.say(domain.format_table(entries))  # if its reader is gone, the page is still written
        names = display_names(entries)
        named = dict(zip(names, runs, strict=True))
        others = {f"{name} (--listen)" if name in named else name: run for name, run in others.items()}
        attention = world.share(
            [partial(_attention, run, tokens, label=name, show_progress=world.shows) for name, run in named.items()]
        )
        parts, figures = contents.shown(named | others, entries, opened)
        figures = {
            "comparison": entries,
            "by_place": [{"label": name, **place.figures()} for name, place in zip(names, places, strict=True)],
            "attention": attention,
            **figures,
        }
        if not world.is_first:
            return figures
        charts = [
            learning_chart([(name, one.curve) for name, one in zip(names, scored, strict=True)], unit=runs[0].unit),
            place_chart(dict(zip(names, places, strict=True)), unit=runs[0].unit, unit_s=unit_s),
            attention_chart(attention),
        ]
        page = Page(
            labels=[*names, *others],
            charts=[chart for chart in charts if chart is not None],
            settings=settings_tables(names, [contents.settings(run) for run in runs]),
            **parts,
        )
        write_page(out, page)
        write_json(json_file, figures)
        if world.shows:
            print(f"{out}: open it in a browser")
        return figures


def _attention(run: TrainedRun, tokens: TokenSet, *, label: str, show_progress: bool) -> dict[str, Any]:
    """Attention by position, beside the run's label; {absent: why} if there is nothing to see."""
    observed = observe_layers(run, tokens, max_tokens=DEFAULT_TOKENS, show_progress=show_progress)
    return {"label": label, "attention_by_position": attention_by_position(observed)}
