"""Validator of objects against the schemas of Kubernetes.

It runs in an interpreter that has the package `kubernetes-validate`, possibly not that of the
tests. It reads {"versions": [...], "objects": [[where, object], ...]} and prints {"objects",
"validated", "invalid", "errors"}.
"""

import json
import sys
from functools import cache

from kubernetes_validate import utils

utils.schema_contents = cache(utils.schema_contents)  # otherwise it parses 2 MB for each object


def main() -> None:
    """Print one line of JSON."""
    asked = json.load(sys.stdin)
    errors, validated = [], 0
    unique = {
        json.dumps(found, sort_keys=True): (where, found) for where, found in asked["objects"]
    }
    for where, found in unique.values():
        for version in asked["versions"]:
            name = f"{where}: {found.get('kind')}/{found['metadata']['name']}, {version}"
            try:
                utils.validate(found, version, strict=True)
            except (utils.ValidationError, utils.SchemaNotFoundError) as error:
                path = ".".join(str(part) for part in getattr(error, "path", ()))
                errors.append(f"{name}: {path}: {error.message}"[:500])
            validated += 1
    told = {"objects": len(unique), "validated": validated, "invalid": len(errors)}
    print(json.dumps(told | {"errors": errors}))


if __name__ == "__main__":
    main()
