"""The queue of calls to a tracking store, without MLflow."""

import threading

import keras
import numpy as np

from sparkkeras import MLflowCallback
from sparkkeras.tracking.mlflow_run import MAX_FAILURES, Outbox
from tests.models import regression


def fail():
    raise OSError("out of reach")


def test_calls_are_made_in_order_in_another_thread():
    outbox, made = Outbox(None), []
    for number in range(50):
        outbox.put(lambda number=number: made.append((number, threading.current_thread())))
    outbox.wait()
    assert [number for number, _ in made] == list(range(50))
    assert {thread for _, thread in made}.isdisjoint({threading.current_thread()})
    assert not any(thread.is_alive() for _, thread in made)
    outbox.put(lambda: made.append("again"))
    outbox.wait()
    assert made[-1] == "again"


def test_a_lost_store_gets_no_more_calls():
    outbox, made = Outbox(None), []
    for _ in range(MAX_FAILURES):
        outbox.put(fail)
    outbox.put(lambda: made.append("call"))
    outbox.wait()
    assert (made, outbox.is_lost) == ([], True)
    assert str(outbox.take_error()) == "out of reach"
    assert outbox.take_error() is None


def test_failures_that_are_not_in_a_row_are_no_loss():
    outbox, made = Outbox(None), []
    for _ in range(MAX_FAILURES):
        outbox.put(fail)
        outbox.put(lambda: made.append("call"))
    outbox.wait()
    assert (len(made), outbox.is_lost) == (MAX_FAILURES, False)


def test_training_does_not_wait_for_the_store(store, monkeypatch):
    """The store answers only when training is at its end."""
    at_end, epochs = threading.Event(), []

    class AtEnd(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            epochs.append(epoch)

        def on_train_end(self, logs=None):
            at_end.set()

    log_batch = type(store).log_batch

    def waits(self, *args, **options):
        assert at_end.wait(60)
        return log_batch(self, *args, **options)

    monkeypatch.setattr(type(store), "log_batch", waits)
    x, callback = np.ones((4, 3), np.float32), MLflowCallback(log_model=False)
    regression().fit(x, x[:, :1], epochs=3, verbose=0, callbacks=[AtEnd(), callback])
    assert epochs == [0, 1, 2]
    assert len(store.get_metric_history(callback.run_id, "loss")) == 3
