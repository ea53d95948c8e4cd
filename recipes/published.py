"""Published weights of Transformer-XL, in either of two layouts, as a model of ours: what `import` reads.

    weights file, config.json -> Published (the fields of model=transformer_xl, and tensors by our names)

Hugging Face's layout is that of `TransfoXLLMHeadModel` (transformers up to 4.35), kimiyoung's that of
`MemTransformerLM` in the code of Dai et al. 2019. They differ from our defaults in the options at the end of
`TransformerConfig`, and from each other in the names of the trunk, in the order of an adaptive head's clusters, and in
whether a stream begins with zeros in memory.

Shape letters: D model width, H heads, d = D / H head width, V words, n_i words and d_i width of cluster i.
"""

import math
import pickle
import re
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from waveform.system.errors import UserError

WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin", "model.pt")
CONFIG_FILE = "config.json"
_NORM_EPSILON = 1e-5  # torch's, and the layouts'

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
_Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Settings(msgspec.Struct, kw_only=True):
    """What config.json says that tensors do not show, by the names that both codes use."""

    mem_len: _Count
    tgt_len: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)] = 128
    clamp_len: int = -1
    same_length: bool = False
    dropout: _Share = 0.0
    dropatt: _Share = 0.0
    cutoffs: list[int] = []
    # Our model has no such options, and only accepts these values.
    pre_lnorm: bool = False
    attn_type: int = 0
    layer_norm_epsilon: float = _NORM_EPSILON


@dataclass(frozen=True)
class Layout:
    """How the two codes differ."""

    name: str
    trunk: str  # what the names of the trunk's tensors begin with
    from_last_cluster: bool  # whether the head counts its clusters from the last
    empty_memory: str  # model.empty_memory


LAYOUTS = (
    Layout("Hugging Face's", "transformer.", from_last_cluster=False, empty_memory="zeros"),
    Layout("kimiyoung's", "", from_last_cluster=True, empty_memory="mask"),
)


@dataclass(frozen=True)
class Published:
    """A Transformer-XL that was read."""

    layout: Layout
    vocab_size: int
    fields: dict[str, Any]  # of `TransformerXLConfig`, without vocab_size
    weights: dict[str, Tensor]  # the model's state dict, in fp32


def read_published(checkpoint: Path, *, first_input: int) -> Published:
    """Read published weights: a folder, or the file in it.

    first_input: the word whose vector stands for begin-of-utterance, which these models do not have. Raises UserError
    for a file that is damaged, holds more than tensors or is of another layout, and for what our model does not have.
    """
    path = _weights_file(checkpoint)
    settings = _read_settings(path.parent / CONFIG_FILE)
    tensors = _read_tensors(path)
    for layout in LAYOUTS:
        if f"{layout.trunk}word_emb.emb_layers.0.weight" in tensors:
            try:
                return _Reader(path, tensors, layout, settings).read(first_input)
            except (RuntimeError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:  # torch's, of shapes
                reason = " ".join(str(error).split())[:200]
                raise UserError(
                    f"{path} has a tensor of another shape than a Transformer-XL's: {reason}; get the file again"
                ) from error
    raise UserError(
        f"{path} is not a Transformer-XL in a known layout: it has neither transformer.word_emb.emb_layers.0.weight "
        "(Hugging Face's TransfoXLLMHeadModel) nor word_emb.emb_layers.0.weight (kimiyoung's MemTransformerLM)"
    )


def _weights_file(checkpoint: Path) -> Path:
    if checkpoint.is_file():
        return checkpoint
    found = [checkpoint / name for name in WEIGHTS_FILES if (checkpoint / name).is_file()]
    if not found:
        raise UserError(f"{checkpoint} is not a file of weights, nor a folder with one of {', '.join(WEIGHTS_FILES)}")
    return found[0]


def _read_settings(path: Path) -> Settings:
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=Settings)
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; the weights do not show mem_len, clamp_len, same_length and the like, so write them "
            'there, for example {"mem_len": 1600, "tgt_len": 128, "clamp_len": 1000, "same_length": true}'
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path} does not hold the settings of a Transformer-XL: {error}") from error
    for name, known in (("pre_lnorm", False), ("attn_type", 0), ("layer_norm_epsilon", _NORM_EPSILON)):
        value = getattr(settings, name)
        if value != known:
            raise UserError(f"{path} has {name}={value!r}; only weights with {known!r} can be imported")
    return settings


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of named tensors without running code that it may hold. Raises UserError."""
    try:
        with open(path, "rb") as file:
            is_torch = file.read(2) in (b"PK", b"\x80\x02")  # a zip archive; before torch 1.6, a pickle
        tensors = torch.load(path, map_location="cpu", weights_only=True) if is_torch else load_file(path)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds more than tensors, so opening it could run code; if you trust it, save the weights "
            "alone, with torch.save(model.state_dict(), FILE)"
        ) from error
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise UserError(f"cannot read weights from {path}: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UserError(f"{path} holds something other than named tensors; save a model's state_dict() there")
    return tensors


class _Reader:
    """Takes the tensors of one file by their published names."""

    def __init__(self, path: Path, tensors: dict[str, Tensor], layout: Layout, settings: Settings) -> None:
        self.path, self.layout, self.settings = path, layout, settings
        self._tensors, self._taken = tensors, set[str]()
        self.num_layers = self._count(r"layers\.(\d{1,4})\.")
        self.d_model = int(self._take(f"{layout.trunk}layers.0.dec_attn.r_net.weight").shape[1])

    def _count(self, numbered: str) -> int:
        """Count parts of the trunk by the largest number in the names that match `numbered`."""
        pattern = re.compile(re.escape(self.layout.trunk) + numbered)
        return 1 + max((int(found[1]) for name in self._tensors if (found := pattern.match(name))), default=0)

    def _take(self, *names: str) -> Tensor:
        """The first of `names` that exists, in fp32."""
        name = next((name for name in names if name in self._tensors), names[0])
        if name not in self._tensors:
            raise UserError(
                f"{self.path} lacks {name}, which {self.layout.name} layout has; is it the whole language model, with "
                "its head?"
            )
        self._taken.add(name)
        return self._tensors[name].float()

    def read(self, first_input: int) -> Published:
        """Convert everything; see `read_published`."""
        weights: dict[str, Tensor] = {}
        for i in range(self.num_layers):
            weights |= {f"layers.{i}.{name}": tensor for name, tensor in self._layer(i).items()}
        inputs, outputs = self._inputs_and_outputs()
        is_tied = inputs.are_shared_with(outputs)
        vocab_size = sum(len(table) for table in inputs.tables)
        if first_input >= vocab_size:
            raise UserError(f"{self.path} has {vocab_size:,} words, fewer than the vocabulary")
        weights |= self._head(outputs, is_tied=is_tied) | _embedding(inputs, first_input, is_tied=is_tied)
        self._refuse_others()
        settings, sizes = self.settings, [len(table) for table in inputs.tables]
        widths = [table.shape[1] for table in inputs.tables]
        fields = {
            "num_layers": self.num_layers,
            "d_model": self.d_model,
            "num_heads": len(weights["layers.0.attention.content_bias"]),
            "d_feedforward": len(weights["layers.0.feedforward_in.bias"]),
            "window": settings.tgt_len,
            "memory": settings.mem_len,
            "norm": "post",
            "num_position_features": self.d_model,
            "local_layers": 0,
            "empty_memory": self.layout.empty_memory,
            "dropout": settings.dropout,
            "head": "adaptive" if len(sizes) > 1 else "softmax",
            "cutoffs": list(accumulate(sizes[:-1])),
            "div_value": widths[0] // widths[1] if len(sizes) > 1 else 1,
            "tie_embeddings": is_tied,
            "activation": "relu",
            "same_length": settings.same_length,
            "clamp_len": max(0, settings.clamp_len),
            "attention_dropout": settings.dropatt,
            "project_first": inputs.projections[0] is not None,
        }
        return Published(self.layout, vocab_size, fields, weights)

    def _layer(self, i: int) -> dict[str, Tensor]:
        trunk = self.layout.trunk
        attention, feedforward = f"{trunk}layers.{i}.dec_attn.", f"{trunk}layers.{i}.pos_ff."
        query, key, value = self._take(f"{attention}qkv_net.weight").chunk(3)
        return {
            "attention.query.weight": query,
            "attention.key.weight": key,
            "attention.value.weight": value,
            "attention.position.weight": self._take(f"{attention}r_net.weight"),
            "attention.output.weight": self._take(f"{attention}o_net.weight"),
            # Each layer has its own, or all share one, of which each gets a copy.
            "attention.content_bias": self._take(f"{attention}r_w_bias", f"{trunk}r_w_bias").clone(),
            "attention.position_bias": self._take(f"{attention}r_r_bias", f"{trunk}r_r_bias").clone(),
            "attention_norm.weight": self._take(f"{attention}layer_norm.weight"),
            "attention_norm.bias": self._take(f"{attention}layer_norm.bias"),
            "feedforward_in.weight": self._take(f"{feedforward}CoreNet.0.weight"),
            "feedforward_in.bias": self._take(f"{feedforward}CoreNet.0.bias"),
            "feedforward_out.weight": self._take(f"{feedforward}CoreNet.3.weight"),
            "feedforward_out.bias": self._take(f"{feedforward}CoreNet.3.bias"),
            "feedforward_norm.weight": self._take(f"{feedforward}layer_norm.weight"),
            "feedforward_norm.bias": self._take(f"{feedforward}layer_norm.bias"),
        }

    def _inputs_and_outputs(self) -> tuple["_Clusters", "_Clusters"]:
        words = f"{self.layout.trunk}word_emb.emb_"
        # What is tied may be in the file once, under the input's name; the first projection is never tied.
        tables = "crit.out_layers" if "crit.out_layers.0.weight" in self._tensors else f"{words}layers"
        projections = "crit.out_projs" if "crit.out_projs.1" in self._tensors else f"{words}projs"
        inputs = self._clusters(f"{words}layers", f"{words}projs", f"{words}projs")
        return inputs, self._clusters(tables, "crit.out_projs", projections)

    def _clusters(self, tables: str, first_projection: str, projections: str) -> "_Clusters":
        """Read the clusters of words by their names; if they are equally wide, they share one table, which is cut.

        Embeddings narrower than the model have a projection beside that one table, which `_refuse_others` refuses.
        """
        num_tables = self._count(r"word_emb\.emb_(?:layers|projs)\.(\d{1,4})")
        table, *others = [self._take(f"{tables}.{i}.weight") for i in range(num_tables)]
        if others:
            named = [first_projection, *[projections] * len(others)]
            return _Clusters([table, *others], [self._take(f"{name}.{i}") for i, name in enumerate(named)])
        cutoffs = self.settings.cutoffs
        num_rare = len(self._take("crit.cluster_bias")) if "crit.cluster_bias" in self._tensors else 0
        bounds = [0, *cutoffs[:num_rare], len(table)]
        if len(bounds) != num_rare + 2 or any(a >= b for a, b in pairwise(bounds)):
            raise UserError(
                f"{self.path} has {num_rare} clusters of rare words, which cutoffs={cutoffs} in {CONFIG_FILE} does not "
                f"cut {len(table):,} words into; write where they begin"
            )
        identity: list[Tensor | None] = [torch.eye(self.d_model)] * num_rare
        return _Clusters([table[a:b] for a, b in pairwise(bounds)], [None, *identity])

    def _head(self, outputs: "_Clusters", *, is_tied: bool) -> dict[str, Tensor]:
        """The head by our names."""
        num_biases = len(outputs.tables) if outputs.projections[0] is not None else 1
        bias = torch.cat([self._take(f"crit.out_layers.{i}.bias") for i in range(num_biases)])
        sizes, first = [len(table) for table in outputs.tables], outputs.projections[0]
        if len(bias) != sum(sizes):
            raise UserError(f"{self.path} has crit.out_layers of {len(bias):,} words, but an input of {sum(sizes):,}")
        if len(sizes) == 1 and not is_tied:
            return {"head.projection.weight": outputs.tables[0], "head.projection.bias": bias}
        head = {f"head.biases.{i}": part for i, part in enumerate(bias.split(sizes))}
        if len(sizes) > 1:
            order = [0] if self.layout.from_last_cluster else []
            head["head.cluster_weight"] = self._take("crit.cluster_weight").flip(order)
            head["head.cluster_bias"] = self._take("crit.cluster_bias").flip(order)
        if first is not None:
            head["head.first_projection"] = first
        return head if is_tied else head | outputs.named("head")

    def _refuse_others(self) -> None:
        trunk = self.layout.trunk
        # Biases for all layers may be there beside those of each layer; the frequencies are always the same.
        known = {f"{trunk}r_w_bias", f"{trunk}r_r_bias", f"{trunk}pos_emb.inv_freq"}
        others = sorted(self._tensors.keys() - self._taken - known)
        if others:
            raise UserError(
                f"{self.path} also has {others[0]}, which is not part of a Transformer-XL in {self.layout.name} layout"
            )


@dataclass(frozen=True)
class _Clusters:
    """Vectors of words by clusters, of the input or of the head."""

    tables: list[Tensor]  # [n_i, d_i]
    projections: list[Tensor | None]  # [D, d_i]; the first may be missing

    def are_shared_with(self, head: "_Clusters") -> bool:
        """Whether tables and projections, except that of the first cluster, are equal."""
        pairs = [*zip(self.tables, head.tables, strict=True), *zip(self.projections, head.projections, strict=True)]
        del pairs[len(self.tables)]
        return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)

    def named(self, owner: str) -> dict[str, Tensor]:
        """All but the first projection, by our names."""
        named = {f"{owner}.tables.{i}": table for i, table in enumerate(self.tables)}
        return named | {f"{owner}.projections.{i}": p for i, p in enumerate(self.projections[1:]) if p is not None}


def _embedding(inputs: _Clusters, first_input: int, *, is_tied: bool) -> dict[str, Tensor]:
    """The input embedding by our names, begin-of-utterance included.

    Published models multiply vectors by sqrt(D), and so does ours if they are shared with the head. Otherwise this is
    the place to do it.
    """
    first = inputs.projections[0]
    scale = math.sqrt(len(first) if first is not None else inputs.tables[0].shape[1])
    bounds = [0, *accumulate(len(table) for table in inputs.tables)]
    cluster = next(i for i, (a, b) in enumerate(pairwise(bounds)) if a <= first_input < b)
    begin, projection = inputs.tables[cluster][first_input - bounds[cluster]], inputs.projections[cluster]
    begin = scale * (begin if projection is None else projection @ begin)
    if not is_tied:
        tables = [t if p is not None else scale * t for t, p in zip(inputs.tables, inputs.projections, strict=True)]
        inputs = _Clusters(tables, [p if p is None else scale * p for p in inputs.projections])
        if len(tables) == 1:
            return {"embedding.weight": torch.cat([tables[0], begin[None]])}
    projected = {} if inputs.projections[0] is None else {"embedding.first_projection": inputs.projections[0]}
    return inputs.named("embedding") | projected | {"embedding.begin": begin}
