"""Measure sparkkeras: ``python benchmarks/run.py [--only NAME...] [--repeats N] [--quick] [--output DIR]``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cases  # noqa: F401 (registers the benchmarks)
import checkpoints  # noqa: F401 (likewise)
import convergence  # noqa: F401 (likewise)
import growth  # noqa: F401 (likewise)
import keyed  # noqa: F401 (likewise)
import monitoring  # noqa: F401 (likewise)
import preprocessing  # noqa: F401 (likewise)
import regret  # noqa: F401 (likewise)
import report
import searches  # noqa: F401 (likewise)
import sorted_rows  # noqa: F401 (likewise)
from harness import BENCHMARKS, ELEPHAS_PYTHON, FULL, QUICK, Benchmark, Samples

HERE = Path(__file__).resolve().parent
CORES = 2
TIME_LIMIT = 3600
LOG_LINES = 40


def main() -> int:
    """Run the chosen benchmarks; return 1 if any failed, else 0."""
    options = _options()
    if options.child:
        _measure(options.child, Path(options.samples), options.quick)
        return 0
    _restrict_cpus(CORES)
    chosen = [BENCHMARKS[name] for name in options.only or BENCHMARKS]
    chosen = [case for case in chosen if not _skipped(case)]
    environments = {"sparkkeras": sys.executable}
    if ELEPHAS_PYTHON.exists():
        environments["elephas"] = str(ELEPHAS_PYTHON)
    about = {"quick": options.quick, "spark": "local[2], UI off, spark.python.unix.domain.socket.enabled=true"}
    about |= report.machine(environments)
    _print_header(about)
    samples: dict[str, Samples] = {}
    failed: set[str] = set()
    for repeat in range(options.repeats):
        for case in chosen:
            if case.name in failed or (case.once and repeat):
                continue
            print(f"[{repeat + 1}/{options.repeats}] {case.name} ...", end=" ", flush=True)
            found = _in_own_process(case, options.quick)
            if found is None:
                failed.add(case.name)
                continue
            merged = samples.setdefault(case.name, {})
            for contestant, turns in found.items():
                merged.setdefault(contestant, []).extend(turns)
            _write(options, about, chosen, samples, failed)
    if samples:
        print(f"\n{report.table(report.results(chosen, samples))}\n")
        for path in _write(options, about, chosen, samples, failed):
            print(f"wrote {path}")
    if failed:
        print(f"failed: {', '.join(sorted(failed))}")
    return int(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure sparkkeras against Keras and Elephas.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(BENCHMARKS), help=", ".join(BENCHMARKS))
    parser.add_argument("--repeats", type=int, help="run all benchmarks so many times, in new processes (3; quick: 1)")
    parser.add_argument("--quick", action="store_true", help="only check that all run: few rows and epochs, no real results")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="DIR", help="the folder for the results")
    parser.add_argument("--child", choices=BENCHMARKS, help=argparse.SUPPRESS)
    parser.add_argument("--samples", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.quick else 3)
    return options


def _measure(name: str, path: Path, quick: bool) -> None:
    """Run one benchmark in this process and write its samples to a file."""
    path.write_text(json.dumps(BENCHMARKS[name].run(QUICK if quick else FULL)))


def _in_own_process(case: Benchmark, quick: bool) -> Samples | None:
    """Run one benchmark in a new process and return its samples; if it fails, print its last log lines and return None."""
    environment = {
        **os.environ,
        **case.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        samples, log = Path(folder) / "samples.json", Path(folder) / "log"
        command = [sys.executable, __file__, f"--child={case.name}", f"--samples={samples}", *(["--quick"] * quick)]
        with log.open("w") as output:
            try:
                code = subprocess.run(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=TIME_LIMIT, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = f"it took longer than {TIME_LIMIT} s"
        if code == 0:
            print(f"{time.perf_counter() - started:.0f} s")
            return json.loads(samples.read_text())
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        print("\n".join([f"failed ({code}). The end of its log:", *lines]))
        return None


def _write(options, about, chosen, samples, failed) -> list[Path]:
    """Write the results so far."""
    name = "quick" if options.quick else "latest"
    found = report.results(chosen, samples)
    content = {
        "about": about,
        "results": [result.as_json() for result in found],
        "failed": sorted(failed),
        "samples": samples,
    }
    path = report.save(options.output, name, content)
    quick = "QUICK RUN, NOT MEANINGFUL - " if options.quick else ""
    caption = f"{quick}{about['date'][:10]}, {about['processor']}, {about['cpus_used']} CPUs, {about['spark']}"
    paths = [path, report.chart(found, options.output, name, caption)]
    load = f"load at the start {about['load_at_start']}"
    for case in chosen:
        if case.name not in samples:
            continue
        own = options.output / (f"quick-{case.name}" if options.quick else case.name)
        if case.draw is not None:
            paths.append(own.with_suffix(".png"))
            case.draw(samples[case.name], paths[-1], f"{quick}{about['date'][:10]}, {about['processor']}, {load}")
        if case.summary is not None:
            paths.append(own.with_suffix(".md"))
            paths[-1].write_text(f"{quick}{case.summary(samples[case.name])}\n")
    return [path for path in paths if path is not None]


def _skipped(case: Benchmark) -> bool:
    reason = case.missing()
    if reason:
        print(f"skipping {case.name}: {reason}")
    return reason is not None


def _print_header(about: dict) -> None:
    print(f"{about['processor']}, {about['cpus_used']} of {about['cpus']} CPUs; {about['system']}; {about['java']}")
    for name, versions in about["versions"].items():
        print(f"{name}: {', '.join(f'{package} {version}' for package, version in sorted(versions.items()))}")
    print(f"Spark: {about['spark']}")
    if about["load_at_start"] > 0.5:
        print(f"The machine is busy (load {about['load_at_start']}): the results will be noisy.")
    if about["quick"]:
        print("Quick run: a tenth of the rows, almost no warm-up. The results are not meaningful.")
    print()


def _restrict_cpus(cores: int) -> None:
    """Restrict this process and its children to ``cores`` CPUs, so that all contestants use the same ones."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


if __name__ == "__main__":
    sys.exit(main())
