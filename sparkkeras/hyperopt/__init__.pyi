# The public names: what type checkers and editors know of the package, and __init__.py loads when it is first used.
from sparkkeras.hyperopt.ask_tell import Search as Search
from sparkkeras.hyperopt.distributions import choice as choice
from sparkkeras.hyperopt.distributions import integer as integer
from sparkkeras.hyperopt.distributions import loguniform as loguniform
from sparkkeras.hyperopt.distributions import normal as normal
from sparkkeras.hyperopt.distributions import uniform as uniform
from sparkkeras.hyperopt.hypermodel import HyperModel as HyperModel
from sparkkeras.hyperopt.hypermodel import HyperParameters as HyperParameters
from sparkkeras.hyperopt.journal import JournalBackend as JournalBackend
from sparkkeras.hyperopt.reporting import ReportCallback as ReportCallback
from sparkkeras.hyperopt.reporting import report as report
from sparkkeras.hyperopt.search import HyperParamModel as HyperParamModel
from sparkkeras.hyperopt.spark_trials import SparkTrials as SparkTrials
from sparkkeras.hyperopt.trials import Trial as Trial
