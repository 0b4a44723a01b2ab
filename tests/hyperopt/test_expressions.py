"""The hyperopt library: its expressions as spaces, and its suggest functions, with the trials of ``hyperopt.fmin``."""

import math
from functools import partial

import hyperopt
import numpy as np
import optuna
import pytest
from hyperopt import anneal, hp, rand, tpe
from hyperopt.pyll import scope
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt import Search, SparkTrials, choice, integer, loguniform, normal, uniform
from sparkkeras.hyperopt.expressions import Suggester, history_of, value_of
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.trials import Trial
from sparkkeras.hyperopt.workers import LocalWorkers
from tests.hyperopt.test_study import params_of, run

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:hyperopt.*", "ignore::UserWarning:hyperopt.*"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning:hyperopt.*"),
]


def a_function(x):
    return x


class Thing:
    pass


SHARED = hp.uniform("shared", 1, 2)

SPACES = {
    "a structure": {
        "choices": [hp.choice("c", [-3, 2, "x", None]), hp.pchoice("p", [(0.1, 4), (0.6, "y"), (0.3, a_function)])],
        "whole numbers": (hp.randint("r", 5), hp.randint("s", 5, 9), hp.uniformint("i", 2, 9)),
        "numbers": [
            hp.uniform("u", -1, 1),
            hp.loguniform("lu", -9, 0),
            {1: hp.normal("n", 100, 1), 2: {("k", 2): hp.lognormal("ln", 0, 1)}},
        ],
        "quantized numbers": [
            hp.quniform("qu", 1, 10, 4),
            hp.quniform("small", 0, 1, 0.1),
            hp.qloguniform("qlu", -2, 3, 1),
            hp.qloguniform("wide", 0, 3, 2.5),
            hp.qnormal("qn", 0, 5, 2),
            hp.qlognormal("qln", 0, 1, 1),
        ],
        "computed": {
            "int": scope.int(hp.quniform("e", 1, 8, 1)) + 1,
            "power": 2 ** hp.randint("f", 4),
            "shared": [SHARED, -SHARED],
            "item": scope.getitem([1, 2], hp.randint("g", 2)),
        },
    },
    "a list": [SHARED, (hp.choice("b", [3, [4, 5]]), "x")],
    "a choice": hp.choice("a", [hp.uniform("b", 0, 1), {"x": hp.normal("c", 0, 1), "y": hp.choice("d", [1, 2])}]),
    "conditional": {
        "lr": hp.loguniform("lr", -9, -2),
        "optimizer": hp.choice(
            "optimizer",
            [
                {"kind": "sgd", "m": hp.uniform("m", 0.5, 1)},
                {"kind": "adam", "deep": [hp.pchoice("n", [(0.2, 1), (0.8, 9)])]},
            ],
        ),
        "fixed": (1, "two", None, 3.0, True),
    },
}


def loss(params):
    """Any smooth function of the numbers in a structure."""
    if isinstance(params, dict):
        return sum(loss(value) for value in params.values())
    if isinstance(params, (list, tuple)):
        return sum(loss(value) for value in params)
    return math.sin(params) + params**2 / 200 if isinstance(params, (int, float)) else 0.0


def by_fmin(space, suggest, count, seed):
    """The hyper-parameters of the trials of ``hyperopt.fmin``, and the trials."""
    met, trials = [], hyperopt.Trials()

    def objective(params):
        met.append(params)
        return loss(params)

    hyperopt.fmin(objective, space, suggest, count, trials=trials, rstate=np.random.default_rng(seed), verbose=False)
    return met, trials


def drawn_of(space, trials):
    """The values of trials in hyperopt's terms."""
    history = history_of(trials, 1.0, Space(space).parameters)
    return [{label: values[0] for label, values in doc["misc"]["vals"].items() if values} for doc in history.trials]


# Suggest functions


@pytest.mark.parametrize(
    ("kind", "algo"), [*((kind, tpe.suggest) for kind in SPACES), ("conditional", "anneal"), ("conditional", rand.suggest)]
)
def test_trials_are_those_of_fmin_also_after_a_resume(kind, algo, tmp_path):
    space = SPACES[kind]
    expected, trials = by_fmin(space, anneal.suggest if algo == "anneal" else algo, 28, 5)
    for count in (23, 3, 2):  # TPE samples randomly before trial 20
        with Search(space, algo=algo, seed=5, save_to=tmp_path / "search") as search:
            run(search, count, loss)
    assert repr(params_of(search)) == repr(expected)
    assert history_of(search.trials, 1.0, Space(space).parameters).vals == trials.vals
    with Search(space, algo="tpe", save_to=tmp_path / "search") as search:
        assert repr(params_of(search)) == repr(expected)


def test_fmin_has_the_same_trials_with_spark_trials():
    def best(trials):
        generator, suggest = np.random.default_rng(1), partial(tpe.suggest, n_startup_jobs=3)
        return hyperopt.fmin(loss, SPACES["conditional"], suggest, 12, trials=trials, rstate=generator, verbose=False)

    own, theirs = SparkTrials(spark_session=LocalWorkers()), hyperopt.Trials()
    assert best(own) == best(theirs)
    assert (own.vals, own.losses(), own.argmin) == (theirs.vals, theirs.losses(), theirs.argmin)


@pytest.mark.parametrize("algo", ["tpe", tpe.suggest])
def test_fmin_takes_any_algorithm_and_space(algo, tmp_path):
    """Failures do not end the search."""
    space = {"n": integer(2, 9, step=7), "o": choice("one", "two"), "x": uniform(0, 1, step=0.5)}

    def objective(params):
        if params["o"] == "one":
            raise ValueError
        return params["x"] - params["n"]

    for count in (6, 9):  # the second one resumes the first, with another generator
        trials = SparkTrials(spark_session=LocalWorkers(), save_to=str(tmp_path / "search"))
        generator = np.random.default_rng(count)
        found = hyperopt.fmin(
            objective, space, algo, count, trials=trials, rstate=generator, verbose=False, return_argmin=False
        )
    assert len(trials) == 9
    assert set(trials.statuses()) == {"ok", "fail"}
    assert found == trials.search.best_params
    assert trials.argmin == drawn_of(space, [trials.search.best_trial])[0]


def test_a_suggest_function_gets_the_trials_of_other_algorithms(tmp_path):
    """It continues a search that has trials of every status, chosen by Optuna."""
    seen = []

    def suggest(new_ids, domain, trials, seed):
        seen.append(trials)
        return tpe.suggest(new_ids, domain, trials, seed)

    space = {"k": choice({"x": uniform(0, 1, step=0.25)}, {"n": integer(3, 9, step=2)}), "lr": loguniform(0.1, 1)}
    with Search(space, algo="random", seed=2, mode="max", save_to=tmp_path) as search:
        run(search, 3, lambda params: params["lr"])
        search.tell(search.ask(), error="it broke")
    rates, values = [params["lr"] for params in params_of(search)], [trial.value for trial in search.trials[:3]]
    with Search(space, algo=suggest, mode="max", save_to=tmp_path) as again:
        assert [again.ask().number, again.ask().number] == [4, 5]
    assert params_of(again)[:4] == params_of(search)
    assert seen[0].vals["lr"] == rates
    assert seen[1].statuses() == ["ok", "ok", "ok", "fail", "new"]
    assert seen[1].losses() == [*(-value for value in values), None, None]


@pytest.mark.filterwarnings("error")
def test_suggestions_raise_no_warnings():
    run(Search(SPACES["conditional"], algo=tpe.suggest), 25, loss)


# Expressions, searched by Optuna


@pytest.mark.parametrize("kind", SPACES)
def test_samplers_of_optuna_suggest_values_with_the_distributions_of_hyperopt(kind):
    space = SPACES[kind]
    search = Search(space, algo="random", seed=4)
    for _ in range(150):
        search.ask()
    values = drawn_of(space, search.trials)
    assert repr([hyperopt.space_eval(space, each) for each in values]) == repr(params_of(search))
    _, trials = by_fmin(space, rand.suggest, 400, 1)
    for label, expected in trials.vals.items():
        found = [each[label] for each in values if label in each]
        assert ks_2samp(found, expected).pvalue > 1e-3, label


@pytest.mark.parametrize("algo", ["random", rand.suggest])
def test_options_are_the_objects_of_the_space(algo):
    options = [Thing(), np.arange(3), a_function, Thing]
    search = Search({"a": hp.choice("a", options), "b": choice(*options)}, algo=algo, seed=1)
    met = [search.ask().params for _ in range(40)]
    for name in ("a", "b"):
        assert {id(each[name]) for each in met} == {id(each) for each in options}


@pytest.mark.parametrize("algo", ["tpe", "anneal"])
def test_expressions_may_stand_beside_distributions(algo):
    space = {"a": uniform(0, 1), "b": {"c": hp.randint("c", 3)}, "d": choice(hp.uniform("u", 5, 6), "x")}
    met = params_of(run(Search(space, algo=algo, seed=1), 25, loss))
    assert {params["b"]["c"] for params in met} == {0, 1, 2}
    assert all(0 <= params["a"] <= 1 and (params["d"] == "x" or 5 <= params["d"] <= 6) for params in met)


# Conversions


NODES = [
    integer(-3, 9),
    integer(-3, 9, step=5),
    integer(1, 99, log=True),
    uniform(-1, 2),
    uniform(0, 1, step=1 / 3),
    loguniform(0.01, 9),
    normal(1, 2),
    choice(*range(5)),
    hp.randint("a", -2, 9),
    hp.quniform("a", 1, 9, 4),
    hp.uniformint("a", -5, 3),
    hp.loguniform("a", -3, 1),
    hp.qloguniform("a", 0, 3, 0.7),
    hp.qnormal("a", 1, 5, 2),
    hp.lognormal("a", 0, 1),
    hp.qlognormal("a", 0, 2, 0.7),
    hp.pchoice("a", [(0.2, 1), (0.5, "x"), (0.3, None)]),
]


@settings(deadline=None)
@given(st.sampled_from(NODES), st.floats(0, 1))
def test_values_of_optuna_and_of_hyperopt_convert_into_each_other(node, part):
    space = Space({"a": node})
    parameter = space.parameters["a"]
    searched = parameter.searched
    if parameter.options and hasattr(searched, "choices"):
        chosen = searched.choices[min(int(part * len(searched.choices)), len(searched.choices) - 1)]
    elif isinstance(searched, optuna.distributions.IntDistribution):
        chosen = searched.low + searched.step * int(part * ((searched.high - searched.low) // searched.step))
    else:
        chosen = searched.low + part * (searched.high - searched.low)
    (drawn,) = drawn_of({"a": node}, [Trial(0, {}, chosen={"a": chosen})])
    assert value_of(parameter, drawn["a"]) == parameter.value(chosen)
    found = Suggester(tpe.suggest, space, 1.0).searched(drawn)["a"]
    assert searched.low <= found <= searched.high if hasattr(searched, "low") else found == chosen
    assert parameter.value(found) == pytest.approx(parameter.value(chosen), rel=1e-6, abs=1e-6)


# Errors


@scope.define
def a_thing_of(rate):
    return Thing()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hp.choice("a", [1, hp.uniform("a", 0, 1)]), "the name 'a'"),
        (lambda: {"a": hp.choice("a", [uniform(0, 1), 2])}, r"by choice"),
        (lambda: {"a": scope.int(hp.choice("a", ["x", "y"]))}, "cannot be sampled"),
        (lambda: {"a": scope.a_thing_of(hp.uniform("a", 0, 1))}, r"\(Thing\) is computed"),
    ],
)
def test_expressions_that_cannot_be_searched_are_rejected(make, words):
    with pytest.raises(ConfigurationError, match=words):
        Search(make())
