"""Clipping of gradients: trunk and compressor separately, because the paper mixes no losses."""

from collections.abc import Mapping

from torch import Tensor, nn

from waveform.engine.interface import SequenceModel, optional_parts


def parameter_groups(module: nn.Module, model: SequenceModel) -> dict[str, list[nn.Parameter]]:
    """The parameters of `module` that are clipped together: `trunk`, and `compressor` if one learns from its own loss.

    model: it, or the part of it that may have a compressor.
    """
    compressor = optional_parts(model).compressor_parameters()
    apart = {id(parameter) for parameter in compressor}
    trunk = [parameter for parameter in module.parameters() if id(parameter) not in apart]
    return {"trunk": trunk, **({"compressor": compressor} if compressor else {})}


def clip(groups: Mapping[str, list[nn.Parameter]], norm: float) -> dict[str, Tensor]:
    """Scale each group's gradients in place to at most `norm`; returns what their norms were."""
    return {name: nn.utils.clip_grad_norm_(parameters, norm) for name, parameters in groups.items()}
