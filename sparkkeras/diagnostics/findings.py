"""What a diagnosis has found."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import asdict, dataclass

from sparkkeras.errors import counted

OK, WARNING, ERROR = "ok", "warning", "error"

_ADVICE = re.compile(r"\.\s+|: (?=(?:call|pass|set|use|raise|install|choose|add|remove)\b)")
"""Where the advice begins in a message of an error."""

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

    @classmethod
    def rejected(cls, subject: str, error: Exception, remedy: str) -> Finding:
        """What an error of this package says: its first sentence, and as the remedy what it advises.

        Args:
            subject: What was looked at.
            error: The error. Its further lines, such as a stack trace, do not count.
            remedy: The remedy if the error advises nothing.
        """
        text = str(error).partition(" The traceback:")[0].strip() or repr(error)
        text = text.partition("\n")[0]
        message, *advice = _ADVICE.split(text, maxsplit=1)
        advised = advice[0].strip() if advice else ""
        return cls(ERROR, subject, f"{message.rstrip('.')}.", advised[:1].upper() + advised[1:] or remedy)

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

    def to_json(self, strict: bool = False) -> str:
        """The findings as a JSON object: ``{"ok": bool, "findings": [{"status", "subject", "message", "remedy"}, ...]}``.

        ``"ok"`` is `is_ok` with the same ``strict``.
        """
        found = {"ok": self.is_ok(strict), "findings": [asdict(finding) for finding in self.findings]}
        return json.dumps(found, indent=2)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.findings), "", self.summary()])

    def summary(self) -> str:
        """The numbers of errors and warnings, as a sentence."""
        counts = [(len(self.errors), ERROR), (len(self.warnings), WARNING)]
        found = " and ".join(counted(number, status) for number, status in counts if number)
        return f"Found {found}." if found else "No problems found."
