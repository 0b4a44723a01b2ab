"""What a diagnosis has found."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

OK, WARNING, ERROR = "ok", "warning", "error"

_STATUS_WIDTH, _SUBJECT_WIDTH, _TEXT_WIDTH = 7, 15, 100


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        status: ``"ok"``, ``"warning"`` (works, but slowly or not always) or ``"error"`` (does not work).
        subject: What was looked at, such as ``"Java"``.
        message: What was found.
        remedy: What to do about it; empty if the status is ``"ok"``.
    """

    status: str
    subject: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        indent = " " * (_STATUS_WIDTH + _SUBJECT_WIDTH + 4)
        texts = [self.message, *([f"-> {self.remedy}"] if self.remedy else [])]
        wrapped = [line for text in texts for line in textwrap.wrap(text, _TEXT_WIDTH, break_long_words=False)]
        return f"{self.status:{_STATUS_WIDTH}}  {self.subject:{_SUBJECT_WIDTH}}  " + f"\n{indent}".join(wrapped)


@dataclass(frozen=True)
class Diagnosis:
    """The findings of `sparkkeras.diagnose`; prints as a list of them.

    Attributes:
        findings: In the order of the checks.
    """

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> list[Finding]:
        """The findings of what does not work."""
        return [finding for finding in self.findings if finding.status == ERROR]

    @property
    def warnings(self) -> list[Finding]:
        """The findings of what is slow, or does not always work."""
        return [finding for finding in self.findings if finding.status == WARNING]

    def is_ok(self, strict: bool = False) -> bool:
        """Whether there is no error, and with ``strict`` no warning either."""
        return not self.errors and not (strict and self.warnings)

    def to_json(self) -> str:
        """The findings as a JSON object: ``{"ok": bool, "findings": [{"status", "subject", "message", "remedy"}, ...]}``."""
        found = {"ok": self.is_ok(), "findings": [asdict(finding) for finding in self.findings]}
        return json.dumps(found, indent=2)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.findings), "", self.summary()])

    def summary(self) -> str:
        """The numbers of errors and warnings, as a sentence."""
        counts = [_counted(self.errors, ERROR), _counted(self.warnings, WARNING)]
        found = " and ".join(count for count in counts if count)
        return f"Found {found}." if found else "No problems found."


def _counted(findings: Sequence[Finding], status: str) -> str:
    return f"{len(findings)} {status}{'s' if len(findings) != 1 else ''}" if findings else ""
