"""Making a process ready to train."""

import logging
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from sparkkeras import device


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's warnings")
def test_tensorflows_warnings_of_retracing_are_left_out_where_several_models_are_traced_once(monkeypatch):
    import tensorflow as tf
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    manager = polymorphic_function._FrequentTracingDetectorManager()  # one that has not warned yet
    monkeypatch.setattr(polymorphic_function, "_frequent_tracing_detector_manager", manager)
    seen = []
    logger = tf.get_logger()

    def note(record):
        seen.append(record)
        return False

    logger.addFilter(note)
    try:
        for _ in range(6):
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).predict_on_batch(np.zeros((1, 3)))
        assert seen
        assert not any(map(device._is_for_the_person, seen))
        del seen[:]
        own = tf.function(lambda number: number)
        for number in range(6):
            own(number)
        assert seen
        assert all(map(device._is_for_the_person, seen))
    finally:
        logger.removeFilter(note)
    assert device._is_for_the_person(logging.LogRecord("tensorflow", logging.WARNING, "", 0, "%s left", ("one",), None))


@pytest.mark.parametrize(("every", "steps"), [(1, 1), (7, 7), (32, 32), (37, 1), (40, 20), (64, 32), (99, 11)])
def test_a_compiled_call_ends_where_a_window_does(every, steps):
    """The largest number of steps, up to 32 here, that goes into a window without a rest."""
    assert device.steps_per_execution(SimpleNamespace(run_eagerly=False), 32, False, every) == steps
