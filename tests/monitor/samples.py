"""Messages of runs as a monitor records them: realistic, and the same each time."""

import math
import random

START = 1_760_000_000.0


class Recorder:
    """Collects the messages of one run, with times that a clock gives which the caller moves."""

    def __init__(self, run, kind, name, **fields):
        self.messages = []
        self.run = run
        self.start = self.time = START + 1000 * sum(map(ord, run))
        self.add("run", kind=kind, name=name, **{**BLANK, **fields})

    def add(self, type_, after=0.0, **fields):
        self.time += after
        self.messages.append({"type": type_, "run": self.run, "time": round(self.time, 3), **fields})

    def end(self, status="finished", error="", traceback=""):
        self.add("end", status=status, error=error, traceback=traceback, seconds=round(self.time - self.start, 3))
        return self.messages


BLANK = {
    "settings": {},
    "epochs": None,
    "initial_epoch": 0,
    "metric": "",
    "minimizes": True,
    "max_trials": None,
    "parameters": [],
}
FIT = {
    "mode": "synchronous",
    "rule": "mean",
    "frequency": "epoch",
    "num_workers": 4,
    "batch_size": 128,
    "optimizer": "Adam",
    "learning_rate": 0.002,
    "loss": "sparse_categorical_crossentropy",
    "validation_split": 0.1,
    "parameters": 1_663_370,
    "backend": "tensorflow",
    "seed": 7,
}


def curves(noise, epoch, scale=1.0, end=0.12):
    """The logs of an epoch of a classifier that learns, and in the end overfits a little."""
    loss = end + 2.1 * scale * math.exp(-epoch / 5) + noise.gauss(0, 0.012)
    val_loss = end + 0.07 + 2.0 * scale * math.exp(-epoch / 5) + 0.0035 * max(0, epoch - 14) + noise.gauss(0, 0.03)
    return {
        "loss": loss,
        "accuracy": 1 - 0.28 * loss,
        "val_loss": val_loss,
        "val_accuracy": 1 - 0.3 * val_loss,
        "learning_rate": 0.002 * 0.5 ** (epoch // 10),
    }


def synchronous(*given, **more):
    """A fit that has finished, with a slow worker."""
    return trained(*given, **more).end()


def failed():
    """A fit that fails in its fourth epoch."""
    record = trained(3, "fit-3", "digits with a bug", of=30)
    text = "Task 2 of stage 5 failed on worker-02.cluster and runs again: ValueError"
    record.add("incident", 2.0, kind="retry", text=text)
    error = "TrainingError: worker 2 failed: Matrix size-incompatible: In[0]: [128,63], In[1]: [64,10]"
    return record.end("failed", error, TRACEBACK)


def trained(epochs=30, run="fit-1", name="digits", scale=1.0, workers=4, of=None, **settings):
    noise = random.Random(7)
    record = Recorder(run, "fit", name, settings={**FIT, "num_workers": workers, **settings}, epochs=of or epochs)
    record.add("phase", 0.4, text="Storing rows on the workers")
    record.add("count", 6.2, workers=workers)
    for epoch in range(epochs):
        seconds = worker_epoch(record, noise, epoch, workers, startup=3.1 if epoch == 0 else 0.0)
        record.add(
            "epoch",
            0.1,
            epoch=epoch,
            logs=curves(noise, epoch, scale, end=0.12 * scale),
            rows=54_000,
            seconds=seconds,
            startup_seconds=3.1 if epoch == 0 else 0.0,
        )
    return record


def worker_epoch(record, noise, epoch, workers, startup):
    seconds = [round(noise.gauss(5.2, 0.18) * (2.1 if worker == 3 else 1), 3) for worker in range(workers)]
    rows = [54_000 // workers] * workers
    progress(record, epoch, 0.5, 27_000, startup + max(seconds) / 2, startup, left=None)
    record.add("workers", max(seconds) / 2, epoch=epoch, worker=list(range(workers)), rows=rows, seconds=seconds)
    return max(seconds)


def progress(record, epoch, done, rows, seconds, startup=0.0, left=None, speed=5200.0):
    record.add(
        "progress",
        seconds,
        epoch=epoch,
        done=done,
        rows=rows,
        rows_per_second=speed,
        startup_seconds=startup,
        logs={},
        seconds_left=left,
    )


def asynchronous(epochs=18, of=40, run="fit-2"):
    """A fit through a parameter server that still runs, with incidents and checkpoints."""
    noise = random.Random(11)
    settings = {
        **FIT,
        "mode": "asynchronous",
        "rule": "dynsgd",
        "frequency": 5,
        "num_workers": 8,
        "parameter_server_mode": "socket",
    }
    record = Recorder(run, "fit", "recommender", settings=settings, epochs=of)
    record.add("phase", 0.5, text="Storing rows on the workers")
    record.add("count", 9.0, workers=8)
    for epoch in range(epochs):
        server_epoch(record, noise, epoch)
        if epoch % 5 == 4:
            path = f"hdfs://nameserver/models/recommender/epoch-{epoch + 1:04d}"
            record.add("checkpoint", 0.3, epoch=epoch + 1, path=path, seconds=round(noise.uniform(0.6, 1.4), 2))
        for kind, text in INCIDENTS.get(epoch, ()):
            record.add("incident", 1.7, kind=kind, text=text)
    progress(record, epochs, 0.62, 402_000, 9.4, left=21.5 * (of - epochs), speed=29_870.0)
    return record.messages


INCIDENTS = {
    4: [("retry", "Task 5 of stage 12 failed on worker-03.cluster and runs again: Python worker exited unexpectedly")],
    5: [("takeover", "Another attempt of task 5 continues for the lost worker 5 from its update 118")],
    11: [
        ("executor", "Executor 7 on worker-11.cluster was lost: container killed on request, exit code 137"),
        ("repair", "The rows of partition 6 are read again, as their file was on the lost executor"),
    ],
    14: [("warning", "The learning rate of the checkpoint replaces the one that was set")],
}


def server_epoch(record, noise, epoch):
    progress(record, epoch, 0.5, 324_000, 10.4, speed=29_600.0)
    slowdown = 1.5 if epoch in (4, 11) else 1.1 if epoch in (5, 12) else 1.0  # tasks that are lost and run again
    whole = 21.3 * slowdown + noise.gauss(0, 0.5)
    seconds = [round(noise.gauss(20.4, 0.5) * (slowdown if worker in (5, 6) else 1), 3) for worker in range(8)]
    record.add("workers", 10.9, epoch=epoch, worker=list(range(8)), rows=[81_000] * 8, seconds=seconds)
    staleness = {str(value): max(1, int(640 * math.exp(-((value - 7) ** 2) / 6))) for value in range(2, 16)}
    count = sum(staleness.values())
    record.add(
        "updates",
        epoch=epoch,
        count=count,
        per_second=round(count / whole, 2),
        mean_staleness=7.1 + noise.uniform(-0.3, 0.3),
        max_staleness=13 + epoch % 3,
        staleness=staleness,
    )
    logs = curves(noise, epoch * 0.6, 0.5, end=0.31)
    logs = {name.replace("accuracy", "auc"): value for name, value in logs.items() if name != "learning_rate"}
    record.add("epoch", 0.2, epoch=epoch, logs=logs, rows=648_000, seconds=round(whole, 3), startup_seconds=0.0)


TRACEBACK = """Traceback (most recent call last):
  File "/opt/spark/work/app-20251009/3/sparkkeras.zip/sparkkeras/worker/trainer.py", line 214, in fit
    logs = self._model.fit(batches, epochs=1, verbose=0, callbacks=callbacks)
  File "/opt/venv/lib/python3.12/site-packages/keras/src/utils/traceback_utils.py", line 122, in error_handler
    raise e.with_traceback(filtered_tb) from None
  File "/home/me/models.py", line 41, in call
    return keras.ops.matmul(inputs, self.kernel) + self.bias
ValueError: Matrix size-incompatible: In[0]: [128,63], In[1]: [64,10]
"""


SPACE = [
    {"name": "learning_rate", "options": [], "is_log": True},
    {"name": "dropout", "options": [], "is_log": False},
    {"name": "units", "options": ["32", "64", "128", "256"], "is_log": False},
    {"name": "optimizer", "options": ["adam", "rmsprop", "sgd"], "is_log": False},
]


def search(trials=40, run="search-1", epochs=12):
    """A search that still runs, with pruned and failed trials."""
    noise = random.Random(3)
    settings = {"algorithm": "tpe", "pruner": "ASHA", "max_trials": trials + 20, "workers": 4, "epochs": epochs, "seed": 3}
    record = Recorder(
        run, "search", "digits", settings=settings, metric="val_loss", max_trials=trials + 20, parameters=SPACE
    )
    record.add("count", 4.0, workers=4)
    for number in range(trials):
        record.add("trial", noise.uniform(6, 12), **trial(noise, number, epochs, is_running=number >= trials - 4))
    return record.messages


def trial(noise, number, epochs, is_running=False):
    params = {
        "learning_rate": 10 ** noise.uniform(-5, -1),
        "dropout": round(noise.uniform(0, 0.6), 3),
        "units": noise.choice(["32", "64", "128", "256"]),
        "optimizer": noise.choice(["adam", "rmsprop", "sgd"]),
    }
    distance = (
        abs(math.log10(params["learning_rate"]) + 2.8) + (params["optimizer"] == "sgd") * 0.5 + params["dropout"] * 0.4
    )
    end = 0.08 + 0.16 * distance**1.5 + noise.uniform(0, 0.02)
    values = [end + 1.3 * math.exp(-epoch / (2 + distance)) + noise.gauss(0, 0.008) for epoch in range(epochs)]
    fields = {"status": "ok", "error": "", "traceback": "", "attempts": 1}
    if number in (9, 27):
        values = []
        fields = {
            **fields,
            "status": "failed",
            "error": "ResourceExhaustedError: OOM when allocating a tensor",
            "traceback": TRACEBACK,
            "attempts": 2,
        }
    elif is_running:
        values = values[: 1 + number % 5]
        fields["status"] = "running"
    elif distance > 1.1 and number > 6:
        values = values[: 3 if distance > 1.6 else 6]
        fields["status"] = "pruned"
    best = min(values, default=None)
    return {
        "trial": number,
        "params": params,
        "value": None if is_running else best,
        "best_epoch": values.index(best) + 1 if values else None,
        "values": values,
        "seconds": round(2.4 * len(values) + noise.uniform(1, 2), 2),
        "worker": number % 4,
        **fields,
    }


def ensemble(members=5, run="ensemble-1", epochs=15):
    """An ensemble whose members were trained for different numbers of epochs."""
    noise = random.Random(9)
    record = Recorder(
        run, "ensemble", "digits ensemble", settings={"members": members, "voting": "soft", "epochs": epochs}, epochs=epochs
    )
    record.add("count", 3.0, workers=members)
    for member in range(members):
        logs = [curves(noise, epoch, 0.8 + 0.1 * member) for epoch in range(epochs - member)]
        history = {name: [entry[name] for entry in logs] for name in ("loss", "accuracy", "val_loss", "val_accuracy")}
        record.add("member", 14.0, member=member, epochs=list(range(len(logs))), history=history)
    return record.end()


def function(ranks=4, run="function-1", epochs=6, of=10):
    """A function that still runs, whose ranks write lines and report their metrics."""
    noise = random.Random(2)
    record = Recorder(run, "function", "train_resnet", settings={"ranks": ranks, "framework": "torch", "backend": "gloo"})
    for rank in range(ranks):
        record.add("rank", 0.4, rank=rank, state="started", host=f"worker-{rank:02d}.cluster")
    for epoch in range(epochs):
        for rank in range(ranks):
            logs = curves(noise, epoch, 1 + 0.1 * rank)
            left = {"seconds_left": 30.0 * (of - epoch - 1)} if rank == 0 else {}
            record.add("output", rank=rank, text=f"[rank {rank}] epoch {epoch + 1}  loss {logs['loss']:.4f}\n")
            record.add("report", 30.0 / ranks, rank=rank, epoch=epoch, epochs=of, logs=logs, **left)
    return record.messages


def comparison():
    """Three fits with other settings."""
    slower = synchronous(run="fit-4", name="digits, small learning rate", scale=1.2, learning_rate=0.0005, optimizer="SGD")
    wider = synchronous(run="fit-5", name="digits, wide", scale=0.85, parameters=6_402_000, batch_size=256)
    return synchronous() + slower + wider
