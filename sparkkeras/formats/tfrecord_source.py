"""TFRecord files of tf.train.Example as a data source of Spark's Python API.

Spark creates the data source, plans reads and commits writes in Python processes on the driver's machine (behind Spark
Connect on the server's), which have no SparkSession, and which may lack this package, as executors may. So the class is
pickled with the code that it uses (`_PICKLED`), and files are listed and opened with pyarrow.fs.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
import threading
from abc import ABCMeta
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from sparkkeras.arguments import one_of
from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.formats.examples import collect_stats
from sparkkeras.formats.records import SUFFIXES
from sparkkeras.formats.tfrecord_files import list_files, open_file
from sparkkeras.formats.tfrecord_reader import TFRecordReader, read_sample, sampled_files, warn_of_unknown
from sparkkeras.formats.tfrecord_schema import BINARY_WITH_SCHEMA, ddl, fields_of, infer_fields
from sparkkeras.formats.tfrecord_writer import TFRecordWriter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class _PickledByValue(ABCMeta):
    """The type of classes that are pickled with the code that they use, instead of as the name of a module."""


_PICKLED = (
    "arguments",
    "errors",
    "formats.examples",
    "formats.records",
    "formats.tfrecord_files",
    "formats.tfrecord_reader",
    "formats.tfrecord_schema",
    "formats.tfrecord_source",
    "formats.tfrecord_writer",
    "spark.filesystem",
)
"""The modules of this package with code that the data source uses."""

_OPTIONS = ("binary_features", "compression")
_OPTIONS_OF_SPARK = ("path", "paths", "location", "owner", "provider")
"""The options that Spark adds; the last three when it creates a table."""

_pickling = threading.Lock()


def _by_value(kind: type) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    from pyspark import cloudpickle

    modules = [sys.modules[f"sparkkeras.{name}"] for name in _PICKLED]
    with _pickling:
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            return pickle.loads, (cloudpickle.dumps(kind),)
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


copyreg.pickle(_PickledByValue, _by_value)


class TFRecordDataSource(DataSource, metaclass=_PickledByValue):
    """The format ``"tfrecord"`` for Spark's DataFrame readers and writers: files of tf.train.Example, without a jar.

    Columns and features correspond as in `sparkkeras.save_as_tfrecords` and `sparkkeras.load_tfrecords`. Spark sends the
    class to its processes together with the code that it uses: they need pyarrow and google-crc32c, and not this package.

    **Reading.** ``path`` is a file or a folder; on local disks also a glob. Of a folder, all files are read except hidden
    ones and those whose names start with ``_``, and of its subfolders those with names like ``column=value``, which does not
    become a column. Each file is a partition, which is streamed and may have any size. The compression is detected from the
    content. Without a schema, the columns are inferred from the first records of several files, which the driver reads when
    ``load`` is called. With a schema, the driver reads first records when the query is planned, and writes a warning to its
    standard error (with Spark Connect, to the server's) if they all lack a column of the schema.

    **Writing.** Spark supports the modes ``"append"`` and ``"overwrite"`` for such formats; for its other modes it raises
    an error (`sparkkeras.save_as_tfrecords` rejects existing paths). Each partition becomes a file. If a task fails, all
    files of the job are deleted. Overwriting replaces the folder when the new one is complete. Appending moves complete
    files into the folder one by one. ``_SUCCESS`` is written last. There is no ``partitionBy``, and no streaming.

    **Options.** ``compression`` (of the files to write): ``none``, ``gzip`` or ``zlib``. ``binary_features`` (only without a
    schema): names of features to load as binary even if their bytes are valid UTF-8, separated by commas. SQL reads and
    writes a view with the same options, so reading accepts ``compression`` and writing ``binary_features``, without effect.

    Paths without a scheme are local paths, on a disk that the driver and all executors share. URIs (``file:``, ``hdfs:``,
    ``s3:`` or ``s3a:``, ``gs:``, ``abfs:``) are opened by pyarrow.fs with the credentials that it finds on each machine;
    it does not use Spark's. Object stores cannot rename folders: there, files appear one by one, and replaced files are
    deleted when all new ones exist.

    Raises:
        StorageError: The path does not exist, cannot be read or written, or has files only in subfolders.
        DataError: An Example cannot hold the type of a column or a value, a record does not fit the schema, a file is
            damaged, or the sampled files have no records or contradict each other.
        ConfigurationError: An option is unknown, or an option or the schema is invalid.
        ClusterError: google-crc32c is not installed.

    Spark's own exceptions contain the text of these errors.

    Example::

        spark.dataSource.register(TFRecordDataSource)
        df.write.format("tfrecord").mode("append").option("compression", "gzip").save("/shared/digits")
        spark.read.format("tfrecord").schema("features array<float>, label bigint").load("/shared/digits")
    """

    _infers = False
    """Whether the columns are inferred from the files; otherwise the user has set them."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "tfrecord"

    def schema(self) -> str:
        """The columns of the files at the path, inferred from a sample of the records."""
        self._check_options()
        self._infers = True  # Spark calls reader() of this object or of its copy
        files, sizes = list_files(self._path)
        sample = (read_sample([(name, open_file(files, name))]) for name in sampled_files(sizes))
        return ddl(infer_fields(collect_stats(chain.from_iterable(sample)), self._path, self._binary_features))

    def reader(self, schema: StructType) -> TFRecordReader:
        """The reader of the files at the path."""
        from pyspark.sql.pandas.types import to_arrow_schema

        self._check_options()
        fields = fields_of(schema)
        files, sizes = list_files(self._path)
        if not self._infers:
            if self._binary_features:
                raise ConfigurationError(BINARY_WITH_SCHEMA)
            warn_of_unknown(self._path, fields, ((name, open_file(files, name)) for name in sampled_files(sizes)))
        return TFRecordReader(files, sorted(sizes), fields, to_arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> TFRecordWriter:
        """The writer of a job, whose temporary folders exist."""
        return self._writer(schema, "overwrite" if overwrite else "append")

    def _writer(self, schema: StructType, mode: str) -> TFRecordWriter:
        self._check_options()
        name = self.options.get("compression", "none").lower()
        one_of("compression", name, ("none", *filter(None, SUFFIXES)))
        compression = None if name == "none" else name
        return TFRecordWriter.of(self._path, fields_of(schema, written=True), mode, compression)

    def _check_options(self) -> None:
        for name in self.options:
            if name not in (*_OPTIONS, *_OPTIONS_OF_SPARK):
                raise ConfigurationError(f"the format tfrecord has no option {name!r}. {known_names(name, _OPTIONS)}")

    @property
    def _path(self) -> str:
        if "paths" in self.options:
            raise ConfigurationError(
                f"paths={self.options['paths']}: expected one path, of a file, a folder, or a local glob. Load the "
                "paths one by one, and combine the DataFrames with union()."
            )
        if "path" not in self.options:
            raise ConfigurationError(
                "the path is missing: pass it to load(path) or save(path). In SQL, use CREATE TEMPORARY VIEW ... USING "
                "tfrecord OPTIONS (path '...'), because Spark does not pass the path of a table to this format."
            )
        return str(self.options["path"])

    @property
    def _binary_features(self) -> list[str]:
        return [name for each in self.options.get("binary_features", "").split(",") if (name := each.strip())]


class NewTFRecordFolder(TFRecordDataSource):
    """The format of `sparkkeras.save_as_tfrecords`: refuses existing paths instead of appending to them.

    Its name does not collide with a format ``"tfrecord"`` that users have registered.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "sparkkeras_tfrecord"

    def writer(self, schema: StructType, overwrite: bool) -> TFRecordWriter:
        """The writer of a job, whose temporary folders exist."""
        return self._writer(schema, "overwrite" if overwrite else "error")
