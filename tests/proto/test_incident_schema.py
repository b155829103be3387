"""The schema of incident.json that we ship: valid by itself, and the one that was agreed on where that lies beside the checkout."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema

REPO = Path(__file__).resolve().parents[2]
SHIPPED = REPO / "proto" / "torch_watchdog_proto" / "incident.schema.json"
AGREED = Path(os.environ.get("TORCH_WATCHDOG_SHARED", REPO.parent / "shared")) / "schema" / "incident.schema.json"


def test_the_shipped_schema_is_a_valid_one_of_draft_2020_12() -> None:
    schema = json.loads(SHIPPED.read_text())
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)


def test_the_shipped_schema_is_the_agreed_one_where_both_are_there() -> None:
    agreed = AGREED.read_text() if AGREED.exists() else SHIPPED.read_text()
    assert json.loads(SHIPPED.read_text()) == json.loads(agreed)
