"""JSON with a checksum over its content, so that damage is noticed when it is read."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """JSON content with a checksum over it, which `verify_checksum` verifies."""
    return {**content, "checksum": _checksum(content)}


def verify_checksum(content: Any) -> None:
    """Raises ValueError if the checksum is missing or wrong."""
    if not isinstance(content, dict):
        raise ValueError("it is not a mapping")
    rest = {key: value for key, value in content.items() if key != "checksum"}
    if content.get("checksum") != _checksum(rest):
        raise ValueError("its checksum differs")
