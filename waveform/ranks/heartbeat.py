"""Barriers in the job's store, and a heartbeat of the first rank for those that wait while it works alone.

Preparing data may take hours, and no collective can tell work from a hang, nor can one be abandoned: destroying gloo's
group waits for it forever. So a thread of each rank records in the store that its rank has reached a barrier, and asks
which others have; the first rank's thread also counts, once a second, as long as its process runs. It is a thread
because a request to a store whose process was stopped never returns.
"""

import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as in rendezvous.py

_BEAT_S, _ASK_S, _LEAVE_S = 1.0, 0.01, 2.0


class Heartbeat:
    """`beats` grows as long as the first rank's process runs; every rank has reached `passed` barriers."""

    def __init__(self, host: str, port: int, *, prefix: str, rank: int, size: int, timeout: timedelta) -> None:
        """prefix: of this attempt's keys, the same for every rank."""
        self.beats = self.passed = self._arrived = 0
        self.lost = False  # the process that keeps the store has ended
        self._prefix, self._rank, self._size = prefix, rank, size
        self._stopped, self._wake = threading.Event(), threading.Event()
        # A separate connection: another thread may be waiting on the job's.
        self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def arrive(self) -> int:
        """This rank has reached its next barrier; returns its number. `passed` reaches it when every rank has."""
        self._arrived += 1
        self._wake.set()
        return self._arrived

    def stop(self) -> None:
        """End the thread; the first rank, whose process may keep the store, waits a moment for the others."""
        self._stopped.set()
        self._wake.set()
        self._thread.join(2 * _LEAVE_S)  # not forever: it may be waiting for a process that was stopped

    def _count(self, key: str, add: int) -> int:
        return int(self._store.add(f"{self._prefix}/{key}", add))

    def _run(self) -> None:
        announced, beaten = 0, 0.0
        try:
            while not self._stopped.is_set():
                self._wake.wait(_ASK_S if self.passed < self._arrived else _BEAT_S)
                self._wake.clear()
                while announced < self._arrived:
                    announced += 1
                    self._count(f"barrier/{announced}", 1)
                if self.passed < announced and self._count(f"barrier/{self.passed + 1}", 0) == self._size:
                    self.passed += 1
                if time.monotonic() - beaten >= _BEAT_S:
                    beaten = time.monotonic()
                    self.beats = self._count("beats", int(self._rank == 0))
            left, end = self._count("left", 1), time.monotonic() + _LEAVE_S
            while self._rank == 0 and left < self._size and time.monotonic() < end:
                time.sleep(_ASK_S)
                left = self._count("left", 0)
        except RuntimeError:
            self.lost = True
