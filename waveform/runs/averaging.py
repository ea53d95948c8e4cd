"""The mean of the weights of a run's newest checkpoints, for evaluation (Polyak and Juditsky 1992)."""

from torch import Tensor, nn

from waveform.engine import checkpoint
from waveform.runs.opened import TrainedRun
from waveform.system.errors import UserError


def average_weights(run: TrainedRun, num_checkpoints: int) -> None:
    """Give the model of `run` the mean weights of its newest checkpoints, in place.

    AWD-LSTM (Merity et al. 2017), which Transformer-XL follows on Penn Treebank, averages every step from some step on;
    here it is every `train.checkpoint_every` steps. Raises UserError if the run keeps fewer checkpoints.
    """
    if num_checkpoints < 1:
        raise UserError(f"--average is {num_checkpoints}; it must be at least 1")

    def mean_weights() -> dict[str, Tensor]:
        found = checkpoint.newest_complete(run.folder, at_most=num_checkpoints)
        if len(found) < num_checkpoints:
            raise UserError(
                f"--average {num_checkpoints}: {run.folder} has {len(found)} complete checkpoints; train with "
                f"train.keep_checkpoints={num_checkpoints}, or average fewer"
            )
        mean = {name: weight.double() / num_checkpoints for name, weight in found[0].model_weights().items()}
        for other in found[1:]:
            for name, weight in other.model_weights().items():
                mean[name] += weight.double() / num_checkpoints
        return mean

    assert isinstance(run.model, nn.Module)
    run.model.load_state_dict(checkpoint.read_while_training(run.folder, mean_weights))
