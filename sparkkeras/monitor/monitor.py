"""`Monitor`: shows runs on a page while they run, and saves it as a file."""

from __future__ import annotations

import atexit
import html
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import keras

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.errors import ConfigurationError, StorageError, guarded, warn
from sparkkeras.events import Event, RunEnded, RunStarted
from sparkkeras.modeling.description import describe_model
from sparkkeras.modeling.state import has_settable_rate, learning_rate
from sparkkeras.monitor.messages import Messages, RunReporter
from sparkkeras.monitor.server import PageServer, saved_page
from sparkkeras.spark import filesystem


class Monitor(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows training live on a web page: metrics, speed, workers, what Spark did, checkpoints, trials of a search.

    Pass it as a callback of `SparkModel.fit` or of ``keras.Model.fit``, or as ``monitor=`` of `HyperParamModel.minimize`,
    `SparkEnsemble.fit` and `SparkRunner.run`. The page is served from now on until `close`, or the end of the process, and
    shows all runs that get this Monitor, one after the other. Only those who have its address, which has a random token, can
    open it.

    Args:
        port: The port to listen on; 0: any free port.
        host: The address to listen on. The default serves this machine only; ``"0.0.0.0"`` serves all that can reach it,
            over unencrypted HTTP.
        save_to: A file ending in ``.html``, on any file system that Spark can access, to write whenever a run ends, also
            after a failure: the same page with all runs so far, which needs no server and no network; several trainings are
            compared when it is opened. ``None``: none.
        verbose: Whether to print the address, and the path of ``save_to``.
        name: The name of the runs on the page and in saved files; ``None``: that of the model or the function.

    Attributes:
        url: The address of the page.
        name: See above; a new value is used from the next run on.

    Raises:
        ConfigurationError: An argument is unknown or out of range, or the address cannot be used.
        StorageError: The folder of ``save_to`` does not exist or cannot be written.

    Example::

        monitor = Monitor(save_to="training.html")
        spark_model.fit(df, epochs=10, callbacks=[monitor])
    """

    async_safe = True  # Keras may call it from a thread, after each batch

    @known_arguments
    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        save_to: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._save_to = None if save_to is None else _html_path("save_to", save_to)
        if isinstance(port, str) and port.endswith(".html"):
            raise ConfigurationError(f"port={port!r}: expected a whole number; for the file, Monitor(save_to={port!r}).")
        if not isinstance(host, str) or not host:
            raise ConfigurationError(
                f'host={host!r}: expected an address of this machine, such as "127.0.0.1" (this machine only) or "0.0.0.0".'
            )
        arguments.flag("verbose", verbose)
        self.name = name
        self._lock = threading.RLock()
        self._messages = Messages()
        self._reporter: RunReporter | None = None  # of the run that runs now
        self._server = PageServer(self._messages, host, arguments.port("port", port))
        self.url = self._server.url
        self._next_batch = 0.0
        self._kinds: list[str] = []  # of all runs
        atexit.register(self.close)  # a training of Keras that failed is saved then
        if verbose:
            saved = "" if self._save_to is None else f" (saved to {self._save_to!r} when a run ends)"
            sys.stdout.write(f"Monitor: {self.url}{saved}\n")
            sys.stdout.flush()

    @property
    def name(self) -> str | None:
        """The name of the runs that begin from now on; ``None``: that of the model or the function.

        Raises:
            ConfigurationError: A new value is neither a string that is not empty nor ``None``.
        """
        return self._name

    @name.setter
    def name(self, name: str | None) -> None:
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise ConfigurationError(
                f'name={name!r}: expected a name for the runs of this Monitor, such as "small learning rate", or None for '
                "that of the model or the function."
            )
        self._name = name

    def __repr__(self) -> str:
        return f"Monitor(url={self.url!r}{', closed' if self._server.is_closed else ''})"

    def _repr_html_(self) -> str:
        """What a notebook shows: a link to the page."""
        url = html.escape(self.url)
        return f'Monitor: <a href="{url}" target="_blank" rel="noopener noreferrer">{url}</a>'

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.on_event(RunEnded(error))
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ConfigurationError(
            "a Monitor cannot be pickled: it runs on the driver. Pass it as callbacks= (not worker_callbacks=) of fit, and "
            "as monitor= of a search, an ensemble or a SparkRunner."
        )

    def close(self) -> None:
        """Stop serving the page, and end a run that has not reported its end (of ``keras.Model.fit``) as stopped."""
        atexit.unregister(self.close)
        self._server.close()
        self._stop()

    @guarded
    def _stop(self) -> None:
        if self._reporter is not None:
            self._reporter.end("stopped")
            self._reporter = None
            self._write()

    @staticmethod
    @known_arguments
    def save(
        history: keras.callbacks.History | Mapping[str, keras.callbacks.History],
        path: str | os.PathLike[str],
    ) -> None:
        """Write the page of trainings that have ended.

        Args:
            history: What ``fit`` returned; or several by name, to compare them.
            path: The path of the file, which ends in ``.html``, on any file system that Spark can access; an existing
                file is replaced.

        Raises:
            ConfigurationError: ``history`` is not a History, or ``path`` does not end in ``.html``.
            StorageError: The file cannot be written.
        """
        target = _html_path("path", path)
        messages = Messages()
        histories = _histories(history)
        for name, each in histories.items():
            _add_history(messages, name, each)
        _write_page(messages, target, selects_all=len(histories) > 1)

    @guarded
    def on_event(self, event: Event) -> None:
        """Show an event of a run; see `sparkkeras.events`."""
        if isinstance(event, RunStarted):
            self._begin(event)
        elif isinstance(event, RunEnded):
            self._end(event)
        elif self._reporter is not None:
            self._reporter.handle(event)

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:
        """Begin a run, unless a `RunStarted` has begun it: that of ``keras.Model.fit``."""
        if self._reporter is None or self._reporter.kind == "keras":
            settings = {"batches": self.params.get("steps"), **describe_model(self.model)}
            self._begin(RunStarted("keras", self.model.name, settings, self.params.get("epochs")))

    @guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the beginning of an epoch."""
        if self._reporter is not None:
            self._reporter.epoch_begins(epoch)

    @guarded
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Show the progress of ``keras.Model.fit`` within an epoch, twice a second."""
        steps, now = self.params.get("steps"), time.monotonic()
        if self._reporter is not None and steps and now >= self._next_batch:
            self._next_batch = now + 0.5
            self._reporter.batches_done(min(1.0, (batch + 1) / steps), logs or {})

    @guarded
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Show the metrics of an epoch."""
        if self._reporter is not None:
            self._reporter.epoch_ends(epoch, {**_rate(self.model), **(logs or {})})

    @guarded
    def on_train_end(self, logs: Any = None) -> None:
        """End the run of ``keras.Model.fit``; others end with `RunEnded`."""
        if self._reporter is not None and self._reporter.kind == "keras":
            self._end(RunEnded())

    def _warn(self, error: Exception) -> None:
        if isinstance(error, ConfigurationError):
            raise error
        if isinstance(error, StorageError):
            warn(f"the page of the monitor was not saved: {error}")
        else:
            warn(f"the monitor may show less from now on: {type(error).__name__}: {error}")

    def _begin(self, started: RunStarted) -> None:
        if self._server.is_closed:
            added = "" if self._save_to is None else f" The run is added to {self._save_to!r}."
            warn(f"this Monitor is closed: it serves no page.{added} Create another one to watch this run.")
        if self._reporter is not None and self._reporter.kind == "keras":  # Keras calls nothing after an error
            self._reporter.end("stopped")
        elif self._reporter is not None:
            raise ConfigurationError(
                "this Monitor shows another run, which has not ended: create a Monitor for each run of the same time."
            )
        self._kinds.append(started.kind)
        named = started if self._name is None else replace(started, name=self._name)
        self._reporter = RunReporter(self._messages, named)

    def _end(self, event: RunEnded) -> None:
        if self._reporter is not None:
            self._reporter.handle(event)
            self._reporter = None
        self._write()

    def _write(self) -> None:
        if self._save_to is not None and not filesystem.is_reachable(self._save_to):
            warn(f"cannot write {self._save_to!r}: Spark has been stopped.")
        elif self._save_to is not None:
            are_trainings = set(self._kinds) <= {"fit", "keras"}  # which have the same curves
            _write_page(self._messages, self._save_to, selects_all=are_trainings and len(self._kinds) > 1)


def _rate(model: keras.Model | None) -> dict[str, float]:
    """The learning rate of a model by its name in logs, to which a later callback may add it."""
    if model is None or model.optimizer is None or not has_settable_rate(model):
        return {}
    return {"learning_rate": float(f"{learning_rate(model):.6g}")}


def _html_path(name: str, value: Any) -> str:
    """The path of a file to write.

    Raises:
        ConfigurationError: It does not end in ``.html``.
        StorageError: Its folder on this machine does not exist, or cannot be written; or its file system cannot be used.
    """
    given = arguments.path(name, value)
    if not given.endswith(".html"):
        raise ConfigurationError(f"{name}={given!r} must end in .html: the file is a web page.")
    local = filesystem.local_path(given)
    if local is None:
        if filesystem.is_reachable(given):
            filesystem.exists(given)  # an error before the run, if its file system cannot be used
        return given
    path = Path(local).expanduser()
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        problem = "cannot be written" if folder.is_dir() else "does not exist"
        raise StorageError(
            f"{name}={str(path)!r}: the folder {str(folder)!r} {problem}. Create it, or use another local path."
        )
    return str(path.absolute())


def _write_page(messages: Messages, path: str, selects_all: bool = False) -> None:
    """Write the page, complete or not at all.

    Args:
        messages: The messages.
        path: The path.
        selects_all: Whether all runs are compared when it is opened, instead of the last one.

    Raises:
        StorageError: It cannot be written.
    """
    filesystem.write_bytes(path, saved_page(messages.after(0)[1], selects_all).encode(), overwrite=True)


def _histories(history: Any) -> dict[str, keras.callbacks.History]:
    found = history if isinstance(history, Mapping) else {"": history}
    for name, each in found.items():
        if not isinstance(each, keras.callbacks.History):
            raise ConfigurationError(
                "history: expected a keras.callbacks.History, as fit returns it, or a dict of them by name; received "
                f"{each!r}."
            )
        if not getattr(each, "epoch", None):
            which = "it" if found is not history else f"the one of {name!r}"
            raise ConfigurationError(f"history: {which} has no epochs: nothing was trained.")
    if not found:
        raise ConfigurationError("history: the dict is empty; expected at least one keras.callbacks.History by name.")
    return {str(name): each for name, each in found.items()}


def _add_history(messages: Messages, name: str, history: keras.callbacks.History) -> None:
    """Add the messages of a run that a History describes; the durations of its epochs are not known."""
    model = history.model
    settings = {} if model is None else describe_model(model)
    epochs = (history.params or {}).get("epochs")
    started = RunStarted("fit", name or ("training" if model is None else model.name), settings, epochs)
    RunReporter(messages, started).add_history(history.epoch, history.history)
