"""A job for torchrun whose rank 1 kills itself once, then hangs once, then continues; FOLDER is its only argument."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.engine.conftest import write_tokens
from tests.engine.training import small_trainer
from waveform.ranks.distributed import job
from waveform.system.errors import UserError

TIMEOUT_S = 8


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with job(device="cpu", timeout_s=TIMEOUT_S) as world:
        tokens = write_tokens(folder / f"tokens_{attempt}_{world.rank}", [60, 45, 33, 80])
        train = {"max_steps": 8, "checkpoint_every": 2, "timeout_s": TIMEOUT_S}
        trainer = small_trainer("compressive_transformer", tokens, folder / "run", world=world, **train)
        if world.is_first:
            (folder / f"attempt_{attempt}").write_text(str(trainer.learner.step))
        update = trainer.learner.update

        def fail() -> Any:
            if world.rank == 1 and (attempt, trainer.learner.step) == (0, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            if world.rank == 1 and (attempt, trainer.learner.step) == (1, 5):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that torchrun can end it without its 30 s of grace
                time.sleep(600)
            return update()

        trainer.learner.update = fail
        try:
            trainer.run()
        except UserError as error:
            print(f"attempt {attempt}: {error}", file=sys.stderr, flush=True)
            os._exit(2)
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)
