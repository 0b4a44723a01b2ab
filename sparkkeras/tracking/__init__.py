"""Experiment tracking: what happens in training and in searches, for MLflow and TensorBoard.

- `mlflow_callback.py` has `MLflowCallback`, which translates Keras's calls and events into runs.
- `mlflow_run.py` writes one run: parameters, metrics, tags and files, in a thread of its own.
- `mlflow_model.py` logs models such that MLflow scores them: signature, input example, and loading with custom code.
- `worker_tensorboard.py` has `WorkerTensorBoard`: curves of each worker.

Other trackers have Keras callbacks, which run on the driver; they need nothing from here.
"""
