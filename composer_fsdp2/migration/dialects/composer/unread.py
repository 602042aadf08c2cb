"""Findings for unknown keys, and for keys that contradict each other."""

from collections.abc import Callable
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.rows import unknown_key
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.keys import KEYS_BY_NAME
from composer_fsdp2.fsdp1.translate import Translation
from composer_fsdp2.migration.dialects.composer.surroundings import Given

Read = Callable[[Given], Translation]


def contradictions_of(known: Given, read: Read, error: ConfigError) -> list[Finding]:
    """Return a finding for each key: the usual one if the key can be read alone, otherwise its error, or that of all.

    Args:
        read: The runtime's own translation, with the file's other settings applied.
    """
    findings: list[Finding] = []
    is_told = False
    for name, value in known.items():
        try:
            findings += _alone(name, known, read)
        except ConfigError as own:
            is_told = True
            findings.append(_wrong(name, value, str(own)))
    if not is_told:  # each key is right, and they contradict each other
        told = next((each.key for each in findings if each.key in error.keys), findings[0].key)
        findings = [_wrong(told, each.value, str(error)) if each.key == told else each for each in findings]
    return findings


def _alone(name: str, known: Given, read: Read) -> tuple[Finding, ...]:
    """Return the finding of a key that is read alone, or with only those keys that it needs.

    Raises:
        ConfigError: The key is wrong in itself.
    """

    def finding(*names: str) -> tuple[Finding, ...]:
        return read({each: known[each] for each in names}).findings[:1]

    try:
        return finding(name)
    except ConfigError as error:
        needed = [each for each in error.keys if each in known and each != name]
        if not needed:
            raise
        return finding(name, *needed)


def _wrong(name: str, value: Any, reason: str) -> Finding:
    return Finding(key=name, value=value, outcome=Outcome.NEEDS_DECISION, reason=reason)


def unknown_keys(given: Given) -> list[Finding]:
    reason = "no version of Composer knew this key; FSDPConfig took it and did nothing with it"
    return [
        unknown_key(name, value, KEYS_BY_NAME, reason, hint="") if isinstance(name, str) else _no_text(name, value)
        for name, value in given.items()
        if name not in KEYS_BY_NAME
    ]


def _no_text(name: object, value: Any) -> Finding:
    reason = "YAML does not read this key as text, so that no argument of Composer's FSDPConfig can have it as its name"
    return Finding(
        key=str(name), value=value, outcome=Outcome.NEEDS_DECISION, reason=reason, hint="remove it", known=False
    )
