import sys

import pytest
from keras.src.utils.module_utils import tensorflow as lazy

from sparkkeras.modeling.backends import without_tensorflow


@pytest.fixture
def not_imported(monkeypatch):
    """TensorFlow is installed, and not imported."""
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(lazy, "_available", None)


def test_keras_imports_tensorflow_only_after_the_context(not_imported):
    with without_tensorflow():
        with without_tensorflow():
            assert not lazy.available
        assert not lazy.available
    assert "tensorflow" not in sys.modules
    assert lazy._available is None  # Keras looks for it when it is needed


def test_a_process_that_uses_tensorflow_keeps_it(not_imported, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", object())
    with without_tensorflow():
        assert lazy._available is None
