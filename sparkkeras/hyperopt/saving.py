"""Saves trials that ended, and their models, on one background thread of the driver.

Storage may be slow: writing a large model to an object store may take longer than a worker waits for a reply. So the calls
of workers only put into a queue what to save and get their reply at once, and no lock is held while files are written. The
thread saves one trial after the other, in the order in which they ended:

1. It writes the model, which the driver asked for because it may be among the best.
2. It tells the study the result and writes the journal: from then on, the trial is part of a search that resumes here.
3. It removes the models that are no longer among the best.
4. It calls `TrialLedger.saved`: the trial counts as finished, and its worker gets the next one.

A driver that dies before step 2 has not shown the trial as finished, and a resumed search repeats it; one that dies later
leaves at most a surplus model, which a resumed search removes. A worker gets no new trial before its last one is saved,
which bounds the queue. An error of the storage ends the search; nothing is saved after it.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkkeras.hyperopt.trials import STOPPED, Trial

if TYPE_CHECKING:
    from sparkkeras.hyperopt.journal import Journal
    from sparkkeras.hyperopt.ledger import TrialLedger


@dataclass(frozen=True)
class UploadedModel:
    """A model file that a worker has uploaded to the driver.

    Attributes:
        draft: The local path of the file.
        suffix: The suffix of the file in the journal.
    """

    draft: Path
    suffix: str


class TrialSaver:
    """Saves trials in the background. See the module docstring.

    Args:
        journal: The folder of the search. Only the saver writes to it while it runs.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._queue: queue.SimpleQueue[tuple[Trial, UploadedModel | None] | None] = queue.SimpleQueue()
        self._is_cancelled = False

    def save(self, trial: Trial, model: UploadedModel | None) -> None:
        """Save a trial and its model in the background, and remove the draft of the model.

        Of a stopped trial only the model is saved, since a resumed search runs the trial again.
        """
        self._queue.put((trial, model))

    @contextmanager
    def running(self, ledger: TrialLedger) -> Iterator[None]:
        """Save the trials of a ledger while the context is open, and wait at its end until all are saved.

        An interrupt (Ctrl-C) of this wait cancels what is left, except for the file that is being written.
        """
        thread = threading.Thread(target=self._run, args=(ledger,), name="sparkkeras-save-trials", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._queue.put(None)
            try:
                thread.join()
            finally:
                self._is_cancelled = True

    def _run(self, ledger: TrialLedger) -> None:
        has_failed = False

        def attempt(write: Callable[[], None]) -> None:
            nonlocal has_failed
            try:
                if not has_failed:
                    write()
            except Exception as error:
                has_failed = True
                ledger.fail(error)

        attempt(self._journal.flush)  # a search writes no models before its journal
        while not self._is_cancelled:
            try:
                item = self._queue.get(timeout=self._journal.flush_seconds)
            except queue.Empty:
                attempt(self._journal.flush)
                continue
            if item is None:
                break
            attempt(functools.partial(self._save, ledger, *item))
            ledger.saved(item[0].number)
        if not self._is_cancelled:
            attempt(self._journal.flush)

    def _save(self, ledger: TrialLedger, trial: Trial, model: UploadedModel | None) -> None:
        if model is not None:
            self._journal.keep_model(trial.number, trial.values, model.draft, model.suffix)
            model.draft.unlink(missing_ok=True)
        if trial.status != STOPPED:
            ledger.tell(trial)
            self._journal.flush()
            self._journal.count_model(trial.number)
        self._journal.drop_surplus()
