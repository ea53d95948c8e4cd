"""What training records: the loss, speed and gradient norms of the steps between two records of the log."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from waveform.engine.metrics import MetricsLog, bits
from waveform.ranks.distributed import World


class TrainLog:
    """Sums losses on every rank from one record to the next; the first rank writes the records."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.metrics: MetricsLog | None = None  # of the first rank, while it is open
        # Since the last record: [sum of nats, tokens, auxiliary losses, rows without padding].
        self._sums = torch.zeros(4, dtype=torch.float64, device=world.device)
        self._seconds, self._tokens_seen = 0.0, 0  # at the last record, or when the log was opened

    @contextmanager
    def opened(self, run_dir: Path, *, step: int, seconds: float, tokens_seen: int) -> Iterator[None]:
        """Within, records can be written. `step`, at which training is, replaces any later one in the log."""
        self._seconds, self._tokens_seen = seconds, tokens_seen
        self.metrics = MetricsLog(run_dir, resume_step=step) if self._world.is_first else None
        try:
            yield
        finally:
            if self.metrics is not None:
                self.metrics.close()
                self.metrics = None

    def add(self, sums: Tensor) -> None:
        """Count the sums of this rank that `Trainer.update` returns."""
        self._sums += sums.to(self._sums.device)

    def over_ranks(self) -> tuple[float, float, float, float]:
        """The sums since the last record, over all ranks."""
        nats, num_tokens, aux, num_whole = self._world.sum_(self._sums.clone()).tolist()
        return nats, num_tokens, aux, num_whole

    def write_train(
        self, *, step: int, seconds: float, tokens_seen: int, norms: Mapping[str, Tensor], **values: Any
    ) -> dict[str, Any]:
        """Write a record of the steps since the last one, and return it; every rank calls this at the same step."""
        nats, num_tokens, aux, num_whole = self.over_ranks()
        nll = nats / max(num_tokens, 1)
        record = {
            "seconds": round(seconds, 3),
            "nll_nats": nll,
            "nll_bits": bits(nll),
            "aux_loss": aux / max(num_whole, 1),
            "tokens_seen": tokens_seen,
            "tokens_per_second": (tokens_seen - self._tokens_seen) / max(seconds - self._seconds, 1e-9),
            **values,
        }
        if self.metrics is not None:
            record |= {f"grad_norm_{name}": float(norm) for name, norm in norms.items()}
            self.metrics.write("train", step=step, **record)
        self._sums.zero_()
        self._seconds, self._tokens_seen = seconds, tokens_seen
        return record

    def lacks_evaluation(self, step: int) -> bool:
        """Whether an evaluation at `step` is this rank's to write, and not written yet."""
        return self.metrics is not None and not self.metrics.has_evaluation(step)
