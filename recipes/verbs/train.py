"""`python -m recipes train`: composes a configuration and trains a model, or an agent, into a run folder."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from recipes.corpora.catalogue import find_recipe
from recipes.corpora.tokenizers import load_tokenizer
from recipes.reinforcement.recipes import RECIPES as AGENT_RECIPES
from recipes.text import compose_config, print_config, require_text
from waveform.engine.dataset import Dataset, read_dataset
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.engine.trainer import RunContext, TrainResult
from waveform.ranks.distributed import job
from waveform.runs.folder import CONFIG_FILE, check_run_dir
from waveform.runs.origin import Origin
from waveform.runs.settings import typed
from waveform.runs.training import check_settings, report_training, train_run, train_runs
from waveform.system.errors import UserError


def train(
    recipe: str,
    data_dir: Path | str,
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    origin: Origin | None = None,
    config_dir: Path | None = None,
    show_progress: bool = True,
) -> TrainResult:
    """Train on the data set in `data_dir`, prepared by the same recipe, into `run_dir`; resume a run that is there.

    origin: a run whose weights and settings this one begins with; its vocabulary must be the same. Under torchrun every
    process calls this. Raises UserError for bad settings or data, for a run folder with a different configuration, for
    an origin that does not fit, and if the loss stops being finite.
    """
    run_dir = Path(run_dir)
    config = compose_config(recipe, overrides, config_dir=config_dir, origin=origin, run_dir=run_dir)
    train_config: TrainConfig = typed(TrainConfig, config["train"], section="train")
    data = open_prepared(data_dir, recipe)
    if origin is not None and origin.run is not None and not (run_dir / CONFIG_FILE).exists():
        _refuse_other_vocabulary(Path(origin.run), data.folder)
    with job(device=train_config.device, timeout_s=train_config.timeout_s) as world:
        check_run_dir(run_dir)
        check_settings(run_dir, config, train_config, dataset=vars(data), world=world)
        return train_run(
            data,
            config,
            train_config,
            RunContext(run_dir, world, show_progress=show_progress),
            amount=amount_of(data),
            cut_valid=True,
        )


def train_all(
    recipe: str,
    data_dir: Path | str,
    runs: Mapping[Path, Sequence[str]],
    *,
    config_dir: Path | None = None,
    show_progress: bool = True,
) -> list[TrainResult]:
    """Train several runs on a data set in turn, in slices of seconds; resumes what is there. Returns how each ended.

    runs: `key=value` settings of each run folder. Raises UserError as `train` does, before anything is trained if it is
    for a setting. Otherwise as `train_runs` of waveform/runs/training.
    """
    data = open_prepared(data_dir, recipe)
    configs = {run_dir: compose_config(recipe, overrides, config_dir=config_dir) for run_dir, overrides in runs.items()}
    settings: dict[Path, TrainConfig] = {
        run_dir: typed(TrainConfig, config["train"], section="train") for run_dir, config in configs.items()
    }
    first = next(iter(settings.values()))
    with job(device=first.device, timeout_s=first.timeout_s) as world:
        for run_dir, config in configs.items():
            check_run_dir(run_dir)
            check_settings(run_dir, config, settings[run_dir], dataset=vars(data), world=world)
        opened = [
            (config, settings[run_dir], RunContext(run_dir, world, show_progress=show_progress))
            for run_dir, config in configs.items()
        ]
        return train_runs(data, opened, amount=amount_of(data))


def open_prepared(data_dir: Path | str, recipe: str) -> Dataset:
    """Open a data set that `recipe` has prepared. Raises UserError if there is none, or another's."""
    data = read_dataset(Path(data_dir))
    prepared_as = data.modality.get("recipe")
    if prepared_as != recipe:
        raise UserError(f"{data_dir} was prepared as {prepared_as or data.modality.get('kind')}, not as {recipe}")
    return data


def amount_of(data: Dataset) -> Callable[[TokenSet], str]:
    """What says how much text a split of `data` is."""
    return lambda tokens: f"{tokens.num_tokens:,} {data.modality['tokens']} of {data.modality['recipe']}"


def _refuse_other_vocabulary(origin: Path, data_dir: Path) -> None:
    """Raises UserError if the run at `origin` is not on text, or has another vocabulary than that of `data_dir`."""
    known = Path(require_text(origin, remedy="name one on text, or begin without --from")["path"])
    if load_tokenizer(known).content() != load_tokenizer(data_dir).content():
        raise UserError(
            f"{data_dir} has a different vocabulary from {known}, with which {origin} was trained, so its tokens mean "
            "something else; begin without --from, or use data prepared with that vocabulary"
        )


def train_paths(
    recipe: str,
    paths: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    origin: Origin | None = None,
    config_dir: Path | None = None,
) -> TrainResult:
    """`train` with the paths of a command line: DATA_DIR and RUN_DIR, or RUN_DIR alone for an agent."""
    if recipe in AGENT_RECIPES:
        _refuse_origin(origin)
        if len(paths) != 1:
            raise UserError(f"{recipe} has no data: give RUN_DIR alone, and then settings")
        from recipes.reinforcement.training import train_agent  # here: others do without it

        return train_agent(recipe, Path(paths[0]), overrides, config_dir=config_dir)
    if len(paths) != 2:
        find_recipe(recipe)
        raise UserError(f"{recipe} needs two paths, DATA_DIR and RUN_DIR, and then settings; {len(paths)} were given")
    return train(recipe, paths[0], paths[1], overrides, origin=origin, config_dir=config_dir)


def print_settings(
    recipe: str,
    paths: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    origin: Origin | None = None,
    config_dir: Path | None = None,
) -> None:
    """Print the resolved configuration of a run on a corpus, or of an agent."""
    if recipe in AGENT_RECIPES:
        _refuse_origin(origin)
        from recipes.reinforcement.settings import print_config as print_agent_config

        print_agent_config(recipe, overrides, config_dir=config_dir)
    else:
        print_config(recipe, overrides, config_dir=config_dir, origin=origin, run_dir=Path(paths[-1]))


def _refuse_origin(origin: Origin | None) -> None:
    if origin is not None and origin.run is not None:
        raise UserError("--from: an agent begins with weights of its own; leave it out")


def report(result: TrainResult) -> int:
    """Say how training ended; returns the exit code of the command."""
    return report_training(result, unit="tokens or steps")
