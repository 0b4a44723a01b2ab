"""A real MLflow with an SQLite store."""

import pytest


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    """The URI of a store: creating one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def store(database, tmp_path):
    """The client of the store, which has one experiment besides the default one, the current one."""
    import mlflow

    mlflow.set_tracking_uri(database)
    client = mlflow.MlflowClient()
    experiment = client.create_experiment(str(tmp_path), artifact_location=f"file://{tmp_path}/artifacts")
    mlflow.set_experiment(experiment_id=experiment)
    try:
        yield client
    finally:
        while mlflow.active_run():
            mlflow.end_run()
        client.delete_experiment(experiment)
        mlflow.set_tracking_uri(None)
