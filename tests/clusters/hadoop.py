"""Hadoop on this machine: HDFS with two DataNodes and YARN with two NodeManagers, each a process with an address of its own.

Maven gets the daemons once, in the version of PySpark's Hadoop client. They end with the process that started them.
"""

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from xml.sax.saxutils import escape

import psutil

from tests.processes import clean_environment, free_port

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>sparkkeras</groupId>
  <artifactId>hadoop</artifactId>
  <version>1</version>
  <dependencies>
    {dependencies}
  </dependencies>
</project>
"""
ARTIFACTS = [
    "org.apache.hadoop:hadoop-client-minicluster:{version}",
    "org.apache.hadoop:hadoop-client-runtime:{version}",
    "org.apache.hadoop:hadoop-minikdc:{version}",
    "org.bouncycastle:bcpkix-jdk18on:1.79",  # the ResourceManager needs it, and does not declare it
    "org.slf4j:slf4j-reload4j:1.7.36",
]
NODES = ("127.0.0.2", "127.0.0.3")
"""The addresses of the two nodes: each has a DataNode and a NodeManager."""

START_SECONDS = 300
NODE_MEMORY_MB = 6144
NODE_CORES = 4

KINDS = {
    "kdc": "minikdc.MiniKdc",
    "namenode": "hdfs.server.namenode.NameNode",
    "datanode": "hdfs.server.datanode.DataNode",
    "resourcemanager": "yarn.server.resourcemanager.ResourceManager",
    "nodemanager": "yarn.server.nodemanager.NodeManager",
}
JAVA_OPTIONS = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "--add-opens=java.base/java.lang=ALL-UNNAMED"]


END_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]
"""The words before a command that Linux ends with its parent process."""


class MissingError(Exception):
    """What a test needs and this machine lacks."""


def jars():
    """PySpark's folder of jars."""
    import pyspark

    return Path(pyspark.__file__).parent / "jars"


def classpath(artifacts=ARTIFACTS):
    """The class path of artifacts, which Maven downloads on the first call.

    Args:
        artifacts: ``group:name:version`` of each, where ``{version}`` is that of PySpark's Hadoop client.

    Raises:
        MissingError: Java or Maven is missing, or Maven cannot get the artifacts.
    """
    for program in ("java", "mvn", "setpriv"):
        if shutil.which(program) is None:
            raise MissingError(f"{program} is not on PATH")
    clients = [path.stem for path in jars().glob("hadoop-client-runtime-*.jar")]
    version = clients[0].removeprefix("hadoop-client-runtime-") if clients else None
    if version is None:
        raise MissingError(f"{jars()} has no hadoop-client-runtime jar, whose version Hadoop must have")
    coordinates = [artifact.format(version=version).split(":") for artifact in artifacts]
    names = ("groupId", "artifactId", "version")
    tags = ["".join(f"<{name}>{value}</{name}>" for name, value in zip(names, each, strict=True)) for each in coordinates]
    dependencies = "".join(f"<dependency>{each}</dependency>" for each in tags)
    with tempfile.TemporaryDirectory() as folder:
        pom, output = Path(folder) / "pom.xml", Path(folder) / "classpath"
        pom.write_text(POM.format(dependencies=dependencies))
        command = ["mvn", "--quiet", "--batch-mode", "--file", pom]
        command += ["dependency:build-classpath", f"-Dmdep.outputFile={output}"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=900)
        if done.returncode != 0:
            reason = next((line for line in done.stdout.splitlines() if "ERROR" in line), done.stderr[-500:])
            raise MissingError(f"Maven cannot get {':'.join(coordinates[0])}: {reason}")
        return output.read_text().strip()


class Hadoop:
    """A running cluster; a context manager.

    Args:
        folder: For the files and logs of the daemons. Its subfolder ``conf`` is the client's HADOOP_CONF_DIR.
        secured: Whether it has a KDC, and asks for Kerberos tickets. The user ``me`` is in the keytab.

    Attributes:
        keytab: The keytab of all users and daemons, if it is secured.
        java_options: What Java needs to find the KDC, if it is secured.
    """

    def __init__(self, folder, secured=False):
        self.folder = Path(folder).resolve()
        self.conf = self.folder / "conf"
        self.secured = secured
        self.keytab = self.folder / "keytab"
        self.java_options = [f"-Djava.security.krb5.conf={self.folder}/kdc/krb5.conf"] if secured else []
        self._ports = {name: free_port() for name in ("namenode", "namenode-http", "web", *_RM_ADDRESSES)}
        self.url = f"hdfs://127.0.0.1:{self._ports['namenode']}"
        self._settings = self._defaults() | (self._security() if secured else {})
        self._classpath = classpath()
        self.daemons = {}

    def __enter__(self):
        try:
            self._write(self.conf, {})
            if self.secured:
                self._start_kdc()
            self._format()
            for name in ("namenode", "resourcemanager", "nodemanager0", "nodemanager1"):
                self.start(name)
            self.wait(lambda: self.datanodes() == 0, "the NameNode has not come")  # DataNodes try only each 10 seconds
            for node in range(len(NODES)):
                self.start(f"datanode{node}")
            self.wait(lambda: self.datanodes() == len(NODES) and self.nodes() == len(NODES), "the nodes have not come")
            self.fs("-mkdir", "-p", "/user", "/tmp")
            self.fs("-chmod", "1777", "/user", "/tmp")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in sorted(self.daemons, reverse=True):  # the ResourceManager would start containers again
            self.kill(name)
        for process in self.containers():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def start(self, name, *arguments):
        """Start a daemon: ``namenode``, ``resourcemanager``, ``datanode0``, ``nodemanager1``, ..."""
        kind = name.rstrip("0123456789")
        conf = self.conf
        if kind != name:
            conf = self.folder / name / "conf"
            self._write(conf, self._of_node(name, NODES[int(name.removeprefix(kind))]))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                [*END_WITH_PARENT, *self._java(conf, f"org.apache.hadoop.{KINDS[kind]}", *arguments)],
                env=_bare_environment(),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def kill(self, name):
        """Kill a daemon, and what it has not started itself lives on."""
        process = self.daemons.pop(name)
        process.kill()
        process.wait()

    def lose(self, node):
        """Kill a NodeManager and its containers at once, as if its machine had lost power."""
        containers = self.containers(node)
        self.kill(f"nodemanager{node}")
        for process in containers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def containers(self, node=None):
        """The processes of YARN's containers, of one node or all."""
        root = str(self.folder / (f"nodemanager{node}" if node is not None else "nodemanager"))
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("LOCAL_DIRS", "").startswith(root):
                    found.append(process)
        return found

    def wait(self, condition, failure, seconds=START_SECONDS):
        """Wait for a condition."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError, LookupError):  # a daemon that is starting
                if condition():
                    return
            ended = [name for name, process in self.daemons.items() if process.poll() is not None]
            if ended:
                raise AssertionError(f"{ended[0]} has ended:\n{_tail(self.folder / f'{ended[0]}.log')}")
            if time.monotonic() > deadline:
                raise AssertionError(failure + "".join(f"\n{log}:\n{_tail(log)}" for log in self.folder.glob("*.log")))
            time.sleep(0.2)

    def datanodes(self):
        """The number of live DataNodes."""
        url = f"http://127.0.0.1:{self._ports['namenode-http']}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
        return _json(url)["beans"][0]["NumLiveDataNodes"]

    def nodes(self):
        """The number of active NodeManagers."""
        return self.rest("metrics")["clusterMetrics"]["activeNodes"]

    def rest(self, path):
        """What the ResourceManager's REST API says."""
        return _json(f"http://127.0.0.1:{self._ports['web']}/ws/v1/cluster/{path}")

    def fs(self, *arguments, check=True):
        """Run ``hdfs dfs`` with these arguments; returns the output."""
        return self.client("fs.FsShell", *arguments, check=check)

    def client(self, tool, *arguments, check=True):
        """Run a command-line tool of Hadoop; returns the output."""
        command = self._java(self.conf, f"org.apache.hadoop.{tool}", *map(str, arguments))
        environment = _bare_environment()
        if self.secured:
            environment |= {"KRB5PRINCIPAL": "hdfs/localhost", "KRB5KEYTAB": str(self.keytab)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def log(self, application):
        """All output of the containers of an application, on all nodes."""
        files = sorted(self.folder.glob(f"nodemanager*/logs/{application}/*/std*"))
        return "\n".join(f"=== {path.parent.name} {path.name}\n{path.read_text(errors='replace')}" for path in files)

    def _java(self, conf, name, *arguments):
        return ["java", *JAVA_OPTIONS, *self.java_options, "-Xmx256m", "-cp", f"{conf}:{self._classpath}", name, *arguments]

    def _start_kdc(self):
        """Start the KDC, which writes krb5.conf and the keytab."""
        work = self.folder / "kdc"
        work.mkdir()
        settings = {
            "org.name": "EXAMPLE",
            "org.domain": "COM",
            "kdc.bind.address": "127.0.0.1",
            "kdc.port": "0",
            "instance": "DefaultKrbServer",
            "transport": "TCP",
            "debug": "false",
            "max.ticket.lifetime": "86400000",
            "max.renewable.lifetime": "604800000",
        }
        (work / "kdc.conf").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self.start("kdc", str(work), str(work / "kdc.conf"), str(self.keytab), *_PRINCIPALS)
        self.wait(lambda: "created keytab" in (self.folder / "kdc.log").read_text(), "the KDC has not come")

    def _security(self):
        """Settings for Kerberos; DataNodes need neither privileged ports nor TLS. Tokens end soon, and are renewed."""
        principals = {
            "dfs.namenode": ("kerberos.principal", "keytab.file", "hdfs/localhost"),
            "dfs.datanode": ("kerberos.principal", "keytab.file", "hdfs/localhost"),
            "dfs.web.authentication": ("kerberos.principal", "kerberos.keytab", "HTTP/localhost"),
            "yarn.resourcemanager": ("principal", "keytab", "yarn/localhost"),
            "yarn.nodemanager": ("principal", "keytab", "yarn/localhost"),
        }
        settings = {}
        for name, (principal, keytab, value) in principals.items():
            settings |= {f"{name}.{principal}": f"{value}@EXAMPLE.COM", f"{name}.{keytab}": str(self.keytab)}
        return settings | {
            "hadoop.security.authentication": "kerberos",
            "dfs.block.access.token.enable": "true",
            "dfs.namenode.delegation.token.renew-interval": "60000",
            "dfs.namenode.delegation.token.max-lifetime": "120000",
            "ignore.secure.ports.for.testing": "true",
        }

    def _format(self):
        log = self.folder / "format.log"
        with log.open("wb") as file:
            command = [*self._java(self.conf, "org.apache.hadoop.hdfs.server.namenode.NameNode"), "-format"]
            code = subprocess.run(command, env=_bare_environment(), stdout=file, stderr=file).returncode
        assert code == 0, _tail(log)

    def _defaults(self):
        ports = self._ports
        addresses = {f"yarn.resourcemanager.{name}": f"127.0.0.1:{ports[name]}" for name in _RM_ADDRESSES}
        queues = "yarn.scheduler.capacity.root"
        preemption = "yarn.resourcemanager.monitor.capacity.preemption"
        return addresses | {
            "fs.defaultFS": self.url,
            "hadoop.tmp.dir": f"{self.folder}/tmp",
            "dfs.replication": "2",
            "dfs.namenode.name.dir": f"file://{self.folder}/namenode",
            "dfs.namenode.http-address": f"127.0.0.1:{ports['namenode-http']}",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.client.use.datanode.hostname": "true",  # as its address the NameNode takes what it sees: 127.0.0.1
            "dfs.datanode.use.datanode.hostname": "true",
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.heartbeat.recheck-interval": "2000",
            "dfs.namenode.safemode.extension": "0",
            "yarn.resourcemanager.hostname": "127.0.0.1",
            "yarn.resourcemanager.webapp.address": f"127.0.0.1:{ports['web']}",
            "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "200",
            "yarn.nm.liveness-monitor.expiry-interval-ms": "10000",
            "yarn.scheduler.minimum-allocation-mb": "256",
            "yarn.nodemanager.resource.memory-mb": str(NODE_MEMORY_MB),
            "yarn.nodemanager.resource.cpu-vcores": str(NODE_CORES),
            "yarn.nodemanager.pmem-check-enabled": "true",
            "yarn.nodemanager.resource.memory.enforced": "false",  # true would leave it to cgroups
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.container-monitor.interval-ms": "1000",
            "yarn.nodemanager.user-home-dir": f"{self.folder}/home",
            "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "99",
            # Two queues: what one does not use, the other may borrow, until the first one wants it back.
            f"{queues}.queues": "default,urgent",
            f"{queues}.default.capacity": "10",
            f"{queues}.default.maximum-capacity": "100",
            f"{queues}.default.user-limit-factor": "10",
            f"{queues}.urgent.capacity": "90",
            f"{queues}.urgent.maximum-capacity": "100",
            "yarn.scheduler.capacity.maximum-am-resource-percent": "0.9",
            "yarn.scheduler.capacity.resource-calculator": "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator",
            "yarn.resourcemanager.scheduler.monitor.enable": "true",
            f"{preemption}.monitoring_interval": "1000",
            f"{preemption}.max_wait_before_kill": "3000",
            f"{preemption}.total_preemption_per_round": "1.0",
            f"{preemption}.natural_termination_factor": "1.0",
        }

    def _of_node(self, name, address):
        root = self.folder / name
        return {
            "dfs.datanode.data.dir": f"file://{root}/data",
            "dfs.datanode.hostname": address,
            "dfs.datanode.address": f"{address}:0",
            "dfs.datanode.http.address": f"{address}:0",
            "dfs.datanode.ipc.address": f"{address}:0",
            "yarn.nodemanager.hostname": address,
            "yarn.nodemanager.address": f"{address}:0",
            "yarn.nodemanager.localizer.address": f"{address}:0",
            "yarn.nodemanager.webapp.address": f"{address}:0",
            "yarn.nodemanager.collector-service.address": f"{address}:0",
            "yarn.nodemanager.local-dirs": f"{root}/local",
            "yarn.nodemanager.log-dirs": f"{root}/logs",
        }

    def _write(self, folder, more):
        """Write a folder of configuration files."""
        folder.mkdir(parents=True, exist_ok=True)
        prefixes = {"core-site": ("fs.", "hadoop."), "hdfs-site": ("dfs.", "ignore."), "yarn-site": ("yarn.",)}
        prefixes["capacity-scheduler"] = ("yarn.scheduler.capacity.",)
        for name, prefix in prefixes.items():
            chosen = {key: value for key, value in (self._settings | more).items() if key.startswith(prefix)}
            properties = "".join(
                f"  <property><name>{key}</name><value>{escape(value)}</value></property>\n" for key, value in chosen.items()
            )
            (folder / f"{name}.xml").write_text(f"<configuration>\n{properties}</configuration>\n")
        logs = [
            "log4j.rootLogger=WARN, A",
            "log4j.appender.A=org.apache.log4j.ConsoleAppender",
            "log4j.appender.A.target=System.err",
            "log4j.appender.A.layout=org.apache.log4j.PatternLayout",
            "log4j.appender.A.layout.ConversionPattern=%d %p %c: %m%n",
        ]
        (folder / "log4j.properties").write_text("\n".join(logs))


_PRINCIPALS = ("hdfs/localhost", "yarn/localhost", "HTTP/localhost", "me")
_RM_ADDRESSES = ("address", "scheduler.address", "resource-tracker.address", "admin.address")


def _bare_environment():
    """The environment of a machine on which no Python and no Spark is installed."""
    kept = {name: value for name, value in clean_environment().items() if name in ("JAVA_HOME", "USER", "LANG")}
    java = Path(shutil.which("java") or "").resolve().parent
    return kept | {"PATH": "/usr/bin:/bin", "JAVA_HOME": kept.get("JAVA_HOME", str(java.parent))}


def _json(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def _tail(log, count=3000):
    return log.read_text(errors="replace")[-count:]
