"""JSON with a checksum over its content, so that damage is noticed when it is read."""

import hashlib
import json
from typing import Any


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """JSON content with a checksum over it, which `verify_checksum` verifies."""
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16)
    return {**content, "checksum": digest.hexdigest()}


def verify_checksum(content: Any) -> None:
    """Raises ValueError if the checksum is missing or wrong."""
    if not isinstance(content, dict):
        raise ValueError("it is not a mapping")
    if content != with_checksum({key: value for key, value in content.items() if key != "checksum"}):
        raise ValueError("its checksum differs")
