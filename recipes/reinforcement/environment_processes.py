"""Each row's environment in a process of its own: for slow ones, and for DMLab, of which a process can have only one.

Rows step side by side, and what happens in them is what would happen in this process.
"""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from recipes.reinforcement.environment import Environments, Outcome
from waveform.system.errors import Trouble, UserError
from waveform.system.signals import SIGNALS

_Make = Callable[..., Environments]  # makes the environments of some `rows`; can be pickled


class EnvironmentProcesses(Environments):
    """N rows, a process each; see the module's docstring. The processes end with this object or its process."""

    def __init__(self, make: _Make, *, rows: np.ndarray) -> None:
        """Raises UserError if `make` does, and Trouble if one of the processes ends, here and in every method."""
        # Forked from a process that has loaded little, not from this one, whose threads a fork would leave hanging.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "gymnasium"])
        self._connections: list[Connection[Any, Any]] = []
        self._processes, open_connections = [], ExitStack()
        for row in rows.reshape(-1, 1):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, make, row), daemon=True)
            process.start()
            there.close()
            self._connections.append(open_connections.enter_context(here))
            self._processes.append(process)
        # Closed when this process ends, before it waits for the others: they end when nobody is there to ask.
        Finalize(self, open_connections.close, exitpriority=0)
        (self.observation, self.num_actions), *_ = [self._answer(row) for row in range(len(rows))]

    def begin(self) -> np.ndarray:
        return np.concatenate(self._ask("begin"))

    def step(self, actions: np.ndarray) -> Outcome:
        answers = self._ask("step", [actions[row : row + 1] for row in range(len(actions))])
        return Outcome(*map(np.concatenate, zip(*answers, strict=True)))

    def state(self) -> Sequence[np.ndarray]:
        """Of every row, rows first."""
        return [np.concatenate(arrays) for arrays in zip(*self._ask("state"), strict=True)]

    def restore(self, state: Sequence[np.ndarray]) -> None:
        self._ask("restore", [[array[row : row + 1] for array in state] for row in range(len(self._connections))])

    def picture(self) -> np.ndarray:
        return np.asarray(self._ask("picture")[0])

    def _ask(self, method: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """What a method returns for each row; arguments: one for each."""
        for row, connection in enumerate(self._connections):
            with suppress(OSError):  # the process has ended, as `_answer` will say
                connection.send((method,) if arguments is None else (method, arguments[row]))
        return [self._answer(row) for row in range(len(self._connections))]

    def _answer(self, row: int) -> Any:
        try:
            answer = self._connections[row].recv()
        except (EOFError, OSError) as error:
            process = self._processes[row]
            process.join(10)
            raise Trouble(
                f"the process of the environment in row {row} has ended (exit code {process.exitcode}); if it wrote "
                "why, see above. Run the same command again to continue from the last checkpoint"
            ) from error
        if isinstance(answer, UserError):
            raise answer
        return answer


def _serve(connection: "Connection[Any, Any]", make: _Make, rows: np.ndarray) -> None:
    """Answer what is asked of one row's environment until nobody is there to ask."""
    for number in SIGNALS:  # terminals and schedulers signal all processes, but the one that trains has yet to save
        signal.signal(number, signal.SIG_IGN)
    try:
        environments = make(rows=rows)
        connection.send((environments.observation, environments.num_actions))
        while True:
            method, *arguments = connection.recv()
            connection.send(getattr(environments, method)(*arguments))
    except UserError as error:
        connection.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
