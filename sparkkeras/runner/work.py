"""What a user passes to `SparkRunner.run`, as the work of ranks: a call of a function, or a script."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkkeras.data.block import describe
from sparkkeras.errors import ConfigurationError, CustomObjectError, StorageError, nearest_name
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.runner.rank import FunctionCall, RankWork, Script


def work_of(function_or_file: Any, args: tuple[Any, ...], kwargs: dict[str, Any], others: Sequence[str] = ()) -> RankWork:
    """The work of each rank; see `SparkRunner.run`.

    Args:
        function_or_file: The function, or the path of the file.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        others: The arguments of ``run`` that are not passed on, for messages.

    Raises:
        ConfigurationError: It is neither a function nor a path, or does not take these arguments.
        CustomObjectError: The function or an argument cannot be pickled.
        StorageError: The file cannot be read.
    """
    if isinstance(function_or_file, (str, os.PathLike)):
        return _script(Path(function_or_file), args, kwargs)
    if not callable(function_or_file):
        raise ConfigurationError(
            f"run received {describe(function_or_file)}; expected a function, or the path of a Python file."
        )
    return _function_call(function_or_file, args, kwargs, others)


def _script(path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Script:
    if kwargs:
        raise ConfigurationError(
            f"{next(iter(kwargs))}= is an argument by name, which a Python file does not take: pass its command line as "
            'positional arguments, such as run("train.py", "--epochs", 3).'
        )
    for value in args:
        if not isinstance(value, (str, int, float, os.PathLike)):
            raise ConfigurationError(f"{value!r} is no command-line argument: expected strings, numbers and paths.")
    try:
        path.open("rb").close()
    except FileNotFoundError as error:
        raise StorageError(f"there is no file {str(path)!r} (working directory {str(Path.cwd())!r}).") from error
    except IsADirectoryError as error:
        raise StorageError(f"{str(path)!r} is a folder: expected the path of a Python file.") from error
    except OSError as error:
        raise StorageError(f"the file {str(path)!r} cannot be read: {error.strerror}.") from error
    return Script(str(path.resolve()), None, tuple(map(str, args)))


def _function_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], others: Sequence[str]
) -> FunctionCall:
    name = f"the function {getattr(function, '__name__', type(function).__name__)}"
    try:
        signature = inspect.signature(function)
        signature.bind(*args, **kwargs)
    except ValueError:
        pass  # a builtin without a signature
    except TypeError as error:
        raise ConfigurationError(
            f"run received other arguments than {name} takes: {error}. {_advice(signature, kwargs, others)}"
        ) from error
    try:
        return FunctionCall(ByValue.dump((function, args, kwargs), name))
    except CustomObjectError:
        ByValue.dump(args, "args")  # names what cannot be pickled
        ByValue.dump(kwargs, "kwargs")
        ByValue.dump(function, name)
        raise


def _advice(signature: inspect.Signature, kwargs: Mapping[str, Any], others: Sequence[str]) -> str:
    """What to do about arguments that a function does not take."""
    unpacked = [f"{each}=" for each in ("args", "kwargs") if each in kwargs]
    if unpacked:
        return (
            f"It received {' and '.join(unpacked)}, whose values it does not unpack: pass them as run(function, 1, name=2)."
        )
    taken = [each for each in others if each in signature.parameters]
    if taken:
        own = taken[0]
        return (
            f"{own}= is an argument of run itself, which is not passed on: bind it, functools.partial(function, {own}=...)."
        )
    unknown = [each for each in kwargs if each not in signature.parameters]
    nearest = nearest_name(unknown[0], [*others, *signature.parameters]) if unknown else ""
    return f"Pass them as run(function, 1, name=2). Arguments of run itself are {', '.join(others)}.{nearest}"
