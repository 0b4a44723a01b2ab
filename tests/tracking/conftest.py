"""A real MLflow with an SQLite store in the folder of the test."""

import shutil

import pytest


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """The file of a store without runs: creating one takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_store, tmp_path):
    """The client of a new store, whose experiment is the current one."""
    import mlflow

    shutil.copyfile(empty_store, tmp_path / "mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = mlflow.MlflowClient().create_experiment("tests", artifact_location=f"file://{tmp_path}/artifacts")
    mlflow.set_experiment(experiment_id=experiment)
    try:
        yield mlflow.MlflowClient()
    finally:
        while mlflow.active_run():
            mlflow.end_run()
        mlflow.set_tracking_uri(None)
